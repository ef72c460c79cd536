#!/usr/bin/env bash
# Set everything up, then lint, type-check and test: bash launcher/run_tests.sh
# With pytest arguments only those tests: bash launcher/run_tests.sh tests/unit -k ppo
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

asyncrl_setup dev
cd "$ASYNCRL_ROOT"
if [ $# -eq 0 ]; then
    python -m ruff check .
    python -m ruff format --check .
    python -m mypy
fi
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
exec python -m pytest "$@"
