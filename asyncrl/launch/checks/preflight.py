"""Checks before anything starts whether a config can run on this machine: its files, sizes, tokenizer, etcd."""

from __future__ import annotations

import importlib.util
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from asyncrl.config.engines import traits_of
from asyncrl.config.import_object import adapted
from asyncrl.config.modes import mode_of
from asyncrl.config.nearest import did_you_mean
from asyncrl.config.schema import (
    CRITIC,
    REF,
    TRACKERS,
    ConfigError,
    ExperimentConfig,
    PromptSourceConfig,
    eval_place,
    evaluation_sets,
    generating_sources,
    model_settings,
    prompt_sources,
    trackers_of,
)
from asyncrl.config.transports import FILES, forms_nccl_groups
from asyncrl.config.validation import problems_of_generating_step
from asyncrl.data.model_folder import read_object, text_config
from asyncrl.data.model_limits import ModelLimits
from asyncrl.data.prompts import PromptSource, is_file_name, load_tokenizer
from asyncrl.data.replay import check_replay, plan_replay
from asyncrl.data.trajectories import tokenizer_fingerprint
from asyncrl.dataflow.graph import build_dataflow, trajectory_keys
from asyncrl.dataflow.layout_checks import problem_of_grid, problem_of_losses
from asyncrl.dataflow.phases import phases
from asyncrl.dataflow.topology import allocation_of
from asyncrl.generation.server_environment import find_program, own_torch
from asyncrl.launch.checks.bound_names import BoundNames, takes_prompts
from asyncrl.launch.checks.checklist import (
    FIELDS,
    MODEL,
    PROMPTS,
    TASKS,
    TOKENIZER,
    WEIGHTS,
    Case,
    Check,
)
from asyncrl.launch.checks.disk import check_room
from asyncrl.launch.checks.environment import judge_environment
from asyncrl.launch.checks.model_files import (
    check_end_tokens,
    check_vocabulary,
    count_parameters,
    read_config,
    tokenizer_config,
)
from asyncrl.launch.checks.prompt_lengths import judge_prompt_lengths
from asyncrl.launch.program import run_directory
from asyncrl.launch.recovery import refuse_to_replace
from asyncrl.protocol.names import ACTOR
from asyncrl.runtime.disk import too_few_open_files
from asyncrl.runtime.interfaces import interfaces_here
from asyncrl.runtime.names.etcd.access import EtcdAccess
from asyncrl.runtime.names.etcd.server import EtcdServerError, find_etcd
from asyncrl.weights.versions import MANIFEST, read_manifest

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
_MULTI_STEP = "asyncrl.rollout.agent:MultiStepAgent"


def _check_model(case: Case) -> None:
    config = case.config
    hint = f"make it with `{config.prepare}`" if config.prepare else "give a folder in Hugging Face format"
    case.model = read_config(config.model_path, hint)


def _check_weights(case: Case) -> None:
    case.num_parameters = count_parameters(case.config.model_path)
    check_end_tokens(case.config.model_path, case.model)


def _check_models(case: Case) -> Iterator[ConfigError]:
    """Check the folders of the other models as that of model_path, and the grid of each model in each phase."""
    train = case.config.train
    models: dict[str, Mapping[str, object]] = {ACTOR: case.model}
    for role, (place, settings) in model_settings(train).items():
        field, path = f"{place}.path", settings.path
        try:
            if path:
                models[role] = read_config(path, "give a folder in Hugging Face format", field=field)
                count_parameters(path, field=field)
                _check_reads_tokens(field, path, case.tokenizer_path, models[role])
        except ConfigError as error:
            yield error
    ref = models.get(REF, case.model)
    others = [name for name in _SHAPE_FIELDS if ref.get(name) != case.model.get(name)]
    if train.ref.update_interval and others:
        yield ConfigError(
            f"train.ref.update_interval={train.ref.update_interval}: the actor's weights do not fit the model of train.ref.path: "
            f"its config.json has a different {others[0]}; use 0, or a reference with the actor's architecture"
        )
    if mode_of(case.config.mode).trains:
        for phase in phases(case.config):
            yield from _check_grids(phase, models)


