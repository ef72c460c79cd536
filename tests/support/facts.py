"""Lists the facts that the prose of one git revision contains and the prose of a later revision lacks.

    python -m tests.support.facts BEFORE AFTER

Prose is each docstring, comment and message (a string of four words or more) of the folders in `FOLDERS`, and each Markdown page.
A fact is a number with its unit, a shape such as `[batch, seq]`, a dtype, an equation, the name of an error, or a citation: an
arXiv id, an equation's number, a section, a URL, an algorithm or a system of a paper. Equal facts have one form: 1,000 is 1000,
"half a second" is 0.5 s, and "two minutes" is 120 s.

The revisions are compared as multisets: one statement of a fact in AFTER accounts for one statement of it in BEFORE. The
two must resemble each other. The new paragraph must contain the share `SHARED_IN_FILE` of the old sentence's words if it is in
the same file, or in the file to which git renamed it. In any other file it must contain the share `SHARED` of them. The most
similar statements are paired first.

The output has each fact without a partner, with its old file, line and sentence. The comparison reads words and not meaning, so a
listed fact may still be there, in other words. Numbers in code, in strings of several lines in tests (data) and in generated files
are not facts. `facts_lost.md` gives the reason for each fact in the output for the prose of issue 18.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

FOLDERS = ("asyncrl/", "launcher/", "examples/", "benchmarks/", "tests/", "configs/")
SHARED, SHARED_IN_FILE = 0.5, 0.25
FEWEST_WORDS = 4  # shorter messages are no prose; for shorter sentences the words of their paragraph are compared
# Files without prose: generated ones, and those that quote source code.
_NO_PROSE = re.compile(
    r"docs/(configuration|chaos-matrix.*|design/path-of-a-.*)\.md|benchmarks/results\.md"
    r"|tests/(oracle/mutant_table\.py|support/facts.*)"
)

_SENTENCE = re.compile(r"(?<=[.!?;])(?<!\beq\.)(?<!\bEq\.)(?<!\bal\.) (?=\S)")
_COMMENT = re.compile(r"(?:^[ \t]*#.*\n)+|(?<=\s)# .*", re.MULTILINE)  # successive lines are one paragraph
_NUMBER_WORDS = {
    "one": 1, "single": 1, "two": 2, "twice": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7,
    "eight": 8, "nine": 9, "ten": 10, "eleven": 11, "twelve": 12, "twenty": 20, "thirty": 30, "hundred": 100,
    "thousand": 1000, "half a": 0.5, "half an": 0.5, "a half": 0.5, "a third": 0.33, "a quarter": 0.25, "a fifth": 0.2,
    "a sixth": 0.17, "a tenth": 0.1,
}  # fmt: skip
_COUNTED = ("token", "step", "sample", "prompt", "rank", "server", "host", "worker", "version", "line", "file")
_UNITS = [  # the unit in its one form, the factor to it, and the words that stand for it
    ("s", 1e-6, "us|µs|microseconds?"), ("s", 1e-3, "ms|milliseconds?"), ("s", 1, "s|sec|seconds?"),
    ("s", 60, "min|minutes?"), ("s", 3600, "h|hours?"), ("s", 86400, "days?"),
    ("B", 1, "B|bytes?"), ("B", 1e3, "[kK]B"), ("B", 1e6, "MB"), ("B", 1e9, "GB"),
    ("B", 2**10, "KiB"), ("B", 2**20, "MiB"), ("B", 2**30, "GiB"), ("%", 1, "%|percent|per cent"), ("x", 1, "x|times"),
    *((word, 1, f"{word}s?") for word in _COUNTED),
]  # fmt: skip
_UNIT = "|".join(words for _, _, words in _UNITS)
_DIGITS = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?"
_NUMBER = re.compile(
    rf"(?<![\w.#/])(?P<number>{_DIGITS}|\b(?i:{'|'.join(_NUMBER_WORDS)})\b)"
    rf"(?=(?:(?:-|–|\s+(?:to|or|and)\s+)(?:{_DIGITS}|\w+))?(?:[ -]?(?P<unit>{_UNIT})(?!\w))?)(?![\w/])"
)
_DIM = r"(?:[a-z]\w*|\d+|\*|\.\.\.)(?:\s?[*+/-]\s?\w+)*"
_TERM = r"[\w.()|^\[\]]+"
_EQUATION = re.compile(rf"(?<![\w`/=.-]){_TERM}(?: (?:[=<>*/^+-]|[<>=]=) {_TERM})+(?<=\w|\)|\])|\bO\([^)]+\)")
_NAMED = [
    re.compile(  # citations
        r"https?://[^\s)>\"'`]*[\w/]|\b\d{4}\.\d{4,5}\b|\b[Ee]q(?:uation|\.)\s?\(?\d+\)?|\b[Ss]ections?\s\d[\d.]*"
        r"|\b(?:RFC|PEP)[ -]?\d+|\b[A-Z]\w+ et al\.|\bDESIGN(?:\.md)?,?\s\d[\d.]*"
        r"|\b(?:GAE|PPO|DAPO|GRPO|RLOO|REINFORCE|ReMax|CISPO|GSPO|IMPALA|V-trace|VAPO|DPO|Schulman|TIS|GSM8K|HMAC|TLS"
        r"|AReaL|Megatron|DeepSpeed|FSDP|ZeRO|verl|OpenRLHF|slime|vLLM|prime-rl|torchtitan|StreamRL|PipelineRL)\b"
    ),
    re.compile(  # shapes
        rf"\[(?:{_DIM},\s?)+(?:{_DIM})?\]|\((?:{_DIM},|(?=[^)]*[_\d*])(?:{_DIM}, )+{_DIM})\)"
        r"|\[(?:[a-z]|batch|seq|tokens?|vocab|hidden|n_\w+|num_\w+)\]"
    ),
    re.compile(r"\b(?:b?float(?:8|16|32|64)|[bf]p?(?:8|16|32)|u?int(?:8|16|32|64)|(?:single|double) precision)\b"),
    re.compile(r"\b[A-Z]\w+Error\b"),
]


@dataclass(frozen=True, eq=False)
class Fact:
    """One statement of a fact. words: those of the sentence; paragraph: those of its paragraph."""

    fact: str
    file: str
    line: int
    sentence: str
    words: frozenset[str]
    paragraph: frozenset[str]


def facts_of(revision: str) -> list[Fact]:
    found = []
    for file in _git("ls-tree", "-r", "--name-only", revision).split("\n"):
        is_prose = file.endswith(".md") or (file.startswith(FOLDERS) and file.endswith((".py", ".sh", ".yaml")))
        if not is_prose or _NO_PROSE.fullmatch(file):
            continue
        for line, paragraph in _paragraphs(file, _git("show", f"{revision}:{file}")):
            of_paragraph = _words(paragraph)
            for sentence in _SENTENCE.split(" ".join(paragraph.split())):
                words = _words(sentence)
                words = words if len(words) >= FEWEST_WORDS else of_paragraph
                found += [Fact(fact, file, line, sentence, words, of_paragraph) for fact in _facts(sentence)]
    return found


def lost(before: list[Fact], after: list[Fact], renamed: dict[str, str]) -> list[Fact]:
    """Return the facts of `before` without a partner in `after`. renamed: maps a file's old name to its new one."""
    candidates: defaultdict[str, list[Fact]] = defaultdict(list)
    for new in after:
        number, _, unit = new.fact.partition(" ")
        for fact in {new.fact, number if unit else new.fact}:  # the new sentence may have a unit that the old one lacks
            candidates[fact].append(new)
    pairs = []
    for old in before:
        file = renamed.get(old.file, old.file)
        for new in candidates[old.fact]:
            shared = len(old.words & new.paragraph) / len(old.words) if old.words else float(new.file == file)
            if shared >= (SHARED_IN_FILE if new.file == file else SHARED):
                pairs.append((shared + (new.file == file), old, new))
    kept: set[Fact] = set()
    used: set[Fact] = set()
    for _, old, new in sorted(pairs, key=lambda pair: pair[0], reverse=True):
        if old not in kept and new not in used:
            kept.add(old)
            used.add(new)
    return [old for old in before if old not in kept]


