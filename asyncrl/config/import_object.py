"""Imports users' functions and classes by import path: `package.module:name` or `path/to/file.py:name`. The name may be that of a
class's attribute: `Class.method`."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.config.errors import ConfigError

# Adapters that a config names in short, `name:what it adapts`: their classes, and the arguments that take the latter
ADAPTERS = {
    "command": ("asyncrl.rollout.command_agent:CommandAgent", "command"),
    "openenv": ("asyncrl.rollout.openenv:OpenEnvAgent", "server"),
    "verifiers": ("asyncrl.rollout.episodes:VerifiersAgent", "environment"),
}


def adapted(spec: str) -> tuple[str, dict[str, str]]:
    """Return the import path of a task's agent or env, and the argument that the spec gives to the class if it names an adapter."""
    name, _, what = spec.partition(":")
    if name not in ADAPTERS:
        return spec, {}
    path, argument = ADAPTERS[name]
    return path, {argument: what}


def import_object(spec: str, what: str) -> Any:
    """Return the named object. Raises ConfigError that says which part of the path is wrong. Errors raised by the user's module
    pass through.

    A file is imported only once. Its folder is appended to sys.path, so that it can import modules beside it, and then the current
    folder. So the standard library and installed packages come first, whatever the user's files are called.
    """
    location, colon, name = spec.rpartition(":")
    if not colon or not location or not name:
        raise ConfigError(f"{what} {spec!r}: expected `package.module:name` or `path/to/file.py:name`")
    if location.endswith(".py"):
        module = _import_file(location, what)
    else:
        _append_folder(_current_folder())
        module = _import_module(location, what)
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        public = [known for known in vars(module) if not known.startswith("_")]
        has = f"it has {', '.join(sorted(public)) or 'nothing'}"
        raise ConfigError(f"{what} {spec!r}: {location} has no {name!r}; {has}{_shadowed(location)}") from None


def no_terminal(*_args: object, **_kwargs: object) -> None:
    """Replaces breakpoint() in judge processes and in processes that the launcher started: raises RuntimeError with the remedy."""
    raise RuntimeError(
        "breakpoint(): this process has no terminal; start the run with debug.leave_out=[its name], which prints the command "
        "to start it by hand"
    )


def _import_module(location: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(location)
    except ModuleNotFoundError as error:
        if error.name is not None and (location == error.name or location.startswith(f"{error.name}.")):
            text = f"{what}: there is no module {location!r} (looked in sys.path){_shadowed(location)}"
            raise ConfigError(text) from error
        raise  # the module exists; one of its own imports is missing


def _current_folder() -> Path:
    return Path(os.curdir).resolve()


def _append_folder(folder: Path) -> None:
    """Let modules of this folder be imported, after the standard library and installed packages."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _shadowed(location: str) -> str:
    """The remedy, if the current folder has this module too, but an installed package or the standard library comes first."""
    first, parts = sys.modules.get(location.partition(".")[0]), location.split(".")
    file = _current_folder().joinpath(*parts).with_suffix(".py")
    theirs = getattr(first, "__file__", None) or next(iter(getattr(first, "__path__", ())), "")
    if location.endswith(".py") or not file.is_file() or not theirs or Path(theirs).is_relative_to(_current_folder()):
        return ""
    return f"; {parts[0]} is {theirs}, which comes first; for your file write {os.path.join(*parts)}.py:NAME"


def _import_file(location: str, what: str) -> ModuleType:
    path = Path(location).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{what}: there is no file {path}")
    module_name = f"{path.stem}_{hashlib.sha1(str(path).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    _append_folder(path.parent)
    _append_folder(_current_folder())
    file_spec = importlib.util.spec_from_file_location(module_name, path)
    assert file_spec is not None
    assert file_spec.loader is not None
    module = importlib.util.module_from_spec(file_spec)
    sys.modules[module_name] = module
    try:
        file_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module
