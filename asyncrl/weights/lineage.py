"""The lineage of the newest weights: the attempts and steps that they come from. An audit checks that each prompt in it was either
trained once or rejected (pure, except for reading files).

An interrupted run continues from a checkpoint, in a new attempt. Everything that earlier attempts did after that checkpoint is
void, because the weights contain none of it. The journals record everything, in the order of each process's events:

    master.jsonl            begun (from which checkpoint), stored, dropped, trained, rejected, snapshot, checkpoint, published,
                            ended
    gserver_manager.jsonl   admitted; adopted (by a restarted manager, for a ticket that its predecessor admitted)
    rollout_worker_N.jsonl  pushed, with the verdict of the model worker that received the group

A checkpoint holds the state at its `snapshot` event. If an attempt continues from it, the events before that line belong to the
lineage, and those after it do not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from asyncrl.config.modes import mode_of
from asyncrl.runtime.metrics import read_json_lines

Event = Mapping[str, Any]
Point = tuple[int, int]  # (attempt, step)
# Reasons of rejections that are not the task's fault: the prompt's tickets were lost as often as manager.max_issues allows
INFRASTRUCTURE_REASONS = frozenset({"max_issues"})
_MAX_NAMED = 10  # prompts or tickets that a message names for each kind of problem


class Stretch(Struct, frozen=True, kw_only=True):
    """The steps of one attempt that are part of a lineage."""

    attempt: int
    first: int
    last: int | None  # None: to the end of the attempt, which is the newest one of its lineage

    def has(self, step: int) -> bool:
        return self.first <= step and (self.last is None or step <= self.last)


class Lineage(Struct, frozen=True, kw_only=True):
    """The stretches that weights come from, oldest first."""

    stretches: list[Stretch]

    @property
    def newest(self) -> int:
        return self.stretches[-1].attempt

    def has(self, attempt: int, step: int) -> bool:
        """Whether a train step of an attempt is part of the lineage."""
        return any(stretch.attempt == attempt and stretch.has(step) for stretch in self.stretches)

    def has_weights(self, attempt: int, step: int) -> bool:
        """Whether the weights after this step of an attempt are part of the lineage (or are those that the attempt began
        with). If so, an evaluation of them counts."""
        return self.has(attempt, step) or self.has(attempt, step + 1)


class Attempt(Struct, frozen=True, kw_only=True):
    """An attempt's events in the master's journal. parent: the checkpoint that the attempt continued from."""

    number: int
    parent: Point | None
    events: list[Event]
    begun: Event

    def before(self, step: int | None) -> list[Event]:
        """The events that a checkpoint of that step contains; step None: all events."""
        if step is None:
            return self.events
        for end, event in enumerate(self.events):
            if event["event"] == "snapshot" and event["step"] == step:
                return self.events[:end]
        last = max(
            (at for at, event in enumerate(self.events) if _is_step(event) and event["step"] <= step), default=-1
        )
        return self.events[: last + 1]


def read_attempts(run_dir: Path) -> list[Attempt]:
    """The attempts in the master's journal, oldest first."""
    return attempts_of(read_json_lines(run_dir / "journal" / "master.jsonl"))


def attempts_of(events: Iterable[Event]) -> list[Attempt]:
    by_attempt: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        by_attempt[int(event.get("attempt", 1))].append(event)
    attempts = []
    for number, own in sorted(by_attempt.items()):
        begun = next((event for event in own if event["event"] == "begun"), {})
        parent = begun.get("from")
        point = (int(parent[0]), int(parent[1])) if parent else None
        attempts.append(Attempt(number=number, parent=point, events=own, begun=begun))
    return attempts


def lineage_of(attempts: Sequence[Attempt], newest: int | None = None) -> Lineage | None:
    """The lineage of the newest attempt, or of the attempt `newest`. None if there are no attempts."""
    known = {attempt.number: attempt for attempt in attempts}
    if not known:
        return None
    attempt: Attempt | None = known[max(known) if newest is None else newest]
    stretches: list[Stretch] = []
    last: int | None = None
    while attempt is not None:
        first = attempt.parent[1] + 1 if attempt.parent is not None else 1
        stretches.append(Stretch(attempt=attempt.number, first=first, last=last))
        if attempt.parent is None:
            break
        number, last = attempt.parent
        attempt = known.get(number)
    return Lineage(stretches=stretches[::-1])


