#!/usr/bin/env bash
# Set everything up, then lint, type-check and test: bash launcher/run_tests.sh [pytest arguments ...]
set -euo pipefail
ASYNCRL_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ASYNCRL_ROOT"
. launcher/setup.sh

asyncrl_setup dev
if [ $# -eq 0 ]; then
    ruff check .
    ruff format --check .
    mypy
fi
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
exec python -m pytest "$@"
