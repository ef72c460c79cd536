"""From generated pieces to a trajectory (pure): responses -> episodes -> the SequenceSample of a group.

The client (rollout/client.py) assembles a Response from the pieces that servers send. An agent (rollout/agent.py) puts responses
and the environment's observations into Episodes, one per group member. `build_sample` packs the group, and `complete_sample` adds
the ticket. With mode=sync, model/group_maker.py does all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.data.routes import ROUTES, Routes
from asyncrl.data.sequence import KEY_SPECS, SequenceSample, spec_of
from asyncrl.dataflow.graph import DENSE_REWARDS, SEATS, SESSIONS, TRAJECTORY_KEYS
from asyncrl.protocol.trajectories import GroupSummary
from asyncrl.rewards.score import Score, answers_of
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock

MAX_LOGPROB = 0.5  # a logprob is at most 0, plus the rounding error of 16-bit numbers
ANSWERS = (
    "words_answer_of_score"  # the text of each response's answer, or null; from the agent to its rollout worker only
)
NOT_SAMPLED = -1  # the version of a token that no policy sampled
_TICKET_KEYS = frozenset({"task_ids", "birth_time"})


@dataclass(slots=True)
class Response:
    """A policy's response to input_ids, assembled from one or more pieces. logprobs[t] belongs to output_ids[t]."""

    input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # For each run of tokens of one version: the WeightVersion packed into an integer, and the number of tokens
    versions: list[tuple[int, int]] = field(default_factory=list)
    # True: ended by EOS, or by a stop string of the OpenAI API. False: cut at max_new_tokens, or the server's context was full
    finished: bool = False
    routes: Routes | None = None  # of all tokens but the last, from the first input token on (train.routes)

    def add_piece(self, output_ids: list[int], logprobs: list[float], versions: Sequence[tuple[int, int]]) -> None:
        """Append the result of one request. The runs in `versions` must cover the piece."""
        assert len(output_ids) == len(logprobs) == sum(count for _, count in versions)
        self.output_ids += output_ids
        self.logprobs += logprobs
        for version, count in versions:
            if self.versions and self.versions[-1][0] == version:
                self.versions[-1] = (version, self.versions[-1][1] + count)
            elif count:
                self.versions.append((version, count))

    def truncate(self, count: int) -> None:
        """Keep only the first `count` tokens."""
        del self.output_ids[count:], self.logprobs[count:]
        if self.routes is not None:
            self.routes = replace(self.routes, rows=self.routes.rows[: len(self.input_ids) + count - 1])
        left = count
        runs: list[tuple[int, int]] = []
        for version, length in self.versions:
            if left > 0:
                runs.append((version, min(length, left)))
            left -= length
        self.versions = runs

    @property
    def oldest_version(self) -> int:
        """The oldest version of the tokens, packed into an integer; NOT_SAMPLED if there is no token."""
        return min((version for version, _ in self.versions), default=NOT_SAMPLED)


# Called with a response after each new piece; may shorten it; True: stop generating
OnPiece = Callable[[Response], bool]


