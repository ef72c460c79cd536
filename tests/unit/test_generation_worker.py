"""The housekeeping of a generation server's process."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from asyncrl.generation.worker import GenerationServer


async def test_expired_requests_are_reported_with_both_kinds_of_answer(caplog: pytest.LogCaptureFixture) -> None:
    """A retracted request gets its tokens, and any other one 503."""
    journal = MagicMock()
    journal.flush.side_effect = OSError("the end of this test")
    worker: Any = SimpleNamespace(board=MagicMock(), logger=logging.getLogger("asyncrl.test.generation"))
    engine = MagicMock(failure=None)
    engine.expire_waiting.return_value = 3
    with pytest.raises(OSError, match="the end of this test"):
        await GenerationServer._report_and_expire(worker, engine, journal)
    assert caplog.messages == [
        "3 requests waited too long and were answered: 503, or the tokens so far of a retracted request"
    ]
