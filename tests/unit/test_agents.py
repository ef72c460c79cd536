"""Agents and environments; the test plays the policy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import (
    ConfigError,
    EvalSetConfig,
    PromptSourceConfig,
    RolloutConfig,
    SamplingConfig,
    TaskConfig,
)
from asyncrl.data.prompts import Prompt, PromptSource
from asyncrl.data.sequence import SequenceSample
from asyncrl.protocol.manager import Ticket
from asyncrl.protocol.trajectories import Locator
from asyncrl.protocol.versions import WeightVersion
from asyncrl.rewards.outcome import RolloutRejected
from asyncrl.rewards.reward import Completion, Reward, call_arguments
from asyncrl.rewards.score import Score
from asyncrl.rewards.trajectory import Response, sample_answers
from asyncrl.rollout.agent import (
    ActQueue,
    Agent,
    Env,
    FeedbackEnv,
    MultiStepAgent,
    Observation,
    ObsQueue,
    RewardEnv,
    SingleStepAgent,
    StepResult,
    UnjudgedEnv,
)
from asyncrl.rollout.rollouts import TRAIN, TaskTable
from asyncrl.testing.tiny import make_chat_tokenizer
from tests.support.services import make_services

SAMPLING = SamplingConfig(max_new_tokens=8)
EOS = 0
VERSION = WeightVersion(1, 4).pack()
Policy = Callable[[list[int]], tuple[str, bool]]


class CharTokenizer:
    """One token per character; id 0 is EOS, a special token."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        assert skip_special_tokens
        return "".join(chr(token) for token in ids if token != EOS)


TOKENIZER = CharTokenizer()


def text_ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


PROMPT = Prompt("e0-p0", "2+2=", text_ids("2+2="), "4", "default", {}, False)


def right(prompt: str, completion: str, answer: str) -> float:
    return float(completion == answer)


def half(prompt: str, completion: str, answer: str) -> float:
    return 0.5


def make_reward(name: str = "right") -> Reward:
    return Reward(f"{__name__}:{name}", timeout_s=60.0, services=make_services())


async def collect(agent: Agent, env: Env, policy: Policy) -> tuple[SequenceSample, list[Observation]]:
    """Run an agent against a policy that receives the tokens so far and returns (text, finished)."""
    obs_queue, act_queue = ObsQueue(1), ActQueue(1)
    seen: list[Observation] = []

    async def play() -> None:
        while True:
            observation = await obs_queue.get()
            seen.append(observation)
            responses = []
            for input_ids in observation.inputs:
                text, finished = policy(input_ids)
                output_ids = text_ids(text) + [EOS] * finished
                response = Response(input_ids, finished=finished)
                response.add_piece(output_ids, [-0.5] * len(output_ids), [(VERSION, len(output_ids))])
                responses.append(response)
            await act_queue.put(responses)

    player = asyncio.ensure_future(play())
    try:
        (sample,) = await agent.collect_trajectory(PROMPT, env, obs_queue, act_queue)
    finally:
        player.cancel()
    return sample, seen


def sequences(sample: SequenceSample) -> list[str]:
    return [TOKENIZER.decode(ids.tolist(), skip_special_tokens=True) for ids in sample.slices()[0]]


def trained(sample: SequenceSample) -> list[str]:
    """Return the text under the loss mask, with EOS shown as $."""
    (ids,), (masks,) = sample.slices(), sample.slices("loss_mask")
    return [
        "".join("$" if token == EOS else chr(token) for token in row[mask].tolist())
        for row, mask in zip(ids, masks, strict=True)
    ]


