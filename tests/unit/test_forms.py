"""The table of weight forms: the contract that each form keeps, and that no other code compares the name of a form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from fake_form import KIND, MaskForm

from asyncrl.generation.engine import WeightsRefused
from asyncrl.protocol.versions import WeightVersion
from asyncrl.weights import forms
from asyncrl.weights.form import WeightsError
from asyncrl.weights.forms import FORMS
from asyncrl.weights.versions import (
    Manifest,
    VerifiedVersion,
    commit_version,
    list_versions,
    prune_versions,
    verify_version,
    version_dir,
    write_part,
)
from asyncrl.weights.whole import whole
from tests.support.decisions import PACKAGE, decisions
from tests.support.live_tensors import live_tensors

SHAPES = {"a": (8, 4), "b": (60,), "c": (3, 3)}
Tensors = dict[str, torch.Tensor]
KINDS = [*FORMS, KIND]


def bits(tensors: Tensors) -> dict[str, list[int]]:
    return {name: tensor.detach().view(torch.int16).reshape(-1).tolist() for name, tensor in tensors.items()}


class Trainer:
    """Two ranks write version 0 in full, and each later version in the form, as a change to the version before."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.form, self.folder = kind, FORMS[kind], folder
        rng = np.random.default_rng(1)
        raw = {name: rng.integers(-(2**15), 2**15, shape).astype(np.int16) for name, shape in SHAPES.items()}
        self.versions: list[Tensors] = [
            {name: torch.from_numpy(data).view(torch.bfloat16) for name, data in raw.items()}
        ]
        for _ in range(2):
            new = {name: tensor.clone() for name, tensor in self.versions[-1].items()}
            new["b"].view(torch.int16)[int(rng.integers(60))] ^= 1
            new["c"].view(torch.int16)[0, 0] ^= -(2**15)
            self.versions.append(new)
        self.manifests: list[Manifest] = []
        for number in range(3):
            self.manifests.append(self.write(number))

    def path(self, number: int) -> Path:
        return version_dir(self.folder, "actor", WeightVersion(1, number))

    def write(self, number: int, *, replace: bool = False) -> Manifest:
        path, files = self.path(number), []
        for part, names in enumerate((("a", "b"), ("c",))):
            share = {name: tensor for name, tensor in self.versions[number].items() if name in names}
            changes = self.form.encode(self.versions[number - 1], share) if number else None
            others = {self.form.file_name(part): changes} if changes is not None else None
            whole_tensors = share.items() if changes is None else ()
            files += write_part(path, whole_tensors, part=part, fsync=False, others=others)
        base = self.manifests[number - 1] if number else None
        version = WeightVersion(1, number)
        sides = {self.form.about: b"{}"} if number and self.form.about else {}
        return commit_version(path, files, sides=sides, version=version, fsync=False, base=base, replace=replace)


class Model(torch.nn.Module):
    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)))


def load(model: Model, trainer: Trainer, number: int, served: str = "") -> str:
    return live_tensors(model).load_version(trainer.path(number), WeightVersion(1, number), VerifiedVersion(), served)


@pytest.fixture(params=KINDS)
def trainer(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    monkeypatch.setitem(FORMS, KIND, MaskForm())
    return Trainer(request.param, tmp_path)


def test_each_reader_gets_the_tensors_of_the_trainer(trainer):
    model, served = Model(**SHAPES), ""
    for number, expected in enumerate(trainer.versions):
        manifest = verify_version(trainer.path(number), WeightVersion(1, number))
        assert FORMS[manifest.kind] is (trainer.form if number else FORMS["full"])
        assert bits(whole(trainer.path(number))) == bits(expected)
        served = load(model, trainer, number, served)  # from the version before
        assert served == manifest.fingerprint
        assert bits(dict(model.named_parameters())) == bits(expected)
    late = Model(**SHAPES)
    load(late, trainer, 2)
    assert bits(dict(late.named_parameters())) == bits(trainer.versions[2])


def test_a_torn_file_is_refused(trainer):
    file = next(file for file in sorted(trainer.path(2).iterdir()) if file.suffix != ".json")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(WeightsError, match=f"{file.name} has .* bytes"):
        verify_version(trainer.path(2))
    with pytest.raises(WeightsRefused, match=file.name):
        load(Model(**SHAPES), trainer, 2)


def test_another_base_is_refused(trainer):
    trainer.versions[1] = {name: -tensor for name, tensor in trainer.versions[1].items()}
    trainer.write(1, replace=True)
    if not trainer.form.has_base:
        assert bits(whole(trainer.path(2))) == bits(trainer.versions[2])
        return
    with pytest.raises(WeightsError, match="is not the base of"):
        verify_version(trainer.path(2))
    with pytest.raises(WeightsRefused, match="is not the base of"):
        load(Model(**SHAPES), trainer, 2)


@pytest.mark.parametrize("shapes", [{"a": (8, 4), "b": (60,)}, {**SHAPES, "c": (9, 1)}])
def test_tensors_that_do_not_fit_are_refused_and_change_nothing(trainer, shapes):
    model = Model(**shapes)
    with pytest.raises(WeightsRefused, match=r"c (does not belong to this model|has shape \(3, 3\))"):
        load(model, trainer, 2, trainer.manifests[1].fingerprint)
    assert not any(parameter.any() for parameter in model.parameters())


def test_a_kept_version_keeps_its_bases(trainer):
    prune_versions(trainer.path(2).parent, keep=1, in_use=[])
    assert len(list_versions(trainer.path(2).parent)) == (3 if trainer.form.has_base else 1)
    verify_version(trainer.path(2))


def test_an_unknown_form_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(FORMS, KIND, MaskForm())
        trainer = Trainer(KIND, tmp_path)
    with pytest.raises(WeightsError, match=r"v00000002 is 'mask'; the known forms are full, delta"):
        verify_version(trainer.path(2))


def test_no_code_outside_the_table_compares_the_name_of_a_form():
    streams = (PACKAGE / "rollout" / "dialects").iterdir()  # a key of streamed answers has this name
    own = [PACKAGE / "weights" / "delta.py", Path(forms.__file__)]
    assert decisions({"delta", ".delta"}, [*own, *streams]) == set()
