"""The tensors of a version that is an adapter, for an engine that has another program load the version's folder."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config.schema import LoraConfig
from asyncrl.generation.checks import ModelTensors, TensorSpec, check_tensors
from asyncrl.protocol.errors import ErrorClass
from asyncrl.weights.adapter import ABOUT, check_about, check_files, name_of, read_about
from asyncrl.weights.form import WeightsError


class AdapterTensors(ModelTensors):
    """The two matrices of each layer that adapter_config.json names, in the shapes that the base's files give.

    All versions of a run have the same layers, so the first one's are kept.
    """

    def __init__(self, model_path: str | Path, lora: LoraConfig) -> None:
        super().__init__(model_path, tied=False)
        self._base, self._expected = self._expected, {}
        self._lora = lora

    def _check(self, folder: Path) -> None:
        file = check_files(folder)
        check_about(folder, self._lora, "", [])
        expected: dict[str, TensorSpec] = {}
        for layer in read_about(folder).get("target_modules") or ():
            found = self._base.get(f"{layer}.weight")
            if found is None or len(found.shape) != 2:
                raise WeightsError(
                    f"{ABOUT} names {layer}, which is no matrix in the files of model_path; use the engine transformers",
                    ErrorClass.PERMANENT,
                )
            outputs, inputs = found.shape
            expected[name_of(layer, "A")] = TensorSpec((self._lora.rank, inputs))
            expected[name_of(layer, "B")] = TensorSpec((outputs, self._lora.rank))
        if not expected or (self._expected and expected != self._expected):
            raise WeightsError(
                f"{ABOUT} does not name the layers that all versions of this run have", ErrorClass.PERMANENT
            )
        check_tensors(expected, self._aliases(expected), [file])
        self._expected = expected