async def test_single_step_scores_a_group_at_once() -> None:
    answers = iter([("4", True), ("5", True), ("4", False)])
    agent = SingleStepAgent(tokenizer=TOKENIZER, sampling=SAMPLING, group_size=3)
    sample, seen = await collect(agent, RewardEnv(prompt=PROMPT, reward=make_reward()), lambda _: next(answers))
    assert len(seen) == 1
    assert seen[0].sampling is SAMPLING
    assert sequences(sample) == ["2+2=4", "2+2=5", "2+2=4"]
    assert trained(sample) == ["4$", "5$", "4"]
    assert sample.data["rewards"].tolist() == [1.0, 0.0, 1.0]
    assert sample.data["seq_no_eos_mask"].tolist() == [False, False, True]


async def test_feedback_is_appended_between_turns() -> None:
    agent = MultiStepAgent(
        tokenizer=TOKENIZER, sampling=SAMPLING, group_size=2, turn_discount=0.5, feedback_template=" [{}] "
    )
    env = FeedbackEnv(prompt=PROMPT, reward=make_reward(), feedback="again", max_turns=3)
    first = iter([("5", True), ("4", True)])

    def policy(input_ids: list[int]) -> tuple[str, bool]:
        text = TOKENIZER.decode(input_ids, skip_special_tokens=True)
        return ("4", True) if "again" in text else next(first)

    sample, seen = await collect(agent, env, policy)

    assert [len(observation.inputs) for observation in seen] == [2, 1]  # a finished episode takes no further turn
    assert sequences(sample) == ["2+2=5 [again] 4", "2+2=4"]
    assert trained(sample) == ["5$4$", "4$"]
    assert sample.data["rewards"].tolist() == [0.5, 1.0]
    assert sample.data["prompt_mask"].sum() == 2 * len(PROMPT.input_ids)


async def test_turns_are_bounded_and_the_last_feedback_is_not_appended() -> None:
    agent = MultiStepAgent(tokenizer=TOKENIZER, sampling=SAMPLING, group_size=1, max_turns=2)
    env = FeedbackEnv(prompt=PROMPT, reward=make_reward(), feedback="no", max_turns=9)
    sample, seen = await collect(agent, env, lambda _: ("5", True))
    assert len(seen) == 2
    assert sequences(sample) == ["2+2=5no5"]


class Graded(Env):
    """A step's reward is one number for each token of the action: 1 for a "4", else 0. It ends with the third step."""

    turns = 0

    async def reset(self) -> tuple[Any, dict[str, Any]]:
        return None, {}

    async def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if isinstance(action, list):
            return None, [self.graded(completion) for completion in action], True, False, {}
        self.turns += 1
        return "no", self.graded(action), self.turns == 3, False, {}

    def graded(self, completion: Completion) -> list[float]:
        return [float(token == ord("4")) for token in completion.token_ids]


async def test_an_environment_rewards_single_tokens() -> None:
    answers = iter([("142", True), ("4", False)])
    agent = SingleStepAgent(tokenizer=TOKENIZER, sampling=SAMPLING, group_size=2)
    sample, _ = await collect(agent, Graded(prompt=PROMPT, reward=None), lambda _: next(answers))
    first, second = sample.slices("dense_rewards")[0]
    assert first.tolist() == [0] * 4 + [0, 1, 0, 0]  # 2+2=142 and EOS
    assert second.tolist() == [0] * 4 + [1]
    assert sample.data["rewards"].tolist() == [0, 0]


async def test_an_environment_rewards_the_tokens_of_each_turn() -> None:
    agent = MultiStepAgent(tokenizer=TOKENIZER, sampling=SAMPLING, group_size=1, turn_discount=0.5)
    sample, _ = await collect(agent, Graded(prompt=PROMPT, reward=None), lambda _: ("14", True))
    # three turns of "14" and EOS, with "no" in between
    assert sample.data["dense_rewards"].tolist() == [0] * 4 + [0, 1, 0, 0, 0] + [0, 0.5, 0, 0, 0] + [0, 0.25, 0]


