"""The parts of a model that texts do not reach: towers that encode images and sounds, and what projects their outputs."""

from __future__ import annotations

from transformers import PreTrainedModel

from asyncrl.architectures.attention import backbone_of


def drop_towers(model: PreTrainedModel) -> None:
    """Remove these parts, so that they take no memory and no step of an optimizer changes them."""
    backbone, decoder = backbone_of(model), model.get_decoder()  # type: ignore[no-untyped-call]
    children = dict(backbone.named_children())
    if any(child is decoder for child in children.values()):
        others = [name for name, child in children.items() if child is not decoder]
        for name in (*others, *dict(backbone.named_parameters(recurse=False))):
            setattr(backbone, name, None)
