"""Checks before anything starts whether a config can run on this machine: its files, sizes, tokenizer, etcd."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import resource
import shutil
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from asyncrl.config.schema import (
    REF,
    ConfigError,
    ExperimentConfig,
    PromptSourceConfig,
    model_settings,
    resolve_auto,
)
from asyncrl.data.prompts import PromptSource, is_file_name, load_tokenizer
from asyncrl.data.replay import check_replay, plan_replay
from asyncrl.data.trajectories import tokenizer_fingerprint
from asyncrl.dataflow.graph import build_dataflow, trajectory_keys
from asyncrl.dataflow.layout_checks import problem_of_grid
from asyncrl.dataflow.phases import phases
from asyncrl.dataflow.topology import allocation_of
from asyncrl.generation.sglang_environment import SETUP_HINT, TorchVersions, find_sglang, own_torch
from asyncrl.launch.checks.model_files import check_vocabulary, count_parameters, read_config
from asyncrl.launch.checks.task_arguments import check_task_arguments
from asyncrl.launch.program import run_directory, writes_checkpoints
from asyncrl.protocol.names import ACTOR
from asyncrl.runtime.devices import visible_devices
from asyncrl.runtime.disk import existing_parent, size_text, too_few_open_files
from asyncrl.runtime.names.etcd.access import EtcdAccess
from asyncrl.runtime.names.etcd.server import EtcdServerError, find_etcd
from asyncrl.runtime.names.memory import MEMORY
from asyncrl.weights.versions import MANIFEST, read_manifest, tensor_files

_SHAPE_FIELDS = (  # fields of config.json that determine the tensors' names and shapes
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)
_FLOATS_OF_A_PARAMETER = 3  # float32 values per parameter in a checkpoint: itself and two moments
_ETCD_BYTES = 130_000_000  # etcd allocates two files of its write-ahead log at its start


def preflight(config: ExperimentConfig) -> int:
    """Check the config against the files on this machine. Returns the number of training prompts (train_only: of the recorded
    groups to train on).

    Raises ConfigError with the field and the remedy.
    """
    hint = f"make it with `{config.prepare}`" if config.prepare else "give a folder in Hugging Face format"
    model = read_config(config.model_path, hint)
    num_parameters = count_parameters(config.model_path)
    tokenizer_path = config.tokenizer_path or config.model_path
    _check_tokenizer(tokenizer_path)
    check_vocabulary(tokenizer_path, model)
    models = {ACTOR: model} | _read_other_models(config, tokenizer_path, model)
    for phase in phases(config):
        if config.mode != "rollout_only":
            _check_grids(phase, models)
        _check_engine(phase)
    _check_chat_template(config, tokenizer_path)
    if config.train.ptx is not None and config.mode != "rollout_only":
        _open("train.ptx.texts", config.train.ptx.texts, config)
    _check_tasks(config)
    _check_name_resolve(config)
    _check_length(config, model)
    _check_room(config, num_parameters)
    _check_wandb(config)
    if problem := too_few_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1]):
        raise ConfigError(problem)
    if config.mode == "train_only":
        return _check_replay(config, model)
    if config.mode == "rollout_only" and not tensor_files(Path(config.model_path).expanduser()):
        raise ConfigError(
            f"model_path={config.model_path!r}: there is no *.safetensors; save the model with save_pretrained"
        )
    num_prompts = _count("prompts", config.prompts, config)
    if num_prompts < config.train.batch_size:
        raise ConfigError(
            f"train.batch_size={config.train.batch_size}: {config.prompts.path} has only {num_prompts} prompts, "
            "so a batch could never fill; use a smaller batch or more prompts"
        )
    if (
        config.eval.prompts is not None
        and _count("eval.prompts", config.eval.prompts, config) < config.eval.num_prompts
    ):
        raise ConfigError(
            f"eval.num_prompts={config.eval.num_prompts}: {config.eval.prompts.path} has fewer prompts; use a smaller number"
        )
    return num_prompts


def _read_other_models(
    config: ExperimentConfig, tokenizer_path: str, actor: Mapping[str, object]
) -> dict[str, Mapping[str, object]]:
    """Return config.json by role of the other models that have a path. Checks their folders as that of model_path."""
    train = config.train
    found: dict[str, Mapping[str, object]] = {}
    for role, (place, settings) in model_settings(train).items():
        field, path = f"{place}.path", settings.path
        if path:
            found[role] = read_config(path, "give a folder in Hugging Face format", field=field)
            count_parameters(path, field=field)
            try:
                check_vocabulary(tokenizer_path, found[role])
            except ConfigError as error:
                raise ConfigError(f"{field}={path!r}: it reads the actor's tokens, but {error}") from error
    others = [name for name in _SHAPE_FIELDS if REF in found and found[REF].get(name) != actor.get(name)]
    if train.ref.update_interval and others:
        raise ConfigError(
            f"train.ref.update_interval={train.ref.update_interval}: the actor's weights do not fit the model of train.ref.path: "
            f"its config.json has a different {others[0]}; use 0, or a reference with the actor's architecture"
        )
    return found


def _check_grids(config: ExperimentConfig, models: Mapping[str, Mapping[str, object]]) -> None:
    """Check that each model can be split into the pipeline stages and tensor parallel ranks of its grid in the allocation, and that
    a mixture of experts has only one rank."""
    placements, _ = allocation_of(config).place(build_dataflow(config.train, config.mode))
    for placement in placements:
        if placement.grid.on_cpu:
            continue
        if problem := problem_of_grid(placement.grid, models.get(placement.role, models[ACTOR])):
            where = f"allocation={config.allocation!r}: the {placement.name} has the grid {placement.grid}"
            raise ConfigError(f"{where}, and {problem}")


def _check_wandb(config: ExperimentConfig) -> None:
    """Check that the package wandb is installed. A folder of that name, such as wandb itself creates, does not count."""
    spec = importlib.util.find_spec("wandb") if config.wandb.mode != "disabled" else None
    if config.wandb.mode != "disabled" and (spec is None or spec.origin is None):
        raise ConfigError(
            f"wandb.mode={config.wandb.mode!r}: the package wandb is not installed: pip install 'asyncrl[wandb]', or set "
            "wandb.mode=disabled"
        )


def _check_tokenizer(path: str) -> None:
    """Check that the tokenizer is readable and has an EOS token. Imports transformers only if that is necessary, because the import
    takes a second."""
    folder = Path(path).expanduser()
    if _has_eos_token(folder) and _is_readable(folder / "tokenizer.json"):
        return
    try:
        tokenizer = load_tokenizer(path)
    except Exception as error:
        raise ConfigError(f"tokenizer_path={path!r}: no tokenizer can be loaded from it: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"tokenizer_path={path!r}: the tokenizer has no EOS token, so no response could ever end; set eos_token"
        )


def _has_eos_token(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token"))
    except (OSError, ValueError, AttributeError):
        return False


def _check_chat_template(config: ExperimentConfig, path: str) -> None:
    """Check that the tokenizer has a chat template if prompts use one. Looks for the files that save_pretrained writes."""
    folder = Path(path).expanduser()
    texts = config.train.ptx.texts if config.train.ptx is not None else None
    for name, prompts in (
        ("prompts", config.prompts),
        ("eval.prompts", config.eval.prompts),
        ("train.ptx.texts", texts),
    ):
        if prompts is not None and prompts.chat_template and folder.is_dir() and not _has_chat_template(folder):
            raise ConfigError(
                f"{name}.chat_template=True: the tokenizer in {path} has no chat template; set {name}.chat_template=false "
                "and write each prompt as its final text, or put the template into chat_template.jinja there"
            )


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def _is_readable(file: Path) -> bool:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(file))
    except Exception:  # tokenizers raises no narrower type
        return False
    return True


def _check_tasks(config: ExperimentConfig) -> None:
    for name, task in config.rollout.tasks.items():
        for kind, spec in (("reward", task.reward), ("agent", task.agent), ("env", task.env)):
            file = spec.rpartition(":")[0]
            if file.endswith(".py") and not Path(file).expanduser().is_file():
                raise ConfigError(f"rollout.tasks.{name}.{kind}={spec!r}: there is no file {Path(file).absolute()}")
            if file.endswith(".py"):
                _check_defines(f"rollout.tasks.{name}.{kind}", spec)
            elif spec:
                _check_module(f"rollout.tasks.{name}.{kind}", spec)
        check_task_arguments(f"rollout.tasks.{name}", task)


def _check_module(field: str, spec: str) -> None:
    """Check that the package exists where the run's processes look: the current folder, then Python's path. Does not import it."""
    package = spec.partition(":")[0].partition(".")[0]
    if package in sys.modules or PathFinder.find_spec(package, [os.getcwd()]) or importlib.util.find_spec(package):
        return
    raise ConfigError(
        f"{field}={spec!r}: there is no module {package!r}; write path/to/file.py:name for a file, or install the package"
    )


def _check_defines(field: str, spec: str) -> None:
    """Check that the file defines or imports the name. Parses the file without running it, because the file may import packages
    that the launcher's environment does not have."""
    file, _, wanted = spec.rpartition(":")
    try:
        body = ast.parse(Path(file).expanduser().read_text(encoding="utf-8"), filename=file).body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{field}={spec!r}: the file is not valid Python: {error}") from error
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    if wanted not in names and "*" not in names:
        raise ConfigError(
            f"{field}={spec!r}: {file} does not define {wanted!r}; it defines {', '.join(sorted(names)) or 'nothing'}"
        )