def _facts(sentence: str) -> Iterator[str]:
    for pattern in _NAMED:
        for match in pattern.finditer(sentence):
            yield re.sub(r"\s", "", match[0]).rstrip(".,")
        sentence = pattern.sub(" ", sentence)
    for match in _EQUATION.finditer(sentence):
        if re.search(r"[=<>*^+]", match[0]):
            yield re.sub(r"[\s()]", "", match[0])
    for match in _NUMBER.finditer(sentence):
        word, found = match["number"].lower(), match["unit"] or ""
        unit, factor = next(((unit, factor) for unit, factor, words in _UNITS if re.fullmatch(words, found)), ("", 1))
        if unit or word not in ("one", "single"):  # "one" is often a pronoun
            value = _NUMBER_WORDS.get(word) or float(match["number"].replace(",", ""))
            yield f"{value * factor:.10g} {unit}".strip()


def _words(text: str) -> frozenset[str]:
    return frozenset(word.lower().rstrip("s") for word in re.findall(r"[A-Za-z_]{4,}", text))


def _paragraphs(file: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each paragraph of a file's prose. line: the number of its first line."""
    if file.endswith(".md"):
        yield from _split(text, 1)
        return
    for comment in _COMMENT.finditer(text):
        yield text.count("\n", 0, comment.start()) + 1, re.sub(r"(?m)^[ \t]*#[!:]?", "", comment[0])
    nodes = list(ast.walk(ast.parse(text))) if file.endswith(".py") else []
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    pieces = {id(piece) for node in nodes if isinstance(node, ast.JoinedStr) for piece in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            string = "".join(str(piece.value) if isinstance(piece, ast.Constant) else "{}" for piece in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in pieces:
            string = node.value
        else:
            continue
        if id(node) in docstrings or (
            len(string.split()) >= FEWEST_WORDS and not (file.startswith("tests/") and "\n" in string)
        ):
            yield from _split(string, node.lineno)


def _split(text: str, line: int) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each paragraph, item of a list and row of a table."""
    for paragraph in re.split(r"(\n\s*\n|\n(?=\s*[-*|#]))", text):
        if paragraph.strip():
            yield line, paragraph
        line += paragraph.count("\n")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def main(before: str, after: str) -> None:
    facts, later = facts_of(before), facts_of(after)
    rows = _git("diff", "--name-status", "-M30%", "-l9999", "--diff-filter=R", before, after).splitlines()
    losses = lost(facts, later, {old: new for _, old, new in (row.split("\t") for row in rows)})
    for loss in losses:
        print(f"{loss.file}:{loss.line}: {loss.fact} | {loss.sentence}")
    print(f"{len(facts)} facts before, {len(later)} after, {len(losses)} without a partner")


if __name__ == "__main__":
    main(*sys.argv[1:])