def lineages_of(attempts: Sequence[Attempt]) -> list[Lineage]:
    """Return one lineage for each attempt that began anew: the lineage of the newest attempt that descends from it. In the order of
    the attempts that began anew."""
    by_root: dict[int, Lineage] = {}
    for attempt in attempts:
        lineage = lineage_of(attempts, attempt.number)
        assert lineage is not None
        by_root[lineage.stretches[0].attempt] = lineage
    return [by_root[root] for root in sorted(by_root)]


# ----------------------------------------------------------------------------------------------------------------- audit


class Audit(Struct, frozen=True, kw_only=True):
    """The fate of every prompt in the lineage of the newest weights."""

    run_dir: str
    lineage: list[Stretch]
    steps: int
    trained: int  # prompts
    rejected: dict[str, int]  # prompts, by reason; those of INFRASTRUCTURE_REASONS are problems
    complete: bool  # the run has finished
    voided_steps: int  # train steps outside the lineage, over all attempts
    voided_prompts: int  # prompts trained or rejected outside the lineage
    unconfirmed: int  # trained groups without a recorded push: their rollout worker died before it wrote the record
    unchecked: list[str]  # checks that were impossible because a journal is missing
    problems: list[str]


class _Problems:
    """Collects problems, and reports one line for each kind."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = {}

    def add(self, what: str, who: object) -> None:
        self._found.setdefault(what, []).append(str(who))

    def lines(self) -> list[str]:
        lines = []
        for what, who in self._found.items():
            more = f" and {len(who) - _MAX_NAMED} more" if len(who) > _MAX_NAMED else ""
            lines.append(f"{what}: {', '.join(who[:_MAX_NAMED])}{more}")
        return lines


def audit(run_dir: Path) -> Audit:
    """Check the journals. Raises ValueError for a journal that cannot be read.

    Checks that no prompt was trained or rejected a second time, and none rejected for a reason outside its task; that every prompt
    was trained or rejected, if the run ended with all prompts done; that no step is missing; that each trained group was admitted
    once, and stored once in the attempt that trained it; that no trained group was refused, or stored by two pushes; and that none
    exceeded the staleness bound.
    """
    attempts = read_attempts(run_dir)
    admitted = list(_events_of(run_dir, "gserver_manager", ("admitted", "adopted")))
    pushed = list(_events_of(run_dir, "rollout_worker_*", ("pushed",)))
    return audit_of(str(run_dir), attempts, admitted, pushed)


def audit_of(run_dir: str, attempts: Sequence[Attempt], admitted: Sequence[Event], pushed: Sequence[Event]) -> Audit:
    problems = _Problems()
    lineage = lineage_of(attempts)
    stretches = lineage.stretches if lineage is not None else []
    known = {attempt.number: attempt for attempt in attempts}
    if stretches and (parent := known[stretches[0].attempt].parent) is not None:
        problems.add("an attempt continues from one that is missing in the journal", f"attempt {parent[0]}")
    kept = [(stretch.attempt, event) for stretch in stretches for event in known[stretch.attempt].before(stretch.last)]
    steps = [event for _, event in kept if event["event"] == "trained"]
    numbers = [event["step"] for event in steps]
    before = known[stretches[0].attempt].begun.get("first_step", 0) if stretches else 0
    for number in numbers:
        if number != before + 1:
            problems.add("steps do not follow each other", f"{before} -> {number}")
        before = number
    trained = _trained(kept, known, problems)
    rejected = _rejected(kept, trained, problems)
    newest = known[stretches[-1].attempt] if stretches else None
    ended = next((e for e in newest.events if e["event"] == "ended"), None) if newest is not None else None
    if ended is not None and ended["done"] == ended["of"] and len(trained) + len(rejected) != ended["of"]:
        problems.add("prompts neither trained nor rejected", ended["of"] - len(trained) - len(rejected))
    unchecked = _check_ways(kept, admitted, pushed, known, problems)
    every = [event for attempt in attempts for event in attempt.events]
    in_all = Counter(event["event"] for event in every)
    done_in_all = sum(len(e["groups"]) for e in every if e["event"] == "trained") + in_all["rejected"]
    pushed_tickets = {event["ticket"] for event in pushed}
    return Audit(
        run_dir=run_dir,
        lineage=stretches,
        steps=len(steps),
        trained=len(trained),
        rejected=dict(Counter(rejected.values())),
        complete=ended is not None,
        voided_steps=in_all["trained"] - len(steps),
        voided_prompts=done_in_all - sum(len(event["groups"]) for event in steps) - len(rejected),
        unconfirmed=sum(group["ticket"] not in pushed_tickets for event in steps for group in event["groups"])
        if pushed
        else 0,
        unchecked=unchecked,
        problems=problems.lines(),
    )


def _trained(
    kept: Sequence[tuple[int, Event]], known: Mapping[int, Attempt], problems: _Problems
) -> dict[tuple[int, int], str]:
    """Return trained prompt -> the ticket of its group, and add problems with trained groups."""
    trained: dict[tuple[int, int], str] = {}
    for attempt, event in kept:
        if event["event"] != "trained":
            continue
        eta = known[attempt].begun.get("max_head_offpolicyness")
        for group in event["groups"]:
            prompt = _prompt(group)
            if prompt in trained:
                problems.add("prompts trained twice", f"{_named(prompt)} (step {event['step']})")
            trained[prompt] = group["ticket"]
            oldest = min(first for first, _ in group["versions"])
            newest = max(last for _, last in group["versions"])
            if eta is not None and event["step"] - 1 - oldest > eta:
                problems.add(
                    f"groups more than {eta} versions old", f"{group['ticket']} ({event['step'] - 1 - oldest})"
                )
            if newest > event["step"] - 1:
                problems.add("groups sampled from a version that did not exist yet", group["ticket"])
    return trained


def _rejected(
    kept: Sequence[tuple[int, Event]], trained: Mapping[tuple[int, int], str], problems: _Problems
) -> dict[tuple[int, int], str]:
    """Rejected prompts -> the reasons."""
    rejected: dict[tuple[int, int], str] = {}
    for _, event in kept:
        if event["event"] != "rejected":
            continue
        prompt = _prompt(event)
        if prompt in trained:
            problems.add("prompts trained and rejected", _named(prompt))
        if prompt in rejected:
            problems.add("prompts rejected twice", _named(prompt))
        if not event["reason"]:
            problems.add("prompts rejected without a reason", _named(prompt))
        if event["reason"] in INFRASTRUCTURE_REASONS:
            problems.add(
                "prompts rejected through the infrastructure and not their task",
                f"{_named(prompt)} ({event['reason']})",
            )
        rejected[prompt] = event["reason"]
    return rejected


def _check_ways(
    kept: Sequence[tuple[int, Event]],
    admitted: Sequence[Event],
    pushed: Sequence[Event],
    known: Mapping[int, Attempt],
    problems: _Problems,
) -> list[str]:
    """Check that each trained group was admitted and stored once, and not stored by two pushes. Returns the
    checks that could not be made because a journal is missing."""
    stored = Counter((attempt, event["ticket"]) for attempt, event in kept if event["event"] == "stored")
    # A killed manager may have admitted tickets without recording them: its successor adopts them
    prompts = {event["ticket"]: _prompt(event) for event in admitted}
    num_admitted = Counter(event["ticket"] for event in admitted if event["event"] == "admitted")
    verdicts: dict[str, list[str]] = defaultdict(list)
    for event in pushed:
        verdicts[event["ticket"]].append(event["verdict"])
    rolled_out = {attempt for attempt, _ in kept if mode_of(known[attempt].begun.get("mode", "")).updates_servers}
    for attempt, event in kept:
        for group in event["groups"] if event["event"] == "trained" else ():
            ticket = group["ticket"]
            if stored[attempt, ticket] != 1:
                problems.add("trained groups not stored once in their attempt", f"{ticket} ({stored[attempt, ticket]})")
            if attempt not in rolled_out:
                continue
            if admitted and ticket not in prompts:
                problems.add("trained groups that were never admitted", ticket)
            if num_admitted[ticket] > 1:
                problems.add("trained groups admitted more than once", ticket)
            if ticket in prompts and prompts[ticket] != _prompt(group):
                problems.add("groups admitted for another prompt", ticket)
            said = verdicts.get(ticket, [])
            if said.count("stored") > 1:
                problems.add("trained groups stored by more than one push", ticket)
            if "refused" in said and "stored" not in said:
                problems.add("trained groups that were refused", ticket)
    unchecked = []
    if rolled_out and not admitted:
        unchecked.append("admissions: there is no journal of the gserver manager")
    if rolled_out and not pushed:
        unchecked.append("pushes: there is no journal of a rollout worker")
    return unchecked


def _events_of(run_dir: Path, stem: str, kinds: Sequence[str]) -> Iterator[Event]:
    for path in sorted((run_dir / "journal").glob(f"{stem}.jsonl")):
        for event in read_json_lines(path):
            if event.get("event") in kinds:
                yield event


def _is_step(event: Event) -> bool:
    return bool(event["event"] == "trained")


def _prompt(event: Event) -> tuple[int, int]:
    epoch, position = event["prompt"]
    return int(epoch), int(position)


def _named(prompt: tuple[int, int]) -> str:
    return f"e{prompt[0]}-p{prompt[1]}"
