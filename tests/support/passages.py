"""Draws passages of prose at random, for a reader who restates them without the code.

    python -m tests.support.passages SEED [--count 40]

A passage is a docstring, a block of comments, a message (a string of six words or more outside tests), a paragraph or a table
row of a Markdown page. Each has six words or more. All are equally likely. The output is a Markdown list without file names;
the places follow on the standard error stream, for the judge. tests/readers has the restatements and verdicts.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_CODE = ("asyncrl", "launcher", "examples", "benchmarks", "tests")
_PAGES = ("*.md", "docs/**/*.md", "examples/*/*.md", "benchmarks/*.md", "tests/oracle/*.md")
_GENERATED = ("configuration.md", "chaos-matrix.md", "chaos-matrix-sglang.md", "results.md", "surface_changes.md")
_FEWEST_WORDS = 6


class Passage(NamedTuple):
    file: str
    line: int
    kind: str  # such as "page" or "docstring of Ledger.view"
    text: str


def of_code(path: Path) -> Iterator[Passage]:
    """Docstrings, comment blocks and messages of a Python file."""
    name, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    pending: list[tuple[ast.AST, str]] = [(tree, "")]
    while pending:
        node, inside = pending.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        if isinstance(node, ast.JoinedStr):
            yield Passage(name, node.lineno, f"message in {inside}", "".join(_piece(part) for part in node.values))
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield Passage(name, node.lineno, f"message in {inside}", node.value)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inside = f"{inside}.{node.name}".lstrip(".")
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            found := ast.get_docstring(node)
        ):
            yield Passage(name, node.body[0].lineno, f"docstring of {inside or 'a module'}", found)
        pending += [(child, inside) for child in ast.iter_child_nodes(node)]
    yield from _comments(name, text)


def _piece(part: ast.expr) -> str:
    return f"{{{ast.unparse(part.value)}}}" if isinstance(part, ast.FormattedValue) else ast.literal_eval(part)


def _comments(name: str, text: str) -> Iterator[Passage]:
    """Blocks of comment lines. A comment behind code comes with its line."""
    block: list[str] = []
    first = last = 0
    grows = False  # whether the block consists of lines of their own; a comment behind code is complete
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        words = token.string.lstrip("# ")
        alone = token.line.lstrip().startswith("#")
        if block and token.start[0] == last + 1 and alone and grows:
            block.append(words)
        else:
            yield Passage(name, first, "comment", " ".join(block))
            block = [words if alone else f"`{token.line[: token.start[1]].strip()}` {words}"]
            first, grows = token.start[0], alone
        last = token.start[0]
    yield Passage(name, first, "comment", " ".join(block))


def of_page(path: Path) -> Iterator[Passage]:
    """Paragraphs, list items and table rows of a Markdown page, without its code and generated parts."""
    text = path.read_text(encoding="utf-8")
    for unwanted in (r"^```.*?^```", r"<!-- [^>]* from here -->.*?<!-- to here -->"):
        text = re.sub(unwanted, lambda found: "\n" * found[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    line = 1
    for piece in re.split(r"(\n\s*\n|\n(?=[|]|\s*[-*] |\s*\d+\. ))", text):
        if not piece.lstrip().startswith(("#", "|--", "|:-")):
            yield Passage(str(path.relative_to(ROOT)), line, "page", piece)
        line += piece.count("\n")


def passages() -> list[Passage]:
    code = sorted(path for folder in _CODE for path in (ROOT / folder).rglob("*.py"))
    pages = sorted({path for pattern in _PAGES for path in ROOT.glob(pattern) if path.name not in _GENERATED})
    found = [each for path in code for each in of_code(path)] + [each for path in pages for each in of_page(path)]
    return sorted({each for each in found if _is_prose(each)})


def _is_prose(passage: Passage) -> bool:
    data = passage.kind.startswith("message") and (passage.file.startswith("tests/") or "\n" in passage.text)
    return (
        not data
        and len(re.findall(r"\b[A-Za-z]{2,}\b", re.sub(r"`[^`]*`|\{[^}]*\}", "", passage.text))) >= _FEWEST_WORDS
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=40)
    args = parser.parse_args()
    drawn = random.Random(args.seed).sample(passages(), args.count)
    for number, (file, line, kind, text) in enumerate(drawn, 1):
        print(f"{number}. ({kind}) {' '.join(text.split())}\n")
        print(f"{number}. {file}:{line}", file=sys.stderr)


if __name__ == "__main__":
    main()
