"""The calls of a model worker: one of a kind that it cannot execute fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from asyncrl.model.calls import Calls
from asyncrl.runtime.clock import SYSTEM_CLOCK


async def test_a_call_of_an_unhandled_kind_gets_no_successful_reply() -> None:
    class Unhandled: ...

    calls: Any = SimpleNamespace(_clock=SYSTEM_CLOCK)
    call: Any = MagicMock(body=Unhandled())
    with pytest.raises(TypeError, match=r"^this worker cannot execute a call of kind Unhandled$"):
        await Calls._execute_here(calls, call)
    call.reply.assert_not_called()