async def test_an_episode_of_several_turns_has_the_answer_of_its_last_score() -> None:
    class Scored(Graded):
        async def step(self, action: Any) -> StepResult:
            observation, _, *ended = await super().step(action)
            return observation, Score(1.0, f"answer {self.turns}"), *ended

    agent = MultiStepAgent(tokenizer=TOKENIZER, sampling=SAMPLING, group_size=1)
    sample, _ = await collect(agent, Scored(prompt=PROMPT, reward=None), lambda _: ("4", True))
    assert sample_answers(sample) == ["answer 3"]
    assert sample.data["rewards"].tolist() == [3.0]


async def test_rewards_of_turns_stand_at_their_last_tokens() -> None:
    agent = MultiStepAgent(
        tokenizer=TOKENIZER, sampling=SAMPLING, group_size=1, max_turns=2, turn_discount=0.5, turn_rewards=True
    )
    env = RewardEnv(prompt=PROMPT, reward=make_reward("half"))
    env.step = partial(goes_on, env.step)  # type: ignore[method-assign]
    sample, _ = await collect(agent, env, lambda _: ("14", True))
    assert sample.data["dense_rewards"].tolist() == [0] * 4 + [0, 0, 0.5, 0, 0] + [0, 0, 0.25]
    assert sample.data["rewards"].tolist() == [0]


async def goes_on(step: Any, action: Completion) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
    _, reward, *_ = await step(action)
    return "no", reward, False, False, {}


class ChatTokenizer(CharTokenizer):
    """Renders a message as <role:content$>, where $ is EOS."""

    eos_token_id = EOS
    chat_template = "..."

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return super().decode(ids, True) if skip_special_tokens else super().decode(ids, True) + "$" * ids.count(EOS)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [EOS if letter == "$" else ord(letter) for letter in text]

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        *,
        tools: None,
        tokenize: bool,
        add_generation_prompt: bool,
        thinking: bool = True,
    ) -> str:
        assert not tokenize
        assert tools is None
        assert add_generation_prompt
        shown = (f"<{message['role']}:{message['content'].strip()}$>" for message in messages)
        return "".join(shown) + ("<assistant:" if thinking else "<assistant:[]")


@pytest.mark.parametrize(("arguments", "prompt_end"), [({}, ""), ({"thinking": False}, "[]")])
async def test_feedback_becomes_a_turn_of_the_chat(arguments: dict[str, Any], prompt_end: str) -> None:
    """The response's own EOS ends its turn, so the template's EOS is left out. The template's text behind it is not trained."""
    agent = MultiStepAgent(
        tokenizer=ChatTokenizer(),
        sampling=SAMPLING,
        group_size=1,
        feedback_role="user",
        chat_template_args=arguments,
    )
    env = FeedbackEnv(prompt=PROMPT, reward=make_reward(), feedback="no {}", max_turns=2)
    sample, _ = await collect(agent, env, lambda _: ("5", True))
    (ids,) = sample.slices()[0]
    text = "".join("$" if token == EOS else chr(token) for token in ids.tolist())
    assert text == f"2+2=5$><user:no {{}}$><assistant:{prompt_end}5$"
    assert trained(sample) == ["5$5$"]


async def test_a_turn_that_the_template_ends_with_another_eos_is_not_ended_twice(tmp_path: Path) -> None:
    """The template ends turns with <|end|>, which generation_config.json lists beside the tokenizer's EOS. Later turns have the
    template arguments of the prompt."""
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}<|assistant|>{{ mood }}"
    tokenizer = make_chat_tokenizer(None, template)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|end|>", "<|user|>", "<|assistant|>"]})
    (end,) = tokenizer.encode("<|end|>")
    (tmp_path / "p.jsonl").write_text('{"prompt": "hi"}\n')
    config = PromptSourceConfig(
        path=str(tmp_path / "p.jsonl"), answer_key="", chat_template=True, chat_template_args={"mood": "glad"}
    )
    prompt = PromptSource(config, tokenizer).get(Locator(0, 0))
    agent = MultiStepAgent(tokenizer=tokenizer, sampling=SAMPLING, group_size=1, max_turns=2, feedback_role="user")
    env = FeedbackEnv(prompt=prompt, reward=make_reward(), feedback="No.", max_turns=2)
    obs_queue, act_queue = ObsQueue(1), ActQueue(1)
    collecting = asyncio.ensure_future(agent.collect_trajectory(prompt, env, obs_queue, act_queue))
    for _ in range(2):
        (input_ids,) = (await obs_queue.get()).inputs
        response = Response(input_ids, finished=True)
        response.add_piece([*tokenizer.encode("5"), end], [-0.5] * 2, [(VERSION, 2)])
        await act_queue.put([response])
    (sample,) = await collecting
    text = "<|user|>hi<|end|>\n<|assistant|>glad5<|end|>\n<|user|>No.<|end|>\n<|assistant|>glad5<|end|>"
    assert tokenizer.decode(sample.data["packed_input_ids"].tolist()) == text


