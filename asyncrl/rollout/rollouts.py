"""Tasks, and the rollout of a ticket.

A task is one kind of problem: its reward, its agents (one per mode) and the class of its environments, which the worker loads once.
A failure of a user's agent, environment or reward ends only the rollout in which it happened.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import msgspec

from asyncrl.config.import_object import adapted, import_object
from asyncrl.config.nearest import did_you_mean
from asyncrl.config.schema import (
    ConfigError,
    EvalSetConfig,
    RolloutConfig,
    SamplingConfig,
    TaskConfig,
    eval_sampling,
    rollout_of_task,
)
from asyncrl.data.prompts import Prompt, PromptError
from asyncrl.data.sequence import SequenceSample
from asyncrl.protocol.manager import RolloutResult, Ticket
from asyncrl.protocol.trajectories import GroupSummary, TrajectoryMeta
from asyncrl.rewards.judges import CodeChangedError
from asyncrl.rewards.outcome import TASK_CLOSED, RolloutEnded, RolloutRejected, RolloutReleased, objection_to
from asyncrl.rewards.reward import Reward
from asyncrl.rewards.reward_function import shown
from asyncrl.rewards.trajectory import OnPiece, Response
from asyncrl.rollout.agent import ActQueue, Agent, Env, ObsQueue, RewardEnv, SingleStepAgent, UnjudgedEnv
from asyncrl.rollout.chat_agent import ChatAgent
from asyncrl.rollout.client import PartialRolloutManager, Route
from asyncrl.rollout.episodes import EpisodeAgent
from asyncrl.rollout.openai_api import ChatEndpoint
from asyncrl.rollout.rollout_data import RolloutData
from asyncrl.runtime.channel_protocol import ChannelRefused
from asyncrl.runtime.disk import out_of_files
from asyncrl.runtime.journal import BackgroundJournal
from asyncrl.runtime.services import Services
from asyncrl.streams.push_pull import NameResolvingZmqPusher

TRAIN = "train"
Kind = Literal["agent", "env"]
# Base classes, the class of a task that names none, and the arguments that the worker sets
_CLASSES: Mapping[Kind, tuple[tuple[type, ...], type, tuple[str, ...]]] = {
    "agent": ((Agent, ChatAgent), SingleStepAgent, ("tokenizer", "sampling", "group_size")),
    "env": ((Env,), RewardEnv, ("prompt", "reward")),
}


class Task:
    """One kind of problem."""

    def __init__(
        self,
        name: str,
        task_id: int,
        config: TaskConfig,
        rollout: RolloutConfig,
        sets: Mapping[str, EvalSetConfig],
        services: Services,
        *,
        tokenizer: Any,
    ) -> None:
        """sets: of evaluations, by name."""
        self.name = name
        self.task_id = task_id
        self.rollout = rollout = rollout_of_task(rollout, name)
        self._reward = Reward.of(config.reward, rollout, services) if config.reward else None
        field = f"rollout.tasks.{name}"
        agent_class, agent_args = load_class(field, config, "agent")
        self._env_class, self._env_args = load_class(field, config, "env")
        if not (config.reward or config.env):  # the agent judges itself
            self._env_class = UnjudgedEnv
        modes: dict[tuple[str, str], tuple[SamplingConfig, int]] = {("", TRAIN): (rollout.sampling, rollout.group_size)}
        for eval_set, chosen in sets.items():
            modes |= {(eval_set, mode): found for mode, found in eval_sampling(chosen, rollout).items()}

        def make(sampling: SamplingConfig, group_size: int) -> Agent | ChatAgent:
            made: Agent | ChatAgent = agent_class(
                tokenizer=tokenizer, sampling=sampling, group_size=group_size, **agent_args
            )
            return made

        self._train, self._make = modes["", TRAIN], make
        # By evaluation set and mode
        self.agents: Mapping[tuple[str, str], Agent | ChatAgent] = {mode: make(*how) for mode, how in modes.items()}
        self._ordered = self._train, self.agents["", TRAIN]  # the newest order's sampling and group size, and its agent

    async def start(self) -> None:
        """Wait for the imports of reward and agents, which may take minutes. Raises ConfigError if one fails."""
        for part in (self._reward, *self.agents.values()):
            if isinstance(part, Reward | EpisodeAgent):
                await part.start()

    def close(self) -> None:
        """End the processes of the task's reward."""
        if self._reward is not None:
            self._reward.close()

    def agent_for(self, ticket: Ticket) -> Agent | ChatAgent:
        """The agent of the ticket's mode. That of a train ticket has the sampling and the group size that the step has ordered."""
        if ticket.eval_mode:
            return self.agents[ticket.eval_set, ticket.eval_mode]
        sampling, group_size = self._train
        longest = min(ticket.max_new_tokens or sampling.max_new_tokens, sampling.max_new_tokens)
        wanted = (replace(sampling, max_new_tokens=longest), ticket.group_size or group_size)
        if wanted != self._ordered[0]:
            self._ordered = wanted, self._make(*wanted)
        return self._ordered[1]

    def make_env(self, prompt: Prompt) -> Env:
        """A fresh environment for one prompt."""
        env: Env = self._env_class(prompt=prompt, reward=self._reward, **self._env_args)
        return env