def _check_replay(config: ExperimentConfig, model: Mapping[str, object]) -> int:
    """Check that the recordings to replay are complete and fit the model. Returns the number of groups."""
    plan = plan_replay(
        config.replay,
        batch_size=config.train.batch_size,
        max_steps=config.train.max_steps,
        max_head_offpolicyness=config.manager.max_head_offpolicyness,
    )
    vocab_size = model.get("vocab_size")
    assert isinstance(vocab_size, int)
    check_replay(
        plan,
        vocab_size=vocab_size,
        tokenizer=tokenizer_fingerprint(config.tokenizer_path or config.model_path),
        keys=trajectory_keys(config.train),
    )
    folder = Path(config.model_path).expanduser()
    if (folder / MANIFEST).is_file() and (version := read_manifest(folder).version) != plan.first_step:
        raise ConfigError(
            f"replay.first_step={plan.first_step}: model_path has version {version}; use the weights of version "
            f"{plan.first_step}, or replay.first_step={version}"
        )
    return plan.num_groups


def _check_room(config: ExperimentConfig, num_parameters: int) -> None:
    """Check that the run's disk has room for the files that the run is certain to write.

    These are the weight versions kept, one more being written, the final models (the critic and those of train.roles are assumed to
    be as large as the actor), the checkpoints kept, one more being written, and etcd's log.
    """
    run_dir = run_directory(config)
    dtype = resolve_auto(config, on_gpu=bool(visible_devices())).train.dtype
    weights = num_parameters * (2 if dtype == "bfloat16" else 4)
    num_trained = 1 + (config.train.critic is not None) + len(config.train.roles)
    others = 1 + num_trained
    own_etcd = not config.name_resolve.endpoints
    needed = (config.weights.keep + others) * weights + (_ETCD_BYTES if own_etcd else 0)
    recover, num_checkpoints = 0, config.checkpoint.keep_last + 1
    if writes_checkpoints(config):
        recover = _FLOATS_OF_A_PARAMETER * 4 * num_parameters * num_trained
        needed += num_checkpoints * recover
    try:
        free = shutil.disk_usage(existing_parent(run_dir)).free
        # Files of earlier attempts count as free space, because the run removes them
        old = (*run_dir.glob("weights/*/*/*"), *run_dir.glob("checkpoints/recover/*/*"))
        free += sum(file.stat().st_size for file in old)
    except OSError:  # the launcher reports the error
        return
    if free < needed:
        checkpoints = f", {num_checkpoints} checkpoints of {size_text(recover)}" if recover else ""
        keep_less = "set weights.keep=1" + (" and checkpoint.keep_last=1" if recover else "")
        raise ConfigError(
            f"fileroot={config.fileroot!r}: {size_text(free)} are free there, but the run needs {size_text(needed)} (weights.keep "
            f"+ {others} times {size_text(weights)} of weights{checkpoints}, and etcd's data); free space, use a larger disk, or "
            f"{keep_less}"
        )


