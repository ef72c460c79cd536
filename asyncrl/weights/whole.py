"""All tensors of a version of any form, for readers that load only full versions."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from asyncrl.weights.form import WeightsError
from asyncrl.weights.forms import FORMS
from asyncrl.weights.versions import read_chain, tensor_files, write_version


def whole(path: Path) -> dict[str, Tensor]:
    """All tensors of a version, of any form. Verifies no checksums. Raises WeightsError, OSError."""
    tensors: dict[str, Tensor] = {}
    for folder, manifest in read_chain(path):
        for file in tensor_files(folder):
            tensors |= {name: tensor.clone() for name, tensor in load_file(file).items()}
        changes = FORMS[manifest.kind].read(folder)
        for change in changes:
            if change.name not in tensors or list(tensors[change.name].shape) != change.shape:
                raise WeightsError(
                    f"{folder} changes {change.name} of shape {change.shape}, which its base does not have"
                )
        FORMS[manifest.kind].apply(changes, tensors)
    return tensors


def write_whole(path: Path, target: Path, *, fsync: bool = True) -> None:
    """Write a version as a full one, which `from_pretrained` loads. Raises WeightsError, OSError."""
    links = read_chain(path)
    source_dir, version = links[0][0], links[-1][1].weight_version
    write_version(target, whole(path).items(), source_dir=source_dir, version=version, fsync=fsync)
