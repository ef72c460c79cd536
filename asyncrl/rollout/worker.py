"""RolloutWorker: tickets in, trajectories out.

It asks the gserver manager for as many tickets as it has room, rolls each out in a task of its own (an agent that meets an
environment, its responses from generation servers), pushes the trajectory to the ticket's head, and tells the manager how
the ticket ended. Where a task has a ChatAgent it serves the OpenAI API to it. It computes nothing on tensors and imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from asyncrl.config.schema import ConfigError, RolloutWorkerConfig, SamplingConfig
from asyncrl.data.prompts import Prompt, PromptError, PromptSource, load_tokenizer
from asyncrl.data.sequence import SequenceSample
from asyncrl.protocol.messages import RolloutResult, Ticket, TrajectoryMeta, WeightVersion
from asyncrl.rewards.outcome import RolloutEnded, RolloutRejected, RolloutReleased, objection_to
from asyncrl.rewards.reward_function import shown
from asyncrl.rewards.trajectory import OnPiece, Response, SampleSummary, complete_sample
from asyncrl.rollout.agent import ActQueue, ObsQueue
from asyncrl.rollout.chat_agent import ChatAgent
from asyncrl.rollout.client import PartialRolloutManager, Route
from asyncrl.rollout.manager_client import ManagerClient
from asyncrl.rollout.openai_api import ChatEndpoint
from asyncrl.rollout.tasks import TRAIN, Task, TaskTable
from asyncrl.runtime.channel import ChannelRefused
from asyncrl.runtime.disk import out_of_files
from asyncrl.runtime.journal import BackgroundJournal
from asyncrl.runtime.push_pull import NameResolvingZmqPusher
from asyncrl.runtime.worker import WaitTimeoutError, Worker

_ALLOCATE_WAIT_S = 5.0  # how long the manager may hold back its answer until it admits something
_REFUSED_PAUSE_S = 0.2  # after an empty answer that came sooner
_STOP_REPORT_S = 2.0  # for telling the manager what a stopped worker releases
_MAX_DETAIL_CHARS = 400  # of what the manager is told about a rollout that ended without a trajectory
_CANCEL_LIMIT_S = 5.0  # for an agent to end that is cancelled
_MAX_LEFT_BEHIND = 64  # agents that have not; past it every rollout is rejected
# Why a head refuses a trajectory for what is in it (model/trajectory_receiver.py): another try would give the same
_BAD_CONTENT = frozenset({"missing_keys", "bad_lengths", "bad_tokens", "bad_logprobs", "not_finite"})
_SPARE_FILES = 256  # file descriptors kept for everything but generation requests


@dataclass
class _Held:
    """A ticket this worker holds, from its grant until the manager has its result."""

    ticket: Ticket
    birth_time: float
    task: asyncio.Task[None] | None = None
    taken_back: str = ""  # why it is being cancelled
    reporting: bool = False  # its result is decided: too late to cancel


class RolloutWorker(Worker):
    """Holds up to max_concurrent_per_worker train tickets, and evaluation tickets beside them."""

    def __init__(self, config: RolloutWorkerConfig) -> None:
        super().__init__(config.worker)
        self.config = config
        self._held: dict[str, _Held] = {}
        self._changed = asyncio.Event()  # a ticket has ended
        self._logged: set[str] = set()
        self._left_behind: set[asyncio.Future[Any]] = set()  # agents that were cancelled and go on
        self.manager: ManagerClient
        self.client: PartialRolloutManager
        self._pusher: NameResolvingZmqPusher
        self._tasks: TaskTable
        self._closers: list[Any] = []

    async def setup(self) -> None:
        config, rollout, info = self.config, self.config.rollout, self.info
        tokenizer = load_tokenizer(config.tokenizer_path)
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                f"tokenizer_path={config.tokenizer_path!r}: has no EOS token, so no response could ever end; set eos_token"
            )
        self._stop_token_ids = [int(tokenizer.eos_token_id)]
        self._prompts = PromptSource(config.prompts, tokenizer, info.seed)
        self._eval_prompts = PromptSource(config.eval_prompts, tokenizer, info.seed) if config.eval_prompts else None
        self._tasks = TaskTable(rollout, tokenizer=tokenizer, board=self.board, logger=self.logger)
        self.manager = ManagerClient(self, call_limit_s=info.runtime.start_timeout_s)
        self._closers.append(self.manager)
        self.client = PartialRolloutManager(
            self.manager,
            board=self.board,
            logger=self.logger,
            new_tokens_per_chunk=int(rollout.new_tokens_per_chunk),
            request_timeout_s=rollout.request_timeout_s,
            max_requests=_connection_limit(
                rollout.max_concurrent_per_worker * (rollout.group_size + 1),
                self.logger,
                files_each=3
                if self._tasks.chat
                else 1,  # an agent's connection to the OpenAI API has both its ends here
            ),
        )
        self._closers.append(self.client)
        self._pusher = NameResolvingZmqPusher(
            self.resolver,
            self.names,
            pusher_index=info.index,
            num_pushers=info.count,
            num_pullers=config.num_heads,
            runtime=info.runtime,
            incarnation=self.incarnation,
        )
        self._closers.append(self._pusher)
        self.journal = BackgroundJournal(Path(info.run_dir) / "journal" / f"rollout_worker_{info.index}.jsonl")
        self._endpoint = ChatEndpoint(board=self.board, logger=self.logger)
        self._closers.append(self._endpoint)
        if self._tasks.chat:
            await self._endpoint.start(info.runtime.host)
            self.logger.info("OpenAI API at %s", self._endpoint.url)
        await self.client.start()
        await self._pusher.start()
        await self.manager.start()

    async def run(self) -> None:
        """Keep the worker full of rollouts until the run needs no more.

        consumes: tickets (allocate_rollout). produces: one task a ticket. waits for: room (a ticket that ends) and admission
        (the manager holds its answer back). unblocked by: rollouts ending, train steps consuming what is stored.
        """
        self.spawn(self._heartbeat_loop(), "heartbeat")
        self.spawn(self.journal.run(), "write the journal")
        while True:
            await self._wait_for_room()
            asked = time.monotonic()
            reply = await self.manager.allocate(self._room(), wait_s=_ALLOCATE_WAIT_S)
            for ticket in reply.tickets:
                self._begin(ticket)
            if reply.finished:
                break
            if reply.refusal == "superseded":
                raise RuntimeError(f"another process runs as {self.name} now; this one ends")
            if not reply.tickets and time.monotonic() - asked < _REFUSED_PAUSE_S:
                await asyncio.sleep(_REFUSED_PAUSE_S)
        await self._drain()

    async def close(self) -> None:
        """Rollouts are over by now: the stop cancelled them, and each has reported itself as released."""
        for closer in reversed(self._closers):
            await closer.close()
        if hasattr(self, "journal"):
            await asyncio.to_thread(self.journal.close)
        if hasattr(self, "_tasks"):
            self._tasks.close()

    # ------------------------------------------------------------------------------------------------------------- tickets

    def _room(self) -> int:
        """Train tickets that fit. Evaluations run beside them, as many again: they must not take the room of training."""
        most = self.config.rollout.max_concurrent_per_worker
        train = sum(held.ticket.kind == "train" for held in self._held.values())
        return min(most - train, 2 * most - len(self._held))

    async def _wait_for_room(self) -> None:
        """Bounded by the rollouts: the manager takes back what is overdue."""
        while self._room() < 1:
            self._changed.clear()
            with self.board.showing("room for another rollout", on=self.name):
                await self._changed.wait()

    def _begin(self, ticket: Ticket) -> None:
        if ticket.ticket_id in self._held:
            return  # granted twice: the answer to a repeated request
        held = _Held(ticket, birth_time=time.time())
        self._held[ticket.ticket_id] = held
        self.board.set_queue("rollouts", len(self._held))
        held.task = self.spawn(self._see_through(held), f"rollout {ticket.ticket_id}")
        held.task.add_done_callback(lambda _: self._end(ticket))

    def _end(self, ticket: Ticket) -> None:
        del self._held[ticket.ticket_id]
        self.board.set_queue("rollouts", len(self._held))
        self.board.progress()
        self._changed.set()

    async def _heartbeat_loop(self) -> None:
        """produces: the list of held tickets. consumes: revocations, dead servers. waits for: the manager, at most call_limit_s."""
        interval_s = 0.0  # a manager that has just begun waits for the first one
        while True:
            await self.manager.until_heartbeat(interval_s)
            reply = await self.manager.heartbeat(list(self._held))
            interval_s = reply.heartbeat_s
            for ticket_id in reply.revoked:
                self._cancel(self._held.get(ticket_id), "revoked")
            for moved in reply.moved:
                if self.client.move(moved.ticket_id, moved.server, moved.server_url):
                    self.logger.info("ticket %s goes on at %s: its server leaves", moved.ticket_id, moved.server)
            if num_left := self.client.leave(reply.dead):
                self.logger.warning("%d requests left servers that are dead (%s)", num_left, ", ".join(reply.dead))

    def _cancel(self, held: _Held | None, why: str) -> None:
        if held is None or held.task is None or held.reporting or held.taken_back:
            return
        held.taken_back = why
        held.task.cancel()

    async def _drain(self) -> None:
        """Let what is running end; after request_timeout_s take it back."""
        limit_s = self.config.rollout.request_timeout_s
        try:
            await self.board.bounded(self._all_ended(), what="the last rollouts", on=self.name, limit_s=limit_s)
        except WaitTimeoutError:
            self.logger.warning("%d rollouts did not end within %g s", len(self._held), limit_s)
            for held in list(self._held.values()):
                self._cancel(held, "stopped")
            await self.board.bounded(
                self._all_ended(), what="the cancelled rollouts", on=self.name, limit_s=self.info.runtime.stop_timeout_s
            )

    async def _all_ended(self) -> None:
        while self._held:
            self._changed.clear()
            await self._changed.wait()

    # --------------------------------------------------------------------------------------------------------- one rollout

    async def _see_through(self, held: _Held) -> None:
        """A ticket's life: roll out, then report, whatever happens. Errors that are not the rollout's fail the worker."""
        ticket = held.ticket
        try:
            with self.trace.overlapping("rollout", kind="rollout", ticket=ticket.ticket_id):
                result = await self._roll_out(ticket, held.birth_time)
        except RolloutEnded as ended:
            detail = self._tell_once(ended.reason, ended)
            result = RolloutResult(
                ticket_id=ticket.ticket_id, outcome=ended.outcome, reason=ended.reason, detail=detail
            )
        except asyncio.CancelledError:
            held.taken_back = held.taken_back or "stopped"  # cancelled from outside: the worker stops
            result = RolloutResult(ticket_id=ticket.ticket_id, outcome="released", reason=held.taken_back)
        held.reporting = True
        await self._report(result, stopping=held.taken_back == "stopped")

    async def _report(self, result: RolloutResult, *, stopping: bool) -> None:
        if not stopping:
            await self.manager.finish(result)
            return
        try:
            async with asyncio.timeout(_STOP_REPORT_S):
                await self.manager.finish(result)
        except (TimeoutError, asyncio.TimeoutError, RuntimeError) as error:
            self.logger.debug(
                "ticket %s not reported (%r): the manager will miss its heartbeat", result.ticket_id, error
            )

    async def _roll_out(self, ticket: Ticket, birth_time: float) -> RolloutResult:
        """From a ticket to its result. Raises RolloutEnded where there is no trajectory."""
        prompt = self._find_prompt(ticket)
        task = self._tasks.of(prompt)
        if prompt.too_long:
            raise RolloutRejected("prompt_too_long", f"prompt {prompt.prompt_id} has {len(prompt.input_ids)} tokens")
        sample = await self._collect(ticket, task, prompt)
        try:
            sample = complete_sample(sample, ticket_id=ticket.ticket_id, task_id=task.task_id, birth_time=birth_time)
            summary = SampleSummary.of(sample)
        except Exception as error:  # an agent may give anything
            raise RolloutRejected("agent_error", str(error)) from error
        if ticket.kind == "eval":
            return _result(ticket, summary, "evaluated")
        if objection := objection_to(summary.rewards, self.config.rollout):
            return _result(ticket, summary, "rejected", objection)
        return await self._push(ticket, task, sample, summary, birth_time)

    def _find_prompt(self, ticket: Ticket) -> Prompt:
        source = self._prompts if ticket.kind == "train" else self._eval_prompts
        if source is None:
            raise RolloutRejected("no_eval_prompts", "an evaluation ticket, but eval.prompts is not set")
        try:
            return source.get(ticket.locator)
        except PromptError as error:
            raise RolloutRejected("bad_prompt", str(error)) from error

    async def _collect(self, ticket: Ticket, task: Task, prompt: Prompt) -> SequenceSample:
        """Run the task's agent, and answer what it asks of the policy, until it has its trajectory.

        The agent's own waits (an environment that hangs) end at rollout.rollout_timeout_s, or when the manager takes the
        overdue ticket back.
        """
        limit_s = self.config.rollout.rollout_timeout_s
        if len(self._left_behind) >= _MAX_LEFT_BEHIND:
            raise RolloutRejected(
                "agent_hangs", f"{len(self._left_behind)} rollouts were cancelled and have not ended: agents hold on"
            )
        route = Route(ticket)
        obs_queue, act_queue = ObsQueue(1), ActQueue(1)
        collecting = asyncio.ensure_future(self._play(task, route, prompt, obs_queue, act_queue))
        answering = asyncio.ensure_future(self._answer(route, obs_queue, act_queue))
        try:
            both = {collecting, answering}
            done, _ = await asyncio.wait(both, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise RolloutRejected(
                    "rollout_timeout", f"the agent of task {task.name!r} took more than {limit_s:g} s"
                )
            samples = _agent_result(collecting if collecting.done() else answering)
        finally:
            await self._abandon(collecting, answering)
        if samples is None or samples == []:
            raise RolloutRejected("agent_declined", f"the agent of task {task.name!r} gave no trajectory")
        if not (isinstance(samples, list) and len(samples) == 1 and isinstance(samples[0], SequenceSample)):
            raise RolloutRejected(
                "agent_error",
                f"the agent of task {task.name!r} gave {shown(samples)}, expected a list of one SequenceSample",
            )
        return samples[0]

    async def _abandon(self, *futures: asyncio.Future[Any]) -> None:
        """Cancel what still runs of a rollout. An agent that swallows the cancellation is left behind, and counted."""
        pending = {future for future in futures if not future.done()}
        for future in pending:
            future.cancel()
        if pending:
            _, pending = await asyncio.wait(pending, timeout=_CANCEL_LIMIT_S)
        for future in futures:
            if future.done() and not future.cancelled():
                future.exception()  # retrieved: what matters of it has been raised
        for future in pending:
            self._left_behind.add(future)
            future.add_done_callback(self._left_behind.discard)
            self.logger.warning(
                "an agent goes on after it was cancelled; it is left behind (%d so far): do not catch CancelledError",
                len(self._left_behind),
            )

    async def _play(
        self, task: Task, route: Route, prompt: Prompt, obs_queue: ObsQueue, act_queue: ActQueue
    ) -> list[SequenceSample]:
        """The agent's part of a rollout: all of it is the user's code."""
        agent = task.agents[route.ticket.eval_mode or TRAIN]
        try:
            env = task.make_env(prompt)
            try:
                if isinstance(agent, ChatAgent):
                    return await agent.collect_sessions(prompt, env, self._endpoint, partial(self._respond, route))
                return await agent.collect_trajectory(prompt, env, obs_queue, act_queue)
            finally:
                await env.close()
        except (Exception, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # SystemExit, say, of code that an environment runs: it would end the worker
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    async def _respond(
        self, route: Route, input_ids: list[int], sampling: SamplingConfig, on_piece: OnPiece
    ) -> Response:
        """The policy as the OpenAI API reaches it."""
        with self.trace.overlapping("generate", kind="generate", ticket=route.ticket.ticket_id):
            return await self.client.respond(route, input_ids, sampling, self._stop_token_ids, on_piece)

    async def _answer(self, route: Route, obs_queue: ObsQueue, act_queue: ActQueue) -> None:
        """consumes: an agent's observations. produces: the policy's responses to each. Cancelled when the agent is done."""
        while True:
            observation = await obs_queue.get()
            with self.trace.overlapping("generate", kind="generate", ticket=route.ticket.ticket_id):
                responses = await self.client.generate(
                    route, observation.inputs, observation.sampling, self._stop_token_ids
                )
            await act_queue.put(responses)

    async def _push(
        self, ticket: Ticket, task: Task, sample: SequenceSample, summary: SampleSummary, birth_time: float
    ) -> RolloutResult:
        """Hand the trajectory to its head. Waits for the master's verdict; unblocked by head and master taking it in."""
        meta = TrajectoryMeta(
            ticket_id=ticket.ticket_id,
            locator=ticket.locator,
            attempt=ticket.attempt,
            head=ticket.head,
            keys=list(sample.keys),
            seqlens=summary.seqlens,
            response_lengths=summary.response_lengths,
            rewards=summary.rewards,
            version_start=summary.version_start,
            version_end=summary.version_end,
            birth_time=birth_time,
            task_id=task.task_id,
        )
        limit_s = self.config.rollout.request_timeout_s
        try:
            with self.trace.overlapping("push", kind="push", ticket=ticket.ticket_id, head=ticket.head):
                async with self.board.waiting("a verdict on a trajectory", on=f"head {ticket.head}", limit_s=limit_s):
                    verdict = await self._pusher.push(meta, sample, head=ticket.head, timeout_s=limit_s)
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise RolloutReleased("push_timeout", f"head {ticket.head} took no trajectory for {limit_s:g} s") from error
        except ChannelRefused as error:
            raise RolloutRejected("push_refused", f"trajectory {ticket.ticket_id}: {error}") from error
        self.journal.add(
            {
                "event": "pushed",
                "attempt": ticket.attempt,
                "ticket": ticket.ticket_id,
                "head": ticket.head,
                "verdict": verdict.verdict,
                "time": time.time(),
            }
        )
        if verdict.verdict == "refused":
            reason, _, why = verdict.reason.partition(": ")
            if reason in _BAD_CONTENT:
                raise RolloutRejected(reason, why)
            detail = self._tell_once("refused", f"trajectory {ticket.ticket_id} refused: {verdict.reason}")
            return _result(ticket, summary, "released", "refused", detail)
        # A duplicate: another ticket of the prompt was first, so the prompt is stored, and not to be handed out again.
        return _result(ticket, summary, "stored", "" if verdict.verdict == "stored" else "duplicate")

    def _tell_once(self, reason: str, detail: BaseException | str) -> str:
        """Log the first of its kind in full, with the traceback of its cause; the others are counted by the manager.

        Returns what the manager is told of it besides the reason: "" for all but the first.
        """
        first = reason not in self._logged
        self._logged.add(reason)
        cause = detail.__cause__ if isinstance(detail, BaseException) else None
        level = logging.WARNING if first else logging.DEBUG
        self.logger.log(level, "rollout ended without a trajectory: %s", detail, exc_info=cause)
        text = detail.detail if isinstance(detail, RolloutEnded) else str(detail)
        return text[:_MAX_DETAIL_CHARS] if first else ""


