#!/usr/bin/env bash
# Set everything up, SGLang's own environment too, then lint, type-check and test: bash launcher/run_tests.sh
# With pytest arguments only those tests: bash launcher/run_tests.sh tests/unit -k ppo
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

asyncrl_setup dev
cd "$ASYNCRL_ROOT"
bash launcher/setup_sandbox.sh || true # else tests/processes/test_sandbox.py fails, and says what is missing
if [ $# -eq 0 ]; then
    # tests/sglang run against the real server, and fail where it is missing. Cached: made once for a working copy, while the checks run.
    if [ -z "${ASYNCRL_SGLANG_PYTHON:-}" ]; then
        bash launcher/setup_sglang.sh --cpu &
        sglang=$!
        trap 'kill "$sglang" 2>/dev/null || true' EXIT
    fi
    bash launcher/setup_slurm.sh || true # else tests/slurm fail, and say what is missing
    python -m ruff check .
    python -m ruff format --check .
    python -m mypy
    if [ -n "${sglang:-}" ]; then
        wait "$sglang"
        trap - EXIT
    fi
fi
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
[ $# -eq 0 ] || exec python -m pytest "$@"

# Two halves at the same time: whole runs and SGLang spend much of theirs waiting for processes to start. Then what needs quiet.
folder=$(mktemp -d)
python -m pytest -m "not alone" tests/end_to_end tests/sglang tests/chaos tests/hosts >"$folder/whole_runs" 2>&1 &
whole_runs=$!
trap 'kill "$whole_runs" 2>/dev/null || true; rm -rf "$folder"' EXIT
echo "whole runs are tested beside what follows, and told of at the end"
status=0
python -m pytest -m "not alone" --ignore=tests/end_to_end --ignore=tests/sglang --ignore=tests/chaos --ignore=tests/hosts || status=$?
wait "$whole_runs" || status=$?
cat "$folder/whole_runs"
python -m pytest -m alone tests/end_to_end || status=$?
exit "$status"
