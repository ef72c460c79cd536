"""Decides which checkpoint a run resumes from if its folder has any (config field `recover`), and whether it fits the config.

These may differ from the run that wrote the checkpoint: layout, numbers of workers, batch size, learning rate, and everything else
that a checkpoint does not contain. These may not: the prompts and their order, and the shapes of the trained models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from asyncrl.config.fields import leaf_values
from asyncrl.config.modes import mode_of
from asyncrl.config.resolve import Resumed, with_absolute_paths
from asyncrl.config.schema import CRITIC, ConfigError, ExperimentConfig, model_settings
from asyncrl.data.model_folder import read_shapes
from asyncrl.data.prompts import PromptSource
from asyncrl.dataflow.graph import build_dataflow
from asyncrl.launch.experiment import draft_experiment
from asyncrl.launch.inputs import changes, read_inputs, saved_inputs
from asyncrl.launch.rundir import SUMMARY_FILE, newest_experiment, next_attempt, read_record
from asyncrl.master.schedule import ended_by
from asyncrl.protocol.names import ACTOR
from asyncrl.weights.checkpoints import (
    Checkpoint,
    CheckpointError,
    DataIdentity,
    MasterState,
    begin_anew,
    newest,
    shapes,
)
from asyncrl.weights.versions import tensor_files

Shape = tuple[int, ...]
FINAL_MODEL = Path("checkpoints") / "final"
_OF_A_LAUNCH = ("fileroot", "experiment", "trial", "recover", "hosts")  # fields that do not say how the run trains
_SHOWN_CHANGES = 6
_ANEW = "start anew with recover=off, or with another trial=..."


def starting_point(
    config: ExperimentConfig,
    run_dir: Path,
    notice: Callable[[str], None],
    say: Callable[[str], None] | None = None,
) -> Checkpoint | None:
    """Return the checkpoint that a launch resumes from; None: it starts anew. Call it before an attempt begins.

    notice: shows an urgent message, such as one about torn checkpoints. say: shows other messages (default: notice).
    Raises ConfigError if recover=required and there is no checkpoint, if the newest one does not fit the config, if a complete run
    has nothing more to do, or if the launch would replace the final model of a complete run unasked. A restart of the trainer group
    within a launch calls `checkpoints.newest` instead, because its config has not changed.
    """
    say = say or notice
    refuse_to_replace(config, run_dir)
    if not mode_of(config.mode).is_recoverable:
        return None
    if config.recover == "off":
        begin_anew(run_dir, next_attempt(run_dir))
        return None
    complete = (run_dir / SUMMARY_FILE).exists()
    if config.recover == "auto" and complete:  # without a final model; see above
        begin_anew(run_dir, next_attempt(run_dir))
        return None
    try:
        found = newest(run_dir, notice)
    except CheckpointError as error:
        raise ConfigError(f"recover={config.recover!r}: {error}") from error
    if found is None:
        if config.recover == "required":
            raise ConfigError(
                f"recover='required': there is no checkpoint to resume from in {run_dir}/checkpoints/recover; use auto, which "
                "starts anew if there is none, or check that fileroot, experiment and trial are those of the run"
            )
        if newest_experiment(run_dir) is not None:
            say("the run in this folder has no checkpoint yet: it starts anew")
        return None
    kept = newest_experiment(run_dir)
    before, inputs = saved_inputs(kept.parent) if kept is not None else None, read_inputs(config)
    problems = [*_of_data(config, found), *_of_models(config, found)]
    if before is not None and inputs.tokenizer != before.tokenizer:
        problems.append(_other_tokenizer(config, found))
    if problems:
        raise ConfigError("\n".join(problems))
    if complete and (finished := _finished(config, found)):
        raise ConfigError(finished)
    changed = changed_fields(config, run_dir)
    others = f", with other values than before: {', '.join(changed)}" if changed else ""
    say(f"going on from step {found.step} of attempt {found.attempt}{others} (recover=off starts anew)")
    if before is not None and (files := changes(before, inputs)):
        notice(
            "files that the run reads have changed since its last launch. From here on it uses them as they are now:"
            + "".join(f"\n  {line}" for line in files)
        )
    return found


def refuse_to_replace(config: ExperimentConfig, run_dir: Path) -> None:
    """Raise ConfigError if the folder has a complete run with a final model, which this launch would replace. recover=off asks for
    that; recover=required continues the run."""
    if config.recover != "auto" or not (run_dir / SUMMARY_FILE).exists() or not (run_dir / FINAL_MODEL).exists():
        return
    record = read_record(run_dir)
    steps = 2 * record.total_steps if record is not None and record.total_steps else "N"
    more = f"continue it with more steps: `asyncrl-launch resume {run_dir} train.max_steps={steps}`; "
    raise ConfigError(
        f"trial={config.trial!r}: the run in {run_dir} is complete, and this one would replace its final model. Choose another "
        f"folder: trial=NAME; {more if mode_of(config.mode).is_recoverable else ''}or replace it: recover=off"
    )


def changed_fields(config: ExperimentConfig, run_dir: Path) -> list[str]:
    """Return the fields that differ from those of the newest launch in the folder, with both values; the first few."""
    kept = newest_experiment(run_dir)
    if kept is None:
        return []
    try:
        before = {path: value for path, value, _ in leaf_values(draft_experiment(kept).config)}
    except (ConfigError, OSError):  # another release's
        return []
    now = leaf_values(with_absolute_paths(config))
    changed = [
        f"{path}={value!r} (was {before.get(path)!r})"
        for path, value, _ in now
        if path not in _OF_A_LAUNCH and value != before.get(path)
    ]
    return [
        *changed[:_SHOWN_CHANGES],
        *([f"and {len(changed) - _SHOWN_CHANGES} more"] if changed[_SHOWN_CHANGES:] else []),
    ]


def _finished(config: ExperimentConfig, found: Checkpoint) -> str:
    """If the run is complete under this config, return an error message with the field to change. "": there is more to train."""
    train, state = config.train, found.state
    field = ended_by(
        train,
        step=found.step,
        recent_rewards=state.recent_rewards,
        num_done=_num_done(state),
        num_total=state.data.num_prompts * train.num_epochs,
    )
    if not field:
        return ""
    value = getattr(train, field)
    example = {"max_steps": 2 * found.step, "num_epochs": train.num_epochs + 1, "target_reward": "null"}[field]
    return (
        f"train.{field}={value}: the run is complete; its last step was {found.step}. For more steps resume it with, for example, "
        f"train.{field}={example}"
    )


def _num_done(state: MasterState) -> int:
    """Return the number of prompts that are trained or rejected, summed over all epochs."""
    cursor = state.done_cursor
    return cursor.epoch * state.data.num_prompts + cursor.position + len(state.done_beyond)


def resumed_of(found: Checkpoint) -> Resumed:
    """Return the facts about a checkpoint with which a config is resolved."""
    return Resumed(found.step, _num_done(found.state), found.state.batch_size)


def _of_data(config: ExperimentConfig, found: Checkpoint) -> Iterator[str]:
    then = found.state.data
    now = DataIdentity.of(PromptSource(config.prompts, None, config.seed), config.train.num_epochs)
    where = f"the checkpoint of step {found.step} (attempt {found.attempt})"
    if (now.num_prompts, now.fingerprint) != (then.num_prompts, then.fingerprint):
        others = f"{then.num_prompts} prompts" if now.num_prompts != then.num_prompts else "other prompts"
        yield (
            f"prompts.path={config.prompts.path!r}: it has {now.num_prompts} prompts, but {where} was made with {others}, so the "
            f"prompts already done cannot be identified; use the original prompts, or {_ANEW}"
        )
    for field, value, wanted in (
        ("seed", now.seed, then.seed),
        ("prompts.shuffle", now.shuffle, then.shuffle),
    ):
        if value != wanted:
            yield f"{field}={value!r}: {where} has the prompt order of {field}={wanted!r}; use that, or {_ANEW}"
    last = max([found.state.done_cursor, *found.state.done_beyond])
    ahead = last.epoch >= now.num_epochs and (last.epoch, last.position) != (now.num_epochs, 0)
    if ahead:
        yield (
            f"train.num_epochs={now.num_epochs}: {where} is in epoch {last.epoch + 1}; use {last.epoch + 1} or more, or {_ANEW}"
        )


def _other_tokenizer(config: ExperimentConfig, found: Checkpoint) -> str:
    field = "tokenizer_path" if config.tokenizer_path else "model_path"
    return (
        f"{field}={getattr(config, field)!r}: the vocabulary of its tokenizer is not that of the run that wrote the checkpoint of "
        f"step {found.step} (attempt {found.attempt}), so the trained tokens would mean other texts; use the original tokenizer, "
        f"or {_ANEW}"
    )


def _of_models(config: ExperimentConfig, found: Checkpoint) -> Iterator[str]:
    """Yield the problems of trained models. Frozen models may differ from those of the checkpoint."""
    saved: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes(found.path).items():
        model, _, tensor = name.partition(".")
        saved.setdefault(model, {})[tensor] = shape
    where = f"the checkpoint of step {found.step} (attempt {found.attempt})"
    settings = model_settings(config.train)
    for model in build_dataflow(config.train, config.mode).trained_roles:
        place, own = settings.get(model, ("model_path", None))
        field, path = (f"{place}.path", own.path) if own and own.path else ("model_path", config.model_path)
        if model not in saved:
            yield f"{place}: {where} was made without a {model}; leave {place} out, or {_ANEW}"
            continue
        adapters = {name: shape for name, shape in saved[model].items() if name.endswith(".lora_A")}
        lora = config.train.lora if model in (ACTOR, CRITIC) else None
        if bool(adapters) != (lora is not None):
            made, remedy = ("with", "set it as then") if adapters else ("without", "leave it out")
            yield f"train.lora: {where} was made {made} adapters of the {model}; {remedy}, or {_ANEW}"
        elif lora is not None and (other := {shape[0] for shape in adapters.values()} - {lora.rank}):
            yield f"train.lora.rank={lora.rank}: the adapters in {where} have rank {min(other)}; use it, or {_ANEW}"
        elif difference := _difference(tensor_shapes(Path(path).expanduser()), _with_bases(saved[model])):
            yield f"{field}={path!r}: {difference} the {model} of {where}; use the model that it was made with, or {_ANEW}"


def _with_bases(saved: Mapping[str, Shape]) -> dict[str, Shape]:
    """The shapes, with that of the layer's weight in place of those of its adapter, A [rank, inputs] and B [outputs, rank]."""
    found = {name: shape for name, shape in saved.items() if not name.endswith((".lora_A", ".lora_B"))}
    for name in saved:
        if name.endswith(".lora_A"):
            layer = name.removesuffix(".lora_A")
            found[f"{layer}.weight"] = (saved[f"{layer}.lora_B"][0], saved[name][1])
    return found


