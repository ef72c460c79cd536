"""The turns of a session's conversations, as trees (pure). Finds the turn that a request continues, and the tokens up to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.data.chat import Message, same_message
from asyncrl.rewards.trajectory import Episode, Response

TEXT = ("text", None)  # the setting of turns without a chat template


@dataclass(slots=True, eq=False)
class Turn:
    """One request and its answer."""

    parent: Turn | None
    setting: tuple[Any, Any]  # tools and template arguments; a request continues only turns with the same setting
    messages: Sequence[Message]  # the request's messages that come after those of the parent turn
    added_ids: list[int]  # tokens between the parent's tokens and the response's
    speaker: str = ""  # the requests' header X-Session-ID; a request continues only turns of its speaker
    completion_id: str = ""  # the id of the answer in the reply
    most: int = 0  # tokens that its answer may have at most
    number: int = -1  # position in the order in which the turns were answered; -1: no answer yet
    response: Response | None = None
    answer: Message | None = None
    text: str = ""  # the answer's text, without special tokens
    stop_token: int | None = None  # the token that ended the answer; None: cut, ended by a stop string, or pending
    children: list[Turn] = field(default_factory=list)

    def path(self) -> list[Turn]:
        """The turns from the first one to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def episode(self) -> Episode:
        """All tokens up to this turn, including its response if there is one."""
        first, *later = self.path()
        episode = Episode(first.added_ids)
        for turn in [first, *later]:
            if turn is not first:
                episode.add_observation(turn.added_ids)
            if turn.response is not None:
                episode.add_response(turn.response)
        return episode


def episodes_of(leaves: Sequence[Turn]) -> list[Episode]:
    """The episodes that end at these turns. A response that several contain is trained in the first of them, and is context in
    the others (`trained_before`), so each sampled token is trained once."""
    seen: set[Turn] = set()
    episodes = []
    for leaf in leaves:
        episode, path = leaf.episode(), leaf.path()
        episode.trained_before = sum(turn in seen for turn in path)  # paths share only their first turns
        seen.update(path)
        episodes.append(episode)
    return episodes


def find_turn(roots: Sequence[Turn], messages: Sequence[Message], setting: tuple[Any, Any]) -> tuple[Turn | None, int]:
    """Return the turn that these messages continue, and how many of them it covers, its answer included. Of several matching turns,
    return the one that covers most messages; of those, the one answered last. (None, 0): no turn matches."""
    best: tuple[Turn | None, int] = (None, 0)
    open_turns = [(turn, 0) for turn in roots if turn.setting == setting]
    while open_turns:
        turn, start = open_turns.pop()
        end = start + len(turn.messages)
        if turn.answer is None or end >= len(messages):
            continue
        if all(map(same_message, turn.messages, messages[start:end])) and same_message(turn.answer, messages[end]):
            if end + 1 > best[1] or (end + 1 == best[1] and best[0] and turn.number > best[0].number):
                best = (turn, end + 1)
            open_turns += [(child, end + 1) for child in turn.children]
    return best


def find_text(roots: Sequence[Turn], text: str) -> tuple[Turn | None, int]:
    """Return the turn of texts that this text continues, and the length of its text. Of several, the longest; of those, the one
    answered last. A turn that ended with a token that its text does not show is not continued."""
    best: tuple[Turn | None, int] = (None, 0)
    open_turns = [(turn, 0) for turn in roots if turn.setting == TEXT]
    while open_turns:
        turn, start = open_turns.pop()
        whole = turn.messages[0]["content"] + turn.text
        end = start + len(whole)
        if turn.answer is None or turn.stop_token is not None or not text.startswith(whole, start):
            continue
        if end > best[1] or (end == best[1] and best[0] and turn.number > best[0].number):
            best = (turn, end)
        open_turns += [(child, end) for child in turn.children]
    return best


def all_turns(roots: Sequence[Turn]) -> Iterator[Turn]:
    """The turns of all trees, including those with a pending answer."""
    open_turns = list(roots)
    while open_turns:
        turn = open_turns.pop()
        yield turn
        open_turns += turn.children


def num_tokens(turns: Iterable[Turn]) -> int:
    """The number of tokens of these turns; of a pending answer, the most that it may have."""
    return sum(
        len(turn.added_ids) + (turn.most if turn.response is None else len(turn.response.output_ids)) for turn in turns
    )


def num_sampled(turns: Iterable[Turn]) -> int:
    """The number of sampled tokens in the turns' answers."""
    return sum(len(turn.response.output_ids) for turn in turns if turn.response is not None)
