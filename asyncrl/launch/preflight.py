"""What can be checked of a run on this machine before anything starts: files, sizes, tokenizer, etcd."""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path

from asyncrl.config import ConfigError, ExperimentConfig, PromptSourceConfig
from asyncrl.data.prompts import PromptSource, load_tokenizer
from asyncrl.dataflow import build_dataflow
from asyncrl.runtime.etcd_server import EtcdServerError, find_etcd


def preflight(config: ExperimentConfig) -> int:
    """Check files against config. Returns the number of training prompts; raises ConfigError naming field and remedy."""
    model = Path(config.model_path).expanduser()
    if not (model / "config.json").is_file():
        hint = f"make it with `{config.prepare}`" if config.prepare else "give a folder in Hugging Face format"
        raise ConfigError(f"model_path={config.model_path!r}: there is no config.json; {hint}")
    _check_tokenizer(config.tokenizer_path or config.model_path)
    _check_tasks(config)
    _check_name_resolve(config)
    _check_length(config, model)
    _check_dataflow(config)
    num_prompts = _count("prompts", config.prompts, config)
    if num_prompts < config.train.batch_size:
        raise ConfigError(
            f"train.batch_size={config.train.batch_size}: {config.prompts.path} has only {num_prompts} prompts, "
            "so a batch could never be full; use a smaller batch or more prompts"
        )
    if (
        config.eval.prompts is not None
        and _count("eval.prompts", config.eval.prompts, config) < config.eval.num_prompts
    ):
        raise ConfigError(
            f"eval.num_prompts={config.eval.num_prompts}: {config.eval.prompts.path} has fewer prompts; use a smaller number"
        )
    return num_prompts


def _check_tokenizer(path: str) -> None:
    """It can be read and has an EOS token. Without transformers, whose import takes a second, where that is enough."""
    folder = Path(path).expanduser()
    if _has_eos_token(folder) and _is_readable(folder / "tokenizer.json"):
        return
    try:
        tokenizer = load_tokenizer(path)
    except Exception as error:
        raise ConfigError(f"tokenizer_path={path!r}: no tokenizer can be loaded from it: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"tokenizer_path={path!r}: has no EOS token, so no response could ever end; set eos_token")


def _has_eos_token(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token"))
    except (OSError, ValueError, AttributeError):
        return False


def _is_readable(file: Path) -> bool:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(file))
    except Exception:  # it raises nothing narrower
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


def _check_defines(field: str, spec: str) -> None:
    """The file defines (or imports) that name. Read, not run: it may need what the launcher does not have."""
    file, _, wanted = spec.rpartition(":")
    try:
        body = ast.parse(Path(file).expanduser().read_text(encoding="utf-8")).body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{field}={spec!r}: the file is not Python: {error}") from error
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    if wanted not in names and "*" not in names:
        raise ConfigError(f"{field}={spec!r}: {file} has no {wanted!r}; it has {', '.join(sorted(names)) or 'nothing'}")


def _check_length(config: ExperimentConfig, model: Path) -> None:
    try:
        text = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model_path={config.model_path!r}: config.json cannot be read: {error}") from error
    limit = text.get("max_position_embeddings")
    asked = config.rollout.sampling.max_new_tokens
    if isinstance(limit, int) and asked >= limit:
        raise ConfigError(
            f"rollout.sampling.max_new_tokens={asked}: the model has {limit} positions for prompt and response"
        )


def _check_dataflow(config: ExperimentConfig) -> None:
    """The MFCs fit together."""
    try:
        build_dataflow(config.train)
    except ValueError as error:
        raise ConfigError(f"train.extra_mfcs: {error}") from error


def _check_name_resolve(config: ExperimentConfig) -> None:
    name_resolve = config.name_resolve
    if name_resolve.backend != "etcd":
        raise ConfigError(
            f"name_resolve.backend={name_resolve.backend!r}: is for tests in one process; a run needs etcd"
        )
    if not name_resolve.endpoints:
        try:
            find_etcd(name_resolve.binary)
        except EtcdServerError as error:
            raise ConfigError(f"name_resolve.binary={name_resolve.binary!r}: {error}") from error


def _count(field: str, prompts: PromptSourceConfig, config: ExperimentConfig) -> int:
    try:
        source = PromptSource(prompts, None, config.seed)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}.path={prompts.path!r}: {error}") from error
    unknown = sorted(map(str, source.tasks - config.rollout.tasks.keys()))
    if unknown:
        raise ConfigError(
            f"{field}.task_key={prompts.task_key!r}: {prompts.path} has prompts of the tasks {', '.join(unknown[:5])}, "
            f"which rollout.tasks does not name; it names {', '.join(sorted(config.rollout.tasks))}"
        )
    return len(source)


def visible_devices() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them. Asks the file system: no torch, no driver."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [device for device in chosen.split(",") if device.strip()]
    nodes = [match[1] for path in Path("/dev").glob("nvidia*") if (match := re.fullmatch(r"nvidia(\d+)", path.name))]
    return [str(index) for index in range(len(nodes))]
