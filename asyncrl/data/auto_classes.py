"""Which of transformers' auto classes makes the language model of a model type. Torch-free.

The source of transformers' tables is parsed, because an import takes seconds.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

from asyncrl.data.model_folder import read_object

_CAUSAL = "AutoModelForCausalLM"
# By auto class: its table. The first that has a model type counts
_TABLES = {
    _CAUSAL: "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}


@functools.cache
def auto_classes() -> Mapping[str, str]:
    """Model type -> auto class, of the installed transformers; empty if its tables cannot be read."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return {}
    try:
        source = (Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
    except OSError:
        return {}
    found: dict[str, str] = {}
    for auto_class, name in _TABLES.items():
        table = re.search(rf"^{name} = .*?^\)", source, re.MULTILINE | re.DOTALL)
        found = dict.fromkeys(re.findall(r'\("([\w.-]+)",', table[0]) if table else (), auto_class) | found
    return found


def auto_class_name(model_type: object) -> str:
    return auto_classes().get(str(model_type), _CAUSAL)


def auto_class_of(folder: Path) -> str:
    """Of the model in a folder, for a message: a folder without a config.json has a causal language model."""
    try:
        return auto_class_name(read_object(folder / "config.json").get("model_type"))
    except (OSError, ValueError):
        return _CAUSAL
