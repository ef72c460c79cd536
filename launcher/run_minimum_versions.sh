#!/usr/bin/env bash
# Test the lowest versions that pyproject.toml allows: bash launcher/run_minimum_versions.sh [PYTEST ARGUMENTS]
# Makes an environment with the lower bound of each requirement of asyncrl and its extras (tools of tests and docs: the newest
# version), then runs the unit tests, the update in all layouts and three steps of the quickstart.
#
# Environment: ASYNCRL_VENV   folder of the environment (default: .venv-minimum in the repository)
#              ASYNCRL_TORCH  the torch version to install (default: the lower bound)
#              PYTHON         the interpreter that makes the environment (default: python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${ASYNCRL_VENV:-$PWD/.venv-minimum}"
unset ASYNCRL_VENV # tests call scripts that would otherwise install into it
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
start=$SECONDS
stamp="$venv/.asyncrl-$(cat pyproject.toml - <<<"$PWD ${ASYNCRL_TORCH:-}" | cksum | cut -d' ' -f1)" # a second start installs nothing
if [ ! -e "$stamp" ]; then
    "${PYTHON:-python3}" -m venv --clear "$venv"
    "${pip[@]}" packaging
    "${pip[@]}" --no-deps -e .
    "$venv/bin/python" launcher/lower_bounds.py gym math openai parquet plot wandb >"$folder/constraints.txt"
    [ -z "${ASYNCRL_TORCH:-}" ] || sed -i "s/^torch==.*/torch==$ASYNCRL_TORCH/" "$folder/constraints.txt"
    "${pip[@]}" -e ".[docs,test]" -c "$folder/constraints.txt"
    touch "$stamp"
fi
echo "== set up in $((SECONDS - start)) s"

export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PATH="$venv/bin:$PATH"
start=$SECONDS
python -m pytest -q tests/unit tests/processes/test_parallel_engine.py "$@"
echo "== tests: $((SECONDS - start)) s"
start=$SECONDS
python -m asyncrl.cli.main prepare configs/quickstart_cpu.yaml
python -m asyncrl.cli.main run configs/quickstart_cpu.yaml train.max_steps=3 "fileroot=$folder/runs"
echo "== three steps of the quickstart: $((SECONDS - start)) s"
