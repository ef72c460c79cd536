#!/usr/bin/env bash
# Set everything up, then lint, type-check and test:
#   bash launcher/run_tests.sh                     unit tests, real processes, one whole run per mode
#   bash launcher/run_tests.sh --ci                also SGLang, vLLM, Slurm, hosts, chaos, fuzz, mutants, the oracle, benchmarks, more runs
#   bash launcher/run_tests.sh --ci chaos mypy     only these parts of it, as the jobs of .github/workflows/ci.yml do
#   bash launcher/run_tests.sh --all               all tests: also the long ones (marked `release`), and all seeds of the oracle
#   bash launcher/run_tests.sh tests/unit -k ppo   only pytest, with these arguments
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

case "${1:-}" in
-h | --help)
    sed -n '2,7s/^# \{0,1\}//p' "$ASYNCRL_ROOT/launcher/run_tests.sh"
    exit 0
    ;;
esac
tier="${1:-}"
began=$SECONDS
unset PYTHONDONTWRITEBYTECODE # each process would compile all of its modules again
case "$tier" in
--ci | --all)
    # tests/sglang and tests/vllm run against real servers, which have separate environments. Two are made at the same time.
    environments=('. "$ASYNCRL_ROOT/launcher/setup.sh"; asyncrl_setup dev')
    [ -n "${ASYNCRL_SGLANG_PYTHON:-}" ] || environments+=('bash "$ASYNCRL_ROOT/launcher/setup_sglang.sh" --cpu')
    if [ -z "${ASYNCRL_VLLM_PYTHON:-}" ] && [[ $# = 1 || " $* " = *" vllm "* ]]; then
        environments+=('bash "$ASYNCRL_ROOT/launcher/setup_vllm.sh" --cpu')
    fi
    printf '%s\n' "${environments[@]}" | ASYNCRL_ROOT="$ASYNCRL_ROOT" xargs -d '\n' -P 2 -I {} bash -c {}
    ;;
esac
asyncrl_setup dev
cd "$ASYNCRL_ROOT"
bash launcher/setup_sandbox.sh || true # if it fails, tests/processes/test_sandbox.py fails and names what is missing
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

# The parts, the longest first. Two run at a time. Large folders have several parts, so that both cores stay busy until the end.
units=('unit/test_[a-l]*' 'unit/test_[m-z]*')
processes=('processes/test_[a-f]*' 'processes/test_[g-m]*' 'processes/test_[n-z]*')
case "$tier" in
"")
    parts=("${units[@]}" "${processes[@]}" end_to_end mypy)
    export ASYNCRL_TEST_MARKS="not full and not alone and not release and not oracle"
    echo "== left out (--all has it): another user of this machine (needs root), long files (CONTRIBUTING.md), SGLang, vLLM, Slurm, hosts, chaos, fuzz, the oracle"
    ;;
--ci | --all)
    bash launcher/setup_slurm.sh || true # if it fails, tests/slurm fail and name what is missing
    parts=(end_to_end benchmarks "${processes[@]}" sglang vllm oracle "${units[@]}" chaos slurm hosts fuzz mypy gpu)
    export ASYNCRL_TEST_MARKS="not alone and not oracle"
    shift
    [ $# = 0 ] || parts=("$@")
    if [ "$tier" = --ci ]; then
        ASYNCRL_TEST_MARKS="$ASYNCRL_TEST_MARKS and not release"
        export ASYNCRL_ORACLE_SEEDS=100
        echo "== left out (--all has it): long tests (marked release), 900 seeds of the oracle"
    elif ! command -v chromium >/dev/null; then # for the test of the page; if it fails, that test says what is missing
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium >/dev/null 2>&1 || true
    fi
    ;;
*) exec python -m pytest "$@" ;;
esac
echo "== set up after $((SECONDS - began)) s"

# Run one part. Each line of its output begins with the part's name. $ASYNCRL_TEST_LOGS keeps the output of failed parts.
test_part() {
    set -o pipefail
    local began=$SECONDS status=0 command log="$ASYNCRL_TEST_LOGS/${1//\//.}"
    case "$1" in
    mypy) command=(-m mypy) ;;
    oracle) command=(tests/oracle/check.py ${ASYNCRL_ORACLE_SEEDS:+--seeds "$ASYNCRL_ORACLE_SEEDS"}) ;;
    *) command=(-m pytest --durations=8 --durations-min=5 -m "$ASYNCRL_TEST_MARKS" tests/$1) ;; # unquoted, so that the shell expands a pattern
    esac
    {
        python "${command[@]}" 2>&1 || status=$?
        echo "== exit code $status after $((SECONDS - began)) s"
        return "$status"
    } | sed -u "s|^|$1: |" | tee "$log" && rm "$log"
}
export -f test_part

began=$SECONDS
python -m ruff check .
python -m ruff format --check .
status=0
ASYNCRL_TEST_LOGS="$(mktemp -d)"
export ASYNCRL_TEST_LOGS
printf '%s\n' "${parts[@]}" | xargs -d '\n' -P 2 -I {} bash -c 'test_part "$1"' - {} || status=1
if [ -n "$tier" ] && [[ " ${parts[*]} " = *" end_to_end "* ]]; then
    python -m pytest -m alone tests/end_to_end || status=1
fi
for log in "$ASYNCRL_TEST_LOGS"/*; do
    [ ! -f "$log" ] || { echo "== ${log##*/} failed; all of its output: $log" && tail -n 60 "$log"; }
done
rmdir "$ASYNCRL_TEST_LOGS" 2>/dev/null || true # fails if it contains logs of failed parts, which are kept
echo "== tested in $((SECONDS - began)) s, exit code $status"
exit "$status"
