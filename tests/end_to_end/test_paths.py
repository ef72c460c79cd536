"""The pages of the two paths name the files that a sample and a weight version actually pass through."""

import re
from pathlib import Path

import pytest

from tests.support import paths


@pytest.mark.full
@pytest.mark.release
@pytest.mark.timeout(400)
def test_the_pages_name_the_files_of_a_run(tmp_path: Path) -> None:
    """If a page and the run differ, run `python -m tests.support.paths --write` and review the changes."""
    for kind, visits in paths.paths(paths.record(tmp_path)).items():
        listed = paths.PAGES[kind].read_text(encoding="utf-8").partition(paths.BEGIN)[2]
        on_the_path = {visit.file for visit in visits if not paths.is_beside(kind, visit.file)}
        assert set(re.findall(r"`(asyncrl/[\w/]+\.py)`", listed)) == on_the_path
