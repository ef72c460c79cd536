"""`python -m asyncrl.cli.architecture_check`: the self-check of an architecture, for `asyncrl-launch check`.

A small copy of the architecture takes the path of a run: the trainer loads it, computes packed rows and exports a version; the
embedded engine loads that version and samples from it. All logprobs must be those of plain transformers.

Reads a Task from stdin in JSON and writes a Result to stdout. It imports torch and runs the code of transformers, so it has a
process of its own with limits on time and memory.
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec

from asyncrl.architectures.agreement import Agreement, no_small_copy
from asyncrl.config.modes import mode_of
from asyncrl.config.schema import ConfigError, ExperimentConfig, GenerationConfig
from asyncrl.data.model_limits import ModelLimits
from asyncrl.dataflow.topology import allocation_of
from asyncrl.generation.engine import WeightsRefused
from asyncrl.launch.checks.checklist import Finding
from asyncrl.protocol.names import ACTOR
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.process import die_with_parent
from asyncrl.weights.versions import version_dir, write_version

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from asyncrl.generation.transformers import TransformersEngine
    from asyncrl.model.engine import TrainEngine

LIMIT_S = 60.0
LIMIT_BYTES = 4 << 30
_NAME = "architecture"
_NOISE = 1e-5  # nats between two attention implementations in a small copy of a mixture of experts


class Task(msgspec.Struct, frozen=True):
    """path: folder of a causal language model. trains: a trainer loads it. generation: config of the embedded engine; None: no
    embedded engine samples from it. by_folder: servers take weights under the names in the model's folder, as SGLang's do.
    share_prefix: train.share_prefix."""

    path: str
    trains: bool
    generation: GenerationConfig | None
    by_folder: bool = False
    share_prefix: str = "auto"


class Result(msgspec.Struct, frozen=True):
    """Problem and not_checked are empty if all computations agree."""

    problem: str = ""
    not_checked: str = ""
    trainer: Agreement | None = None  # not None: the trainer passed, so the problem is the embedded engine's


def task_of(config: ExperimentConfig) -> Task:
    mode = mode_of(config.mode)
    is_embedded = mode.has_servers and allocation_of(config).traits.is_embedded
    generation = config.generation if is_embedded else None
    by_folder = mode.updates_servers and not is_embedded
    path = str(Path(config.model_path).expanduser())
    return Task(path, mode.trains, generation, by_folder, config.train.share_prefix)


def judge_architecture(config: ExperimentConfig) -> list[Finding]:
    """One finding about the architecture of model_path. waits for: its process, for LIMIT_S at most."""
    task = task_of(config)
    command = [sys.executable, "-P", "-m", "asyncrl.cli.architecture_check"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(task), capture_output=True, env=env, timeout=LIMIT_S, check=False
        )
        result = msgspec.json.decode(done.stdout, type=Result)
    except subprocess.TimeoutExpired:
        result = Result(not_checked=f"it took more than {LIMIT_S:g} s")
    except OSError as error:
        result = Result(not_checked=f"its process cannot be started: {error}")
    except msgspec.MsgspecError:
        result = Result(not_checked=f"its process ended: {done.stderr.decode(errors='replace').strip()[-300:]}")
    if result.problem:
        return [
            Finding(_NAME, "fail", result.problem, "use another model; docs/families.md lists the families that work")
        ]
    if result.not_checked:
        remedy = "the trainer and the servers check the model when they load it"
        return [Finding(_NAME, "warn", f"not checked on a small copy: {result.not_checked}", remedy)]
    text = "packed, alone, and decoded from the cache, a small copy computes the same logprobs and gradients"
    return [Finding(_NAME, "ok", text)]


def check_architecture(task: Task) -> Result:
    """Make a small copy of the task's architecture and compare all ways to compute its logprobs."""
    from asyncrl.architectures.small_copy import save_small_copy
    from asyncrl.model.sharding import load_config

    with TemporaryDirectory(prefix="asyncrl-self-check-") as folder:
        model = Path(folder) / "model"
        try:
            config = load_config(task.path, "lm")
            if task.by_folder:
                _check_names(task.path, config)
            save_small_copy(config, model)
        except ConfigError as error:
            return Result(problem=str(error))
        except Exception as error:  # the architecture's own code, with sizes that it may refuse in any way
            return _judge_original(task.path, error)
        trainer, agreement = None, None
        try:
            if task.trains:
                trainer, agreement = _train(model, task.share_prefix)
            if task.generation is not None:
                asyncio.run(_sample(task.generation, model, trainer, Path(folder) / "run"))
        except ConfigError as error:
            return Result(problem=str(error).replace(str(model), task.path), trainer=agreement)
    return Result(trainer=agreement)