class Episode:
    """One sequence of a group under construction: the prompt, then responses and the environment's observations in turn."""

    __slots__ = ("input_ids", "prompt_length", "responses", "reward", "score", "token_rewards", "trained_before")

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.input_ids = list(prompt_ids)  # all tokens so far; the next response continues them
        self.prompt_length = len(self.input_ids)
        self.responses: list[tuple[int, Response]] = []  # (start in input_ids, response)
        self.reward = 0.0  # of the whole episode
        self.score: Score | None = None  # the newest one, whose answer is that of the episode
        self.trained_before = 0  # number of first responses that another sequence of the session trains: context here
        self.token_rewards: list[tuple[int, float]] = []  # (position in input_ids, reward), in addition to `reward`

    def add_response(self, response: Response) -> None:
        """Append the policy's turn. The response must continue all tokens so far."""
        if len(response.input_ids) != len(self.input_ids):
            raise ValueError(
                f"the response was sampled from an input of {len(response.input_ids)} tokens; it cannot continue an episode of "
                f"{len(self.input_ids)} tokens"
            )
        self.responses.append((len(self.input_ids), response))
        self.input_ids += response.output_ids

    def add_observation(self, token_ids: Sequence[int]) -> None:
        """Append the environment's turn. These tokens were not sampled and are not trained on."""
        self.input_ids += token_ids

    def add_reward(self, reward: Any) -> None:
        """Add the reward of the last response: a number, for the whole episode, or a sequence with one number for each token of the
        response. The latter needs train.dense_rewards."""
        self.note_answer(reward)
        if np.ndim(reward) == 0:
            self.reward += float(reward)
        else:
            self.add_turn_reward(reward)

    def note_answer(self, reward: Any) -> None:
        """Keep the answer of a reward that is a Score."""
        if isinstance(reward, Score):
            self.score = reward

    def add_turn_reward(self, reward: Any, turn: int = -1) -> None:
        """Add the reward of a response: a number, at its last token, or a sequence with one number for each of its tokens.

        turn: the index of the response. Needs train.dense_rewards. Raises ValueError if the number of rewards does not fit.
        """
        start, response = self.responses[turn]
        count = len(response.output_ids)
        if np.ndim(reward) == 0 and count == 0:  # an empty response has no token for it
            self.reward += float(reward)
        elif np.ndim(reward) == 0:
            self.token_rewards.append((start + count - 1, float(reward)))
        elif len(reward) == count:
            self.token_rewards += [(start + i, float(value)) for i, value in enumerate(reward)]
        else:
            raise ValueError(f"{len(reward)} rewards for a response of {count} tokens; return one for each token")

    @property
    def truncated(self) -> bool:
        """Whether the last response was cut before its EOS."""
        return bool(self.responses) and not self.responses[-1][1].finished

    @property
    def routes(self) -> Routes | None:
        """The routes of the tokens, to the last one that was computed. None: a response has none."""
        found: Routes | None = None
        for _, response in self.responses:
            if response.routes is None:
                return None
            found = response.routes if found is None else found.joined(response.routes, start=0)
        return found

    @property
    def num_sampled(self) -> int:
        return sum(len(response.output_ids) for _, response in self.responses)


def build_sample(
    sample_id: str,
    episodes: Sequence[Episode],
    *,
    clock: Clock = SYSTEM_CLOCK,
    sessions: Sequence[int] | None = None,
    seats: Sequence[int] | None = None,
) -> SequenceSample:
    """Pack a group's episodes into a sample with every key of a trajectory. Ticket keys hold defaults until `complete_sample`.

    `words_answer_of_score` is there only if an episode has a Score, `dense_rewards` only if one has rewards of tokens, and
    `routed_experts` only if all responses have routes.
    sessions: the index of each episode's session among those of its seat, which becomes the key `sessions`; None: each episode is a
    session, and the key is absent. seats: the index of each episode's seat, in ascending order; None: there is one.
    """
    lengths = [len(episode.input_ids) for episode in episodes]
    total = sum(lengths)
    input_ids = np.empty(total, np.int64)
    logprobs = np.zeros(total, np.float32)
    prompt_mask = np.zeros(total, np.bool_)
    loss_mask = np.zeros(total, np.bool_)
    versions = np.full(total, NOT_SAMPLED, np.int64)
    offset = 0
    for episode, length in zip(episodes, lengths, strict=True):
        input_ids[offset : offset + length] = episode.input_ids
        prompt_mask[offset : offset + episode.prompt_length] = True
        for start, response in episode.responses[episode.trained_before :]:
            position = offset + start
            end = position + len(response.output_ids)
            logprobs[position:end] = response.logprobs
            loss_mask[position:end] = True
            for version, count in response.versions:
                versions[position : position + count] = version
                position += count
        offset += length
    token_rewards = [
        (first + position, reward)
        for first, episode in zip(np.cumsum([0, *lengths[:-1]]).tolist(), episodes, strict=True)
        for position, reward in episode.token_rewards
    ]
    prompt_length = episodes[0].prompt_length
    oldest, newest = _version_bounds(episodes)
    data: dict[str, npt.NDArray[Any]] = {
        "packed_input_ids": input_ids,
        "packed_prompts": input_ids[:prompt_length].copy(),
        "packed_logprobs": logprobs,
        "prompt_mask": prompt_mask,
        "loss_mask": loss_mask,
        "seq_no_eos_mask": np.array([episode.truncated for episode in episodes], np.bool_),
        "rewards": np.array([episode.reward for episode in episodes], np.float32),
        "task_ids": np.zeros(1, np.int64),
        "versions": versions,
        "version_start": oldest,
        "version_end": newest,
        "birth_time": np.array([clock.time()], np.float64),
    }
    if token_rewards:
        dense = np.zeros(total, np.float32)
        for at, reward in token_rewards:
            dense[at] += reward
        data[DENSE_REWARDS] = dense
    if sessions is not None:
        data[SESSIONS] = np.array(sessions, np.int64)
    if seats is not None:
        data[SEATS] = np.array(seats, np.int64)
    runs = {"token": lengths, "prompt": [prompt_length], "sequence": [1] * len(episodes), "group": [1]}
    seqlens = {key: [runs[KEY_SPECS[key].layout]] for key in data}
    sample = SequenceSample((sample_id,), seqlens, data)
    routes = [episode.routes for episode in episodes]
    if not any(found is None for found in routes):
        runs_of = [
            found.encode(length=length) for found, length in zip(routes, lengths, strict=True) if found is not None
        ]
        sample = sample.update(SequenceSample.from_groups([sample_id], [{ROUTES: runs_of}]))
    answers = answers_of(episode.score for episode in episodes)
    return sample.update(SequenceSample.from_groups([sample_id], [{ANSWERS: answers}])) if answers else sample


