#!/usr/bin/env bash
# Set everything up and run an experiment: bash launcher/run_async_ppo.sh [CONFIG] [key=value ...]
# Without arguments: the CPU quickstart, which makes its own small model and learns in minutes.
set -euo pipefail
ASYNCRL_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ASYNCRL_ROOT"
. launcher/setup.sh

case "${1:-}" in
-h | --help)
    sed -n '2,3s/^# //p' "$0"
    exit 0
    ;;
esac
if [ $# -gt 0 ] && [[ "$1" != *=* ]]; then
    config="$1"
    shift
else
    config=configs/quickstart_cpu.yaml
fi

asyncrl_setup ""
asyncrl-launch prepare "$config" "$@"
exec asyncrl-launch run "$config" "$@"
