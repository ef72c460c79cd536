"""A function's home (master/homes.py) decides where the function is computed. Other code hardly knows that workers can be outside
the trainer group."""

from __future__ import annotations

from tests.support.decisions import PACKAGE

OWN = {
    "dataflow/worker_groups.py",
    "master/detached.py",
    "master/homes.py",
    "master/refresh.py",
}
MOST = 8


def test_few_files_name_detached_groups() -> None:
    """Comments count, too."""
    texts = {str(file.relative_to(PACKAGE)): file.read_text() for file in PACKAGE.rglob("*.py")}
    found = {name for name, text in texts.items() if "detached" in text.lower()}
    assert found >= OWN
    assert len(found - OWN) <= MOST, sorted(found - OWN)
