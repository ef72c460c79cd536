"""The table of transports: no other code compares a transport's name."""

from __future__ import annotations

from asyncrl.config.transports import TRANSPORTS
from asyncrl.generation import transports as generation
from asyncrl.manager import transports as manager
from asyncrl.model import transports as model
from tests.support.decisions import PACKAGE, decisions


def test_no_other_code_compares_the_name_of_a_transport() -> None:
    """A decision that depends on the transport reads a trait, so that a new transport needs no change there."""
    tables = {PACKAGE / folder / "transports.py" for folder in ("config", "model", "manager", "generation")}
    assert decisions({*TRANSPORTS}, tables) == set()


def test_each_transport_has_a_row_in_each_table() -> None:
    assert list(TRANSPORTS) == list(model.KINDS) == list(manager.KINDS) == list(generation.KINDS)
