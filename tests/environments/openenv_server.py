"""A server that speaks OpenEnv's protocol, without the package. It plays `shout`: each answer must be its word in capitals.

It is started as a server's interpreter is: PROGRAM -P -m uvicorn APP --uds PATH --log-level LEVEL. APP names a fault, which is
planted in episodes whose seed is 1.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

from aiohttp import WSMsgType, web

ROUNDS = 2
NOT_OF_THE_PROTOCOL: dict[str, Any] = {
    "no_observation": {"type": "observation", "data": {"reward": 1.0}},
    "no_number": {"type": "observation", "data": {"observation": {"text": "hi"}, "reward": float("nan")}},
}


class Shout:
    """One session."""

    def __init__(self, fault: str) -> None:
        self.fault, self.word, self.turn = fault, "", 0

    def reset(self, seed: int = 0) -> dict[str, Any]:
        self.word, self.turn = ("hi", "ho", "hu")[seed], 0
        self.fault = self.fault if seed == 1 else ""
        return self._seen(None)

    def step(self, message: str) -> dict[str, Any]:
        if self.fault == "hang":
            time.sleep(600)
        if self.fault == "exit":
            os._exit(3)
        if self.fault == "leak":
            bytearray(3_000_000_000)
        if self.fault == "exception":
            raise KeyError("planted")
        self.turn += 1
        reward = float(message == self.word.upper())
        self.word += self.word
        return self._seen(reward)

    def _seen(self, reward: float | None) -> dict[str, Any]:
        return {"observation": {"text": self.word}, "reward": reward, "done": self.turn == ROUNDS}


async def talk(request: web.Request) -> web.WebSocketResponse:
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    session = Shout(request.app[FAULT])
    if request.app[OPEN] and request.app[FAULT] == "full":
        await socket.send_json({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}})
        return socket
    request.app[OPEN].add(session)
    try:
        async for received in socket:
            if received.type is WSMsgType.TEXT:
                await socket.send_json(await asyncio.to_thread(answer, session, received.json()))
    finally:
        request.app[OPEN].discard(session)
    return socket


def answer(session: Shout, message: dict[str, Any]) -> dict[str, Any]:
    if message["type"] == "state":
        return {"type": "state", "data": {"step_count": session.turn}}
    if session.fault in NOT_OF_THE_PROTOCOL and message["type"] == "step":
        return NOT_OF_THE_PROTOCOL[session.fault]
    try:
        return {"type": "observation", "data": getattr(session, message["type"])(**message["data"])}
    except BaseException as error:
        return {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": repr(error)}}


FAULT = web.AppKey("fault", str)
OPEN = web.AppKey("open", set)


def make(fault: str = "") -> web.Application:
    app = web.Application()
    app[FAULT], app[OPEN] = fault, set()
    app.router.add_get("/ws", talk)
    return app


if __name__ == "__main__":
    _, _, _, uvicorn, fault, uds, path, *_ = sys.argv
    assert (uvicorn, uds) == ("uvicorn", "--uds")
    web.run_app(make(fault), path=path, print=None)