def _check_reads_tokens(field: str, path: str, tokenizer_path: str, model: Mapping[str, object]) -> None:
    try:
        check_vocabulary(tokenizer_path, model)
    except ConfigError as error:
        raise ConfigError(f"{field}={path!r}: it reads the actor's tokens, but {error}") from error


def _check_grids(config: ExperimentConfig, models: Mapping[str, Mapping[str, object]]) -> Iterator[ConfigError]:
    """Check that each model can be split into the pipeline stages, tensor parallel and context ranks of its grid in the allocation,
    and that a mixture of experts has no tensor parallel ranks."""
    placements, _ = allocation_of(config).place(build_dataflow(config.train, config.mode))
    for placement in placements:
        if placement.grid.on_cpu:
            continue
        model = models.get(placement.role, models[ACTOR])
        if problem := problem_of_grid(placement.grid, model):
            where = f"allocation={config.allocation!r}: the {placement.name} has the grid {placement.grid}"
            yield ConfigError(f"{where}, and {problem}")
        if placement.name in (ACTOR, CRITIC) and (problem := problem_of_losses(model)):
            yield ConfigError(f"the {placement.name}: {problem}")


def _check_open_files(_: Case) -> None:
    if problem := too_few_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1]):
        raise ConfigError(problem)


def _check_trackers(case: Case) -> Iterator[ConfigError]:
    """Check that their packages are installed. A folder of such a name, as wandb itself creates one, does not count."""
    for name, tracker in trackers_of(case.config).items():
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            yield ConfigError(
                f"{name}.mode={tracker.mode!r}: the package {name} is not installed: pip install 'asyncrl[{name}]', or set "
                f"{name}.mode=disabled"
            )
    mlflow = case.config.mlflow
    if mlflow.mode != "disabled" and not (mlflow.uri or os.environ.get("MLFLOW_TRACKING_URI")):
        yield ConfigError(
            "mlflow.uri='' and MLFLOW_TRACKING_URI is not set: MLflow would choose a place of its own; set mlflow.uri, for "
            "example to http://127.0.0.1:5000, or mlflow.mode=disabled"
        )


def _check_tokenizer(case: Case) -> None:
    """Check that the tokenizer is readable and has an EOS token. Imports transformers only if that is necessary, because the import
    takes a second."""
    path = case.tokenizer_path
    folder = Path(path).expanduser()
    if tokenizer_config(folder).get("eos_token") and _is_readable(folder / "tokenizer.json"):
        return
    try:
        if (folder / "tokenizer_config.json").is_file():
            read_object(folder / "tokenizer_config.json")  # bounded, unlike the library's
        tokenizer = load_tokenizer(path)
    except Exception as error:
        raise ConfigError(f"tokenizer_path={path!r}: no tokenizer can be loaded from it: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"tokenizer_path={path!r}: the tokenizer has no EOS token, so no response could ever end; set eos_token"
        )


def _check_chat_template(case: Case) -> Iterator[ConfigError]:
    """Check that the tokenizer has a chat template if prompts use one. Looks for the files that save_pretrained writes."""
    config, path = case.config, case.tokenizer_path
    folder = Path(path).expanduser()
    for name, prompts in prompt_sources(config).items():
        if prompts.chat_template and folder.is_dir() and not _has_chat_template(folder):
            yield ConfigError(
                f"{name}.chat_template=True: the tokenizer in {path} has no chat template; set {name}.chat_template=false "
                "and write each prompt as its final text, or put the template into chat_template.jinja there"
            )
    for name, task in config.rollout.tasks.items():
        role = task.agent_args.get("feedback_role")
        if task.agent == _MULTI_STEP and role and folder.is_dir() and not _has_chat_template(folder):
            yield ConfigError(
                f"rollout.tasks.{name}.agent_args.feedback_role={role!r}: the tokenizer in {path} has no chat template; use "
                "feedback_template, or put the template into chat_template.jinja there"
            )


def _has_chat_template(folder: Path) -> bool:
    files = [folder / "chat_template.jinja", folder / "chat_template.json"]
    return any(map(Path.is_file, files)) or bool(tokenizer_config(folder).get("chat_template"))


def _is_readable(file: Path) -> bool:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(file))
    except Exception:  # tokenizers raises no narrower type
        return False
    return True


