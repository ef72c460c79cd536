"""The pages of docs/design name files and names that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "design").glob("*.md"))
_FILE = re.compile(r"`(asyncrl/[\w/]+\.py)`(?: `(\w+)`)?")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_names_exist(page: Path) -> None:
    named = _FILE.findall(page.read_text())
    assert named
    for file, name in named:
        text = (ROOT / file).read_text()
        defined = rf"^(?:class|(?:async )?def) {name}\b|^{name}(?:: [^=]+)? = "
        assert not name or re.search(defined, text, re.MULTILINE), (file, name)
