"""The guides for users: each quoted message is one of the code, each field exists, and the recipes are those of `plan`."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from asyncrl.config.reference import all_fields, select
from tests.pages import ROOT
from tests.support import recipes

DOCS = ROOT / "docs"


def cells(page: str) -> list[list[str]]:
    """The cells of the rows of a page's tables, without their heads. A `|` in a cell is not supported."""
    rows = [line.strip("| ").split(" | ") for line in (DOCS / page).read_text().splitlines() if line.startswith("| ")]
    return rows


def messages() -> list[str]:
    """The texts of the code; `...` in place of each value."""
    texts = []
    for path in sorted((ROOT / "asyncrl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return [" ".join(text.split()) for text in texts if " " in text]


def quoted(page: str) -> list[str]:
    """The messages in the first column of a page: cells that are code as a whole."""
    found = (re.fullmatch(r"(`+) ?(.*?) ?\1", row[0].strip()) for row in cells(page))
    return [match[2] for match in found if match]


def is_a_message(text: str, known: list[str]) -> bool:
    """Whether a text of the code has these words, with any value or words for each `...`."""
    longest = max(text.split("..."), key=len)
    pattern = ".*?".join(re.escape(part) for part in text.split("..."))
    return any(longest in line and re.search(pattern, line) for line in known)


def test_each_message_of_the_page_is_one_of_the_code() -> None:
    known, found = messages(), quoted("troubleshooting.md")
    assert len(found) > 40
    assert [text for text in found if not is_a_message(text, known)] == []
    assert not is_a_message("the trainer waits ... for nothing", known)


def test_each_field_that_the_guides_name_exists() -> None:
    """In code: a path of the config with a dot, of which the first part is a section."""
    sections = {field.path.partition(".")[0] for field in all_fields() if "." in field.path}
    missing = []
    for page in ("troubleshooting.md", "performance.md", "recipes.md", "installation.md", "index.md", "glossary.md"):
        for path in re.findall(r"`(\w+(?:\.[\w-]+)+)(?:=[^`]*)?`", (DOCS / page).read_text()):
            of_server = path.startswith("generation.server_args.")
            if path.partition(".")[0] in sections and not of_server and not select(path):
                missing.append(f"{page}: {path}")
    assert missing == []


def test_each_row_about_other_systems_names_fields_that_exist_or_a_reason() -> None:
    rows = [row for row in cells("fields-of-other-systems.md") if row[1] != "asyncrl"]
    assert len(rows) > 130
    for theirs, ours, *_ in rows:
        if not ours.startswith("not there: "):
            fields = re.findall(r"`([^`]+)`", ours)
            assert fields, theirs
            assert [field for field in fields if not select(field)] == [], theirs


@pytest.mark.parametrize("recipe", recipes.RECIPES, ids=lambda recipe: f"{recipe.model}-{recipe.gpus}")
def test_a_recipe_is_accepted_and_uses_its_gpus(recipe: recipes.Recipe) -> None:
    from asyncrl.dataflow.topology import allocation_of

    with TemporaryDirectory() as folder:
        config = recipes.config_of(recipe, Path(folder))
    assert allocation_of(config).num_devices == recipe.gpus
    (listed,) = (row for row in recipes.listed() if row.startswith(f"| {recipe.model} | {recipe.gpus} |"))
    assert " ".join(f"`{change}`" for change in recipe.changes) in listed


@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(len(recipes.RECIPES)))
def test_the_page_has_the_figures_of_a_recipe(number: int) -> None:
    recipe = recipes.RECIPES[number]
    assert recipes.row(recipe, recipes.planned(recipe)) == recipes.listed()[number]
