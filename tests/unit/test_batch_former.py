"""When a step may start, with which tickets, and which processes it waits for."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from asyncrl.master.batch import BatchFormer, NotReady, Ready
from asyncrl.protocol.manager import TicketView
from asyncrl.protocol.trajectories import Locator, TrajectoryMeta
from asyncrl.protocol.versions import WeightVersion


class Books:
    """Stored trajectories and the ledger's list of tickets. A letter names each ticket; `a` is the first prompt."""

    def __init__(self, *, batch_size: int = 2, eta: int = 1, **options: Any) -> None:
        self.former = BatchFormer(batch_size=batch_size, max_head_offpolicyness=eta, **options)
        self.eta = eta
        self.deadlines: dict[str, int] = {}
        self.stored: list[str] = []
        self.listed: list[str] = []
        self.exhausted = False
        self.version = 0
        self.now = 0.0

    def run(self, names: str, deadline: int) -> None:
        for name in names:
            self.deadlines[name] = deadline
            self.listed.append(name)

    def store(self, names: str) -> None:
        self.stored += [name for name in names if name not in self.stored]

    def forget(self, names: str) -> None:
        """Remove tickets from the ledger's list: the manager knows that they were consumed, rejected or revoked."""
        self.listed = [name for name in self.listed if name not in names]

    def view(self, name: str) -> TicketView:
        return TicketView(
            ticket_id=name,
            locator=Locator(0, ord(name) - ord("a")),
            deadline=self.deadlines[name],
            state="running",
            worker=f"rollout_worker/{ord(name) % 2}",
        )

    def meta(self, name: str) -> TrajectoryMeta:
        version = WeightVersion(1, self.deadlines[name] - self.eta).pack()
        return TrajectoryMeta(
            ticket_id=name,
            locator=Locator(0, ord(name) - ord("a")),
            attempt=1,
            head=0,
            keys=[],
            seqlens=[2, 2],
            response_lengths=[1, 1],
            rewards=[0.0, 1.0],
            version_start=[version, version],
            version_end=[version, version],
            birth_time=0.0,
        )

    def decide(self) -> Ready | NotReady:
        return self.former.decide(
            stored=[self.meta(name) for name in self.stored],
            live=[self.view(name) for name in self.listed],
            version=self.version,
            exhausted=self.exhausted,
            now=self.now,
        )

    def admissible(self) -> str:
        stored = [self.meta(name) for name in self.stored]
        live = [self.view(name) for name in self.listed]
        found = self.former.admissible(stored=stored, live=live, version=self.version)
        return "".join(meta.ticket_id for meta in found)

    def take(self, names: str) -> None:
        assert set(names) <= set(self.admissible())
        self.former.take(self.meta(name) for name in names)

    def ready(self) -> str:
        decision = self.decide()
        assert isinstance(decision, Ready), decision
        return "".join(decision.tickets)

    def waits(self) -> NotReady:
        decision = self.decide()
        assert isinstance(decision, NotReady), decision
        return decision


def test_waits_while_too_few_are_stored() -> None:
    books = Books()
    books.run("abcd", 1)
    books.store("c")
    waits = books.waits()
    assert waits.reason.startswith("step 0 waits for data: 1 of 2 prompts are stored")
    assert waits.stragglers == ("a",)
    assert waits.on == "rollout_worker/1"
    assert waits.revoke == ()


def test_waits_for_the_manager_when_nothing_runs_or_is_stored() -> None:
    waits = Books().waits()
    assert (waits.on, waits.stragglers) == ("gserver manager", ())


def test_the_earliest_deadlines_in_canonical_order() -> None:
    books = Books()
    books.run("cd", 1)
    books.run("ab", 2)
    books.version = 1
    books.store("badc")
    assert books.ready() == "cd"


def test_equal_deadlines_are_ordered_by_prompt_not_by_arrival() -> None:
    books = Books()
    books.run("abcd", 1)
    books.store("dcba")
    assert books.ready() == "ab"


def test_a_batch_is_in_the_order_of_its_prompts_and_not_of_its_deadlines() -> None:
    books = Books()
    books.run("c", 1)
    books.run("ab", 2)
    books.version = 1
    books.store("cab")
    assert books.ready() == "ac"


