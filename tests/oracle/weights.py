"""Final weights of short seeded runs, and the difference between two sets of weights.

A run uses a config of `runs/`. It is started from the command line with the code of a given tree: this checkout or the base commit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

HERE = Path(__file__).resolve().parent
BASE_TOLERANCE = 1e-6  # largest difference from weights that the base commit trains on the same machine
FILE_TOLERANCE = 1e-4  # largest difference from the committed weights, on any machine
RUN_LIMIT_S = 600.0

Weights = dict[str, Tensor]  # key: `<folder of the checkpoint>/<name of the tensor>`


def extract(revision: str, folder: Path) -> Path:
    """Write the package of a commit to the folder, for use as `tree` in `train`."""
    git = ["git", "-C", str(HERE.parents[1])]
    known = subprocess.run([*git, "cat-file", "-e", f"{revision}^{{commit}}"], capture_output=True, check=False)
    if known.returncode:
        raise RuntimeError(
            f"base commit {revision}: this clone does not have it, so there is nothing to compare with; "
            "get the whole history with `git fetch --unshallow`, or name another commit with --base"
        )
    archive = subprocess.run([*git, "archive", f"{revision}:asyncrl"], stdout=subprocess.PIPE, check=True).stdout
    package = folder / "asyncrl"
    package.mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", str(package)], input=archive, check=True)
    return folder


def train(tree: Path, run: str, folder: Path) -> Weights:
    """Run `runs/<run>.yaml` with the tree's code; the folder, which must be empty, holds the run. Returns its final weights."""
    folder.mkdir(parents=True)
    # PYTHONPATH comes before an installed asyncrl; only the current folder comes before PYTHONPATH, and it has no asyncrl
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    used = _output([sys.executable, "-c", "import asyncrl; print(asyncrl.__file__)"], folder, env).strip()
    if Path(used).parents[1] != tree:
        raise RuntimeError(f"the run would use {used} instead of {tree / 'asyncrl'}")
    overrides = {
        "fileroot": folder / "runs",
        "model_path": HERE / "model",
        "prompts.path": HERE / "prompts.jsonl",
        "rollout.tasks.default.reward": f"{HERE / 'reward.py'}:reward",
        "replay.path": HERE / "recording",
    }
    if run == "sync":
        del overrides["replay.path"]
    program = "asyncrl.cli.main" if (tree / "asyncrl" / "cli").is_dir() else "asyncrl.launch.cli"  # of the base commit
    command = [sys.executable, "-m", program, "run", str(HERE / "runs" / f"{run}.yaml")]
    output = _output([*command, *(f"{field}={value}" for field, value in overrides.items())], folder, env)
    found = {
        f"{file.parent.name}/{name}": tensor
        for file in sorted(folder.glob("runs/*/*/checkpoints/final*/*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    if not found:
        raise RuntimeError(f"{run} left no final weights in {folder}; it printed:\n{output}")
    return found


def committed(run: str) -> Weights:
    """The committed final weights of the run, from the base commit."""
    return {
        f"{file.name.split('.')[1]}/{name}": tensor
        for file in sorted((HERE / "weights").glob(f"{run}.*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def compare(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], tolerance: float) -> tuple[float, list[str]]:
    """Return the largest absolute difference of two sets of weights, and a text for each tensor that differs by more than the
    tolerance, or is missing, new, or of another shape or dtype."""
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"{name} is new" for name in sorted(found.keys() - expected.keys())]
    largest = 0.0
    for name in sorted(expected.keys() & found.keys()):
        one, other = expected[name], found[name]
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            problems.append(f"{name}: {list(one.shape)} {one.dtype} became {list(other.shape)} {other.dtype}")
            continue
        difference = float(torch.nan_to_num((one.double() - other.double()).abs(), nan=float("inf")).max())
        largest = max(largest, difference)
        if difference > tolerance:
            problems.append(f"{name} differs by {difference:.2g}")
    return largest, problems


def _output(command: list[str], folder: Path, env: Mapping[str, str]) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}; it printed:\n{done.stdout}")
    return done.stdout
