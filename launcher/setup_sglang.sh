#!/usr/bin/env bash
# Make a separate environment for SGLang: bash launcher/setup_sglang.sh [--cpu] [--venv DIR]
# Without options: for GPUs, in .venv-sglang of the repository, as in SGLang's documentation (several GB). --cpu: for a machine
# without GPUs, with stand-ins for compiled kernels that have no CPU build (launcher/sglang_cpu). Installed packages are kept, and a
# second start installs nothing. At its end the script prints the interpreter's path for generation.python.
#
# Environment: PYTHON  the interpreter that makes the environment (default: python3, 3.11 or newer)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup_program.sh"
asyncrl_program_options "${BASH_SOURCE[0]}" "$@"
version=0.5.23 cpu="$ASYNCRL_ROOT/launcher/sglang_cpu"
[ $kind = gpu ] && steps=3 || steps=4

install_steps() {
    if [ $kind = gpu ]; then
        _asyncrl_step 10 "upgrading pip" "${pip_install[@]}" --upgrade pip || return 1
        _asyncrl_step 600 "installing SGLang and all that it needs" "${pip_install[@]}" "torch==$ASYNCRL_CUDA_TORCH" \
            "sglang==$version" || return 1
    else
        _asyncrl_step 120 "installing what SGLang needs" "${pip_install[@]}" -r "$cpu/requirements.txt" || return 1
        _asyncrl_step 20 "installing SGLang itself" "${pip_install[@]}" --no-deps -r "$cpu/requirements_without_dependencies.txt" || return 1
        _asyncrl_step 2 "putting stand-ins for kernels in their place" "$venv/bin/python" "$cpu/install.py" || return 1
    fi
    _asyncrl_step 5 "seeing that it can be imported" import_sglang
}

import_sglang() {
    local environment=()
    [ $kind = gpu ] || environment=(SGLANG_USE_CPU_ENGINE=1 CUDA_VISIBLE_DEVICES=)
    (cd / && env -u PYTHONPATH "${environment[@]}" "$venv/bin/python" -c 'import torch, torchvision, sglang')
}

inputs=("$cpu"/{*.txt,*.py,sgl_kernel/*.py})
asyncrl_program_setup SGLang "$version" \
    "sglang-$(cat "${inputs[@]}" - <<<"$kind $version" | cksum | cut -d' ' -f1)" $steps
