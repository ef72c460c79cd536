"""What the source of a module shows without running it: the names that it binds, and whether its step function generates."""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator
from pathlib import Path

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


class BoundNames:
    """The names that a module binds. Raises SyntaxError or ValueError if the source is not valid Python."""

    def __init__(self, source: str, file: str) -> None:
        tree = ast.parse(source, filename=file)
        self._is_complete = not any(map(_may_hide, ast.walk(tree)))
        self.names = frozenset(_bound(symtable.symtable(ast.unparse(_Generators().visit(tree)), file, "exec")))

    def may_have(self, name: str) -> bool:
        """Whether the name may be bound when the module has run. False: it surely is not."""
        return name in self.names or not self._is_complete


def takes_prompts(spec: str) -> bool:
    """Whether the source of train.step shows a step function that generates. False: it does not, or only an import shows it."""
    file, _, wanted = spec.rpartition(":")
    if not file.endswith(".py"):
        return False
    try:
        body = ast.parse(Path(file).expanduser().read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # other checks name these
        return False
    functions = [node for node in body if isinstance(node, ast.AsyncFunctionDef) and node.name == wanted]
    return bool(functions) and [argument.arg for argument in functions[-1].args.args][1:2] == ["prompts"]


class _Generators(ast.NodeTransformer):
    """Makes generators of comprehensions: since Python 3.12 the table lists a comprehension's names as names of the module."""

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp) -> ast.AST:
        return self.generic_visit(ast.GeneratorExp(node.elt, node.generators))

    visit_SetComp = visit_ListComp

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        return self.generic_visit(ast.GeneratorExp(ast.Tuple([node.key, node.value], ast.Load()), node.generators))


def _bound(table: symtable.SymbolTable) -> Iterator[str]:
    """The names that the module binds, and the global names of its functions: a function may bind them when it is called."""
    for symbol in table.get_symbols():
        in_module = table.get_type() == "module" and (symbol.is_assigned() or symbol.is_imported())
        if in_module or symbol.is_declared_global():
            yield symbol.get_name()
    for inner in table.get_children():
        yield from _bound(inner)


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