def _agent_result(ended: asyncio.Future[Any]) -> Any:
    """What a finished agent returned: anything. Its errors are the rollout's: RolloutRejected (`agent_error`).

    So are those of whoever answers it, where it asks nonsense.
    """
    if ended.cancelled():  # by itself: the rollout's own cancellation does not come here
        raise RolloutRejected("agent_error", "the agent has cancelled itself")
    try:
        return ended.result()
    except RolloutEnded:
        raise
    except Exception as error:
        if out_of_files(error) is not None:  # of the process, whose other rollouts would all meet it
            raise
        raise RolloutRejected("agent_error", f"the agent raised {shown(error)}") from error


def _result(
    ticket: Ticket,
    summary: SampleSummary,
    outcome: Literal["stored", "rejected", "evaluated", "released"],
    reason: str = "",
    detail: str = "",
) -> RolloutResult:
    return RolloutResult(
        ticket_id=ticket.ticket_id,
        outcome=outcome,
        reason=reason,
        detail=detail,
        num_tokens=sum(summary.response_lengths),
        lengths=summary.response_lengths,
        rewards=summary.rewards,
        version_start=WeightVersion.unpack(min(summary.version_start)).version,
        version_end=WeightVersion.unpack(max(summary.version_end)).version,
    )


def _connection_limit(wanted: int, logger: logging.Logger, *, files_each: int) -> int:
    """How many generation requests may be out: as many as rollouts can make, if the process may open that many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted * files_each + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    limit = max(1, (soft - _SPARE_FILES) // files_each)
    logger.warning(
        "only %d of %d generation requests can be out at once: the limit of open files is %d (ulimit -n)",
        limit,
        wanted,
        soft,
    )
    return limit
