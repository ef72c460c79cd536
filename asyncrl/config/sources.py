"""Finds the source files that an import path runs, by their text: nothing is imported."""

from __future__ import annotations

import ast
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

# Files in these folders belong to Python or to asyncrl, and those below these names to installed packages
_NOT_USERS = (*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")), str(Path(__file__).parents[1]))
_INSTALLED = frozenset({"site-packages", "dist-packages"})


def sources_of(spec: str) -> list[Path]:
    """Return the user's source files that an import of `package.module:name` or `path/to/file.py:name` runs: the first one, and all
    that it imports. A file that cannot be read or parsed ends its branch: the import itself reports the error."""
    location = spec.rpartition(":")[0]
    is_file = location.endswith(".py")
    folder = str(Path(location).expanduser().parent) if is_file else ""
    todo = [(Path(location).expanduser(), "")] if is_file else list(_files_of(location, folder))
    found: dict[Path, None] = {}
    while todo:
        file, module = todo.pop()
        if file not in found:
            found[file] = None
            todo += [entry for name in _imports_of(file, module) for entry in _files_of(name, folder)]
    return list(found)


def code_of(spec: str) -> str:
    """Return a hash of the contents of `sources_of`. Two imports with the same hash run the same code of the user's."""
    digest = hashlib.sha256()
    for file in sorted(sources_of(spec)):
        digest.update(f"{file}\0".encode() + (file.read_bytes() if file.is_file() else b"\0"))
    return digest.hexdigest()


def module_file(module: str, folder: str = "") -> Path | None:
    """Return the source file of a module; None if there is none. Finds it as an import would, but does not run its parent packages.
    folder: the folder of the file that imports it."""
    path: list[str] | None = [*sys.path, *filter(None, [folder]), os.getcwd()]
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        try:
            spec = PathFinder.find_spec(name, path)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return _loaded_file(module)
        path = list(spec.submodule_search_locations or [])
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def _loaded_file(module: str) -> Path | None:
    """Return the source file of a module that is already imported; None for any other. Needed for asyncrl's own modules in an
    editable installation, because PathFinder does not find them there."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file) if file and file.endswith(".py") else None


def _files_of(module: str, folder: str) -> Iterator[tuple[Path, str]]:
    """Yield the user's files that an import of the module runs, those of its parent packages first, each with its module's name."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        file = module_file(name, folder)
        if file is None or _INSTALLED.intersection(file.parts) or any(map(file.is_relative_to, _NOT_USERS)):
            continue
        yield file, name


def _imports_of(file: Path, module: str) -> Iterator[str]:
    """Yield the modules that a file imports anywhere in it. What may be a module or another object of a package counts as both."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{name}.{alias.name}".lstrip(".") for alias in node.names)