def test_waits_for_a_straggler_that_would_be_too_old() -> None:
    """At step 0 two of four tickets with deadline 1 are stored; the others still fit into step 1, which must wait for them."""
    books = Books()
    books.run("abcd", 1)
    books.store("cd")
    assert books.ready() == "cd"
    books.stored, books.version = [], 1
    books.forget("cd")
    books.run("ef", 2)
    books.store("ef")
    waits = books.waits()
    assert waits.stragglers == ("a", "b")
    assert waits.reason == "step 1 waits for rollouts that would otherwise exceed the allowed off-policyness (a, b)"
    assert waits.on == "rollout_worker/1, rollout_worker/0"
    books.store("b")
    assert books.waits().stragglers == ("a",)
    books.store("a")
    assert books.ready() == "ab"


def test_the_rule_checks_every_deadline() -> None:
    """B = 1, eta = 2: besides the batch, two unstored tickets have deadline 1. Step 0 would leave one step for both."""
    books = Books(batch_size=1, eta=2)
    books.run("ab", 1)
    books.run("c", 2)
    books.store("c")
    assert books.waits().stragglers == ("a", "b")
    books.store("b")
    assert books.ready() == "b"


def test_with_eta_0_a_step_waits_for_the_whole_batch() -> None:
    books = Books(eta=0)
    books.run("ab", 0)
    books.store("b")
    assert books.waits().stragglers == ("a",)
    books.store("a")
    assert books.ready() == "ab"


def test_a_step_does_not_wait_for_a_rejected_straggler() -> None:
    books = Books()
    books.run("ab", 1)
    books.run("cd", 2)
    books.version = 1
    books.store("cd")
    assert books.waits().stragglers == ("a", "b")
    books.forget("a")
    assert books.waits().stragglers == ("b",)
    books.forget("b")
    assert books.ready() == "cd"


# ------------------------------------------------------------------------------------- groups taken before the rest arrives


def test_with_eta_0_every_stored_group_is_admissible() -> None:
    books = Books(batch_size=3, eta=0)
    books.run("abc", 0)
    assert books.admissible() == ""
    books.store("c")
    books.take("c")
    assert books.admissible() == ""
    assert books.waits().stragglers == ("a", "b")
    assert books.waits().reason.startswith("step 0 waits for data: 1 of 3 prompts are stored")
    books.store("ab")
    books.take("a")
    assert books.ready() == "abc"


def test_a_group_is_not_admissible_if_the_running_ones_need_the_batch() -> None:
    """Step 1 must train a and b, whose deadline it is. When b is rejected, e or f may take its place; which one makes no
    difference to a."""
    books = Books()
    books.run("ab", 1)
    books.run("ef", 2)
    books.version = 1
    books.store("fe")
    assert books.admissible() == ""
    books.store("a")
    assert books.admissible() == "a"
    books.take("a")
    books.forget("b")
    assert books.admissible() == "e"
    books.take("e")
    assert books.admissible() == ""
    assert books.ready() == "ae"


def test_the_rule_for_taking_checks_every_deadline() -> None:
    """B = 1, eta = 2: a and b fill the steps 0 and 1. Taking c would leave step 1 for both."""
    books = Books(batch_size=1, eta=2)
    books.run("ab", 1)
    books.run("c", 2)
    books.store("c")
    assert books.admissible() == ""
    books.store("b")
    assert books.admissible() == "b"


def test_late_trajectories_are_given_up_and_taken_ones_are_kept() -> None:
    """Step 0 has room for two. A third trajectory, of a worker that counted as lost, arrives after one has been taken."""
    books = Books(eta=0)
    books.run("ab", 0)
    books.store("b")
    books.take("b")
    books.run("c", 0)
    books.store("c")
    waits = books.waits()
    assert (waits.drop, waits.revoke) == ((), ("a",))
    books.forget("a")
    assert books.ready() == "bc"


def test_other_tickets_of_a_taken_prompt_are_void() -> None:
    books = Books(eta=0)
    books.run("ab", 0)
    books.store("a")
    books.take("a")
    again = replace(books.view("a"), ticket_id="again")
    decision = books.former.decide(
        stored=[books.meta("a"), books.meta("b")],
        live=[again, books.view("b")],
        version=0,
        exhausted=False,
        now=0.0,
    )
    assert decision == Ready(("a", "b"))


