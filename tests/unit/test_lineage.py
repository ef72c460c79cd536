"""The lineage of the newest weights, and the problems that the audit finds in journals."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from asyncrl.cli import main as cli
from asyncrl.weights.lineage import Audit, attempts_of, audit_of, lineage_of, lineages_of

Event = dict[str, Any]


def begun(attempt: int, parent: tuple[int, int] | None = None, **fields: Any) -> Event:
    about = {"mode": "async", "num_prompts": 8, "num_epochs": 1, "max_head_offpolicyness": 1}
    return {"event": "begun", "attempt": attempt, "from": parent, **about, **fields}


def stored(attempt: int, *positions: int) -> list[Event]:
    return [{"event": "stored", "attempt": attempt, "ticket": f"a{attempt}-{p}", "prompt": [0, p]} for p in positions]


def trained(attempt: int, step: int, *positions: int, version: int | None = None) -> Event:
    made_by = step - 1 if version is None else version
    groups = [
        {"ticket": f"a{attempt}-{p}", "prompt": [0, p], "head": 0, "versions": [[made_by, made_by]]} for p in positions
    ]
    return {"event": "trained", "attempt": attempt, "step": step, "groups": groups}


def rejected(attempt: int, position: int, reason: str = "too_hard") -> Event:
    return {"event": "rejected", "attempt": attempt, "prompt": [0, position], "reason": reason}


def snapshot(attempt: int, step: int) -> Event:
    return {"event": "snapshot", "attempt": attempt, "step": step}


def ended(attempt: int, done: int, of: int = 8) -> Event:
    return {"event": "ended", "attempt": attempt, "step": 9, "done": done, "of": of}


def of_tickets(*tickets: str) -> tuple[list[Event], list[Event]]:
    """Return the events of admitting and of pushing tickets such as `a1-0`."""
    admitted = [{"event": "admitted", "ticket": name, "prompt": [0, int(name[3:])]} for name in tickets]
    return admitted, [{"event": "pushed", "ticket": name, "verdict": "stored"} for name in tickets]


# Step 2 and the rejection of prompt 4 come after the checkpoint of step 1, although that rejection precedes the end of step 2
INTERRUPTED = [
    begun(1),
    *stored(1, 0, 1),
    trained(1, 1, 0, 1),
    rejected(1, 2),
    snapshot(1, 1),
    *stored(1, 3, 5),
    rejected(1, 4),
    trained(1, 2, 3, 5),
    begun(2, (1, 1)),
    *stored(2, 3, 4),
    trained(2, 2, 3, 4),
    *stored(2, 5, 6),
    rejected(2, 7),
    trained(2, 3, 5, 6),
    ended(2, 8),
]
WAYS = of_tickets("a1-0", "a1-1", "a1-3", "a1-5", "a2-3", "a2-4", "a2-5", "a2-6")


def audit_events(events: list[Event], ways: tuple[list[Event], list[Event]] = WAYS) -> Audit:
    return audit_of("run", attempts_of(events), *ways)


class TestLineage:
    def test_a_chain_of_attempts_is_one_lineage(self):
        lineage = lineage_of(attempts_of([begun(1), begun(2, (1, 6)), begun(3, (1, 6)), begun(4, (3, 8))]))
        assert lineage is not None
        assert [(s.attempt, s.first, s.last) for s in lineage.stretches] == [(1, 1, 6), (3, 7, 8), (4, 9, None)]
        assert [step for step in range(1, 12) if lineage.has(1, step)] == [1, 2, 3, 4, 5, 6]
        assert [lineage.has(attempt, 8) for attempt in (1, 2, 3, 4)] == [False, False, True, False]
        assert lineage.has(4, 1000)
        assert [lineage.has_weights(4, step) for step in (7, 8, 9)] == [False, True, True]
        assert lineage.newest == 4

    def test_each_attempt_without_a_parent_begins_a_lineage(self):
        found = lineages_of(attempts_of([begun(1), begun(2, (1, 6)), begun(3), begun(4, (3, 2))]))
        assert [[s.attempt for s in lineage.stretches] for lineage in found] == [[1, 2], [3, 4]]

    def test_no_attempts_have_no_lineage(self):
        assert lineage_of([]) is None
        assert lineages_of([]) == []


class TestAudit:
    def test_an_interrupted_run_is_clean(self):
        found = audit_events(INTERRUPTED)
        assert found.problems == []
        assert (found.steps, found.trained, found.rejected, found.complete) == (3, 6, {"too_hard": 2}, True)
        assert (found.voided_steps, found.voided_prompts) == (1, 3)
        assert (found.unchecked, found.unconfirmed) == ([], 0)

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            (lambda e: e.insert(-1, trained(2, 4, 3)), "prompts trained twice: e0-p3 (step 4)"),
            (lambda e: e.insert(-1, rejected(2, 3)), "prompts trained and rejected: e0-p3"),
            (lambda e: e.insert(-1, rejected(2, 7)), "prompts rejected twice: e0-p7"),
            (lambda e: e.remove(rejected(2, 7)), "prompts neither trained nor rejected: 1"),
            (lambda e: e.remove(trained(2, 2, 3, 4)), "steps do not follow each other: 1 -> 3"),
            (lambda e: e.remove(stored(2, 6)[0]), "trained groups not stored once in their attempt: a2-6 (0)"),
            (lambda e: e.insert(-2, stored(2, 6)[0]), "trained groups not stored once in their attempt: a2-6 (2)"),
            (lambda e: e.insert(-1, rejected(2, 99, "")), "prompts rejected without a reason: e0-p99"),
            (
                lambda e: e.__setitem__(e.index(rejected(2, 7)), rejected(2, 7, "max_issues")),
                "prompts rejected through the infrastructure and not their task: e0-p7 (max_issues)",
            ),
        ],
    )
    def test_each_problem_is_found(self, change, problem):
        events = list(INTERRUPTED)
        change(events)
        found = audit_events(events)
        assert problem in found.problems

    def test_a_prompt_counted_as_done_but_trained_after_the_checkpoint_is_found(self):
        """The checkpoint counts prompt 3 as done, but only the discarded step 2 trained it, so the lineage never trains it."""
        events = [event for event in INTERRUPTED if event not in (trained(2, 2, 3, 4), *stored(2, 3))]
        events.insert(events.index(stored(2, 4)[0]) + 1, trained(2, 2, 4))
        assert audit_events(events).problems == ["prompts neither trained nor rejected: 1"]

    def test_groups_beyond_the_bound_on_offpolicyness_are_found(self):
        events = [begun(1), *stored(1, 0, 1), trained(1, 1, 0), trained(1, 2, 1, version=0), snapshot(1, 2)]
        assert audit_events(events).problems == []
        events = [begun(1, max_head_offpolicyness=0), *events[1:]]
        assert audit_events(events).problems == ["groups more than 0 versions old: a1-1 (1)"]
        events = [begun(1, max_head_offpolicyness=None), *events[1:]]
        assert audit_events(events).problems == []  # with overdue=train there is no bound
        events = [begun(1), *stored(1, 0), trained(1, 1, 0, version=1)]
        assert audit_events(events).problems == ["groups sampled from a version that did not exist yet: a1-0"]

    def test_a_group_is_as_old_as_its_oldest_token(self):
        mixed = trained(1, 2, 1)
        mixed["groups"][0]["versions"] = [[1, 1], [0, 1]]
        events = [begun(1, max_head_offpolicyness=0), *stored(1, 0, 1), trained(1, 1, 0), mixed]
        assert audit_events(events).problems == ["groups more than 0 versions old: a1-1 (1)"]

    def test_a_checkpoint_without_a_snapshot_ends_with_its_step(self):
        events = [
            begun(1),
            *stored(1, 0, 1, 3),
            trained(1, 1, 0, 1),
            trained(1, 2, 3),
            begun(2, (1, 1)),
            *stored(2, 3, 4),
            trained(2, 2, 3, 4),
            ended(2, 4, of=4),
        ]
        found = audit_events(events)
        assert (found.problems, found.steps, found.trained, found.voided_steps) == ([], 2, 4, 1)

    def test_the_admission_and_the_push_of_each_trained_group_are_checked(self):
        admitted, pushed = WAYS
        assert audit_events(INTERRUPTED, ([], [])).unchecked == [
            "admissions: there is no journal of the gserver manager",
            "pushes: there is no journal of a rollout worker",
        ]
        (problem,) = audit_events(INTERRUPTED, (admitted[:-1], pushed)).problems
        assert problem == "trained groups that were never admitted: a2-6"
        adopted = {**admitted[-1], "event": "adopted"}
        assert audit_events(INTERRUPTED, ([*admitted[:-1], adopted], pushed)).problems == []
        assert audit_events(INTERRUPTED, ([*admitted, adopted, adopted], pushed)).problems == []
        (problem,) = audit_events(INTERRUPTED, ([*admitted, admitted[-1]], pushed)).problems
        assert problem == "trained groups admitted more than once: a2-6"
        (problem,) = audit_events(INTERRUPTED, ([*admitted[:-1], {**admitted[-1], "prompt": [0, 9]}], pushed)).problems
        assert problem == "groups admitted for another prompt: a2-6"
        (problem,) = audit_events(INTERRUPTED, (admitted, [*pushed, pushed[-1]])).problems
        assert problem == "trained groups stored by more than one push: a2-6"
        (problem,) = audit_events(
            INTERRUPTED, (admitted, [*pushed[:-1], {**pushed[-1], "verdict": "refused"}])
        ).problems
        assert problem == "trained groups that were refused: a2-6"
        killed = audit_events(INTERRUPTED, (admitted, pushed[:-1]))  # the worker was killed before it recorded the push
        assert (killed.problems, killed.unconfirmed) == ([], 1)

    def test_mode_sync_has_no_admissions(self):
        events = [begun(1, mode="sync"), *stored(1, 0), trained(1, 1, 0)]
        found = audit_events(events, ([], []))
        assert (found.problems, found.unchecked, found.complete) == ([], [], False)


def test_the_command(tmp_path, capsys):
    run_dir = tmp_path / "runs" / "e" / "t"
    (run_dir / "journal").mkdir(parents=True)
    assert cli.main(["audit", str(run_dir)]) == 1
    assert "no run has begun there" in capsys.readouterr().out.replace("\n", " ")

    def write(events: list[Event]) -> None:
        for name, lines in (("master", events), ("gserver_manager", WAYS[0]), ("rollout_worker_0", WAYS[1])):
            content = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
            (run_dir / "journal" / f"{name}.jsonl").write_bytes(content)

    write(INTERRUPTED)
    assert cli.main(["audit", str(run_dir)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{run_dir}: a complete run",
        "lineage   attempt 1 to step 1, then attempt 2 from step 2",
        "trained   6 prompts, in 3 steps",
        "rejected  2 prompts (too_hard: 2)",
        "void      1 steps, 3 prompts: outside this lineage",
        "ok: each of these prompts was trained or rejected once; no problem found",
    ]
    write([*INTERRUPTED[:-1], trained(2, 4, 3)])
    assert cli.main(["audit", str(run_dir), "--json"]) == 1
    told = msgspec.json.decode(capsys.readouterr().out)
    assert told["problems"] == ["prompts trained twice: e0-p3 (step 4)"]
    assert (told["complete"], told["trained"]) == (False, 6)
