#!/usr/bin/env bash
# The first day on a new GPU node: bash launcher/first_day_gpu.sh [--model MODEL] [--out DIR] [--quick]
# Set everything up, run the tests that need GPUs, then short runs of the main layouts. At the end one table compares planned and
# measured figures. --model: a folder or a name on the Hub (default: a model with random weights). --quick: runs only, two steps each.
# Without a GPU everything runs under gloo, with tiny models, and cells of GPUs read "not measured".
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

case "${1:-}" in
-h | --help)
    sed -n '2,5s/^# //p' "$ASYNCRL_ROOT/launcher/first_day_gpu.sh"
    exit 0
    ;;
esac
asyncrl_setup dev
if compgen -G "/dev/nvidia[0-9]*" >/dev/null && [ -z "${ASYNCRL_SGLANG_PYTHON:-}" ]; then
    bash "$ASYNCRL_ROOT/launcher/setup_sglang.sh"
    export ASYNCRL_SGLANG_PYTHON="$ASYNCRL_ROOT/.venv-sglang/bin/python"
fi
export TOKENIZERS_PARALLELISM=false
exec python "$ASYNCRL_ROOT/launcher/first_day.py" "$@"
