"""RolloutWorker: tickets in, trajectories out.

It asks the gserver manager for as many tickets as it has room for and rolls each one out in its own asyncio task: an agent acts in
an environment, with responses from generation servers. It pushes the trajectory to the ticket's head and reports the result to the
manager. If a task has a ChatAgent, the worker serves the OpenAI API to it. It does not compute on tensors or import torch.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from contextlib import AsyncExitStack

from asyncrl.config.processes import RolloutWorkerConfig
from asyncrl.config.schema import evaluation_sets
from asyncrl.rollout.client import PartialRolloutManager
from asyncrl.rollout.openai_api import ChatEndpoint
from asyncrl.rollout.rollout_data import RolloutData
from asyncrl.rollout.rollouts import Rollouts, TaskTable
from asyncrl.rollout.tickets import HeldTickets, ManagerClient
from asyncrl.runtime.directory import Directory
from asyncrl.runtime.service_client import ServiceClient
from asyncrl.runtime.system import System
from asyncrl.runtime.worker import Worker
from asyncrl.streams.push_pull import NameResolvingZmqPusher

_SPARE_FILES = 256  # file descriptors reserved for all uses except generation requests


class RolloutWorker(Worker):
    """One of the run's rollout workers."""

    def __init__(
        self, config: RolloutWorkerConfig, system: System | None = None, data: RolloutData | None = None
    ) -> None:
        """data: replaces the data that the config names."""
        super().__init__(config.worker, system)
        self.config = config
        self._data = data

    async def run(self, directory: Directory, opened: AsyncExitStack) -> None:
        """Open the parts and run rollouts.

        When the worker stops, all rollouts are cancelled and report their tickets as released, before the parts are closed.
        """
        rollout, info = self.config.rollout, self.info
        data = self._data if self._data is not None else RolloutData(self.config)
        sets = evaluation_sets(self.config.eval)
        tasks = TaskTable(rollout, sets, self.services, tokenizer=data.tokenizer)
        opened.callback(tasks.close)
        await tasks.start()
        journal = data.journal()
        opened.push_async_callback(asyncio.to_thread, journal.close)
        key = self.names.gserver_manager()
        connecting = ServiceClient.connect(directory, self.services, key=key, service="gserver manager")
        manager = ManagerClient(
            await opened.enter_async_context(connecting),
            worker=self.name,
            incarnation=self.incarnation,
            new_id=self.system.new_id,
            call_limit_s=info.runtime.start_limit_s,
        )
        opened.push_async_callback(manager.close)
        client = PartialRolloutManager(
            manager,
            self.services,
            new_tokens_per_chunk=int(rollout.new_tokens_per_chunk),
            request_timeout_s=rollout.request_timeout_s,
            turn_limit_s=rollout.rollout_timeout_s,
            with_routes=self.config.with_routes,
            max_requests=_connection_limit(
                rollout.max_concurrent_per_worker
                * (rollout.group_size + max([1, *(chosen.num_responses for chosen in sets.values())])),
                self.logger,
                # With the OpenAI API both ends of the agent's connection to it are in this process, too
                files_each=3 if tasks.chat else 1,
            ),
        )
        opened.push_async_callback(client.close)
        pusher = NameResolvingZmqPusher(
            directory.resolver,
            self.names,
            pusher_index=info.index,
            num_pushers=info.count,
            num_pullers=self.config.num_heads,
            runtime=info.runtime,
            transport=self.system.transport,
            incarnation=self.incarnation,
            encode=data.encode,
        )
        opened.push_async_callback(pusher.close)
        endpoint = ChatEndpoint(self.services)
        opened.push_async_callback(endpoint.close)
        if tasks.chat:
            await endpoint.start(info.runtime.host)
            self.logger.info("OpenAI API at %s", endpoint.url)
        await pusher.start()
        rollouts = Rollouts(rollout, data, tasks, client, pusher, endpoint, journal, self.services)
        tickets = HeldTickets(
            self.name,
            rollout,
            manager,
            client,
            rollouts,
            self.services,
            stop_timeout_s=info.runtime.stop_timeout_s,
        )
        self.began()
        self.tasks.spawn(journal.run(), "write the journal")
        await self.roll_out(tickets)

    async def roll_out(self, tickets: HeldTickets) -> None:
        """Run rollouts. The caller has opened all parts that they use."""
        await tickets.run()


def _connection_limit(wanted: int, logger: logging.Logger, *, files_each: int) -> int:
    """The limit of concurrent generation requests: as many as rollouts can make, if the process can open that many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted * files_each + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    limit = max(1, (soft - _SPARE_FILES) // files_each)
    logger.warning(
        "only %d of %d generation requests can run at once: the limit of open files is %d; raise it (ulimit -n)",
        limit,
        wanted,
        soft,
    )
    return limit