def test_taken_groups_alone_may_be_the_last_batch() -> None:
    books = Books(batch_size=3, eta=0)
    books.run("abc", 0)
    books.store("ab")
    books.take("ab")
    books.forget("c")
    books.exhausted = True
    assert books.decide() == Ready(("a", "b"), partial=True)


# ------------------------------------------------------------------------------------------------------- end of the run


def test_the_last_batch_is_partial() -> None:
    books = Books(batch_size=4)
    books.run("abc", 1)
    books.store("ca")
    books.exhausted = True
    assert books.waits().stragglers == ("b",)
    books.store("b")
    decision = books.decide()
    assert decision == Ready(("a", "b", "c"), partial=True)
    books.stored = []
    assert isinstance(books.decide(), NotReady)  # the ledger has not heard that they are consumed, and still lists them
    books.forget("abc")
    assert books.decide() == Ready(())


def test_the_prompts_are_not_exhausted_while_a_revoked_one_may_return() -> None:
    """The ledger at hand says exhausted, but is older than the revocation of a ticket, whose prompt may be issued again."""
    books = Books(batch_size=2, overdue_wait_s=10.0)
    books.run("ab", 1)
    books.store("a")
    books.exhausted = True
    books.waits()
    books.now = 10.0
    assert books.waits().revoke == ("b",)
    assert books.waits().revoke == ()
    books.forget("b")
    assert books.ready() == "a"  # by now the ledger itself lists no running ticket


# --------------------------------------------------------------------------------------------------------------- overdue


def straggling(**options: Any) -> Books:
    books = Books(**options)
    books.run("ab", 1)
    books.run("cd", 2)
    books.version = 1
    books.store("bcd")
    return books


def test_waits_for_a_straggler_at_most_overdue_wait_s() -> None:
    books = straggling(overdue_wait_s=30.0)
    assert books.waits().revoke == ()
    books.now = 29.9
    assert books.waits().revoke == ()
    books.now = 30.0
    waits = books.waits()
    assert (waits.revoke, waits.drop, waits.stragglers) == (("a",), (), ("a",))
    assert books.ready() == "bc"  # although the ledger still lists a


def test_drop_revokes_a_straggler_at_once() -> None:
    books = straggling(overdue="drop", overdue_wait_s=30.0)
    assert books.waits().revoke == ("a",)
    assert books.ready() == "bc"


def test_drop_waits_for_a_ledger_that_lists_the_stored_tickets() -> None:
    """An older ledger may list a straggler that has ended since then."""
    books = straggling(overdue="drop", overdue_wait_s=30.0)
    books.forget("d")
    waits = books.waits()
    assert (waits.stragglers, waits.revoke) == (("a",), ())
    books.listed.append("d")
    assert books.waits().revoke == ("a",)


def test_train_does_not_wait_for_deadlines() -> None:
    books = straggling(overdue="train")
    assert books.ready() == "bc"
    books.version, books.stored = 3, ["a", "d"]
    assert books.ready() == "ad"  # older than eta, as the policy allows


def test_a_revoked_straggler_that_still_arrives_is_trained() -> None:
    books = straggling(overdue_wait_s=0.0)
    assert books.waits().revoke == ("a",)
    books.store("a")
    assert books.ready() == "ab"


def test_nothing_is_overdue_while_data_arrives() -> None:
    """Generation is slow, not stuck. If too few are stored, a rollout is overdue only after a standstill."""
    books = Books(batch_size=4, eta=0, overdue_wait_s=30.0)
    books.run("abcd", 0)
    for name in "abc":
        books.store(name)
        assert books.waits().revoke == ()
        books.now += 29.0
        assert books.waits().revoke == ()
    books.now += 1.0
    assert books.waits().revoke == ("d",)


def test_hung_rollouts_become_overdue_before_their_deadline() -> None:
    """Hung rollouts with later deadlines keep the gate closed. Without a limit the run would never move again."""
    books = Books(overdue_wait_s=30.0)
    books.run("abcd", 1)
    books.store("d")
    books.waits()
    books.now = 31.0
    assert books.waits().revoke == ("a",)


