"""The files of an adapter's version are checked against the base before another program loads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from asyncrl.generation.adapter_tensors import AdapterTensors
from asyncrl.generation.engine import WeightsRefused
from asyncrl.weights.adapter import ABOUT
from asyncrl.weights.versions import commit_version, write_part
from tests.support.adapter_store import AdapterStore
from tests.support.weight_store import V0, V1, V2, WeightStore

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # peft asks transformers for it


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> AdapterStore:
    return AdapterStore(tmp_path_factory.mktemp("store"))


def test_versions_of_one_run_are_accepted(store: AdapterStore) -> None:
    tensors = AdapterTensors(store.model_path, store.lora)
    for version in (V0, V1):
        with tensors.verified(store.path(version), version, 1.0) as folder:
            assert folder == store.path(version)


def half(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(list(tensors.items())[::2])


def narrow(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor[:2] if "lora_B" in name else tensor for name, tensor in tensors.items()}


def another_layer(about: str) -> str:
    return about.replace("layers.1.mlp.up_proj", "layers.9.mlp.up_proj")


def one_layer_less(about: str) -> str:
    return about.replace('"model.layers.1.mlp.up_proj",', "")


@pytest.mark.parametrize(
    ("change", "describe", "message"),
    [
        (half, str, "is missing"),
        (narrow, str, "has shape"),
        (dict, another_layer, "names model.layers.9.mlp.up_proj, which is no matrix in the files of model_path"),
        (dict, one_layer_less, "does not name the layers that all versions of this run have"),
        (dict, lambda about: about.replace('"lora_alpha": 8', '"lora_alpha": 9'), "make them equal"),
        (dict, lambda about: about.replace('"bias": "none"', '"use_dora": true'), "use_dora is True"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    store: AdapterStore,
    tmp_path: Path,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    describe: Callable[[str], str],
    message: str,
) -> None:
    tensors = AdapterTensors(store.model_path, store.lora)
    with tensors.verified(store.path(V0), V0, 1.0):
        pass
    path = tmp_path / str(V2)
    sides = {ABOUT: describe((store.path(V2) / ABOUT).read_text()).encode()}
    commit_version(
        path, write_part(path, change(store.tensors(V2)).items(), fsync=False), sides=sides, version=V2, fsync=False
    )
    with pytest.raises(WeightsRefused, match=message), tensors.verified(path, V2, 1.0):
        pass


def test_a_version_of_whole_tensors_is_no_adapter(store: AdapterStore, tmp_path: Path) -> None:
    path = WeightStore(tmp_path).path(V0)
    with (
        pytest.raises(WeightsRefused, match=r"has no adapter_model\.safetensors"),
        AdapterTensors(store.model_path, store.lora).verified(path, V0, 1.0),
    ):
        pass