class TaskTable:
    """All tasks of a run. Task ids are 0, 1, ... in the alphabetical order of the names."""

    def __init__(
        self, rollout: RolloutConfig, sets: Mapping[str, EvalSetConfig], services: Services, *, tokenizer: Any
    ) -> None:
        """sets: of evaluations, by name."""
        if not rollout.tasks:
            raise ConfigError(
                "rollout.tasks is empty; add a task, e.g. rollout.tasks.default.reward=my_package.rewards:exact"
            )
        self._tasks = {
            name: Task(name, task_id, rollout.tasks[name], rollout, sets, services, tokenizer=tokenizer)
            for task_id, name in enumerate(sorted(rollout.tasks))
        }

    async def start(self) -> None:
        """Wait until the tasks can be used."""
        for task in self._tasks.values():
            await task.start()

    def close(self) -> None:
        for task in self._tasks.values():
            task.close()

    @property
    def chat(self) -> bool:
        """Whether any agent uses the OpenAI API."""
        return any(isinstance(agent, ChatAgent) for task in self._tasks.values() for agent in task.agents.values())

    def of(self, prompt: Prompt) -> Task:
        """The prompt's task. Raises RolloutRejected (`unknown_task`) if the config has no task of that name."""
        try:
            return self._tasks[prompt.task]
        except KeyError:
            raise RolloutRejected(
                "unknown_task",
                f"prompt {prompt.prompt_id} has task {prompt.task!r}; rollout.tasks has {sorted(self._tasks)}",
            ) from None


def check_class(field: str, settings: Mapping[str, Any], kind: Kind) -> float:
    """Like load_class, for `asyncrl-launch check`, which calls it in a judge process. settings: the task's fields."""
    load_class(field, TaskConfig(**settings), kind)
    return 1.0


def load_class(field: str, task: TaskConfig, kind: Kind) -> tuple[type, dict[str, Any]]:
    """Import a task's agent or env, and check that it takes the task's arguments, which are returned too. field:
    rollout.tasks.<name>.

    Raises ConfigError with field, value and remedy, or the error of the user's module.
    """
    bases, default, own = _CLASSES[kind]
    spec, given = (task.agent, task.agent_args) if kind == "agent" else (task.env, task.env_args)
    path, arguments = adapted(spec)
    found = import_object(path, f"{field}.{kind}") if spec else default
    if not (inspect.isclass(found) and issubclass(found, bases)):
        wanted = " or ".join(f"{base.__module__}.{base.__name__}" for base in bases)
        raise ConfigError(f"{field}.{kind} {spec!r} is {found!r}; it must be a subclass of {wanted}")
    if kind == "agent" and not (task.reward or task.env or getattr(found, "judges_itself", False)):
        raise ConfigError(
            f"{field}.agent={spec!r}: {found.__name__} needs {field}.reward or {field}.env; only `chat` of a ChatAgent "
            "may return rewards"
        )
    arguments |= given
    _check_arguments(found, f"{field}.{kind}_args", arguments, own)
    return found, arguments


