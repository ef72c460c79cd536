"""What a run that only rolled out (mode=rollout_only) says at its end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.data.trajectories import recording_dir


def recording_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Groups, tokens, rewards, throughput: label and text."""
    seconds = max(summary["training_s"], 1e-9)
    tokens, responses = summary["generated_tokens"], summary["sequences"]
    rows = [
        ("recorded", f"{summary['groups']} groups, {responses} responses, in {summary['steps']} batches"),
        ("generated tokens", f"{tokens}, {tokens / max(responses, 1):.1f} a response"),
        (
            "reward",
            f"mean {summary['mean_reward']:.3f}; {summary['first_reward']:.3f} in the first batch, "
            f"{summary['last_reward']:.3f} in the last",
        ),
        (
            "throughput",
            f"{tokens / seconds:.0f} tokens/s, {summary['groups'] / seconds:.2f} groups/s, in {seconds:.1f} s of rolling out",
        ),
        ("wall time", f"{summary['wall_s']:.1f} s since the master started"),
    ]
    for evaluation in summary["evaluations"]:
        scores = [
            f"{mode} {evaluation[key]:.3f}"
            for mode in ("sampled", "greedy")
            if (key := f"eval/{mode}_reward") in evaluation
        ]
        rows.append(("evaluation of the weights", ", ".join(scores)))
    rejected = ", ".join(f"{why}: {count}" for why, count in summary["rejected"].items())
    return [*rows, ("rejected prompts", rejected or "none")]


def recording_lines(summary: Mapping[str, Any], run_dir: Path) -> list[str]:
    """Where the trajectories are and what they are good for."""
    folder = recording_dir(run_dir, summary["attempt"])
    return [
        f"The trajectories: {folder}",
        f"Look at them:     asyncrl-launch inspect {run_dir}",
        f"Train on them:    asyncrl-launch run CONFIG mode=train_only replay.path={folder} trial=... eval.prompts=null "
        f"manager.max_head_offpolicyness={max(summary['steps'] - 1, 0)}",
    ]
