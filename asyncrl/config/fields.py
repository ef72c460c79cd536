"""Fields of an ExperimentConfig by dotted path (pure): iterate over them, and find the field that an unknown name means."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from functools import cache
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from asyncrl.config.schema import ExperimentConfig

T = TypeVar("T")


class Wrong(NamedTuple):
    """A field of a config that cannot be used."""

    field: str
    text: str  # field, value and remedy


_KEY = "*"  # in a path: a key that the user chooses, such as the name of a task
_CLOSE = 0.8  # two names with at least this difflib ratio count as one name with a typing error
_MOST_EQUAL = 3  # if more than this many fields fit equally well, none is suggested

# For each field, the names that other trainers (AReaL, verl, OpenRLHF, slime, TRL, prime-rl) use for it, and short forms. If such a
# name is also a field elsewhere in this config, it is listed here because users usually mean this field.
ALIASES = {
    "train.optimizer.lr": "lr learning_rate actor_learning_rate actor_lr",
    "train.optimizer.warmup_steps": "warmup warmup_ratio lr_warmup_steps",
    "train.optimizer.schedule": "scheduler lr_scheduler lr_scheduler_type",
    "train.optimizer.grad_clip": "max_grad_norm clip_grad gradient_clipping",
    "train.critic.optimizer.lr": "critic_lr critic_learning_rate",
    "train.batch_size": "train_batch_size rollout_batch_size global_batch_size prompts_per_step",
    "train.num_epochs": "epochs epoch total_epochs num_train_epochs total_train_epochs",
    "train.max_steps": "steps num_steps train_steps max_train_steps total_training_steps total_train_steps",
    "train.algorithm": "algo adv_estimator advantage_estimator",
    "train.save_every_steps": "save_freq save_steps save_interval",
    "train.ppo.eps_clip": "clip clip_range cliprange clip_ratio clip_eps epsilon ppo_clip",
    "train.ppo.eps_clip_higher": "clip_ratio_high clip_higher epsilon_high eps_clip_high",
    "train.ppo.kl_coef": "kl kl_ctl kl_beta init_kl_coef kl_loss_coef kl_penalty",
    "train.ppo.discount": "gamma",
    "train.ppo.gae_lambda": "lam lambda lambd",
    "train.ref.path": "ref_model reference_model ref_path",
    "train.reward_model.path": "reward_model_path rm_path",
    "train.teacher.path": "teacher_model teacher_path teacher_model_path",
    "train.ppo.epochs": "ppo_epochs num_ppo_epochs update_epochs",
    "train.ppo.entropy_coef": "entropy_coeff entropy_bonus entropy_loss_coef",
    "manager.max_head_offpolicyness": (
        "eta staleness max_staleness staleness_threshold offpolicyness max_offpolicyness max_off_policy_steps"
    ),
    "rollout.group_size": "n n_samples n_samples_per_prompt num_generations rollout_n",
    "rollout.sampling.temperature": "temperature",
    "rollout.sampling.top_p": "top_p",
    "rollout.sampling.top_k": "top_k",
    "rollout.sampling.greedy": "greedy",
    "rollout.sampling.max_new_tokens": "max_new_tokens max_tokens max_response_length response_length max_completion_length",
    "rollout.tasks.default.reward": "reward_fn reward_func reward_function custom_reward_function",
    "prompts.path": "data dataset dataset_path train_data train_files prompt_data",
    "prompts.max_prompt_length": "prompt_length max_prompt_len",
    "eval.prompts.path": "eval_data val_files eval_dataset",
    "eval.every_steps": "test_freq eval_freq eval_steps eval_interval",
    "model_path": "model model_name model_name_or_path base_model pretrain hf_checkpoint actor_path",
    "tokenizer_path": "tokenizer tokenizer_name",
    "fileroot": "output_dir save_dir save_path default_local_dir",
    "experiment": "experiment_name",
    "trial": "trial_name run_name",
    "allocation": "n_gpus num_gpus gpus n_gpus_per_node nnodes tp tp_size tensor_parallel_size allocation_mode",
    "recover": "resume resume_mode resume_from_checkpoint",
}


def leaf_values(config: object, path: str = "") -> Iterator[tuple[str, Any, Field[Any]]]:
    """Yield path, value and declaration of every field that is not a section."""
    if isinstance(config, dict):
        for key, value in config.items():
            yield from leaf_values(value, f"{path}.{key}")
    elif is_dataclass(config):
        for entry in fields(config):
            value, name = getattr(config, entry.name), f"{path}.{entry.name}" if path else entry.name
            if _has_fields(value):
                yield from leaf_values(value, name)
            else:
                yield name, value, entry


def elements(config: object) -> Iterator[tuple[str, Any, Field[Any]]]:
    """As leaf_values, but yield each element of a list."""
    for path, value, entry in leaf_values(config):
        if isinstance(value, list):
            yield from ((f"{path}[{at}]", one, entry) for at, one in enumerate(value))
        else:
            yield path, value, entry


def with_leaves(config: T, change: Callable[[str, Any, Field[Any]], Any], path: str = "") -> T:
    """Return the config with other values of the fields that are not sections. change: path, value, declaration -> value."""
    if isinstance(config, dict):
        return {key: with_leaves(value, change, f"{path}.{key}") for key, value in config.items()}  # type: ignore[return-value]
    found = {}
    for entry in fields(config):  # type: ignore[arg-type]
        value, name = getattr(config, entry.name), f"{path}.{entry.name}" if path else entry.name
        found[entry.name] = with_leaves(value, change, name) if _has_fields(value) else change(name, value, entry)
    return replace(config, **found)  # type: ignore[type-var]


def _has_fields(value: object) -> bool:
    """Whether the value is a section, or sections by name."""
    return is_dataclass(value) or (isinstance(value, dict) and any(map(is_dataclass, value.values())))


def default_of(entry: Field[Any]) -> Any:
    return entry.default_factory() if entry.default_factory is not MISSING else entry.default


def overlap(fields: Collection[str], others: Collection[str]) -> bool:
    """Whether one of the fields or sections is one of the others, in it, or around it."""
    return any(f"{one}.".startswith(f"{two}.") or f"{two}.".startswith(f"{one}.") for one in fields for two in others)


def find_field(asked: str) -> str | None:
    """The field that the path `asked` means: itself, a field of that name elsewhere, an alias, or a name with a typing error.

    None if no field is close, or if too many fields have that name.
    """
    parts = [part.replace("-", "_") for part in asked.split(".")]
    by_name: dict[str, list[str]] = {}
    for path in _known_paths():
        by_name.setdefault(_plain(path.rpartition(".")[2]), []).append(path)
    name = _plain(parts[-1])
    is_exact = name in by_name or name in _aliases()
    if not is_exact:
        near = difflib.get_close_matches(name, [*by_name, *_aliases()], n=1, cutoff=_CLOSE)
        if not near:
            return None
        name = near[0]
    meant = _aliases().get(name)

    def rank(path: str) -> tuple[int, bool]:
        """Prefer paths that share more parts: train.critic.lr means the critic's."""
        return len(set(parts[:-1]) & set(path.split(".")[:-1])), path == meant

    candidates = [*by_name.get(name, []), *([meant] if meant else [])]
    best = max(map(rank, candidates))
    equal = {path: _likeness(".".join(parts), path) for path in candidates if rank(path) == best}
    found = max(equal, key=lambda path: equal[path])
    is_unclear = len(equal) > _MOST_EQUAL and equal[found] < 1
    is_far = not is_exact and len(parts) > 1 and best[0] == 0 and equal[found] < _CLOSE
    return None if is_unclear or is_far else _with_keys(found, parts)


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _with_keys(path: str, parts: list[str]) -> str:
    """Replace each `*` in the path by the key that the asked path has there, or by `default` if it has none."""
    found = path.split(".")
    for at, part in enumerate(found):
        if part == _KEY:
            behind = parts.index(found[at - 1]) + 1 if found[at - 1] in parts else len(parts)
            found[at] = parts[behind] if behind < len(parts) - 1 else "default"
    return ".".join(found)


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


