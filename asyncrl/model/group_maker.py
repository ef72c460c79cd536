"""Makes groups on a model worker (mode=sync): prompts at positions of the epoch's order -> responses -> rewards -> trajectories.

For tasks whose episodes have a single response, it replaces a rollout worker, with the same prompts, rewards, limits and rejection
reasons. Sampling and logprobs run on the compute thread. Rewards are computed concurrently, from the worker's event loop, while
the next responses are sampled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
import numpy as np

from asyncrl.config.processes import ModelWorkerConfig
from asyncrl.config.schema import ConfigError, eval_sampling, evaluation_sets, rollout_of_task
from asyncrl.data.model_limits import ModelLimits
from asyncrl.data.prompts import Prompt, PromptError, PromptSource, load_tokenizer
from asyncrl.data.sequence import SequenceSample
from asyncrl.model.engine import TrainEngine
from asyncrl.model.generating import Sampler
from asyncrl.model.interfaces import temperature_of
from asyncrl.protocol.calls import ExecuteMFC
from asyncrl.protocol.manager import RejectedPrompt
from asyncrl.protocol.trajectories import Locator, TrajectoryMeta
from asyncrl.protocol.versions import WeightVersion
from asyncrl.rewards.outcome import RolloutEnded, RolloutRejected, RolloutReleased, objection_to
from asyncrl.rewards.reward import Completion, Reward
from asyncrl.rewards.score import answers_of
from asyncrl.rewards.trajectory import Episode, Response, build_sample, complete_sample, summary_of
from asyncrl.runtime.services import Services

_MODES = ("", "sampled", "greedy")  # of ExecuteMFC.eval_mode; the index of the mode is part of the seed
_MAX_DETAIL_CHARS = 400  # of a rejection's detail for the master


@dataclass
class _Group:
    """A group in the making."""

    group_id: str
    locator: Locator
    prompt: Prompt
    outputs: list[list[int]] = field(default_factory=list)
    rewards: Future[list[float]] | None = None


@dataclass
class Made:
    """Result of GroupMaker.make: the groups, and the prompts without one. In an evaluation the logprobs are not computed: they are
    0."""

    samples: list[SequenceSample]  # of one group each
    metas: list[TrajectoryMeta]  # of these samples
    rejected: list[RejectedPrompt]


class GroupMaker:
    """consumes: locators of prompts.  produces: groups.  waits for: the rewards of each group, at most train.call_timeout_s (each
    try at most rollout.reward_timeout_s)."""

    def __init__(self, config: ModelWorkerConfig, engine: TrainEngine, services: Services) -> None:
        """On the worker's event loop. Raises ConfigError if prompts, tokenizer or rewards are unusable."""
        assert config.groups is not None, "mode=sync"
        groups, info = config.groups, config.worker
        self._rollout, self._train, self._info = groups.rollout, config.train, info
        self._engine = engine
        self._logger, self._clock = services.logger, services.clock
        self._loop = asyncio.get_running_loop()
        self._tokenizer = load_tokenizer(config.tokenizer_path)
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(
                f"tokenizer_path={config.tokenizer_path!r}: has no EOS token, so no response could ever end; set eos_token"
            )
        self._sampler = Sampler(
            engine,
            # As on a generation server: the tokenizer's EOS and those in the model's files
            eos_token_ids=list(
                dict.fromkeys([int(self._tokenizer.eos_token_id), *ModelLimits.of(config.model_path).eos_token_ids])
            ),
            max_sequences=groups.generation.max_running_requests,
            max_tokens=groups.generation.num_blocks * groups.generation.page_size,
        )
        self._prompts = PromptSource(groups.prompts, self._tokenizer, info.seed)
        sets = evaluation_sets(groups.eval)
        self._eval_prompts = {
            name: PromptSource(chosen.prompts, self._tokenizer, info.seed)
            for name, chosen in sets.items()
            if chosen.prompts is not None
        }
        self._eval_sampling = {name: eval_sampling(chosen, groups.rollout) for name, chosen in sets.items()}
        self._of_tasks = {name: rollout_of_task(groups.rollout, name) for name in groups.rollout.tasks}
        self._rewards = {
            name: Reward.of(task.reward, self._of_tasks[name], services) for name, task in groups.rollout.tasks.items()
        }
        self._task_ids = {name: task_id for task_id, name in enumerate(sorted(groups.rollout.tasks))}
        self._judging = asyncio.Semaphore(groups.rollout.max_concurrent_per_worker)
        self._told: set[str] = set()

    async def start(self) -> None:
        """Wait until the reward functions are imported. Raises ConfigError if an import fails."""
        for reward in self._rewards.values():
            await reward.start()

    def close(self) -> None:
        """End the reward processes."""
        for reward in self._rewards.values():
            reward.close()

    def make(self, body: ExecuteMFC, ids: Sequence[str]) -> Made:
        """Make the groups of this replica: `ids`, a part of the call's ids. On the compute thread, collective over the ranks of the
        model."""
        began = self._clock.time()
        evaluates = bool(body.eval_mode)
        sampling, num_each = self._rollout.sampling, self._rollout.group_size
        if evaluates:
            sampling, num_each = self._eval_sampling[body.eval_set][body.eval_mode]
        source = self._eval_prompts[body.eval_set] if evaluates else self._prompts
        locators = dict(zip(body.ids, body.locators, strict=True))
        made = Made([], [], [])
        groups = []
        for group_id in ids:
            try:
                groups.append(_Group(group_id, locators[group_id], self._prompt(locators[group_id], source)))
            except RolloutEnded as ended:
                made.rejected.append(self._rejection(locators[group_id], ended))
        first = body.locators[0]
        seed = (
            self._info.seed,
            body.version,
            self._engine.replica,
            _MODES.index(body.eval_mode),
            first.epoch,
            first.position,
            *([list(self._eval_prompts).index(body.eval_set)] if body.eval_set else []),
        )
        with self._sampler.weights():
            prompts = [group.prompt.input_ids for group in groups]
            for at, outputs in self._sampler.sample(prompts, num_each, sampling, seed=seed):
                groups[at].outputs = outputs
                groups[at].rewards = asyncio.run_coroutine_threadsafe(self._judge(groups[at]), self._loop)
        version = WeightVersion(self._info.attempt, body.version).pack()
        for group in groups:
            try:
                made.samples.append(self._finish(group, version, began, evaluates))
            except RolloutEnded as ended:
                made.rejected.append(self._rejection(group.locator, ended, group.outputs))
        if not evaluates:
            made.samples = self._with_logprobs(made.samples)
        by_id = {group.group_id: group for group in groups}
        made.metas = [self._meta(by_id[sample.ids[0]], sample, began, evaluates) for sample in made.samples]
        return made

    def _prompt(self, locator: Locator, source: PromptSource) -> Prompt:
        try:
            prompt = source.get(locator)
        except PromptError as error:
            raise RolloutRejected("bad_prompt", str(error)) from error
        length = len(prompt.input_ids)
        if prompt.task not in self._rewards:
            raise RolloutRejected(
                "unknown_task",
                f"prompt {prompt.prompt_id} is of task {prompt.task!r}; rollout.tasks has {sorted(self._rewards)}",
            )
        if prompt.too_long:
            raise RolloutRejected("prompt_too_long", f"prompt {prompt.prompt_id} has {length} tokens")
        if length >= self._sampler.max_length:
            raise RolloutRejected(
                "generation_refused",
                f"prompt {prompt.prompt_id} has {length} tokens, but the model has {self._sampler.max_length} positions",
            )
        return prompt

    async def _judge(self, group: _Group) -> list[float]:
        """On the event loop. A reward whose judge processes are lost is retried until train.call_timeout_s ends the wait."""
        async with self._judging:
            completions = [
                Completion(str(self._tokenizer.decode(output, skip_special_tokens=True)), self._finished(output))
                for output in group.outputs
            ]
            while True:
                try:
                    return await self._rewards[group.prompt.task].score(group.prompt, completions)
                except RolloutReleased as released:
                    self._logger.warning("group %s is scored again: %s", group.group_id, released)

    def _finished(self, output: list[int]) -> bool:
        return output[-1] in self._sampler.eos_token_ids

    def _finish(self, group: _Group, version: int, birth_time: float, evaluates: bool) -> SequenceSample:
        """Build the trajectory, with logprobs of 0. Raises RolloutRejected if a reward failed or the config rejects the rewards."""
        assert group.rewards is not None, "all prompts are sampled"
        episodes = []
        for output, reward in zip(group.outputs, group.rewards.result(self._train.call_timeout_s), strict=True):
            episode = Episode(group.prompt.input_ids)
            response = Response(group.prompt.input_ids, finished=self._finished(output))
            response.add_piece(output, [0.0] * len(output), [(version, len(output))])
            episode.add_response(response)
            episode.add_reward(reward)
            episodes.append(episode)
        sample = complete_sample(
            build_sample(group.group_id, episodes),
            ticket_id=group.group_id,
            task_id=self._task_ids[group.prompt.task],
            birth_time=birth_time,
        )
        if not evaluates and (
            objection := objection_to(sample.data["rewards"].tolist(), self._of_tasks[group.prompt.task])
        ):
            raise RolloutRejected(objection)
        return sample

    def _with_logprobs(self, samples: Sequence[SequenceSample]) -> list[SequenceSample]:
        """Replace the logprobs of the sampled tokens by those that the engine computes. They are exact: the engine still has the
        weights that sampled. Collective; a rank may have no samples."""
        whole = SequenceSample.gather(samples) if samples else None
        logprobs = self._engine.logprobs(whole, temperature=temperature_of(self._train))
        if whole is None:
            return []
        assert logprobs is not None, "no pipeline, so every rank gets logprobs of its sample"
        sampled = np.where(whole.data["loss_mask"], logprobs, np.float32(0.0))
        return whole.update(whole.derive({"packed_logprobs": sampled})).unpack()

    def _meta(self, group: _Group, sample: SequenceSample, birth_time: float, evaluates: bool) -> TrajectoryMeta:
        assert group.rewards is not None, "it was judged"
        answers = answers_of(group.rewards.result(0.0)) if evaluates else []
        return TrajectoryMeta(
            ticket_id=group.group_id,
            locator=group.locator,
            attempt=self._info.attempt,
            head=self._engine.replica,
            keys=list(sample.keys),
            **msgspec.structs.asdict(msgspec.structs.replace(summary_of(sample), answers=answers)),
            birth_time=birth_time,
            task_id=self._task_ids[group.prompt.task],
        )

    def _rejection(self, locator: Locator, ended: RolloutEnded, outputs: Sequence[list[int]] = ()) -> RejectedPrompt:
        """Make the report of a rejection. The master receives the detail of only the first rejection for each reason."""
        first = ended.reason not in self._told
        self._told.add(ended.reason)
        self._logger.log(logging.WARNING if first else logging.DEBUG, "no group of prompt %s: %s", locator, ended)
        lengths = [len(output) for output in outputs]
        return RejectedPrompt(
            locator=locator,
            reason=ended.reason,
            detail=ended.detail[:_MAX_DETAIL_CHARS] if first else "",
            lengths=lengths,
        )
