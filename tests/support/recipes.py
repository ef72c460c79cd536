"""The recipes of docs/recipes.md, planned: three sizes of models on 1, 8 and 32 GPUs.

    python -m tests.support.recipes [NUMBER ...] [--write]

plans the recipes of these numbers (default: all), and writes the page's table. All of them take some minutes of two cores.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from asyncrl.config.resolve import Facts, resolve
from asyncrl.config.schema import ExperimentConfig
from asyncrl.launch.experiment import load_experiment
from asyncrl.plan.capacity import GIB, RunPlan, plan_run
from asyncrl.plan.devices import DEVICES
from asyncrl.plan.ranks import plan_training
from tests.pages import ROOT, blocks

PAGE = ROOT / "docs" / "recipes.md"
GPU = "h100-80g"
BEGIN, END = "<!-- plans from here -->", "<!-- to here -->"
# hidden size, width of the MLP, layers, heads, heads of keys and values, tied embeddings: those of Qwen3's config.json
SHAPES = {
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8, True),
    "Qwen3-8B": (4096, 12288, 36, 32, 8, False),
    "Qwen3-32B": (5120, 25600, 64, 64, 8, False),
}
_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "vocab_size": 151936}


class Recipe(NamedTuple):
    model: str  # of SHAPES
    gpus: int
    changes: tuple[str, ...]  # overrides of the page's config


_IN_TURNS = "manager.max_head_offpolicyness=0"
_ADAPTERS = ("train.lora.rank=16", "train.optimizer.lr=2.0e-5")
RECIPES = (
    Recipe("Qwen3-0.6B", 1, ("allocation=sglang.d1@0+d1@0", _IN_TURNS)),
    Recipe("Qwen3-0.6B", 8, ("allocation=sglang.d6+d2",)),
    Recipe("Qwen3-0.6B", 32, ("allocation=sglang.d26+d6", "train.batch_size=256")),
    Recipe("Qwen3-8B", 1, ("allocation=transformers.d1@0+d1@0", _IN_TURNS, *_ADAPTERS, "generation.num_blocks=4096")),
    Recipe("Qwen3-8B", 8, ("allocation=sglang.d4+d4",)),
    Recipe("Qwen3-8B", 32, ("allocation=sglang.d14+d18", "train.batch_size=256")),
    Recipe(
        "Qwen3-32B", 1, ("allocation=transformers.d1@0+d1@0", _IN_TURNS, *_ADAPTERS, "train.max_tokens_per_mb=5120")
    ),
    Recipe("Qwen3-32B", 8, ("allocation=sglang.d4m2@0-7+d8@0-7", _IN_TURNS, "train.max_tokens_per_mb=5120")),
    Recipe("Qwen3-32B", 32, ("allocation=sglang.d2m4+d24", "train.batch_size=256")),
)


def config_of(recipe: Recipe, folder: Path) -> ExperimentConfig:
    """The page's config with the recipe's changes, and a folder with the model's config.json."""
    (text,) = blocks(PAGE, "yaml")
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    *sizes, tied = SHAPES[recipe.model]
    shape = (
        _QWEN3 | dict(zip(_NAMES, sizes, strict=True)) | {"max_position_embeddings": 40960, "tie_word_embeddings": tied}
    )
    (folder / "config.json").write_text(json.dumps(shape))
    return load_experiment(folder / "recipe.yaml", [*recipe.changes, f"model_path={folder}"])


def planned(recipe: Recipe) -> RunPlan:
    with TemporaryDirectory() as folder:
        config = resolve(config_of(recipe, Path(folder)), Facts(on_gpu=True))
        return plan_run(config, DEVICES[GPU], partial(plan_training, known={}))


def row(recipe: Recipe, plan: RunPlan) -> str:
    """A line of the page's table."""
    changes = " ".join(f"`{change}`" for change in recipe.changes)
    fits = ("hardly" if plan.shortages else "yes") if plan.fits else "no"
    time = plan.time
    times = (time.expected_step_s, time.expected_training_s, time.expected_generation_s)
    shown = " | ".join(f"{float(f'{value:.2g}'):,g}" for value in times)
    return f"| {recipe.model} | {recipe.gpus} | {changes} | {fits} | {plan.peak / GIB:.1f} | {shown} |"


def write(rows: Sequence[str]) -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    head = "| model | GPUs | changes | fits | GiB of the fullest GPU | s a step | training | generation |"
    table = "\n".join([head, "|---|---|---|---|---|---|---|---|", *rows])
    PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def listed() -> list[str]:
    """The rows that the page has."""
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    return [line for line in table.splitlines() if line.startswith("| Qwen")]


def main(arguments: Sequence[str]) -> None:
    chosen = [int(argument) for argument in arguments if argument != "--write"]
    rows = listed() or [""] * len(RECIPES)
    for number in chosen or range(len(RECIPES)):
        rows[number] = row(RECIPES[number], planned(RECIPES[number]))
        print(rows[number], flush=True)
    if "--write" in arguments:
        write(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