def _check_length(config: ExperimentConfig, model: Mapping[str, object]) -> None:
    limit = model.get("max_position_embeddings")
    if isinstance(limit, int) and config.train.ptx is not None and config.train.ptx.max_length > limit:
        raise ConfigError(f"train.ptx.max_length={config.train.ptx.max_length}: the model has {limit} positions")
    asked = config.rollout.sampling.max_new_tokens
    if isinstance(limit, int) and asked >= limit:
        raise ConfigError(
            f"rollout.sampling.max_new_tokens={asked}: the model has {limit} positions for prompt and response"
        )


def _check_name_resolve(config: ExperimentConfig) -> None:
    name_resolve = config.name_resolve
    if any(endpoint.startswith(MEMORY) for endpoint in name_resolve.endpoints):
        raise ConfigError(
            f"name_resolve.endpoints={list(name_resolve.endpoints)}: {MEMORY} is for tests in one process; a run needs etcd. For "
            "a private one leave the field out"
        )
    try:
        EtcdAccess.of(name_resolve)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not name_resolve.endpoints:
        secured = [name for name in ("prefix", "user", "ca_file") if getattr(name_resolve, name)]
        if secured:
            raise ConfigError(
                f"name_resolve.{secured[0]}={getattr(name_resolve, secured[0])!r}: applies only to your own etcd; also set "
                "name_resolve.endpoints=[host:2379]"
            )
        try:
            find_etcd(name_resolve.binary)
        except EtcdServerError as error:
            raise ConfigError(f"name_resolve.binary={name_resolve.binary!r}: {error}") from error