# ---------------------------------------------------------------------------------------------------------------- faults


def test_tickets_past_their_deadline_are_revoked_and_stored_ones_dropped() -> None:
    books = Books()
    books.run("ab", 0)
    books.run("cd", 2)
    books.version = 1
    books.store("acd")
    waits = books.waits()
    assert waits.revoke == ("a", "b")
    assert waits.drop == ("a",)
    books.stored.remove("a")
    assert books.ready() == "cd"


def test_more_tickets_than_fit_before_their_deadline() -> None:
    """A worker presumed lost sent a trajectory: three tickets, two places. The running ticket is revoked, not a stored one."""
    books = Books()
    books.run("abc", 1)
    books.version = 1
    books.store("ac")
    assert books.waits().revoke == ("b",)
    assert books.ready() == "ac"
    books = Books()
    books.run("abc", 1)
    books.version = 1
    books.store("abc")
    assert books.waits().drop == ("c",)


def test_a_ledger_older_than_the_stored_tickets_revokes_nothing() -> None:
    """The old ledger still lists `b`, which has been rejected since. `c` took the place of `b` and is already stored."""
    books = Books(batch_size=1)
    books.run("ab", 1)
    books.store("a")
    books.deadlines["c"] = 1
    books.store("c")
    waits = books.waits()
    assert (waits.reason, waits.revoke) == ("step 0 waits for a newer ledger", ())
    books.forget("b")
    books.listed.append("c")
    assert books.ready() == "a"


def test_only_stragglers_that_block_the_step_are_revoked() -> None:
    books = Books(batch_size=2, eta=2, overdue="drop")
    books.run("abc", 1)
    books.run("de", 2)
    books.store("de")
    waits = books.waits()
    assert (waits.stragglers, waits.revoke) == (("a", "b", "c"), ("a",))
    assert books.ready() == "de"


def test_a_stored_ticket_that_the_ledger_does_not_know_is_trained() -> None:
    """The deadline of such a ticket follows from the version of its oldest token. Other tickets of its prompt do not count."""
    books = Books()
    books.run("ab", 1)
    books.store("ab")
    books.listed = []
    other = TicketView(ticket_id="a2", locator=Locator(0, 0), deadline=1, state="running", worker="rollout_worker/0")
    decision = books.former.decide(
        stored=[books.meta("a"), books.meta("b")], live=[other], version=1, exhausted=False, now=0.0
    )
    assert decision == Ready(("a", "b"))


def test_a_ticket_that_the_ledger_does_not_know_is_as_old_as_its_oldest_token() -> None:
    books = Books(batch_size=1)
    books.deadlines = {"a": 2, "b": 2}
    old, new = WeightVersion(1, 0).pack(), WeightVersion(1, 1).pack()
    mixed = replace(books.meta("b"), version_start=[new, old])
    decision = books.former.decide(stored=[books.meta("a"), mixed], live=[], version=1, exhausted=False, now=0.0)
    assert decision == Ready(("b",))


def test_long_lists_of_stragglers_are_cut_in_the_reason() -> None:
    books = Books(batch_size=9, eta=0)
    books.run("abcdefghi", 0)
    waits = books.waits()
    assert waits.reason.endswith("(a, b, c, d, e and 4 more)")
    assert len(waits.stragglers) == 9


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"eta": -1}, "max_head_offpolicyness"),
        ({"overdue": "later"}, "overdue"),
        ({"overdue_wait_s": -1.0}, "overdue_wait_s"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Books(**options)


def test_full_lag_waits_until_generation_is_as_far_ahead_as_allowed() -> None:
    books = Books(batch_size=2, eta=1, wait_for_full_lag=True)
    books.run("abcd", deadline=1)
    books.store("abc")
    assert "3 of 4 prompts are stored" in books.waits().reason
    books.store("d")
    assert books.ready() == "ab"


def test_full_lag_does_not_wait_after_the_last_prompt() -> None:
    books = Books(batch_size=2, eta=1, wait_for_full_lag=True)
    books.run("abc", deadline=1)
    books.store("abc")
    books.exhausted = True
    assert books.ready() == "ab"
    books.stored.remove("a"), books.stored.remove("b")
    books.forget("ab")
    books.version = 1
    assert books.ready() == "c"