@cache
def _aliases() -> dict[str, str]:
    return {_plain(alias): path for path, aliases in ALIASES.items() for alias in aliases.split()}


@cache
def _known_paths() -> tuple[str, ...]:
    """Paths of all fields and sections."""
    return tuple(f"{prefix}{entry.name}" for prefix, section in sections_of(_KEY) for entry in fields(section))


def sections_of(key: str, section: Any = ExperimentConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each section, absent ones too, as an object with its defaults, after the beginning of the paths of its fields. key:
    stands in a path for a name that the user chooses."""
    section = section() if isinstance(section, type) else section
    yield prefix, section
    for name, hint in hints_of(section.__class__).items():
        below, is_keyed = section_in(hint)
        if below is not None:
            value = getattr(section, name)
            place = f"{prefix}{name}.{key}." if is_keyed else f"{prefix}{name}."
            yield from sections_of(key, value if is_dataclass(value) else below, place)


def values_in(section: Any) -> list[Field[Any]]:
    """The fields of a section that are not sections."""
    return [entry for entry in fields(section) if section_in(hints_of(section.__class__)[entry.name])[0] is None]


@cache
def hints_of(section: type) -> dict[str, Any]:
    """The types of a section's fields, by name."""
    return get_type_hints(section)


def section_in(hint: Any) -> tuple[type | None, bool]:
    """The section class in a type hint, and whether it is the value of a dict."""
    if get_origin(hint) is dict:
        below, _ = section_in(get_args(hint)[1])
        return below, True
    for option in get_args(hint) or (hint,):
        if isinstance(option, type) and is_dataclass(option):
            return option, False
    return None, False