async def test_rewards_and_environments_receive_text_without_special_tokens(tmp_path: Path) -> None:
    tokenizer = make_chat_tokenizer(None)
    row = {"messages": [{"role": "user", "content": "a <b>  .  <|im_start|>"}], "answer": "1"}
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    config = PromptSourceConfig(path=str(tmp_path / "p.jsonl"), prompt_key="messages", chat_template=True)
    prompt = PromptSource(config, tokenizer).get(Locator(0, 0))
    assert prompt.text.startswith("<|im_start|>user\na <b>")
    read = "user\na <b>  .  \nassistant\n"
    ((given, *_), _) = call_arguments(prompt, Completion("1", True), ())
    assert given == read
    for env in (RewardEnv, UnjudgedEnv):
        assert await env(prompt=prompt, reward=make_reward()).reset() == (read, {})


def test_feedback_role_needs_a_template_that_renders_the_role() -> None:
    def agent(tokenizer: object, **arguments: Any) -> MultiStepAgent:
        return MultiStepAgent(tokenizer=tokenizer, sampling=SAMPLING, group_size=1, **arguments)

    class NoTemplate(ChatTokenizer):
        chat_template = ""

    class Mute(ChatTokenizer):
        def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
            return "".join(message["content"] for message in messages if message["role"] != "tool")

    with pytest.raises(ValueError, match="has no chat template; use feedback_template"):
        agent(NoTemplate(), feedback_role="user")
    with pytest.raises(ValueError, match="does not show messages of this role"):
        agent(Mute(), feedback_role="tool")
    with pytest.raises(ValueError, match="set only one of them"):
        agent(ChatTokenizer(), feedback_role="user", feedback_template="<{}>")


async def test_a_truncated_response_ends_its_episode() -> None:
    agent = MultiStepAgent(tokenizer=TOKENIZER, sampling=SAMPLING, group_size=1)
    env = FeedbackEnv(prompt=PROMPT, reward=make_reward(), feedback="no")
    sample, seen = await collect(agent, env, lambda _: ("5", False))
    assert len(seen) == 1
    assert sample.data["seq_no_eos_mask"].tolist() == [True]


async def test_a_truncated_response_ends_an_episode_that_its_environment_goes_on_with() -> None:
    agent = MultiStepAgent(tokenizer=TOKENIZER, sampling=SAMPLING, group_size=1)
    sample, seen = await collect(agent, Graded(prompt=PROMPT, reward=None), lambda _: ("5", False))
    assert len(seen) == 1
    assert sequences(sample) == ["2+2=5"]


@pytest.mark.parametrize("fails", [False, True])
async def test_each_members_environment_is_closed_once(fails: bool) -> None:
    closed: list[Env] = []

    class Closed(Graded):
        async def step(self, action: Any) -> StepResult:
            if fails:
                raise OSError("lost")
            return await super().step(action)

        async def close(self) -> None:
            closed.append(self)

    agent = MultiStepAgent(tokenizer=TOKENIZER, sampling=SAMPLING, group_size=2)
    env = Closed(prompt=PROMPT, reward=None)
    with pytest.raises(OSError, match="lost") if fails else contextlib.nullcontext():
        await collect(agent, env, lambda _: ("4", True))
    assert len(set(closed)) == len(closed) == 2
    assert env not in closed


