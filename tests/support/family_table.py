"""The table of families: what the self-check says of each causal language model of transformers.

`python -m tests.support.family_table --write` makes a small copy of each architecture, runs trainer and embedded engine on it as
`asyncrl-launch check` does, and writes the table to docs/verification.md. With names of families it prints their
verdicts, and the time that each takes, and writes nothing.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from asyncrl.cli.architecture_check import Task, check_architecture
from asyncrl.config.schema import GenerationConfig

PAGE = Path(__file__).parents[2] / "docs" / "verification.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
EQUAL = "equal"

_QWEN4_EXP = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}

# Fields of the published models of a family, where the default config of transformers makes no model.
_PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        }
    },
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1},
    "dots1": {
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16, "moe_topk": 2},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 10 + ["conv", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 10 + ["conv", "conv"]},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": {"text_config": _QWEN4_EXP},
    "qwen4_exp_text": _QWEN4_EXP,
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
}


@dataclass(frozen=True)
class Verdict:
    family: str
    text: str  # EQUAL, or the reason why it is refused
    seconds: float


def families() -> list[str]:
    """Model types of all causal language models of the installed transformers, in alphabetical order."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def default_config(family: str) -> transformers.PreTrainedConfig:
    """The config of a family's published models, as far as transformers' default does not make a model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config: transformers.PreTrainedConfig = CONFIG_MAPPING[family](**_PUBLISHED.get(family, {}))
    return config


def judge(family: str) -> Verdict:
    """Check a family. An error of any kind that is not a refusal passes through."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        default_config(family).save_pretrained(folder)
        result = check_architecture(Task(folder, True, GenerationConfig()))
    text = result.problem or result.not_checked or EQUAL
    return Verdict(family, _reason(text), time.perf_counter() - began)


# What each refusal says, and its words in the table. The first that matches counts.
_REASONS = (
    (
        r"mixes the sequences of a row",
        "a layer carries a state, or positions, from one sequence of a packed row into the next",
    ),
    (r"did not call asyncrl's attention|no replaceable attention", "transformers has no replaceable attention for it"),
    (r"does not pass the model's arguments on", "its layers do not pass arguments on to attention"),
    (r"depends on the tokens behind it", "it is not causal with its default config"),
    (r"masks attention in a way", "it masks attention in a way that asyncrl does not compute"),
    (r"layers with keys of several sizes", "the KV cache of the embedded engine has one size of keys"),
    (r"changes its logits", "it changes its logits after the output layer in a way that asyncrl does not compute"),
    (
        r"embedded engine cannot sample|generation.attention",
        "the embedded engine has no cache or attention for its layers",
    ),
    (r"does not support (\w+), which", "its attention has a term that asyncrl does not compute"),
    (r"plain transformers by", "asyncrl's attention does not compute what it defines"),
    (r"makes no model of its config.json", "transformers makes no model of its default config"),
    (r"Multiple valid text configs", "its config has two language models"),
    (r"says that the output layer is the embedding", "its config ties an output layer that the model does not tie"),
    (r"Unrecognized configuration class", "transformers loads it only as a part of another model"),
    (r"cannot train this architecture", "its code does not run in the trainer"),
)


def _reason(text: str) -> str:
    """The words for a verdict in the table, without folders and figures, which differ from run to run."""
    return next((words for pattern, words in _REASONS if re.search(pattern, text)), text)


def table(verdicts: Iterable[Verdict]) -> str:
    """The part of the page between its markers."""
    by_reason: dict[str, list[str]] = {}
    for verdict in verdicts:
        by_reason.setdefault(verdict.text, []).append(verdict.family)
    equal = by_reason.pop(EQUAL, [])
    rows = [f"| equal | {len(equal)} | {', '.join(equal)} |"]
    for reason, names in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        rows.append(f"| refused: {reason} | {len(names)} | {', '.join(names)} |")
    return "\n".join(["| verdict | families | model types |", "|---|---|---|", *rows])


def write(verdicts: Iterable[Verdict]) -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(verdicts)}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def listed() -> dict[str, str]:
    """Family -> verdict, as the page has it."""
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = re.findall(r"^\| (?:refused: )?(.+?) \| \d+ \| (.+) \|$", text, re.MULTILINE)
    return {family: verdict for verdict, names in rows for family in names.split(", ")}


def main(names: Sequence[str]) -> None:
    quiet: Any = transformers.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    verdicts = []
    for family in families() if list(names) == ["--write"] else names:
        verdicts.append(judge(family))
        print(f"{family:26s} {verdicts[-1].seconds:5.1f} s  {verdicts[-1].text}", flush=True)
    if list(names) == ["--write"]:
        write(verdicts)


if __name__ == "__main__":
    main(sys.argv[1:])
