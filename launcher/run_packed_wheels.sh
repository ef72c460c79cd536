#!/usr/bin/env bash
# Test what launcher/pack_wheels.sh packs: bash launcher/run_packed_wheels.sh [PYTEST ARGUMENTS]
# Makes an environment like that of a GPU machine without a network (torch 2.11, transformers 5.17), packs what it lacks, and tests
# there with the packed transformers 5.23: the trainer, weights, the embedded engine, plans, launcher/one_gpu.py with tiny models, and
# three steps of the quickstart. Then it tests the trainer and plans with transformers 5.17.
#
# Environment: ASYNCRL_MACHINE  the interpreter of such an environment (default: one is made, with PYTHON or python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
machine="${ASYNCRL_MACHINE:-}"
if [ -z "$machine" ]; then
    machine="$folder/machine/bin/python"
    "${PYTHON:-python3}" -m venv "$folder/machine"
    "$machine" -m pip install --quiet --disable-pip-version-check torch==2.11.0 transformers==5.17.0 numpy aiohttp grpcio protobuf \
        psutil prometheus-client pyyaml rich yarl packaging pytest pytest-timeout hypothesis
fi
"$machine" -m pip list --format=freeze --disable-pip-version-check >"$folder/has"
python="$("$machine" -c 'import sys; print(f"{sys.version_info.major}.{sys.version_info.minor}")')"
bash launcher/pack_wheels.sh --python "$python" --has "$folder/has" --with pytest-asyncio "$folder/wheels"
"$machine" -m pip install --quiet --no-index --no-deps --no-compile --target "$folder/packed" "$folder"/wheels/*.whl

export PYTHONPATH="$PWD:$folder/packed" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
trainer=(tests/unit/test_{checkpoints,kept_weights,packing,ppo,profile,shards,value,weights}.py
    tests/processes/test_{attention,plan,train_engine}.py)
tests=("$machine" -m pytest -q -m "not release and not alone and not oracle")
"${tests[@]}" "${trainer[@]}" tests/processes/test_{engine_matches_trainer,generation_engine,parallel_engine}.py "$@"
"$machine" launcher/one_gpu.py all --tiny --limit 600 --out "$folder/one_gpu"
(cd "$folder" && PYTHONPATH="$folder/packed" "$machine" -c "import asyncrl; assert 'packed' in asyncrl.__file__")
PATH="$(dirname "$machine"):$PATH" "$machine" -m asyncrl.cli.main prepare configs/quickstart_cpu.yaml
"$machine" -m asyncrl.cli.main run configs/quickstart_cpu.yaml train.max_steps=3 "fileroot=$folder/runs"
rm -r "$folder/packed/"transformers*
"${tests[@]}" "${trainer[@]}" "$@"
