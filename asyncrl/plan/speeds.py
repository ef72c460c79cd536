"""Shares of the data sheet's peaks that real steps reach (pure). Bound / share is the expected time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reached:
    """Bound of the time / measured time. `source` says where the shares are from."""

    training: float
    generation: float
    source: str


# docs/plan.md, "Published speeds", has the runs
DEFAULT = Reached(
    training=0.4,
    generation=0.8,
    source="training from published runs of another trainer on H100s (0.34 to 0.51), generation assumed",
)
REACHED = {  # by the name of the device
    "h200-141g": Reached(
        training=0.31,  # a bound of 574.2 TFLOP / 989 TFLOP/s = 0.58 s took 1.87 s; Qwen3-0.6B reached 0.23
        generation=0.8,
        source="training measured on one H200 (Qwen3-1.7B, 2 x 16384 tokens, without checkpointing or compiled layers: "
        "benchmarks/gpu/2026-11-27.json), generation assumed",
    ),
}


def reached(device: str) -> Reached:
    """The shares of a kind of GPU."""
    return REACHED.get(device, DEFAULT)