def _difference(here: Mapping[str, Shape], saved: Mapping[str, Shape]) -> str:
    """Return the first difference between a model's files and the checkpoint, as the beginning of a sentence; "": none is visible.

    A tensor that only one side has is not a difference by itself (tied weights, buffers, a critic's new output). It is one if the
    two sides share tensors of the same name except for the layer number, because then a layer is missing.
    """
    for name, shape in here.items():
        if name in saved and shape != saved[name]:
            return f"its tensor {name} has the shape {list(shape)}, not {list(saved[name])} as in"
    kinds = {_kind(name) for name in here.keys() & saved.keys()}
    for name in here.keys() ^ saved.keys():
        if _kind(name) in kinds:
            return f"its tensor {name} is not in" if name in here else f"it has no tensor {name}, unlike"
    return "" if kinds or not here else "it has no tensor in common with"


def _kind(name: str) -> str:
    """Return the tensor's name without its layer number, so that it is the same in all layers."""
    return re.sub(r"\d+", "#", name)


def tensor_shapes(folder: Path) -> dict[str, Shape]:
    """Return the shapes in a model's safetensors files, by their headers. Preflight has checked that the files are complete. Empty
    for older formats."""
    found: dict[str, Shape] = {}
    for file in tensor_files(folder):
        found |= read_shapes(file)
    return found
