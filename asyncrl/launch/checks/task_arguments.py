"""Checks before a run starts that rollout.tasks.<name>.env_args and agent_args fit their classes, without importing users' code.

The check parses the source of the class and finds `__init__` in it or in a base class. If the source does not surely show it
(a base is in a library that cannot be read, a class is defined under a condition), the check passes. If `__init__` takes **kwargs,
arguments of any name pass, but required ones must be given. The rollout worker checks the arguments again after it has imported the
class.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.nearest import did_you_mean
from asyncrl.config.schema import ConfigError, TaskConfig
from asyncrl.config.sources import module_file
from asyncrl.launch.checks.bound_names import BoundNames

# By role: names of the arguments that the rollout worker passes itself; the class that is used if the task names none
_ROLES = {
    "env": (("prompt", "reward"), "asyncrl.rollout.agent:RewardEnv"),
    "agent": (("tokenizer", "sampling", "group_size"), "asyncrl.rollout.agent:SingleStepAgent"),
}
_QUEUE_AGENTS = "asyncrl.rollout.agent"
_MAX_BASES = 10  # longest chain of imports and base classes to follow


@dataclass(frozen=True)
class Parameters:
    """The parameters of a class's __init__, without self."""

    names: tuple[str, ...]  # names of the parameters that can be passed by name
    required: frozenset[str]
    takes_any: bool  # **kwargs


def check_task_arguments(field: str, task: TaskConfig) -> None:
    """Check a task's arguments. field: rollout.tasks.<name>. Raises ConfigError with the argument and the valid ones."""
    given: Mapping[str, Mapping[str, Any]] = {"env": task.env_args, "agent": task.agent_args}
    for role, (own, default) in _ROLES.items():
        spec = getattr(task, role) or default
        parameters = find_parameters(spec)
        if parameters is not None:
            _check_fit(f"{field}.{role}_args", given[role], spec, parameters, own)
    judged = task.reward or task.env or not task.agent
    if not judged and any(location == _QUEUE_AGENTS for location, _ in _classes(task.agent)):
        name = task.agent.rpartition(":")[2]
        raise ConfigError(
            f"{field}.agent={task.agent!r}: {name} needs {field}.reward or {field}.env; only a ChatAgent may compute its own "
            "rewards"
        )


def _check_fit(field: str, given: Mapping[str, Any], spec: str, parameters: Parameters, own: tuple[str, ...]) -> None:
    name = spec.rpartition(":")[2]
    free = [parameter for parameter in parameters.names if parameter not in own]
    there = f"it takes {', '.join(free)}" if free else "it takes none"
    for argument, value in given.items():
        if argument in own:
            raise ConfigError(f"{field}.{argument}={value!r}: the rollout worker sets it; leave it out")
        if argument not in parameters.names and not parameters.takes_any:
            hint = did_you_mean(argument, free)
            raise ConfigError(f"{field}.{argument}={value!r}: {name} does not take this argument; {hint}{there}")
    missing = sorted(parameters.required - given.keys() - set(own))
    if missing:
        raise ConfigError(f"{field}={dict(given)}: {name} also needs {', '.join(missing)}; {there}")
    unwanted = [argument for argument in own if argument not in parameters.names]
    if unwanted and not parameters.takes_any:
        raise ConfigError(
            f"{field.removesuffix('_args')}={spec!r}: its __init__ must take {', '.join(own)} by name (or **kwargs), and "
            f"does not take {', '.join(unwanted)}"
        )


def find_parameters(spec: str) -> Parameters | None:
    """Return the parameters of `path/to/file.py:Class` or `package.module:Class`. None if the source does not show them."""
    for _, found in _classes(spec):
        if found.decorator_list or found.keywords:  # a decorator or a metaclass may make another __init__
            return None
        names = BoundNames(found.body)
        if names.may_have("__init__"):
            init = names.find_only("__init__")
            return _parameters(init) if isinstance(init, ast.FunctionDef) and not init.decorator_list else None
    return None


def _classes(spec: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield a class and its chain of base classes, each with its file or module, as far as the source shows them.

    The chain stops at a class with several bases, because the search order among them is not implemented here, and at a base that
    is not a plain name, such as `module.Class`.
    """
    location, _, name = spec.rpartition(":")
    for _ in range(_MAX_BASES):
        file = Path(location).expanduser() if location.endswith(".py") else module_file(location)
        tree = _parse(file) if file is not None else None
        if tree is None:
            return
        names = BoundNames(tree.body)
        found = names.find_only(name)
        if not isinstance(found, ast.ClassDef):  # the module may import the class from another module
            imported = _imports(tree, location).get(name)
            if imported is None or not names.is_bound_once(name):
                return
            location, name = imported
            continue
        yield location, found
        if len(found.bases) != 1 or not isinstance(found.bases[0], ast.Name):
            return
        name = found.bases[0].id


def _parse(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # preflight reports the error
        return None


def _imports(tree: ast.Module, location: str) -> dict[str, tuple[str, str]]:
    """Return name -> (module, its name there) for each `from module import name`. Relative imports are resolved in modules, not in
    files given by path."""
    found = {}
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom) or (node.level and location.endswith(".py")):
            continue
        package = location.rsplit(".", node.level)[0] + "." if node.level else ""
        module = f"{package}{node.module or ''}".rstrip(".")
        if not node.level and location.endswith(".py"):  # a file can import modules from its own folder
            folder = Path(location).expanduser().parent
            source = module_file(module, str(folder))
            module = str(source) if source is not None and source.is_relative_to(folder) else module
        found.update({alias.asname or alias.name: (module, alias.name) for alias in node.names})
    return found


def _parameters(init: ast.FunctionDef) -> Parameters:
    arguments = init.args
    positional = [argument.arg for argument in [*arguments.posonlyargs, *arguments.args]]
    by_keyword = [argument.arg for argument in arguments.kwonlyargs]
    optional = {
        argument for argument, default in zip(by_keyword, arguments.kw_defaults, strict=True) if default is not None
    }
    optional |= set(positional[len(positional) - len(arguments.defaults) :])
    names = [*positional[1:], *by_keyword]
    return Parameters(tuple(names), frozenset(names) - optional, arguments.kwarg is not None)
