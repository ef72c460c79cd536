"""Every loop that repeats failed work, and every wait without a limit, is in the tables of docs/design/bounds.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import asyncrl

ROOT = Path(asyncrl.__file__).parent
PAGE = ROOT.parent / "docs" / "design" / "bounds.md"
Site = tuple[str, str]  # file below asyncrl/, qualified name of the function
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def inside(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below this one, without those of nested functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*_FUNCTIONS, ast.Lambda)):
            yield child
            yield from inside(child)


def repeats(loop: ast.While | ast.For | ast.AsyncFor) -> bool:
    """Whether the loop may repeat failed work, or is endless and waits."""
    parts = list(inside(loop))
    handlers = [part for part in parts if isinstance(part, ast.ExceptHandler)]
    catches = any(not isinstance(handler.body[-1], (ast.Return, ast.Raise, ast.Break)) for handler in handlers)
    names = {ast.unparse(part.func).rpartition(".")[2] for part in parts if isinstance(part, ast.Call)}
    pauses = bool(names & {"sleep", "wait", "wait_for"})
    if not isinstance(loop, ast.While):
        return catches and pauses
    is_endless = isinstance(loop.test, ast.Constant) and bool(loop.test.value)
    return catches or (is_endless and (pauses or any(isinstance(part, (ast.Await, ast.AsyncFor)) for part in parts)))


def has_no_limit(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    name, given = call.func.attr, {keyword.arg for keyword in call.keywords}
    of_asyncio = ast.unparse(call.func.value) == "asyncio"
    return (
        (name in ("wait", "join", "acquire") and not call.args and not given)
        or (name == "wait" and of_asyncio and "timeout" not in given)
        or (name == "wait_for" and len(call.args) < 2 and "timeout" not in given)
    )


def sites_of(source: str) -> set[str]:
    """The functions that have such a loop or wait."""
    found: set[str] = set()

    def visit(node: ast.AST, names: list[str], limited: bool) -> None:
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, _FUNCTIONS)
            here = [*names, child.name] if isinstance(child, _FUNCTIONS) else names
            bounded = limited and not is_function
            if isinstance(child, (ast.With, ast.AsyncWith)):
                bounded |= any(re.search(r"timeout|limit_s", ast.unparse(item.context_expr)) for item in child.items)
            if (isinstance(child, (ast.While, ast.For, ast.AsyncFor)) and repeats(child)) or (
                isinstance(child, ast.Call) and not bounded and has_no_limit(child)
            ):
                found.add(".".join(here))
            visit(child, here, bounded)

    visit(ast.parse(source), [], False)
    return found


def listed() -> set[Site]:
    rows = re.findall(r"^\| `([\w/]+\.py)` \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    return {(file, name) for file, names in rows for name in re.findall(r"`([\w.]+)`", names)}


def functions_of(source: str) -> set[str]:
    """The qualified names of all functions."""
    found: set[str] = set()

    def visit(node: ast.AST, names: list[str]) -> None:
        for child in ast.iter_child_nodes(node):
            here = [*names, child.name] if isinstance(child, _FUNCTIONS) else names
            found.add(".".join(here))
            visit(child, here)

    visit(ast.parse(source), [])
    return found


def test_every_loop_and_wait_is_in_the_tables() -> None:
    there = {
        (str(path.relative_to(ROOT)), name)
        for path in ROOT.rglob("*.py")
        if path.relative_to(ROOT).parts[0] != "testing"
        for name in sites_of(path.read_text())
    }
    assert len(there) > 100
    known = listed()
    assert not there - known, (
        f"add to the tables of docs/design/bounds.md, with class and limit: {sorted(there - known)}"
    )
    stale = {(file, name) for file, name in known if name not in functions_of((ROOT / file).read_text())}
    assert not stale, f"remove from the tables of docs/design/bounds.md: {sorted(stale)}"


RETRY = """
class Client:
    async def ask(self):
        while self.open:
            try:
                return await self.get()
            except OSError:
                continue
"""
PAUSE = """
def ask():
    for number in range(10):
        try:
            return get()
        except OSError:
            clock.sleep(1)
"""


@pytest.mark.parametrize(
    ("source", "sites"),
    [
        (RETRY, {"Client.ask"}),
        (PAUSE, {"ask"}),
        ("async def run():\n    while True:\n        await step()\n", {"run"}),
        ("async def run():\n    await news.wait()\n", {"run"}),
        ("async def run():\n    await asyncio.wait({task})\n", {"run"}),
        ("async def run():\n    await asyncio.wait({task}, timeout=1)\n", set()),
        ("async def run():\n    async with asyncio.timeout(1):\n        await news.wait()\n", set()),
        ("def run():\n    while True:\n        if step():\n            return\n", set()),
        (PAUSE.replace("clock.sleep(1)", "pass"), set()),
        (RETRY.replace("continue", "raise"), set()),
    ],
)
def test_loops_and_waits_are_found(source: str, sites: set[str]) -> None:
    assert sites_of(source) == sites
