"""Polls generation servers for their load: for routing by tokens, and to detect that a leaving server is idle.

consumes: the servers' answers to /v1/loads (SGLang's route, which every engine's server has).
produces: `load_reported` in the ServerTable; `on_told` after each answer of a leaving server.
waits for: each server independently, within a limit. unblocked by: the server's answer.

A failed poll does not change a server's health. Health probes do that (fleet.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from asyncrl.manager.manager_side import FAILURES, ServerCalls
from asyncrl.manager.routing import POLICIES, Server, ServerState, ServerTable
from asyncrl.protocol.generation import LoadsReply

_SHORTEST_INTERVAL_S = 0.2
_MOST_A_SECOND = 100  # polls of all servers together


def interval_s(num_servers: int, heartbeat_s: float) -> float:
    """Seconds between two polls of a server: short enough that routing sees groups end, long enough to cost little."""
    return min(heartbeat_s, max(_SHORTEST_INTERVAL_S, num_servers / _MOST_A_SECOND))


class LoadPoller:
    """Polls the load only of servers for which it is needed: all leaving servers, and all healthy ones if the routing policy reads
    their reports."""

    def __init__(
        self,
        table: ServerTable,
        calls: ServerCalls,
        *,
        heartbeat_s: float,
        limit_s: float,
        on_told: Callable[[], None],
        logger: logging.Logger,
    ) -> None:
        self._table, self._calls = table, calls
        self._heartbeat_s = heartbeat_s
        self._limit_s = limit_s
        self._on_told = on_told
        self._logger = logger
        self._asked: dict[str, asyncio.Task[None]] = {}  # by server; at most one poll of a server at a time
        self._said: set[str] = set()  # servers with a logged failure since their last answer

    async def run(self) -> None:
        try:
            while True:
                servers = [server for server in self._table.servers.values() if self._matters(server)]
                for server in servers:
                    if server.name not in self._asked:
                        self._ask_soon(server)
                await asyncio.sleep(interval_s(len(servers), self._heartbeat_s))
        finally:
            tasks = list(self._asked.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _matters(self, server: Server) -> bool:
        is_read = server.state is ServerState.HEALTHY and POLICIES[self._table.policy].reads_reports
        return is_read or server.state is ServerState.DRAINING

    def _ask_soon(self, server: Server) -> None:
        task = asyncio.get_running_loop().create_task(self._ask(server), name=f"load of {server.name}")
        self._asked[server.name] = task
        task.add_done_callback(lambda _: self._asked.pop(server.name, None))

    async def _ask(self, server: Server) -> None:
        incarnation, promised = server.incarnation, server.promised_tokens
        try:
            async with asyncio.timeout(self._limit_s):
                loads = (await self._calls.get(f"{server.url}/v1/loads?include=core", LoadsReply)).loads
        except FAILURES as error:
            if (
                server.incarnation == incarnation
                and server.state is ServerState.HEALTHY
                and server.name not in self._said
            ):
                self._said.add(server.name)
                self._logger.warning(
                    "%s does not report its load (%r); routing uses its last report and its new groups",
                    server.name,
                    error,
                )
            return
        if server.incarnation != incarnation:
            return
        self._said.discard(server.name)
        used = sum(load.num_total_tokens for load in loads)
        requests = sum(load.num_running_reqs + load.num_waiting_reqs for load in loads)
        self._table.load_reported(server.name, used, requests, promised)
        if server.state is ServerState.DRAINING:
            self._on_told()