def _check_arguments(found: type, field: str, given: Mapping[str, Any], own: Sequence[str]) -> None:
    """own: names of the arguments that the worker sets."""
    parameters = inspect.signature(found).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {
        parameter.name: parameter.default is parameter.empty
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    free = [name for name in named if name not in own]
    takes = f"it takes {', '.join(free) or 'none'}"
    for argument, value in given.items():
        if argument in own:
            raise ConfigError(f"{field}.{argument}={value!r}: the rollout worker sets it; leave it out")
        if argument not in named and not takes_any:
            hint = did_you_mean(argument, free)
            raise ConfigError(
                f"{field}.{argument}={value!r}: {found.__name__} does not take this argument; {hint}{takes}"
            )
    if missing := [name for name in free if named[name] and name not in given]:
        raise ConfigError(f"{field}={dict(given)}: {found.__name__} also needs {', '.join(missing)}; {takes}")
    if not takes_any and (unwanted := [argument for argument in own if argument not in named]):
        raise ConfigError(
            f"{field.removesuffix('_args')}: the __init__ of {found.__name__} must take {', '.join(own)} by name (or **kwargs), "
            f"and does not take {', '.join(unwanted)}"
        )


_MAX_DETAIL_CHARS = 400  # length of the detail in a report about a rollout without a trajectory
_LOOK_S = 0.05  # least wait for a rollout whose time limit stands still in training's turn
_CANCEL_LIMIT_S = 5.0  # for a cancelled agent to end
_MAX_LEFT_BEHIND = 64  # cancelled agents that have not ended; at this number every further rollout is rejected
# Reasons of a head to refuse a trajectory because of its content (model/trajectory_receiver.py). A retry would be refused again.
_BAD_CONTENT = frozenset({"missing_keys", "bad_lengths", "bad_tokens", "bad_logprobs", "not_finite", "bad_words"})


class Rollouts:
    """Runs the rollouts of a worker.

    consumes: tickets.  produces: trajectories, results.
    waits for: generation, rewards, the head's verdict; each with a limit.  unblocked by: generation servers, judges, heads.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        data: RolloutData,
        tasks: TaskTable,
        client: PartialRolloutManager,
        pusher: NameResolvingZmqPusher,
        endpoint: ChatEndpoint,
        journal: BackgroundJournal,
        services: Services,
    ) -> None:
        self._rollout, self._data, self._tasks = rollout, data, tasks
        self._client, self._pusher, self._endpoint, self._journal = client, pusher, endpoint, journal
        self._board, self._logger = services.board, services.logger
        self._trace, self._clock = services.trace, services.clock
        self._stop_token_ids: Sequence[int] = [data.eos_token_id]
        self._logged: set[str] = set()
        self._left_behind: set[asyncio.Future[Any]] = set()  # agents that were cancelled and have not ended

    async def roll_out(self, ticket: Ticket, birth_time: float) -> RolloutResult:
        """Roll out a ticket; returns its result. Raises RolloutEnded if there is no trajectory."""
        prompt = self._find_prompt(ticket)
        task = self._tasks.of(prompt)
        if ticket.kind == "train" and task.name in ticket.closed:
            raise RolloutRejected(TASK_CLOSED, f"task {task.name!r} waits for its gate")
        if prompt.too_long:
            raise RolloutRejected("prompt_too_long", f"prompt {prompt.prompt_id} has {len(prompt.input_ids)} tokens")
        sample = await self._collect(ticket, task, prompt)
        try:
            answers = self._data.answers(sample) if ticket.kind == "eval" else []
            sample = self._data.complete(
                sample, ticket_id=ticket.ticket_id, task_id=task.task_id, birth_time=birth_time
            )
            sample = self._data.add_words(sample, prompt)
            summary = msgspec.structs.replace(self._data.summary(sample), answers=answers)
            judged = self._data.session_summary(sample, summary)
            of_seats = self._data.rewards_by_seat(sample, judged)
        except Exception as error:  # the sample comes from a user's agent and may be invalid in any way
            raise RolloutRejected("agent_error", str(error)) from error
        if ticket.kind == "eval":
            return RolloutResult(ticket_id=ticket.ticket_id, outcome="evaluated", group=judged)
        objections = [objection_to(rewards, task.rollout) for rewards in of_seats]
        if objection := all(objections) and objections[0]:
            return RolloutResult(ticket_id=ticket.ticket_id, outcome="rejected", reason=objection, group=summary)
        return await self._push(ticket, task, sample, summary, birth_time)

    def _find_prompt(self, ticket: Ticket) -> Prompt:
        source = self._data.prompts if ticket.kind == "train" else self._data.eval_prompts.get(ticket.eval_set)
        if source is None:
            raise RolloutRejected("no_eval_prompts", f"got a ticket of the unknown evaluation set {ticket.eval_set!r}")
        try:
            return source.get(ticket.locator)
        except PromptError as error:
            raise RolloutRejected("bad_prompt", str(error)) from error

    async def _collect(self, ticket: Ticket, task: Task, prompt: Prompt) -> SequenceSample:
        """Run the task's agent and answer its requests to the policy until it returns its trajectory.

        The agent's own waits (such as an environment that hangs) end at rollout.rollout_timeout_s, or when the manager revokes the
        overdue ticket. Waits for the ends of training's turns (shared devices) do not count in this limit.
        """
        limit_s = task.rollout.rollout_timeout_s
        if len(self._left_behind) >= _MAX_LEFT_BEHIND:
            raise RolloutRejected(
                "agent_hangs", f"{len(self._left_behind)} rollouts were cancelled and have not ended: their agents hang"
            )
        route = Route(ticket)
        obs_queue, act_queue = ObsQueue(1), ActQueue(1)
        collecting = asyncio.ensure_future(self._play(task, route, prompt, obs_queue, act_queue))
        answering = asyncio.ensure_future(self._answer(route, obs_queue, act_queue))
        try:
            both, done, left_s = {collecting, answering}, set[asyncio.Future[Any]](), limit_s
            ends = route.without_turns(self._clock.monotonic()) + limit_s
            while not done and left_s > 0.0:
                done, _ = await asyncio.wait(both, timeout=max(left_s, _LOOK_S), return_when=asyncio.FIRST_COMPLETED)
                left_s = ends - route.without_turns(self._clock.monotonic())
            if not done:
                raise RolloutRejected(
                    "rollout_timeout", f"the agent of task {task.name!r} took more than {limit_s:g} s"
                )
            samples = _agent_result(collecting if collecting.done() else answering)
        finally:
            await self._abandon(collecting, answering)
        if samples is None or samples == []:
            raise RolloutRejected("agent_declined", f"the agent of task {task.name!r} returned no trajectory")
        if not (isinstance(samples, list) and len(samples) == 1 and isinstance(samples[0], self._data.sample_type)):
            raise RolloutRejected(
                "agent_error",
                f"the agent of task {task.name!r} returned {shown(samples)}, expected a list of one SequenceSample",
            )
        sample: SequenceSample = samples[0]
        return sample

    async def _abandon(self, *futures: asyncio.Future[Any]) -> None:
        """Cancel the running tasks of a rollout. An agent that swallows the cancellation is abandoned and counted."""
        pending = {future for future in futures if not future.done()}
        for future in pending:
            future.cancel()
        if pending:
            _, pending = await asyncio.wait(pending, timeout=_CANCEL_LIMIT_S)
        for future in futures:
            if future.done() and not future.cancelled():
                future.exception()  # mark it as retrieved; a relevant error has been raised already
        for future in pending:
            self._left_behind.add(future)
            future.add_done_callback(self._left_behind.discard)
            self._logger.warning(
                "an agent still runs after it was cancelled and is abandoned (%d so far); do not catch CancelledError in it",
                len(self._left_behind),
            )

    async def _play(
        self, task: Task, route: Route, prompt: Prompt, obs_queue: ObsQueue, act_queue: ActQueue
    ) -> list[SequenceSample]:
        """Make the environment and run the agent. Both may be a user's classes, so every error here counts as the agent's."""
        try:
            agent = task.agent_for(route.ticket)
            env = task.make_env(prompt)
            try:
                if isinstance(agent, ChatAgent):
                    return await agent.collect_sessions(prompt, env, self._endpoint, partial(self._respond, route))
                return await agent.collect_trajectory(prompt, env, obs_queue, act_queue)
            finally:
                await env.close()
        except (Exception, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # e.g. SystemExit from code that an environment runs; it would end the worker
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    async def _respond(
        self, route: Route, input_ids: list[int], sampling: SamplingConfig, on_piece: OnPiece
    ) -> Response:
        """Get one response of the policy for the OpenAI API."""
        with self._trace.overlapping("generate", kind="generate", ticket=route.ticket.ticket_id):
            return await self._client.respond(route, input_ids, sampling, self._stop_token_ids, on_piece)

    async def _answer(self, route: Route, obs_queue: ObsQueue, act_queue: ActQueue) -> None:
        """Answer an agent's observations. Cancelled when the agent has ended.

        consumes: observations. produces: the policy's responses to each.
        """
        while True:
            observation = await obs_queue.get()
            with self._trace.overlapping("generate", kind="generate", ticket=route.ticket.ticket_id):
                responses = await self._client.generate(
                    route, observation.inputs, observation.sampling, self._stop_token_ids
                )
            await act_queue.put(responses)

    async def _push(
        self, ticket: Ticket, task: Task, sample: SequenceSample, summary: GroupSummary, birth_time: float
    ) -> RolloutResult:
        """Push the trajectory to its head. Waits for the master's verdict; unblocked when head and master have judged it."""
        meta = TrajectoryMeta(
            ticket_id=ticket.ticket_id,
            locator=ticket.locator,
            attempt=ticket.attempt,
            head=ticket.head,
            keys=list(sample.keys),
            **msgspec.structs.asdict(summary),
            birth_time=birth_time,
            task_id=task.task_id,
        )
        limit_s = self._rollout.request_timeout_s
        try:
            with self._trace.overlapping("push", kind="push", ticket=ticket.ticket_id, head=ticket.head):
                async with self._board.waiting("a verdict on a trajectory", on=f"head {ticket.head}", limit_s=limit_s):
                    verdict = await self._pusher.push(meta, sample, head=ticket.head, timeout_s=limit_s)
        except TimeoutError as error:
            raise RolloutReleased("push_timeout", f"head {ticket.head} gave no verdict within {limit_s:g} s") from error
        except ChannelRefused as error:
            raise RolloutRejected("push_refused", f"trajectory {ticket.ticket_id}: {error}") from error
        self._journal.add(
            {
                "event": "pushed",
                "attempt": ticket.attempt,
                "ticket": ticket.ticket_id,
                "head": ticket.head,
                "verdict": verdict.verdict,
                "time": self._clock.time(),
            }
        )
        if verdict.verdict == "refused":
            reason, _, why = verdict.reason.partition(": ")
            if reason in _BAD_CONTENT:
                raise RolloutRejected(reason, why)
            detail = self.tell_once("refused", f"trajectory {ticket.ticket_id} refused: {verdict.reason}")
            return RolloutResult(
                ticket_id=ticket.ticket_id, outcome="released", reason="refused", detail=detail, group=summary
            )
        # A duplicate: another ticket of the prompt was stored first, so the prompt must not be granted again.
        reason = "" if verdict.verdict == "stored" else "duplicate"
        return RolloutResult(ticket_id=ticket.ticket_id, outcome="stored", reason=reason, group=summary)

    def tell_once(self, reason: str, detail: BaseException | str) -> str:
        """Log the first failure of each reason in full, with the traceback of its cause. The manager counts the others.

        Returns the detail for the report to the manager: "" for all but the first.
        """
        first = reason not in self._logged
        self._logged.add(reason)
        cause = detail.__cause__ if isinstance(detail, BaseException) else None
        level = logging.WARNING if first else logging.DEBUG
        self._logger.log(level, "rollout ended without a trajectory: %s", detail, exc_info=cause)
        text = detail.detail if isinstance(detail, RolloutEnded) else str(detail)
        return text[:_MAX_DETAIL_CHARS] if first else ""


def _agent_result(ended: asyncio.Future[Any]) -> Any:
    """Return the return value of a finished agent, unchecked. Raises its errors as RolloutRejected (`agent_error`), except
    RolloutEnded, CodeChangedError and a lack of file descriptors, which pass through.

    The same holds for errors of the asyncio task that answers the agent, because invalid requests of the agent cause them.
    """
    if ended.cancelled():  # by itself; when the rollout is cancelled, this function is not called
        raise RolloutRejected("agent_error", "the agent has cancelled itself")
    try:
        return ended.result()
    except RolloutEnded:
        raise
    except Exception as error:
        # These are errors of the process, not of one rollout
        if out_of_files(error) is not None or isinstance(error, CodeChangedError):
            raise
        raise RolloutRejected("agent_error", f"the agent raised {shown(error)}") from error