def _open(field: str, prompts: PromptSourceConfig, config: ExperimentConfig) -> PromptSource:
    try:
        return PromptSource(prompts, None, config.seed)
    except (OSError, ValueError, ImportError) as error:
        missing = config.prepare and is_file_name(prompts.path) and isinstance(error, FileNotFoundError)
        hint = f"; make it with `{config.prepare}`" if missing else ""
        raise ConfigError(f"{field}.path={prompts.path!r}: {error}{hint}") from error


def _count(field: str, prompts: PromptSourceConfig, config: ExperimentConfig) -> int:
    source = _open(field, prompts, config)
    unknown = sorted(map(str, source.tasks - config.rollout.tasks.keys()))
    if unknown:
        raise ConfigError(
            f"{field}.task_key={prompts.task_key!r}: {prompts.path} has prompts of the tasks {', '.join(unknown[:5])}, which are "
            f"not in rollout.tasks; add them there, or use only its tasks: {', '.join(sorted(config.rollout.tasks))}"
        )
    return len(source)


def _check_engine(config: ExperimentConfig) -> None:
    """Check that the environment of the interpreter generation.python has SGLang, and that its NCCL fits the trainer's. Reads the
    files of that environment and does not start the interpreter, because a start takes a second."""
    if config.mode == "train_only" or allocation_of(config).engine != "sglang":
        return
    python = config.generation.python
    found = find_sglang(python)
    where = python or f"this environment ({sys.executable})"
    if found is None:
        raise ConfigError(f"generation.python={python!r}: there is no SGLang in {where}; {SETUP_HINT}")
    _check_nccl(config, own_torch(), found.torch_versions, where)


def _check_nccl(config: ExperimentConfig, trainer: TorchVersions, sglang: TorchVersions, where: str) -> None:
    """Check that trainer and SGLang can form an NCCL group for the broadcast of weights, if the run needs one. Compares the
    versions in their environments on this machine."""
    weights = config.weights
    by_nccl = weights.broadcast_backend == "nccl" or (weights.broadcast_backend == "auto" and bool(visible_devices()))
    if weights.transport != "broadcast" or not by_nccl or trainer.joins(sglang):
        return
    raise ConfigError(
        f"weights.transport='broadcast': the trainer has {trainer}, {where} has {sglang}: different versions of NCCL cannot form "
        f"a group, so every update would go through the disk. Install the same torch on both sides (`pip install torch=="
        f"{sglang.torch.partition('+')[0]}` beside the trainer, or ASYNCRL_TORCH=... for launcher/setup.sh), or set "
        "weights.transport=disk"
    )