def _judge_original(path: str, error: Exception) -> Result:
    """Check that transformers makes a model of this config.json, on a device without memory. error: of the small copy."""
    import torch

    from asyncrl.architectures.auto_class import auto_class, is_proven_by_copy
    from asyncrl.model.sharding import load_config

    try:
        with torch.device("meta"):
            config = load_config(path, "lm")
            auto_class(config).from_config(config)
        if is_proven_by_copy(config):
            return Result(f"model_path={path!r}: {no_small_copy(error)}")
    except Exception as refusal:  # the architecture's own code
        return Result(f"model_path={path!r}: transformers makes no model of its config.json: {refusal!r}")
    return Result(not_checked=f"no small copy of it can be made: {error!r}"[:300])


def _check_names(path: str, config: PreTrainedConfig) -> None:
    """Check that a trainer exports the tensors that are in the model's folder, by the headers of its files. Raises ConfigError."""
    import torch

    from asyncrl.architectures.checkpoint_names import adopt_names
    from asyncrl.generation.checks import ModelTensors
    from asyncrl.model.export import exported_specs
    from asyncrl.model.sharding import Skeleton, stored_tensors, untrained_tensors

    model = Skeleton.of(config, "lm", torch.float32).model
    adopt_names(model, stored_tensors(path))
    specs = exported_specs(model, untrained_tensors(path, model, with_values=False))
    try:
        ModelTensors(path, tied=ModelLimits.of(path).tied).check_sent(specs, complete=True)
    except WeightsRefused as error:
        raise ConfigError(
            f"model_path={path!r}: its tensors are not those that the trainer exports, as transformers saves this architecture, "
            f"so the generation servers would refuse every version: {error}. Use the folder that the model's authors "
            "published, or copy the weights into a new model of transformers (from_config, load_state_dict) and save that"
        ) from error


def _train(model: Path, share_prefix: str) -> tuple[TrainEngine, Agreement]:
    """Raises ConfigError."""
    from asyncrl.architectures.agreement import architecture_errors
    from asyncrl.model.self_check import check_saved_copy

    with architecture_errors(model):
        return check_saved_copy(model, share_prefix=share_prefix)


async def _sample(config: GenerationConfig, model: Path, trainer: TrainEngine | None, run_dir: Path) -> None:
    """Start the embedded engine, which checks its decoding, and load what the trainer exports. Raises ConfigError."""
    from asyncrl.generation.engine import EngineArguments
    from asyncrl.generation.self_check import small_engine_config
    from asyncrl.generation.transformers import TransformersEngine

    engine = TransformersEngine(EngineArguments(str(model), small_engine_config(config)), device="cpu")
    try:
        await engine.start()
        if trainer is not None:
            await _load_export(engine, trainer, model, run_dir)
    except WeightsRefused as error:
        raise ConfigError(
            f"model_path={str(model)!r}: the embedded engine refuses what the trainer exports: {error}"
        ) from error
    finally:
        await engine.close()


async def _load_export(engine: TransformersEngine, trainer: TrainEngine, model: Path, run_dir: Path) -> None:
    """Export the trainer's weights as a version, load it in the engine, and compare the engine's logprobs with the trainer's."""
    import numpy as np

    from asyncrl.architectures.agreement import Difference, bound_of, texts_of
    from asyncrl.model.export import take_share
    from asyncrl.model.self_check import compute
    from asyncrl.model.sharding import load_config, load_whole

    version = WeightVersion(1, 0)
    path = version_dir(run_dir, ACTOR, version)
    write_version(path, take_share(trainer).items(), source_dir=model, version=version, fsync=False)
    load_whole(path, "lm", load_config(path, "lm"), trainer.dtype)  # under the names that transformers expects
    await engine.load_weights(path, version)
    texts = texts_of(trainer.vocab_size)
    expected = compute(trainer, texts)
    assert expected is not None
    scores = [np.array(await engine.score(text), np.float32) for text in texts]
    worst = Difference.between(scores, expected)
    if worst.nats > (bound := bound_of(32, _NOISE)):
        raise ConfigError(
            f"model_path={str(model)!r}: after an export and a load, the engine's logprobs differ from the trainer's by "
            f"{worst.nats:.3g} (bound: {bound:.0e}): the names of the exported tensors do not mean the same to both"
        )


def main() -> None:
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    result = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print to stdout
    found = check_architecture(msgspec.json.decode(sys.stdin.buffer.read(), type=Task))
    with result:
        result.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