async def test_the_environment_ends_an_episode_after_max_turns() -> None:
    env = FeedbackEnv(prompt=PROMPT, reward=make_reward(), feedback="no", max_turns=2)
    await env.reset()
    assert await env.step(Completion("5", True)) == ("no", 0.0, False, False, {})
    assert await env.step(Completion("5", True)) == (None, 0.0, False, True, {})
    await env.reset()
    assert await env.step(Completion("4", True)) == (None, 1.0, True, False, {})


async def test_a_truncated_response_is_the_last_and_is_rewarded() -> None:
    env = FeedbackEnv(prompt=PROMPT, reward=make_reward("half"), feedback="no", max_turns=4)
    await env.reset()
    assert await env.step(Completion("4", False)) == (None, 0.5, False, True, {})


async def test_forks_share_no_progress() -> None:
    env = FeedbackEnv(prompt=PROMPT, reward=make_reward(), feedback="no", max_turns=2)
    one, other = env.fork(), env.fork()
    await one.reset()
    await other.reset()
    await one.step(Completion("5", True))
    assert (await other.step(Completion("5", True)))[2:4] == (False, False)
    assert (await one.step(Completion("5", True)))[2:4] == (False, True)


class CountingEnv(RewardEnv):
    """A user's environment with an argument of its own."""

    def __init__(self, *, prompt: Prompt, reward: Reward | None, bonus: float) -> None:
        super().__init__(prompt=prompt, reward=reward)
        self.bonus = bonus

    async def step(self, action: Any) -> StepResult:
        _, values, terminated, truncated, info = await super().step(action)
        return None, [value + self.bonus for value in values], terminated, truncated, info


def rollout_config(**tasks: TaskConfig) -> RolloutConfig:
    return RolloutConfig(group_size=3, sampling=SAMPLING, tasks=tasks)


def make_table(config: RolloutConfig, tokenizer: Any = TOKENIZER) -> TaskTable:
    sets = {"": EvalSetConfig(), "many": EvalSetConfig(num_responses=5, modes=["sampled"])}
    return TaskTable(config, sets, make_services(), tokenizer=tokenizer)


async def test_tasks_are_numbered_by_name_and_have_an_agent_for_each_set_and_mode() -> None:
    spec = f"{__name__}:right"
    table = make_table(
        rollout_config(
            sums=TaskConfig(reward=spec),
            chess=TaskConfig(reward=spec, env=f"{__name__}:CountingEnv", env_args={"bonus": 0.5}),
            games=TaskConfig(env=f"{__name__}:Graded"),
        )
    )
    chess, sums = table.of(replace(PROMPT, task="chess")), table.of(replace(PROMPT, task="sums"))
    games = table.of(replace(PROMPT, task="games"))
    assert (chess.task_id, games.task_id, sums.task_id) == (0, 1, 2)
    assert type(games.make_env(PROMPT)) is Graded
    assert {mode: (agent.group_size, agent.sampling.greedy) for mode, agent in sums.agents.items()} == {
        ("", TRAIN): (3, False),
        ("", "sampled"): (1, False),
        ("", "greedy"): (1, True),
        ("many", "sampled"): (5, False),
    }
    sample, _ = await collect(chess.agents["", "greedy"], chess.make_env(PROMPT), lambda _: ("4", True))
    assert sample.data["rewards"].tolist() == [1.5]


