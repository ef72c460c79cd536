#!/usr/bin/env bash
# Make a separate environment for SGLang: bash launcher/setup_sglang.sh [--cpu] [--venv DIR]
# Without options: for GPUs, in .venv-sglang of the repository, as in SGLang's documentation (several GB). --cpu: for a machine
# without GPUs, with stand-ins for compiled kernels that have no CPU build (launcher/sglang_cpu). Installed packages are kept, and a
# second start installs nothing. At its end the script prints the interpreter's path for generation.python.
#
# Environment: PYTHON  the interpreter that makes the environment (default: python3, 3.11 or newer)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

SGLANG_VERSION=0.5.23
venv="$ASYNCRL_ROOT/.venv-sglang" python="${PYTHON:-python3}" kind=gpu
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help)
        sed -n '2,7s/^# \{0,1\}//p' "$ASYNCRL_ROOT/launcher/setup_sglang.sh"
        exit 0
        ;;
    --cpu) kind=cpu ;;
    --venv)
        venv="${2:?--venv needs a folder}"
        shift
        ;;
    *)
        echo "setup_sglang.sh: $1 is not known; see bash launcher/setup_sglang.sh --help" >&2
        exit 2
        ;;
    esac
    shift
done
[[ "$venv" = /* ]] || venv="$PWD/$venv"

# Uses venv, python, kind and stamp. Durations were measured on a machine with 2 cores and a fast network.
install_sglang() {
    local log step=0 steps=3 cpu="$ASYNCRL_ROOT/launcher/sglang_cpu"
    local pip=("$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off) # not uv: no lock has all versions
    _asyncrl_check_python || return 1
    [ $kind = gpu ] || steps=4
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || steps=$((steps + 1))
    log="$(mktemp "${TMPDIR:-/tmp}/asyncrl-sglang.XXXXXX")" || log=/dev/null
    echo "== setting up SGLang $SGLANG_VERSION for $kind in $venv: $steps steps, some minutes the first time"
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        _asyncrl_step 10 "making the virtual environment" "$python" -m venv --clear "$venv" || return 1
    fi
    if [ $kind = gpu ]; then
        _asyncrl_step 10 "upgrading pip" "${pip[@]}" --upgrade pip || return 1
        _asyncrl_step 600 "installing SGLang and all that it needs" "${pip[@]}" "torch==$ASYNCRL_CUDA_TORCH" \
            "sglang==$SGLANG_VERSION" || return 1
    else
        _asyncrl_step 120 "installing what SGLang needs" "${pip[@]}" -r "$cpu/requirements.txt" || return 1
        _asyncrl_step 20 "installing SGLang itself" "${pip[@]}" --no-deps -r "$cpu/requirements_without_dependencies.txt" || return 1
        _asyncrl_step 2 "putting stand-ins for kernels in their place" "$venv/bin/python" "$cpu/install.py" || return 1
    fi
    _asyncrl_step 5 "seeing that it can be imported" import_sglang || return 1
    touch "$stamp"
    [ "$log" = /dev/null ] || rm -f "$log"
}

import_sglang() {
    local environment=()
    [ $kind = gpu ] || environment=(SGLANG_USE_CPU_ENGINE=1 CUDA_VISIBLE_DEVICES=)
    (cd / && env -u PYTHONPATH "${environment[@]}" "$venv/bin/python" -c 'import torch, torchvision, sglang')
}

inputs=("$ASYNCRL_ROOT"/launcher/sglang_cpu/{*.txt,*.py,sgl_kernel/*.py})
stamp="$venv/.asyncrl-sglang-$(cat "${inputs[@]}" - <<<"$kind $SGLANG_VERSION" | cksum | cut -d' ' -f1)"
ASYNCRL_VENV_OPTION="--venv "
[ -e "$stamp" ] || install_sglang
echo "SGLang $SGLANG_VERSION is ready: generation.python=$venv/bin/python"
