"""Which of transformers' auto classes makes a model of a config."""

from __future__ import annotations

from typing import Any

import transformers

from asyncrl.data.auto_classes import auto_class_name

_OF_KIND = {"value": "AutoModelForTokenClassification", "reward": "AutoModelForSequenceClassification"}


def is_proven_by_copy(config: transformers.PreTrainedConfig) -> bool:
    """Whether only a small copy shows that texts take the path through the model that the trainer takes: it reads images, too."""
    return auto_class(config) is transformers.AutoModelForImageTextToText


def auto_class(config: transformers.PreTrainedConfig, kind: str = "lm") -> Any:
    """kind: lm, value or reward."""
    return getattr(transformers, _OF_KIND.get(kind) or auto_class_name(config.model_type))
