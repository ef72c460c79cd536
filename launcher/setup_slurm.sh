#!/usr/bin/env bash
# Install Slurm for tests/slurm: bash launcher/setup_slurm.sh
# The tests start their own cluster (munged, slurmctld, four slurmd) and touch no other. For Debian and Ubuntu, as root. Installs
# nothing if the programs exist already.
set -euo pipefail

programs=(munged slurmctld slurmd sbatch ip nsenter)
missing=()
for program in "${programs[@]}"; do
    command -v "$program" >/dev/null || missing+=("$program")
done
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "tests/slurm need ${missing[*]}: install slurmctld, slurmd, slurm-client, munge, iproute2 and util-linux (this script can, as" \
        "root on Debian or Ubuntu), or leave those tests out: bash launcher/run_tests.sh --ignore=tests/slurm" >&2
    exit 1
fi
echo "== installing Slurm for its tests (${missing[*]} missing)"
log=$(mktemp)
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update && apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge iproute2 util-linux; } >"$log" 2>&1; then
    tail -n 12 "$log" >&2
    echo "   -> all of it: $log" >&2
    exit 1
fi
rm -f "$log"
