"""The table of modes: no other code compares a mode's name."""

from __future__ import annotations

from asyncrl.config.modes import MODES
from tests.support.decisions import PACKAGE, decisions


def test_each_mode_has_one_source_of_trajectories() -> None:
    for name, mode in MODES.items():
        assert [mode.has_servers, mode.workers_generate, mode.replays].count(True) == 1, name


def test_no_other_code_compares_the_name_of_a_mode() -> None:
    """A decision that depends on the mode reads a trait, so that a new mode needs no change there."""
    assert decisions({*MODES}, {PACKAGE / "config" / "modes.py"}) == set()
