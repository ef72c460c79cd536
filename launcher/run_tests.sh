#!/usr/bin/env bash
# Set everything up, SGLang's own environment too, then lint, type-check and test: bash launcher/run_tests.sh
# With pytest arguments only those tests: bash launcher/run_tests.sh tests/unit -k ppo
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

asyncrl_setup dev
cd "$ASYNCRL_ROOT"
if [ $# -eq 0 ]; then
    # tests/sglang run against the real server, and fail where it is missing. Cached: made once for a working copy, while the checks run.
    if [ -z "${ASYNCRL_SGLANG_PYTHON:-}" ]; then
        bash launcher/setup_sglang.sh --cpu &
        sglang=$!
        trap 'kill "$sglang" 2>/dev/null || true' EXIT
    fi
    python -m ruff check .
    python -m ruff format --check .
    python -m mypy
    if [ -n "${sglang:-}" ]; then
        wait "$sglang"
        trap - EXIT
    fi
fi
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
exec python -m pytest "$@"
