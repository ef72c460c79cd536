"""Shares of the data sheet's peaks that real steps reach (pure). Bound / share is the expected time."""

from __future__ import annotations

from dataclasses import dataclass

LOAD_BYTES = 2.3e9  # of model files that a process loads in a second
LOAD_SOURCE = "measured for the embedded engine on one H200, with files in memory: benchmarks/gpu/2026-11-27.json"


@dataclass(frozen=True)
class Reached:
    """Bound of the time / measured time. `source` says where the share of training is from. That of generation is assumed."""

    training: float
    generation: float
    source: str


# docs/plan.md, "Published speeds", has the runs
DEFAULT = Reached(
    training=0.4,
    generation=0.8,
    source="published runs of another trainer on H100s, 0.34 to 0.51",
)
REACHED = {  # by the name of the device
    "h200-141g": Reached(
        training=0.3,  # a bound of 0.713 s took 2.358 s; without checkpointing 0.31, and Qwen3-0.6B 0.23
        generation=0.8,
        source="measured on one H200: Qwen3-1.7B, 2 x 16384 tokens, with checkpointing, without compiled layers; "
        "benchmarks/gpu/2026-11-27.json",
    ),
}


def reached(device: str) -> Reached:
    """The shares of a kind of GPU."""
    return REACHED.get(device, DEFAULT)