async def test_the_loop_turns_while_rewards_and_episodes_are_imported(tmp_path: Path) -> None:
    """Otherwise the launcher takes a rollout worker for frozen, and kills it."""
    (tmp_path / "slow.py").write_text(
        "import time; time.sleep(1)\ndef reward(prompt, completion, answer): return 1.0\n"
    )
    (tmp_path / "play.py").write_text("import time; time.sleep(1)\ndef play(settings, item, address): return 1.0\n")
    reward, play = f"{tmp_path}/slow.py:reward", {"play": f"{tmp_path}/play.py:play"}
    agent = "asyncrl.rollout.episodes:EpisodeAgent"
    tasks = {"sums": TaskConfig(reward=reward), "games": TaskConfig(reward=reward, agent=agent, agent_args=play)}
    table = make_table(rollout_config(**tasks), make_chat_tokenizer(None))
    turns = []

    async def turn() -> None:
        while True:
            turns.append(time.monotonic())
            await asyncio.sleep(0.01)

    turning = asyncio.create_task(turn())
    began = time.monotonic()
    await table.start()
    turning.cancel()
    assert time.monotonic() - began > 0.5
    assert len(turns) > 10
    score = Reward.of(reward, rollout_config(), make_services())
    await score.start()
    assert await score.score(PROMPT, [Completion("4", True, (1,))]) == [1.0]
    score.close()
    table.close()


async def test_a_failed_import_is_an_error_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('no')")
    table = make_table(rollout_config(sums=TaskConfig(reward=f"{tmp_path}/broken.py:reward")))
    with pytest.raises(ConfigError, match="no"):
        await table.start()
    table.close()


def test_the_agent_of_a_ticket_has_the_size_that_the_step_orders() -> None:
    def ticket(**fields: Any) -> Ticket:
        about = {
            "ticket_id": "t",
            "kind": "train",
            "locator": Locator(0, 0),
            "attempt": 1,
            "min_version": 0,
            "deadline": 0,
        }
        return Ticket(**{**about, "server": "s", "server_url": "", "head": 0, **fields})

    task = make_table(rollout_config(default=TaskConfig(reward=f"{__name__}:right"))).of(PROMPT)
    whole = task.agent_for(ticket())
    assert whole is task.agents["", TRAIN]
    ordered = task.agent_for(ticket(group_size=2, max_new_tokens=5))
    assert (ordered.group_size, ordered.sampling) == (2, replace(whole.sampling, max_new_tokens=5))
    assert task.agent_for(ticket(group_size=2, max_new_tokens=5)) is ordered
    assert task.agent_for(ticket(group_size=2)).sampling == whole.sampling
    assert task.agent_for(ticket(max_new_tokens=10**6)).sampling == whole.sampling  # the task's own limit stays
    assert task.agent_for(ticket(kind="eval", eval_set="many", eval_mode="sampled")).group_size == 5


def test_a_prompt_of_an_unknown_task_is_rejected() -> None:
    table = make_table(rollout_config(sums=TaskConfig(reward=f"{__name__}:right")))
    with pytest.raises(RolloutRejected, match=r"task 'default'; rollout.tasks has \['sums'\]"):
        table.of(PROMPT)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({}, "rollout.tasks is empty"),
        (
            {"a": TaskConfig()},
            r"rollout\.tasks\.a\.agent='': SingleStepAgent needs rollout\.tasks\.a\.reward or rollout\.tasks\.a\.env",
        ),
        (
            {"a": TaskConfig(reward=f"{__name__}:right", agent="json:JSONDecoder")},
            "must be a subclass of asyncrl.rollout.agent.Agent",
        ),
        (
            {"a": TaskConfig(reward=f"{__name__}:right", agent_args={"turns": 3})},
            r"rollout\.tasks\.a\.agent_args\.turns=3: SingleStepAgent does not take this argument",
        ),
        (
            {"a": TaskConfig(reward=f"{__name__}:right", agent_args={"group_size": 3})},
            "group_size=3: the rollout worker sets it",
        ),
        ({"a": TaskConfig(env=f"{__name__}:CountingEnv", env_args={"bonuses": 1})}, "did you mean 'bonus'"),
    ],
)
def test_an_invalid_task_is_refused(tasks: dict[str, TaskConfig], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_table(rollout_config(**tasks))
