"""The table of families: what the self-check says of each language model of transformers.

`python -m tests.support.family_table --write` makes a small copy of each architecture, runs trainer and embedded engine on it as
`asyncrl-launch check` does, and writes the table to docs/families.md. With names of families it judges these only;
without --write it writes nothing. It prints the verdicts, and the time that each takes.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from asyncrl.architectures.agreement import Agreement
from asyncrl.architectures.small_copy import small_config
from asyncrl.cli.architecture_check import Task, check_architecture
from asyncrl.config.schema import ConfigError, GenerationConfig
from asyncrl.data.auto_classes import auto_classes
from asyncrl.model.export import exported_specs
from asyncrl.model.sharding import Skeleton

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"

_QWEN4_EXP = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}

# Published models of a family, where its name does not say them
_MODELS: Mapping[str, str] = {
    "cwm": "Code World Model",
    "deepseek_v3": "DeepSeek-V3, R1",
    "ernie4_5": "ERNIE 4.5",
    "exaone4": "EXAONE 4",
    "gemma4_text": "Gemma 4",
    "gemma3_text": "Gemma 3",
    "gemma3n_text": "Gemma 3n",
    "glm": "GLM-4 (2024)",
    "glm4": "GLM-4-0414",
    "glm4_moe": "GLM-4.5, 4.6",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "gpt_oss": "gpt-oss (sinks)",
    "granite": "Granite 3",
    "granitemoehybrid": "Granite 4",
    "hy_v3": "Hunyuan 3",
    "lfm2": "LFM2",
    "lfm3": "LFM3",
    "llama": "Llama 2, 3, and others",
    "mistral": "Mistral 7B",
    "ministral3": "Ministral 3",
    "nemotron_h": "Nemotron-H, Nano 2",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "phi": "Phi-1, 2",
    "phi3": "Phi-3, Phi-4",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3_5": "Qwen3.5, 3.6 (its text model)",
    "qwen3_5_moe": "Qwen3.5, 3.6 (its text model)",
    "qwen3_5_text": "Qwen3.5, 3.6",
    "qwen3_5_moe_text": "Qwen3.5, 3.6",
    "qwen3_next": "Qwen3-Next",
}


def _mrope(*sections: int, **others: Any) -> Mapping[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(sections), **others}
    return {"text_config": {"rope_parameters": rope}}


# Fields of the published models of a family, where the default config of transformers makes no model.
_PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        }
    },
    "ernie4_5_vl_moe": _mrope(22, 22, 20),
    "glm46v": _mrope(8, 12, 12, partial_rotary_factor=0.5),
    "glm4v": _mrope(8, 12, 12, partial_rotary_factor=0.5),
    "glm4v_moe": _mrope(8, 12, 12, partial_rotary_factor=0.5),
    "glm_ocr": _mrope(16, 24, 24),
    "glmga": _mrope(8, 12, 12, partial_rotary_factor=0.5),
    "paddleocr_vl": _mrope(16, 24, 24),
    "qwen2_5_omni_thinker": _mrope(16, 24, 24),
    "qwen2_5_vl": _mrope(16, 24, 24),
    "qwen2_vl": _mrope(16, 24, 24),
    "qwen3_omni_moe_thinker": _mrope(24, 20, 20, mrope_interleaved=True),
    "qwen3_vl": _mrope(24, 20, 20, mrope_interleaved=True),
    "qwen3_vl_moe": _mrope(24, 20, 20, mrope_interleaved=True),
    "cohere_compass": {
        "text_config": {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            }
        }
    },
    "hunyuan_vl": {"text_config": {"head_dim": 128}},
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
    "granitemoehybrid": {"layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 10) * 2},
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
    trainer: Agreement | None  # None: the trainer refuses it
    reason: str  # why the trainer refuses it, or the embedded engine; "": neither does
    seconds: float = 0.0

    @property
    def is_trained(self) -> bool:
        return self.trainer is not None


def families() -> list[str]:
    """Model types of all language models of the installed transformers, in alphabetical order: causal ones, and those that read
    images beside text."""
    return sorted(auto_classes())


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
    refusal = _cannot_be_exported(family) if result.trainer is not None else ""
    reason = _reason(refusal or result.problem or result.not_checked)
    return Verdict(family, None if refusal else result.trainer, reason, time.perf_counter() - began)


def _cannot_be_exported(family: str) -> str:
    """Why a trainer cannot write a checkpoint of the family, for which it is refused when the trainer loads it; "": it can."""
    model = Skeleton.of(small_config(default_config(family)), "lm", torch.float32).model
    try:
        exported_specs(model, {})
    except ConfigError as error:
        return str(error)
    return ""


# What each refusal says, and its words in the table. The first that matches counts.
_REASONS = (
    (
        r"mixes the sequences of a row",
        "a layer carries a state, or positions, from one sequence of a packed row into the next",
    ),
    (r"did not call asyncrl's attention|no replaceable attention", "transformers has no replaceable attention for it"),
    (r"does not pass the model's arguments on", "its layers do not pass arguments on to attention"),
    (r"depends on the tokens behind it", "it is not causal with its default config"),
    (
        r"of its checkpoints from several tensors",
        "its checkpoints have tensors that are computed from several tensors of the model",
    ),
    (r"masks attention in a way", "it masks attention in a way that asyncrl does not compute"),
    (r"layers with keys of several sizes", "the KV cache of the embedded engine has one size of keys"),
    (r"changes its logits", "it changes its logits after the output layer in a way that asyncrl does not compute"),
    (r"was decoded with another logprob", "transformers decodes another logprob than its own forward pass gives"),
    (
        r"embedded engine cannot sample|generation.attention",
        "the embedded engine has no cache or attention for its layers",
    ),
    (r"does not support (\w+), which", "its attention has a term that asyncrl does not compute"),
    (r"plain transformers by", "asyncrl's attention does not compute what it defines"),
    (
        r"no small copy.*(pixel_values|image_embeds|flattened_patches|encoder_outputs|inputs_embeds|Bbox|'state')",
        "it computes no text by itself",
    ),
    (
        r"requires the (\w+) library|No module named",
        "transformers needs a package for its towers that asyncrl does not install",
    ),
    (r"no small copy of it can be made", "asyncrl makes no small copy of it"),
    (r"its weights lack", "transformers does not load what it saves"),
    (r"makes no model of its config.json", "transformers makes no model of its default config"),
    (r"Multiple valid text configs", "its config has two language models"),
    (r"says that the output layer is the embedding", "its config ties an output layer that the model does not tie"),
    (r"Unrecognized configuration class", "transformers loads it only as a part of another model"),
    (r"cannot train this architecture", "its code does not run in the trainer"),
)


def _reason(text: str) -> str:
    """The words for a verdict in the table, without folders and figures, which differ from run to run."""
    return next((words for pattern, words in _REASONS if re.search(pattern, text)), text)


def table(verdicts: Sequence[Verdict]) -> str:
    """The part of the page between its markers."""
    rows = ["| model type | models | logprobs | gradients | embedded engine |", "|---|---|---|---|---|"]
    by_reason: dict[str, list[str]] = {}
    for verdict in verdicts:
        if verdict.trainer is None:
            by_reason.setdefault(verdict.reason, []).append(verdict.family)
            continue
        figures = f"{verdict.trainer.nats:.0e} | {verdict.trainer.gradients:.0e}"
        engine = f"refused: {verdict.reason}" if verdict.reason else "samples"
        rows.append(f"| {verdict.family} | {_MODELS.get(verdict.family, '')} | {figures} | {engine} |")
    refused = ["| refused because | families | model types |", "|---|---|---|"]
    for reason, names in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        refused.append(f"| {reason} | {len(names)} | {', '.join(names)} |")
    sampled = sum(verdict.is_trained and not verdict.reason for verdict in verdicts)
    trained = sum(verdict.is_trained for verdict in verdicts)
    counts = f"{trained} families train. The embedded engine samples {sampled} of them."
    return "\n".join([counts, "", *rows, "", f"The other {len(verdicts) - trained} are refused:", "", *refused])


def write(verdicts: Sequence[Verdict]) -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(verdicts)}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def listed() -> dict[str, Verdict]:
    """By family, as the page has it."""
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    found = []
    for family, nats, gradients, engine in re.findall(
        r"^\| (\S+) \| .*\| (\d\S*) \| (\d\S*) \| (?:samples|refused: (.+)) \|$", text, re.MULTILINE
    ):
        found.append(Verdict(family, Agreement(float(nats), float(gradients)), engine))
    for reason, names in re.findall(r"^\| (.+?) \| \d+ \| (.+) \|$", text, re.MULTILINE):
        found += [Verdict(family, None, reason) for family in names.split(", ")]
    return {verdict.family: verdict for verdict in found}


def main(arguments: Sequence[str]) -> None:
    quiet: Any = transformers.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    names = [argument for argument in arguments if argument != "--write"]
    verdicts = listed() if names else {}
    for family in names or families():
        found = verdicts[family] = judge(family)
        print(f"{family:26s} {found.seconds:5.1f} s  {found.trainer}  {found.reason}", flush=True)
    if "--write" in arguments:
        write([verdicts[family] for family in sorted(verdicts)])


if __name__ == "__main__":
    main(sys.argv[1:])
