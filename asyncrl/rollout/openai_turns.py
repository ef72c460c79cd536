"""Turns of a session's conversations, as trees (pure): which turn a request continues, and the tokens up to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.rewards.trajectory import Episode, Response
from asyncrl.rollout.chat_template import Message, same_message


@dataclass(slots=True, eq=False)
class Turn:
    """One request and its answer."""

    parent: Turn | None
    setting: tuple[Any, Any]  # tools and template arguments: another setting is another prompt
    messages: Sequence[Message]  # of the request, behind those of the parent
    added_ids: list[int]  # behind the parent's tokens, before the response's
    number: int = -1  # in the order of their ends; -1: not ended
    response: Response | None = None
    answer: Message | None = None
    text: str = ""  # of the answer, without special tokens
    stop_token: int | None = None  # what ended the answer
    children: list[Turn] = field(default_factory=list)

    def path(self) -> list[Turn]:
        """From the first turn to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def episode(self) -> Episode:
        """All tokens up to this turn's, the response included once there is one."""
        first, *later = self.path()
        episode = Episode(first.added_ids)
        for turn in [first, *later]:
            if turn is not first:
                episode.add_observation(turn.added_ids)
            if turn.response is not None:
                episode.add_response(turn.response)
        return episode


def find_turn(roots: Sequence[Turn], messages: Sequence[Message], setting: tuple[Any, Any]) -> tuple[Turn | None, int]:
    """The turn whose messages and answer cover most of these, and how many; of several the latest."""
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


def all_turns(roots: Sequence[Turn]) -> Iterator[Turn]:
    """Of all trees, those that wait for their answer included."""
    open_turns = list(roots)
    while open_turns:
        turn = open_turns.pop()
        yield turn
        open_turns += turn.children


def num_sampled(turns: Iterable[Turn]) -> int:
    """Tokens of their answers."""
    return sum(len(turn.response.output_ids) for turn in turns if turn.response is not None)
