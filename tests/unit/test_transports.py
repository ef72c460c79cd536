"""The table of transports: no other code compares a transport's name."""

from __future__ import annotations

from asyncrl.config.transports import TRANSPORTS
from tests.support.decisions import PACKAGE, decisions


def test_no_other_code_compares_the_name_of_a_transport() -> None:
    """A decision that depends on the transport reads a trait, so that a new transport needs no change there."""
    assert decisions({*TRANSPORTS}, {PACKAGE / "config" / "transports.py"}) == set()