def _check_tasks(case: Case) -> Iterator[ConfigError]:
    for name, task in case.config.rollout.tasks.items():
        for kind, spec in (("reward", task.reward), ("agent", task.agent), ("env", task.env)):
            try:
                _check_spec(f"rollout.tasks.{name}.{kind}", adapted(spec)[0])
            except ConfigError as error:
                yield error


def _check_spec(field: str, spec: str) -> None:
    file = spec.rpartition(":")[0]
    if file.endswith(".py") and not Path(file).expanduser().is_file():
        raise ConfigError(f"{field}={spec!r}: there is no file {Path(file).absolute()}")
    if file.endswith(".py"):
        _check_defines(field, spec)
    elif spec:
        _check_module(field, spec)


def _check_step(case: Case) -> Iterator[ConfigError]:
    config, manager = case.config, case.config.manager
    if takes_prompts(config.train.step):
        eta, overdue = manager.max_head_offpolicyness, manager.overdue
        for name, value, remedy in problems_of_generating_step(config.mode, config.train, eta, overdue):
            yield ConfigError(f"{name}={value!r}: {remedy}")


def _check_module(field: str, spec: str) -> None:
    """Check that the package exists where the run's processes look: Python's path, then the current folder. Does not import it."""
    package = spec.partition(":")[0].partition(".")[0]
    if package in sys.modules or PathFinder.find_spec(package, [os.getcwd()]) or importlib.util.find_spec(package):
        return
    raise ConfigError(
        f"{field}={spec!r}: there is no module {package!r}; write path/to/file.py:name for a file, or install the package"
    )


def _check_defines(field: str, spec: str) -> None:
    """Check that the file can define the name. Parses the file without running it, because the file may import packages that the
    launcher's environment does not have. Refuses only a name that the import surely would not find."""
    file, _, wanted = spec.rpartition(":")
    content = Path(file).expanduser().read_bytes()
    if b"\0" in content:
        line = content[: content.index(b"\0")].count(b"\n") + 1
        raise ConfigError(f"{field}={spec!r}: {file}:{line} has a zero byte; save the file as UTF-8")
    try:
        names = BoundNames(importlib.util.decode_source(content), file)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{field}={spec!r}: the file is not valid Python: {error}") from error
    if not names.may_have(wanted.partition(".")[0]):
        raise ConfigError(
            f"{field}={spec!r}: {file} does not define {wanted!r}; {did_you_mean(wanted, sorted(names.names))}"
            f"it defines {', '.join(sorted(names.names)) or 'nothing'}"
        )


def _check_replay(case: Case) -> None:
    """Check that the recordings to replay are complete and fit the model."""
    config = case.config
    plan = plan_replay(
        config.replay,
        batch_size=config.train.batch_size,
        max_steps=config.train.max_steps,
        max_head_offpolicyness=config.manager.max_head_offpolicyness,
    )
    vocab_size = case.model.get("vocab_size")
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
    case.num_prompts = plan.num_groups


def _check_length(case: Case) -> Iterator[ConfigError]:
    config, limit = case.config, case.model.get("max_position_embeddings")
    if isinstance(limit, int) and config.train.ptx is not None and config.train.ptx.max_length > limit:
        yield ConfigError(f"train.ptx.max_length={config.train.ptx.max_length}: the model has {limit} positions")
    for field, asked in {field: asked for _, _, field, asked in generating_sources(config)}.items():
        if isinstance(limit, int) and asked >= limit:
            yield ConfigError(f"{field}={asked}: the model has {limit} positions for prompt and response")


def _check_attention(case: Case) -> Iterator[ConfigError]:
    config, kinds = case.config, text_config(case.model).get("layer_types")
    is_embedded = any(allocation_of(phase).traits.is_embedded for phase in phases(config))
    if is_embedded and config.generation.attention == "padded" and "sliding_attention" in (kinds or ()):
        yield ConfigError(
            f"generation.attention=padded does not support sliding windows, which model_path={config.model_path!r} uses; use sdpa"
        )


def _check_name_resolve(case: Case) -> None:
    name_resolve = case.config.name_resolve
    try:
        EtcdAccess(name_resolve)
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


