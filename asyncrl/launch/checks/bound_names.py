"""Which names the source of a module or class binds, found without running it (pure)."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

# Code with one of these may bind names that its source does not show
_HIDDEN = {
    "__dict__",
    "__getattr__",
    "eval",
    "exec",
    "globals",
    "import_module",
    "locals",
    "modules",
    "setattr",
    "vars",
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_FUNCTIONS, ast.ClassDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class BoundNames:
    """The names that the statements of a module or of a class body bind, at any depth of if, try, with, for, while and match."""

    def __init__(self, body: Sequence[ast.stmt]) -> None:
        self.counts = Counter(_bound(body))
        every = [node for statement in body for node in ast.walk(statement)]
        declared = (name for node in every if isinstance(node, ast.Global) for name in node.names)
        self.counts.update(declared)  # a function may bind them when it is called
        self._is_complete = not any(_may_hide(node) for node in every)
        self._plain = {node.name: node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}

    def may_have(self, name: str) -> bool:
        """Whether the name may be bound when the body has run. False: it surely is not."""
        return name in self.counts or not self._is_complete

    def is_bound_once(self, name: str) -> bool:
        """Whether exactly one statement binds the name."""
        return self._is_complete and self.counts[name] == 1

    def find_only(self, name: str) -> ast.ClassDef | ast.FunctionDef | None:
        """The class or function of this name, if it surely is what the name stands for."""
        return self._plain.get(name) if self.is_bound_once(name) else None


def _bound(body: Iterable[ast.AST]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in aliases)
            case ast.Name(id=name, ctx=ast.Store()) | ast.ExceptHandler(name=str(name)):
                yield name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                yield name
        if isinstance(node, _COMPREHENSIONS):  # its variables are its own, but not those of `:=` in it
            yield from (inner.target.id for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr))
        elif not isinstance(node, _SCOPES):
            yield from _bound(ast.iter_child_nodes(node))


def _may_hide(node: ast.AST) -> bool:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.FunctionDef(name=name) if name in _HIDDEN:
            return True
        case ast.ImportFrom(names=[ast.alias(name="*")]):
            return True
        case ast.Call(func=function, args=arguments):  # a function of another module may look the module up
            named = any(isinstance(argument, ast.Name) and argument.id == "__name__" for argument in arguments)
            return named and not ast.unparse(function).endswith("getLogger")
    return False
