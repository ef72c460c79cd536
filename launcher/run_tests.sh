#!/usr/bin/env bash
# Set everything up, then lint, type-check and test:
#   bash launcher/run_tests.sh                     unit tests, real processes, one whole run per mode
#   bash launcher/run_tests.sh --all               also SGLang, Slurm, hosts, chaos, fuzz, mutants, the oracle, benchmarks
#   bash launcher/run_tests.sh tests/unit -k ppo   only pytest, with these arguments
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

case "${1:-}" in
-h | --help)
    sed -n '2,5s/^# \{0,1\}//p' "$ASYNCRL_ROOT/launcher/run_tests.sh"
    exit 0
    ;;
esac
began=$SECONDS
asyncrl_setup dev
cd "$ASYNCRL_ROOT"
bash launcher/setup_sandbox.sh || true # else tests/processes/test_sandbox.py fails and says what is missing
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

# Two lanes at the same time on two cores: much of a test is waiting for processes. The first lane is told of at its end.
case "${1:-}" in
"")
    lane=(tests/end_to_end tests/unit)
    other=(tests/processes)
    marks="not full and not alone"
    ;;
--all)
    # tests/sglang run against the real server, in an environment of its own.
    [ -n "${ASYNCRL_SGLANG_PYTHON:-}" ] || bash launcher/setup_sglang.sh --cpu
    bash launcher/setup_slurm.sh || true # else tests/slurm fail and say what is missing
    lane=(tests/end_to_end tests/sglang tests/chaos tests/hosts)
    other=(tests/processes tests/unit tests/slurm tests/fuzz tests/gpu tests/benchmarks)
    marks="not alone"
    ;;
*) exec python -m pytest "$@" ;;
esac
echo "== set up after $((SECONDS - began)) s"

began=$SECONDS
python -m ruff check .
python -m ruff format --check .
folder=$(mktemp -d)
python -m pytest -m "$marks" "${lane[@]}" >"$folder/lane" 2>&1 &
running=$!
trap 'kill "$running" 2>/dev/null || true; rm -rf "$folder"' EXIT
echo "== ${lane[*]} are tested beside what follows"
status=0
python -m mypy || status=$?
python -m pytest -m "$marks" "${other[@]}" || status=$?
wait "$running" || status=$?
cat "$folder/lane"
if [ "${1:-}" = --all ]; then
    python -m pytest -m alone tests/end_to_end || status=$?
    python tests/oracle/check.py || status=$?
fi
echo "== tested in $((SECONDS - began)) s, exit code $status"
exit "$status"