def _check_prompts(case: Case) -> None:
    case.num_prompts = _count("prompts", case.config.prompts, case.config)


def _check_batch_size(case: Case) -> None:
    config = case.config
    if case.num_prompts < config.train.batch_size:
        raise ConfigError(
            f"train.batch_size={config.train.batch_size}: {config.prompts.path} has only {case.num_prompts} prompts, "
            "so a batch could never fill; use a smaller batch or more prompts"
        )


def _check_eval_prompts(case: Case) -> Iterator[ConfigError]:
    for name, chosen in evaluation_sets(case.config.eval).items():
        place, prompts = eval_place(name), chosen.prompts
        if prompts is not None and _count(f"{place}.prompts", prompts, case.config) < chosen.num_prompts:
            yield ConfigError(
                f"{place}.num_prompts={chosen.num_prompts}: {prompts.path} has fewer prompts; use a smaller number, or 0 for all"
            )


def _check_ptx(case: Case) -> None:
    if (ptx := case.config.train.ptx) is not None:
        source = _open("train.ptx.texts", ptx.texts, case.config)
        try:
            source.check_answers()
        except ValueError as error:
            raise ConfigError(f"train.ptx.texts.answer_key={ptx.texts.answer_key!r}: {error}") from error


def _count(field: str, prompts: PromptSourceConfig, config: ExperimentConfig) -> int:
    source = _open(field, prompts, config)
    unknown = sorted(map(str, source.tasks - config.rollout.tasks.keys()))
    if unknown:
        raise ConfigError(
            f"{field}.task_key={prompts.task_key!r}: {prompts.path} has prompts of the tasks {', '.join(unknown[:5])}, which are "
            f"not in rollout.tasks; {did_you_mean(unknown[0], config.rollout.tasks)}add them there, or use only its tasks: "
            f"{', '.join(sorted(config.rollout.tasks))}"
        )
    if lost := sorted(prompts.task_weights.keys() - source.all_tasks):
        raise ConfigError(
            f"{field}.task_weights.{lost[0]}: {prompts.path} has no prompt of this task; {did_you_mean(lost[0], source.all_tasks)}"
            f"its tasks: {', '.join(sorted(source.all_tasks))}"
        )
    for name, task in config.rollout.tasks.items():
        if field == "prompts" and task.gate is not None and task.gate.task not in source.tasks:
            raise ConfigError(
                f"rollout.tasks.{name}.gate.task={task.gate.task!r}: {prompts.path} has no prompt of this task in an epoch: "
                f"{name!r} would never open"
            )
    return len(source)


def _check_engines(case: Case) -> Iterator[ConfigError]:
    """Check that the environment of generation.python has the engine's program, and that its NCCL fits the trainer's. Reads the
    files of that environment and does not start the interpreter, because a start takes a second."""
    config, python = case.config, case.config.generation.python
    programs = (allocation_of(phase).traits.program for phase in phases(config))
    program = next(filter(None, programs), None)
    if program is None:
        return
    found, trainer = find_program(program, python), own_torch()
    where = python or f"this environment ({sys.executable})"
    if found is None:
        yield ConfigError(f"generation.python={python!r}: there is no {program.name} in {where}; {program.setup_hint}")
    elif forms_nccl_groups(
        config.weights.transport, config.weights.broadcast_backend, on_gpu=bool(case.devices)
    ) and not trainer.joins(found):
        yield ConfigError(
            f"weights.transport={config.weights.transport!r}: the trainer has {trainer}, {where} has {found}: "
            "different versions of NCCL cannot form a group, so every update would go through the disk. Install the same torch on "
            f"both sides (`pip install torch=={found.torch.partition('+')[0]}` beside the trainer, or "
            f"ASYNCRL_TORCH=... for launcher/setup.sh), or set weights.transport={FILES}"
        )


