"""Shared devices: generation and training take turns.

    training()     report the turn -> gserver manager: every server interrupts its requests and sleeps -> devices free
    generation()   all models leave the devices -> report the turn -> gserver manager: servers wake and load the newest version

Generation has a turn only if the next step has to wait for data, or for an evaluation. In training's turn unfinished rollouts wait
with the tokens that they have, and continue under the weights of generation's next turn.

The manager counts a device as used until the server has confirmed its release, or its process has left name resolve. A server and
a manager begin in training's turn, so a restart of either cannot take a device from training. A model worker loads nothing before
the first turn of its attempt.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.master.calls import WorkerCaller
from asyncrl.master.rollouts import LONG_POLL_S, ManagerReports
from asyncrl.protocol.calls import ReleaseDevices
from asyncrl.runtime.board import StatusBoard
from asyncrl.runtime.directory import Directory


class Turns:
    """The turns of a run that shares no devices: neither side waits."""

    is_shared = False

    async def begin(self) -> None: ...

    async def training(self) -> None: ...

    async def generation(self) -> None: ...


class DeviceTurns(Turns):
    """Gives the shared devices to one side at a time.

    consumes: the manager's view.  produces: the turn in the master's reports; calls that move the models off the devices.
    waits for: the servers to sleep ("devices free"); the model workers to move their models; each at most limit_s.
    unblocked by: the servers or their end; the model workers.
    """

    is_shared = True

    def __init__(
        self,
        reports: ManagerReports,
        caller: WorkerCaller,
        workers: Sequence[int],
        directory: Directory,
        *,
        attempt: int,
        board: StatusBoard,
        limit_s: float,
    ) -> None:
        """workers: the model workers that share their devices. limit_s: of each wait (train.call_timeout_s)."""
        self._reports, self._caller, self._workers, self._directory = reports, caller, list(workers), directory
        self._attempt, self._board, self._limit_s = attempt, board, limit_s
        reports.turn = "training"  # in every report, also one that precedes `begin`

    async def begin(self) -> None:
        """Take the devices for this attempt's model workers, which load their models after that."""
        await self.training()
        await self._directory.publish(self._directory.names.devices_free(self._attempt), str(self._attempt))

    async def training(self) -> None:
        """Wait until no generation server holds a shared device. No effect in training's turn."""
        self._reports.turn = "training"
        async with self._board.waiting("devices free", on="generation servers", limit_s=self._limit_s):
            view = await self._reports.report()
            while not view.devices_free:
                view = await self._reports.report(wait_s=LONG_POLL_S, after_revision=view.revision)

    async def generation(self) -> None:
        """Move the models off the devices, then let the servers wake. The newest version must be published. No effect in
        generation's turn."""
        if self._reports.turn == "generation":
            return
        await self._caller.call("models to leave the devices", self._workers, ReleaseDevices())
        self._reports.turn = "generation"
        await self._reports.report()
