"""Profiles of train steps, which `asyncrl-launch profile` asks for while the run goes on."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from asyncrl.master.calls import WorkerCaller
from asyncrl.protocol.calls import BeginProfile, EndProfile
from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.protocol.profiling import ProfileAnswer, ProfileRequest
from asyncrl.runtime.directory import Directory

_KEPT = 3  # the newest profiles of a run


class Profiles:
    """Has the workers of the trainer group record the next train steps.

    consumes: the request in name resolve; the beginning and the end of each step.  produces: calls, the answer in name resolve.
    waits for: the workers to begin and to write, each within the limit of a call.  unblocked by: the workers.
    A request that disappears before its last step, because the command was interrupted, ends its recording without files.
    """

    def __init__(
        self, directory: Directory, caller: WorkerCaller, workers: Sequence[int], run_dir: Path, attempt: int
    ) -> None:
        """workers: those of the trainer group."""
        self._directory, self._caller, self._workers = directory, caller, list(workers)
        self._run_dir, self._attempt = run_dir, attempt
        self._request: ProfileRequest | None = None  # not answered yet
        self._answer: ProfileAnswer | None = None  # of the request that is being recorded

    async def watch(self) -> None:
        """Follow the requests. Never returns."""
        async for event in self._directory.watch(self._directory.names.profile_request()):
            request = None
            if event.kind == "put":
                with contextlib.suppress(*DECODE_ERRORS):
                    request = msgspec.json.decode(event.value or "", type=ProfileRequest)
            self._request = request
            if self._answer is not None and (request is None or request.id != self._answer.id):
                self._answer = None
                await self._caller.call("profiles to be discarded", self._workers, EndProfile())

    async def before_step(self, step: int) -> None:
        """Call before each step, with its number."""
        request = self._request
        if request is None or self._answer is not None:
            return
        self._answer = answer = ProfileAnswer(
            id=request.id,
            first_step=step,
            last_step=step + request.steps - 1,
            num_workers=len(self._workers),
            folder=f"profile/attempt_{self._attempt}_step_{step}",
        )
        await self._caller.call("profiles to begin", self._workers, BeginProfile())
        await self._publish(answer)  # the request may have disappeared meanwhile

    async def after_step(self, step: int) -> None:
        """Call after each step, with its number. After the last one that was asked for, the workers write their files."""
        answer = self._answer
        if answer is None or step < answer.last_step:
            return
        self._answer = self._request = None
        replies = await self._caller.call("profiles to be written", self._workers, EndProfile(folder=answer.folder))
        names = [f"model_worker/{worker}" for worker in self._workers]
        failed = [name for name, reply in zip(names, replies, strict=True) if not reply.num_bytes]
        await asyncio.to_thread(_prune, self._run_dir / "profile")
        await self._publish(msgspec.structs.replace(answer, is_complete=True, failed=failed))
        # Answered requests must not be repeated by a later master
        await asyncio.to_thread(self._directory.resolver.delete, self._directory.names.profile_request())

    async def _publish(self, answer: ProfileAnswer) -> None:
        await self._directory.publish(self._directory.names.profile_answer(), msgspec.json.encode(answer).decode())


def _prune(folder: Path) -> None:
    with contextlib.suppress(OSError):  # no worker has written a file, or a user removes one
        found = sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
        for path in found[:-_KEPT]:
            shutil.rmtree(path, ignore_errors=True)