def _check_on_cpu(case: Case) -> Iterator[ConfigError]:
    """Check that the engine can serve this model on a CPU: the width of its attention heads, and tied embeddings."""
    config, model = case.config, text_config(case.model)
    width = model.get("head_dim") or model.get("hidden_size", 0) // (model.get("num_attention_heads") or 1)
    for engine in {allocation_of(phase).engine for phase in phases(config)} if not case.devices else ():
        heads, tied_limit = traits_of(engine).cpu_heads, traits_of(engine).cpu_tied_limit
        loads_model = config.train.lora is None  # otherwise only adapters
        if tied_limit and loads_model and ModelLimits.of(config.model_path).tied:
            yield ConfigError(
                f"allocation={config.allocation}: model_path={config.model_path!r} has tied embeddings; {tied_limit}: use a model "
                "with tie_word_embeddings=false, a GPU, or the engine transformers"
            )
        if heads and width not in heads:
            yield ConfigError(
                f"allocation={config.allocation}: model_path={config.model_path!r} has attention heads of width {width}; on a CPU "
                f"{engine} has only {', '.join(map(str, heads))}: use another model, or the engine transformers"
            )


def _forms_batches(config: ExperimentConfig) -> bool:
    return _generates(config) and mode_of(config.mode).forms_batches


def _generates(config: ExperimentConfig) -> bool:
    return not mode_of(config.mode).replays


# In the order of their lines
CHECKS = (
    Check("the model", _check_model, reads=("model_path",), gives=MODEL),
    Check("weights", _check_weights, needs=(MODEL,), gives=WEIGHTS),
    Check(
        "tokenizer", _check_tokenizer, needs=(MODEL,), gives=TOKENIZER, when=lambda config: not config.tokenizer_path
    ),
    Check(
        "tokenizer",
        _check_tokenizer,
        reads=("tokenizer_path",),
        gives=TOKENIZER,
        when=lambda config: bool(config.tokenizer_path),
    ),
    Check("vocabulary", lambda case: check_vocabulary(case.tokenizer_path, case.model), needs=(MODEL, TOKENIZER)),
    Check("other models and layout", _check_models, needs=(MODEL, FIELDS)),
    Check("SGLang or vLLM", _check_engines, reads=("allocation", "generation", "weights", "mode"), when=_generates),
    Check("engine on a CPU", _check_on_cpu, reads=("allocation", "mode"), needs=(MODEL,), when=_generates),
    Check("chat template", _check_chat_template, reads=("prompts", "eval", "train.ptx"), needs=(TOKENIZER,)),
    Check("supervised texts", _check_ptx, reads=("train.ptx",), when=lambda config: mode_of(config.mode).trains),
    Check("tasks", _check_tasks, reads=("rollout.tasks",), gives=TASKS),
    Check("the step's generation", _check_step, reads=("train.step", "manager", "mode")),
    Check("etcd", _check_name_resolve, reads=("name_resolve",)),
    Check("lengths", _check_length, reads=("rollout.sampling", "eval", "train.ptx"), needs=(MODEL,)),
    Check("disk space", check_room, needs=(WEIGHTS, FIELDS)),
    Check("trackers", _check_trackers, reads=tuple(TRACKERS)),
    Check(
        "the run's folder",
        lambda case: refuse_to_replace(case.config, run_directory(case.config)),
        reads=("fileroot", "experiment", "trial", "recover", "mode"),
    ),
    Check("open files", _check_open_files),
    Check(
        "environment",
        lambda case: judge_environment(case.config, os.environ, interfaces_here(), on_gpu=bool(case.devices)),
        reads=("allocation", "mode", "train", "cluster", "hosts"),
    ),
    Check(
        "the recording",
        _check_replay,
        needs=(MODEL, TOKENIZER, FIELDS),
        when=lambda config: mode_of(config.mode).replays,
    ),
    Check("prompts", _check_prompts, reads=("prompts", "rollout.tasks"), gives=PROMPTS, when=_generates),
    Check("batch size", _check_batch_size, reads=("train.batch_size", "mode"), needs=(PROMPTS,), when=_forms_batches),
    Check("attention", _check_attention, reads=("allocation", "generation"), needs=(MODEL,), when=_generates),
    Check(
        "lengths of prompts",
        lambda case: judge_prompt_lengths(case.config, case.model, case.tokenizer_path),
        reads=("prompts", "eval", "rollout", "generation", "allocation", "mode"),
        needs=(MODEL, TOKENIZER, PROMPTS),
        when=_generates,
    ),
    Check("prompts of evaluations", _check_eval_prompts, reads=("eval", "rollout.tasks"), when=_generates),
)
