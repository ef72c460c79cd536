#!/usr/bin/env bash
# Set everything up and run an experiment: bash launcher/run_async_ppo.sh [CONFIG] [key=value ...]
# Without CONFIG: the CPU quickstart, which makes its own small model and learns in minutes. Paths are relative to the
# current folder if CONFIG is in it, else to the repository. `asyncrl-launch run --help` explains key=value.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

case "${1:-}" in
-h | --help)
    sed -n '2,4s/^# //p' "$ASYNCRL_ROOT/launcher/run_async_ppo.sh"
    exit 0
    ;;
esac
unset PYTHONDONTWRITEBYTECODE # each process would compile all of its modules again
asyncrl_setup "plot${ASYNCRL_EXTRAS:+,$ASYNCRL_EXTRAS}" # plot: the requirements of `asyncrl-launch plot`
config=configs/quickstart_cpu.yaml
if [ $# -gt 0 ] && [[ "$1" != *=* ]]; then
    config="$1"
    shift
else
    cd "$ASYNCRL_ROOT"
fi
[ -e "$config" ] || cd "$ASYNCRL_ROOT"
python -m asyncrl.cli.main prepare "$config" "$@"
exec python -m asyncrl.cli.main run "$config" "$@"