def _version_bounds(episodes: Sequence[Episode]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Per episode, the oldest and the newest version of its sampled tokens."""
    seen = [
        [version for _, response in episode.responses[episode.trained_before :] for version, _ in response.versions]
        for episode in episodes
    ]
    oldest = np.array([min(versions, default=NOT_SAMPLED) for versions in seen], np.int64)
    newest = np.array([max(versions, default=NOT_SAMPLED) for versions in seen], np.int64)
    return oldest, newest


def complete_sample(
    sample: SequenceSample,
    *,
    ticket_id: str,
    task_id: int,
    birth_time: float,
    dense_rewards: bool = False,
    branches: bool = False,
    routes: bool = False,
    words: Sequence[str] = (),
) -> SequenceSample:
    """Return the agent's sample with the ticket's id and the keys that only the worker knows (task_ids, birth_time).

    words: train.words, which the agent may set. The answers of Scores (ANSWERS) are left out.
    dense_rewards: train.dense_rewards. The result then has `dense_rewards`, zeros if the agent gave none.
    branches: train.branches. The result then has `sessions` and `seats`; each sequence is a session of the same seat if the agent
    says nothing else.
    routes: whether train.routes needs `routed_experts`.
    Raises ValueError if the agent's sample is not exactly one group with every key of a trajectory and a sampled token in each
    sequence, if it has a key that only MFCs write, or if a reward or logprob is invalid.
    """
    if ANSWERS in sample.data:
        sample = sample.select_keys([key for key in sample.keys if key != ANSWERS])
    if sample.num_ids != 1:
        raise ValueError(f"an agent's sample must hold one group, found {sample.num_ids}: {list(sample.ids)[:4]}")
    needed = (*TRAJECTORY_KEYS, *((ROUTES,) if routes else ()))
    missing = [key for key in needed if key not in sample.data and key not in _TICKET_KEYS]
    if missing:
        raise ValueError(
            f"an agent's sample lacks the keys {missing}; build it with asyncrl.rewards.trajectory.build_sample"
        )
    read = {*needed, *words, *((DENSE_REWARDS,) if dense_rewards else ()), *((SESSIONS, SEATS) if branches else ())}
    unread = [key for key in sample.data if spec_of(key) is not None and key not in read]
    if unread and {SESSIONS, SEATS}.issuperset(unread):
        raise ValueError(
            f"an agent's sample has several sequences of a session, or several seats ({', '.join(unread)}); set "
            "train.branches=true, or train one seat with agent_args.trained=last or longest"
        )
    if unread == [DENSE_REWARDS]:
        raise ValueError(
            "an agent's sample has rewards of tokens or turns (`dense_rewards`); set train.dense_rewards=true, or put the reward "
            "into `rewards`"
        )
    if unread:
        raise ValueError(
            f"an agent's sample has the keys {unread}, which an agent must not set; leave them out and put the reward into "
            "`rewards`, compute them with an MFC of train.mfcs, or list words in train.words"
        )
    if not sample.num_sequences() or sample.data["version_start"].min() < 0:
        raise ValueError("an agent's sample has a sequence without a sampled token")
    if dense_rewards and DENSE_REWARDS not in sample.data:
        sample = sample.update(sample.derive({DENSE_REWARDS: np.zeros(len(sample.data["loss_mask"]), np.float32)}))
    if branches and SESSIONS not in sample.data:
        sample = sample.update(sample.derive({SESSIONS: np.arange(sample.num_sequences())}, like="rewards"))
    if branches and SEATS not in sample.data:
        sample = sample.update(sample.derive({SEATS: np.zeros(sample.num_sequences(), np.int64)}, like="rewards"))
    if branches and (np.diff(sample.data[SEATS]) < 0).any():
        raise ValueError(
            f"an agent's sample has seats {sample.data[SEATS].tolist()}; put the sequences of a seat side by side"
        )
    if branches and any(not 0 <= of.min() <= of.max() < len(of) for of in _by_seat(sample, SESSIONS)):
        raise ValueError(
            f"an agent's sample has sessions {sample.data[SESSIONS].tolist()}; number those of a seat from 0, below the number of "
            "its sequences"
        )
    if not np.isfinite(total_rewards(sample)).all():
        raise ValueError(f"an agent's sample has rewards that are not finite: {total_rewards(sample).tolist()}")
    if not np.isfinite(sample.data["packed_logprobs"]).all():
        raise ValueError("an agent's sample has logprobs that are not finite")
    if (highest := sample.data["packed_logprobs"].max()) > MAX_LOGPROB:
        raise ValueError(f"an agent's sample has logprobs up to {highest:g}; a logprob is never above 0")
    own = {"task_ids": np.array([task_id], np.int64), "birth_time": np.array([birth_time], np.float64)}
    return SequenceSample(
        (ticket_id,), {**sample.seqlens, "task_ids": [[1]], "birth_time": [[1]]}, {**sample.data, **own}
    )


def total_rewards(sample: SequenceSample) -> npt.NDArray[np.float32]:
    """Per sequence of a group, `rewards` plus the sum of its `dense_rewards`, if it has any."""
    rewards: npt.NDArray[np.float32] = sample.data["rewards"]
    if DENSE_REWARDS not in sample.data:
        return rewards
    dense = np.add.reduceat(sample.data[DENSE_REWARDS].astype(np.float64), sample.cu_seqlens()[:-1])
    return (rewards + dense).astype(np.float32)


def summary_of(sample: SequenceSample) -> GroupSummary:
    """The summary of a sample of one group. Its rewards are `total_rewards`."""
    starts = sample.cu_seqlens()[:-1]
    # reduceat needs non-empty sequences; each has sampled tokens
    sampled = np.add.reduceat(sample.data["loss_mask"].astype(np.int64), starts)
    return GroupSummary(
        seqlens=list(sample.seqlens["packed_input_ids"][0]),
        response_lengths=sampled.tolist(),
        rewards=total_rewards(sample).tolist(),
        version_start=sample.data["version_start"].tolist(),
        version_end=sample.data["version_end"].tolist(),
    )


def sample_answers(sample: SequenceSample) -> list[str | None]:
    """The answers of Scores in an agent's sample of one group, one for each sequence; empty if there are none."""
    return sample.words(ANSWERS)[0] if ANSWERS in sample.data else []


def session_summary(sample: SequenceSample, summary: GroupSummary) -> GroupSummary:
    """The summary of the sample with one entry for each session: its last sequence, with the mean reward of its sequences.

    Filters of groups and evaluations read it, so that a session counts once, whatever its number of sequences.
    """
    if SESSIONS not in sample.data:
        return summary
    # Like the sequences, sessions are ordered by seat
    sessions = sample.data.get(SEATS, 0) * sample.num_sequences() + sample.data[SESSIONS]
    _, of_S, count_K = np.unique(sessions, return_inverse=True, return_counts=True)
    answers = summary.answers
    last = [int(np.flatnonzero(of_S == session)[-1]) for session in range(len(count_K))]
    return GroupSummary(
        seqlens=[summary.seqlens[at] for at in last],
        response_lengths=[summary.response_lengths[at] for at in last],
        rewards=(np.bincount(of_S, summary.rewards) / count_K).tolist(),
        version_start=[summary.version_start[at] for at in last],
        version_end=[summary.version_end[at] for at in last],
        answers=[answers[at] for at in last] if answers else [],
        num_seats=len(np.unique(sample.data.get(SEATS, 0))),
    )


def rewards_by_seat(sample: SequenceSample, judged: GroupSummary) -> list[list[float]]:
    """The rewards of the sessions of each seat. judged: the result of `session_summary`."""
    if SEATS not in sample.data:
        return [judged.rewards]
    counts = [len(np.unique(sessions)) for sessions in _by_seat(sample, SESSIONS)]
    return [part.tolist() for part in np.split(np.array(judged.rewards), np.cumsum(counts)[:-1])]


def _by_seat(sample: SequenceSample, key: str) -> list[npt.NDArray[Any]]:
    """The values of a key with a value for each sequence, as one part for each seat."""
    return np.split(sample.data[key], np.flatnonzero(np.diff(sample.data[SEATS])) + 1)
