"""Imports users' functions and classes by import path: `package.module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.config.schema import ConfigError


def import_object(spec: str, what: str) -> Any:
    """Return the named object. Raises ConfigError that says which part of the path is wrong. Errors raised by the user's module
    pass through.

    A file is imported only once. Its folder is appended to sys.path, so that it can import modules beside it.
    """
    location, colon, name = spec.rpartition(":")
    if not colon or not location or not name:
        raise config_error(f"{what} {spec!r}: expected `package.module:name` or `path/to/file.py:name`")
    module = _import_file(location, what) if location.endswith(".py") else _import_module(location, what)
    try:
        return getattr(module, name)
    except AttributeError:
        public = [known for known in vars(module) if not known.startswith("_")]
        raise config_error(f"{what} {spec!r}: {location} has no {name!r}; it has {sorted(public)}") from None


def config_error(text: str) -> ConfigError:
    """Create a ConfigError for the caller to raise.

    Imports the config schema only when it is needed: the program that runs reward functions (judge_main.py) starts ten times faster
    without it.
    """
    from asyncrl.config.schema import ConfigError

    return ConfigError(text)


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
            raise config_error(f"{what}: there is no module {location!r} (looked in sys.path)") from error
        raise  # the module exists; one of its own imports is missing


def _import_file(location: str, what: str) -> ModuleType:
    path = Path(location).expanduser().resolve()
    if not path.is_file():
        raise config_error(f"{what}: there is no file {path}")
    module_name = f"{path.stem}_{hashlib.sha1(str(path).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
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
