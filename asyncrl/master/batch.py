"""When the next train step may start, and with which tickets (pure).

S = the B stored tickets with the earliest deadlines. Step v starts only if for every d in v..v+eta

    |{live tickets with deadline <= d} without S| <= (d - v) * B

The condition means: all live tickets that are not in this batch still fit into the steps before their deadlines. If it is not
met, the step waits for the rollouts that NotReady names as stragglers. Without faults that wait always ends, because rollouts
finish. Together with the manager's gate (asyncrl/manager/admission.py) the condition keeps the head off-policyness of every
trained group at eta or below, and without faults no group is dropped and short responses are not favoured.

With every policy, a rollout that holds up a batch for longer than `overdue_wait_s` is revoked, and its prompt is issued again. With
policy `drop`, as many rollouts as exceed the condition's limit are revoked without this wait. With policy `train` a step never
waits for the condition, so groups older than eta may be trained.

With train.streaming the tickets of a step are taken one after another, before the batch is complete. Let C be the taken ones, at
most B. `admissible` returns stored tickets that may be taken so that for every d in v..v+eta

    |{live tickets with deadline <= d} without C| <= (B - |C|) + (d - v) * B

This is the condition for all live tickets still to fit into the rest of step v and the steps after it, in the order of their
deadlines. So a batch that begins with C can always be completed, and every completion that `decide` returns keeps the rule above.
A new ticket cannot break the condition: the gate grants it with a deadline d only while all live tickets, C included, number at
most (d - v + 1) * B. A ticket with deadline v can always be taken, because both sides fall by one for every d. So with eta = 0
every stored ticket is admissible.

For experiments about staleness (`wait_for_full_lag`) a step also waits until generation is as far ahead as the gate permits:
until (1 + eta) * B groups are stored. From then on every group is eta versions old, on a machine of any speed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.protocol.manager import TicketView
from asyncrl.protocol.trajectories import Locator, TrajectoryMeta
from asyncrl.protocol.versions import WeightVersion

POLICIES = ("wait", "drop", "train")
_MAX_NAMED = 5  # stragglers that a reason names


@dataclass(frozen=True)
class Ready:
    """Start the step with these tickets, in canonical order (by prompt). Empty: no trajectory is left to train."""

    tickets: tuple[str, ...]
    partial: bool = False  # the run's last batch, with fewer tickets than batch_size


@dataclass(frozen=True)
class NotReady:
    """Wait. The next report to the manager contains `revoke`. The master removes the groups of the tickets in `drop` from its
    store."""

    reason: str
    on: str  # the processes that the step waits for
    stragglers: tuple[str, ...] = ()  # running tickets that hold up the step
    revoke: tuple[str, ...] = ()  # tickets to take back; their prompts are issued again
    drop: tuple[str, ...] = ()  # the stored tickets among `revoke`: too old to be trained


@dataclass(frozen=True)
class _Live:
    """A ticket whose trajectory is stored at the master, or whose rollout is still running."""

    ticket_id: str
    locator: Locator
    deadline: int
    worker: str  # "": the ticket is stored


class BatchFormer:
    """Forms a batch from the stored and live tickets, or names the tickets to wait for.

    Its only state: since when it has waited for each ticket, how many tickets were stored at the last decision, the tickets that
    it has put into a batch or revoked while the manager's ledger still lists them as live, and those taken for the next batch.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        max_head_offpolicyness: int,
        overdue: str = "wait",
        overdue_wait_s: float = 600.0,
        wait_for_full_lag: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"train.batch_size is {batch_size}; use at least 1 prompt a step")
        if max_head_offpolicyness < 0:
            raise ValueError(f"manager.max_head_offpolicyness is {max_head_offpolicyness}; use 0 (synchronous) or more")
        if overdue not in POLICIES:
            raise ValueError(f"manager.overdue is {overdue!r}; use one of {', '.join(POLICIES)}")
        if overdue_wait_s < 0:
            raise ValueError(f"manager.overdue_wait_s is {overdue_wait_s}; use a number of seconds, 0 or more")
        self._batch_size = batch_size
        self._eta = max_head_offpolicyness
        self._overdue = overdue
        self._limit_s = overdue_wait_s
        self._least_stored = batch_size * (1 + max_head_offpolicyness if wait_for_full_lag else 1)
        self._gone: set[str] = set()  # tickets in an earlier batch or taken for the next one, or revoked
        self._taken: dict[str, Locator] = {}  # the first tickets of the next batch
        self._held_since: dict[str, float] = {}
        self._num_stored = -1

    def decide(
        self,
        *,
        stored: Iterable[TrajectoryMeta],
        live: Sequence[TicketView],
        version: int,
        exhausted: bool,
        now: float,
        settled: bool = True,
    ) -> Ready | NotReady:
        """Return the next batch, or the reason to wait. stored: the trajectories that the master holds, without those in a step.
        From the manager's newest ledger: live tickets; exhausted: no further ticket will come; settled: a restarted manager has
        heard from all rollout workers."""
        if not settled:
            return NotReady(
                f"step {version} waits until a new manager has heard from all rollout workers", "gserver manager"
            )
        metas = self._not_taken(stored)
        tickets = self._merge(metas, live)
        # A ledger older than the store may still list rejected tickets beside the tickets that replaced them.
        current = metas.keys() <= {view.ticket_id for view in live}
        held = [ticket for ticket in tickets if not ticket.worker]
        running = [ticket for ticket in tickets if ticket.worker]
        if excess := self._excess(tickets, version):
            if not current:
                return NotReady(f"step {version} waits for a newer ledger", "gserver manager")
            return self._give_up(excess, version)
        if len(held) + len(self._taken) < self._least_stored:
            listed = {view.ticket_id for view in live}
            pending = running or (listed & (self._gone - self._taken.keys()))
            if pending or not exhausted:
                return self._too_few(held, running, version, now)
            if len(held) + len(self._taken) < self._batch_size:
                return self._ready(held, partial=bool(held or self._taken))
        batch = held[: self._batch_size - len(self._taken)]
        stragglers, too_many = self._stragglers(tickets, batch, version)
        if too_many > 0 and self._overdue != "train":
            limit_s = 0.0 if self._overdue == "drop" and current else self._limit_s
            reason = f"step {version} waits for rollouts that would otherwise exceed the allowed off-policyness"
            return self._wait_for(stragglers, reason, now, limit_s, too_many)
        return self._ready(batch, partial=False)

    def admissible(
        self, *, stored: Iterable[TrajectoryMeta], live: Sequence[TicketView], version: int, settled: bool = True
    ) -> list[TrajectoryMeta]:
        """Return the stored trajectories that may be taken for the next batch now, earliest deadline first. See the rule of this
        module; with policy `train` it does not apply. The arguments are those of `decide`."""
        metas = self._not_taken(stored)
        tickets = self._merge(metas, live)
        if not settled or self._excess(tickets, version):
            return []
        room = self._batch_size - len(self._taken)
        slack = {
            deadline: room
            + (deadline - version) * self._batch_size
            - sum(ticket.deadline <= deadline for ticket in tickets)
            for deadline in range(version, version + self._eta + 1)
        }
        found: list[TrajectoryMeta] = []
        for ticket in (ticket for ticket in tickets if not ticket.worker):
            sooner = [deadline for deadline in slack if deadline < ticket.deadline]
            late = self._overdue != "train" and any(slack[deadline] < 1 for deadline in sooner)
            if late or len(found) == room:  # then the same is true of each ticket with a later deadline
                break
            for deadline in sooner:
                slack[deadline] -= 1
            found.append(metas[ticket.ticket_id])
        return found

    def take(self, groups: Iterable[TrajectoryMeta]) -> None:
        """Take admissible trajectories: the next batch contains them."""
        for meta in groups:
            self._taken[meta.ticket_id] = meta.locator
            self._gone.add(meta.ticket_id)

    # ------------------------------------------------------------------------------------ stored and live tickets

    def _not_taken(self, stored: Iterable[TrajectoryMeta]) -> dict[str, TrajectoryMeta]:
        return {meta.ticket_id: meta for meta in stored if meta.ticket_id not in self._taken}

    def _merge(self, stored: Mapping[str, TrajectoryMeta], live: Sequence[TicketView]) -> list[_Live]:
        """Return the stored tickets and the running ones, earliest deadline first. A ticket that the master has stored counts as
        stored, whatever the ledger says, and running tickets of the same prompt are left out."""
        views = {view.ticket_id: view for view in live}
        self._gone &= views.keys()  # forget the tickets that the ledger no longer lists
        self._gone -= stored.keys()  # revoked, but the trajectory has arrived: it counts as stored
        # A prompt's other tickets are void
        answered = {meta.locator for meta in stored.values()}.union(self._taken.values())
        tickets = [
            _Live(view.ticket_id, view.locator, view.deadline, view.worker or "unknown")
            for view in live
            if view.locator not in answered and view.ticket_id not in self._gone
        ]
        for ticket_id, meta in stored.items():
            view = views.get(ticket_id)
            deadline = view.deadline if view is not None else self._oldest(meta) + self._eta
            tickets.append(_Live(ticket_id, meta.locator, deadline, ""))
        return sorted(tickets, key=lambda ticket: (ticket.deadline, ticket.locator, ticket.ticket_id))

    @staticmethod
    def _oldest(meta: TrajectoryMeta) -> int:
        return WeightVersion.unpack(min(meta.version_start)).version

    # ---------------------------------------------------------------------------------------------------- the rule

    def _stragglers(self, tickets: Sequence[_Live], batch: Sequence[_Live], version: int) -> tuple[list[_Live], int]:
        """Check the rule of this module for each d. For the first d at which more tickets are due than it allows, return the
        running ones among them, and by how many they exceed the limit. ([], 0): the rule holds."""
        chosen = {ticket.ticket_id for ticket in batch}
        rest = [ticket for ticket in tickets if ticket.ticket_id not in chosen]
        for deadline in range(version, version + self._eta + 1):
            due = [ticket for ticket in rest if ticket.deadline <= deadline]
            too_many = len(due) - (deadline - version) * self._batch_size
            if too_many > 0:
                return [ticket for ticket in due if ticket.worker], too_many
        return [], 0

    def _excess(self, tickets: Sequence[_Live], version: int) -> list[_Live]:
        """Return the tickets to give up because not all can be trained in time, even if every rollout finished now.

        Only faults cause an excess, for example when the trajectory of a worker that counted as lost arrives after all. The result
        includes every ticket with a passed deadline. Of the others, running tickets are given up before stored ones. With policy
        `train` no ticket is given up.
        """
        if self._overdue == "train":
            return []
        excess: list[_Live] = [ticket for ticket in tickets if ticket.deadline < version]
        kept = [ticket for ticket in tickets if ticket.deadline >= version]
        for deadline in range(version, version + self._eta + 1):
            due = [ticket for ticket in kept if ticket.deadline <= deadline]
            over = len(due) + len(self._taken) - (deadline - version + 1) * self._batch_size
            if over > 0:
                out = sorted(reversed(due), key=lambda ticket: not ticket.worker)[:over]
                excess += out
                kept = [ticket for ticket in kept if ticket not in out]
        return excess

    # ------------------------------------------------------------------------------------------------- the answers

    def _ready(self, batch: Sequence[_Live], *, partial: bool) -> Ready:
        self._held_since.clear()
        self._num_stored = -1
        locators = {ticket.ticket_id: ticket.locator for ticket in batch} | self._taken
        self._taken = {}
        self._gone.update(locators)
        return Ready(tuple(sorted(locators, key=lambda ticket_id: (locators[ticket_id], ticket_id))), partial)

    def _too_few(self, held: Sequence[_Live], running: Sequence[_Live], version: int, now: float) -> NotReady:
        """Return the answer if too few groups are stored: wait for the rollouts that are due first. The time after which they are
        overdue begins anew whenever the number of stored groups changes."""
        if len(held) != self._num_stored:
            self._num_stored = len(held)
            self._held_since.clear()
        num_stored = len(held) + len(self._taken)
        missing = self._least_stored - num_stored
        reason = f"step {version} waits for data: {num_stored} of {self._least_stored} prompts are stored"
        if not running:
            self._held_since.clear()
            return NotReady(f"{reason}, no rollout is running", "gserver manager")
        return self._wait_for(running[:missing], reason, now, self._limit_s, missing)

    def _wait_for(
        self, stragglers: Sequence[_Live], reason: str, now: float, limit_s: float, too_many: int
    ) -> NotReady:
        """Return the answer to wait for these rollouts. At most too_many of those that have held up the step for limit_s are
        revoked."""
        self._held_since = {ticket.ticket_id: self._held_since.get(ticket.ticket_id, now) for ticket in stragglers}
        late = [ticket for ticket in stragglers if now - self._held_since[ticket.ticket_id] >= limit_s]
        names = tuple(ticket.ticket_id for ticket in stragglers)
        named = ", ".join(names[:_MAX_NAMED]) + (
            f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        )
        revoke = self._revoke(late[:too_many])
        return NotReady(f"{reason} ({named})", _workers(stragglers), names, revoke)

    def _give_up(self, excess: Sequence[_Live], version: int) -> NotReady:
        drop = tuple(ticket.ticket_id for ticket in excess if not ticket.worker)
        reason = f"step {version}: {len(excess)} tickets are too old to be trained in time"
        return NotReady(reason, "gserver manager", (), self._revoke(excess), drop)

    def _revoke(self, tickets: Collection[_Live]) -> tuple[str, ...]:
        revoke = tuple(ticket.ticket_id for ticket in tickets)
        self._gone.update(revoke)
        return revoke


def _workers(tickets: Iterable[_Live]) -> str:
    return ", ".join(dict.fromkeys(ticket.worker for ticket in tickets))
