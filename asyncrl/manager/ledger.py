"""The ledger of live tickets. It neither loses nor duplicates a ticket (pure).

A train ticket is granted while the gate (admission.py) has room and a server of the newest served version has room for a group
(else refused: `no_server`, `servers_full`, or `updating` while other servers still load that version). Other refusals: `not_ready`
(the ledger is not `settled`), `exhausted` (no prompt is left, the master has ordered no further ones, or it has asked to stop) and
`rejections_unseen` (there are too many rejections that the master has not recorded). A ticket is live from its grant until the
master reports it as `consumed`, or until it is rejected, released or lost. The ledger keeps every live ticket.

Every call may arrive twice, late, or from a worker that counts as lost. All fields that the master reports are absolute values, not
changes, except `consumed`: that is a set of tickets, and a repeated ticket has no effect. Time is passed in. The HTTP side
(http.py) calls these methods between two awaits, so each is atomic.

No train ticket is admitted until the master has sent a full report. In a manager that replaces a dead one, a *grace period* follows
the report: it ends once every rollout worker has reported its tickets, at the latest after a lease. Reported tickets are adopted:
they are live again, so no running prompt is issued twice. Until the grace period ends the ledger is not `settled`: no step begins.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.manager import intervals
from asyncrl.manager.admission import EvalItem, EvaluationBook, Gate, PromptCursor
from asyncrl.manager.routing import Server, ServerTable
from asyncrl.protocol.fence import Fence, IncarnationFence
from asyncrl.protocol.manager import (
    TRAININGS_TURN,
    AllocateReply,
    AllocateRequest,
    EvaluateReply,
    EvaluateRequest,
    FinishReply,
    FinishRequest,
    HeartbeatReply,
    HeartbeatRequest,
    LedgerView,
    MasterReport,
    MovedTicket,
    Order,
    RejectedPrompt,
    RolloutResult,
    ScheduleReply,
    ScheduleRequest,
    Ticket,
    TicketView,
)
from asyncrl.protocol.tickets import TicketId, TicketSeal
from asyncrl.protocol.trajectories import Locator
from asyncrl.rewards.outcome import REWARD_LOST

MAX_COUNT = 4096  # tickets of one request
_MAX_REQUESTS = 16  # answers to allocate requests kept per worker; a worker repeats a request only if it got no answer
_MAX_DROPPED = 10_000
_MAX_UNSEEN = 16_384  # rejections that the master has not recorded; at this number train tickets are refused
_MAX_REASONS = 32  # different reasons counted; further ones count as `other`
_MAX_EARLY = 65_536  # at most this many results of rollouts are kept that arrive before the master's first report
_TOKENS_MEMORY = 0.95  # weight of the old value in the running mean of a group's tokens

Journal = Callable[[Literal["admitted", "adopted"], Ticket], None]


class StaleAttemptError(ValueError):
    """A report from an old attempt: the training side has begun a newer one."""


class UnreachedError(ValueError):
    """A report of an attempt or a version that the run cannot have reached."""


@dataclass(slots=True)
class _Live:
    """A live ticket: its rollout is running, or its trajectory waits for its train step."""

    ticket: Ticket
    worker: str
    incarnation: str
    granted_at: float
    server: str  # the server that runs it now
    expected_tokens: float
    state: Literal["running", "stored"] = "running"
    seen_by_master: bool = False  # the master has reported it as stored
    num_missed: int = 0  # consecutive heartbeats that did not list it
    lost_url: str = ""  # URL of the server that the worker reported as lost; empty once the ticket has a server again
    has_moved: bool = False  # its duration must not count for `server`: it has moved there, or was counted already
    moved: bool = False  # moved to another server without a request of the worker; heartbeat replies name that server
    item: EvalItem | None = None  # for an eval ticket


@dataclass
class _Holder:
    """A rollout worker, in its newest incarnation."""

    incarnations: IncarnationFence
    last_seen: float
    last_heartbeat: float
    answers: OrderedDict[str, tuple[str, ...]] = field(default_factory=OrderedDict)  # request id -> its tickets


class Ledger:
    """The ledger that the module docstring describes. `revision` grows with every change of the master's view."""

    def __init__(
        self,
        servers: ServerTable,
        *,
        batch_size: int,
        eta: int,
        max_concurrent: int = 0,
        eval_share: float = 0.25,
        num_heads: int = 1,
        heads_of_worker: Mapping[str, Sequence[int]] | None = None,
        max_issues: int = 3,
        lease_s: float = 15.0,
        heartbeat_s: float = 2.0,
        attempt: int = 1,
        grace_s: float = 0.0,
        num_workers: int = 0,
        nonce: str,
        ticket_key: bytes = b"",
        journal: Journal = lambda event, ticket: None,
    ) -> None:
        """heads_of_worker: the heads (trainer processes that receive trajectories) that a worker may send to; by default all. A
        ticket gets the one of these heads that has fewest live tickets.

        grace_s: maximum length of the grace period, which begins with the first full report. No train ticket is admitted during it.
        It is a lease, the longest time that a previous manager's tickets last; 0 without a previous manager.
        num_workers: number of rollout workers. The grace period ends when this many have reported. 0: not known.
        ticket_key: the run's key (protocol/tickets.py). With it the ledger recognizes tickets that previous managers have granted.
        journal: called for every train ticket that is granted or adopted.
        """
        self.servers = servers
        self.gate = Gate(batch_size, eta, max_concurrent or (1 + eta) * batch_size)
        self.eval_limit = max(1, int(eval_share * self.gate.max_concurrent))
        self._attempts = Fence(attempt)
        self.trained_version = 0
        self.revision = 0
        self.finished = False  # the run is over: workers stop requesting tickets
        self.counters: Counter[tuple[str, str]] = Counter()  # (event, reason) -> count; for metrics
        self.rejected_lengths: Counter[tuple[str, int]] = Counter()  # (reason, power of two) -> responses
        self._reasons: set[str] = set()
        self._release_details: dict[str, str] = {}  # by reason: the newest detail that a worker has sent
        self._all_heads = range(num_heads)
        self._heads_of_worker = dict(heads_of_worker or {})
        self._max_issues = max_issues
        self._lease_s = lease_s
        self._heartbeat_s = heartbeat_s
        self._eval_share = eval_share
        self._grace_s = grace_s
        self._num_workers = num_workers
        self._journal = journal
        self._early_held: dict[str, HeartbeatRequest] = {}  # last one of each worker, until the master has registered
        self._early_results: dict[str, tuple[FinishRequest, RolloutResult]] = {}  # by ticket, until then
        self._nonce = nonce
        self._seal = TicketSeal(ticket_key)
        self._num_train_tickets = 0
        self._num_eval_tickets = 0
        self._last_expire: float | None = None
        self._holders: dict[str, _Holder] = {}
        self._mean_tokens = 0.0
        self._evaluations = EvaluationBook(max_issues)
        self._reset()

    @property
    def attempt(self) -> int:
        """The newest attempt that this ledger knows of."""
        return self._attempts.newest

    def _reset(self) -> None:
        """Reset the state that belongs to one attempt of the training side."""
        self._order: Order | None = None
        self._closed: list[str] | None = None  # tasks; None: the master has not reported yet
        self._cursor: PromptCursor | None = None  # None: the master has not reported yet which prompts are done
        self._live: dict[str, _Live] = {}
        self._by_prompt: dict[Locator, str] = {}
        self._evals: dict[str, _Live] = {}
        self._running_of: dict[str, dict[str, _Live]] = {}  # by worker and ticket; each heartbeat reads it
        self._num_running = 0
        self._live_of_head: Counter[int] = Counter()
        self._rejected: deque[RejectedPrompt] = deque()
        self._num_forgotten = 0  # rejections that the master has recorded
        self._dropped: OrderedDict[str, None] = OrderedDict()  # tickets whose trajectories the master has dropped
        self._stopped = False
        self._grace_until: float | None = None  # None: no grace period, or it is over
        self._heard: set[str] = set()  # workers that have reported their tickets in this grace period

    # ---------------------------------------------------------------------------------------------------- numbers

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def num_stored(self) -> int:
        return len(self._live) - self._num_running

    @property
    def num_evals_running(self) -> int:
        return len(self._evals)

    @property
    def served_version(self) -> int:
        """Newest version served in this attempt; -1: none."""
        return self.servers.served if self.servers.attempt == self.attempt else -1

    @property
    def exhausted(self) -> bool:
        return self._cursor is not None and self._cursor.exhausted

    @property
    def settled(self) -> bool:
        """All live tickets are known: the master has registered, and no grace period is active."""
        return self._cursor is not None and self._grace_until is None

    @property
    def num_again(self) -> int:
        """Prompts that wait to be issued again."""
        return self._cursor.num_again if self._cursor is not None else 0

    def refusal(self, now: float) -> str:
        """Why a train ticket would be refused now; "" if it would be admitted."""
        return self._train_room(now)[1]

    def room(self, now: float) -> int:
        """Upper bound of the number of tickets that would be granted now, for training and evaluations together."""
        served = self.served_version
        evals = 0
        if (
            self._evaluations.num_waiting
            and served >= 0
            and self.servers.has(served)
            and self.servers.room(served) != 0
        ):
            evals = max(0, self.eval_limit - len(self._evals))
        return self._train_room(now)[0] + evals

    def _train_room(self, now: float) -> tuple[int, str]:
        """How many train tickets are admitted now, and the refusal's reason if that is 0."""
        if not self.settled:
            return 0, "not_ready"
        assert self._cursor is not None
        if self._stopped or self._cursor.exhausted:
            return 0, "exhausted"
        if len(self._rejected) >= _MAX_UNSEEN:
            return 0, "rejections_unseen"
        served = self.served_version
        if served < 0:
            return 0, "no_server"
        room, refusal = self.gate.room(
            live=len(self._live), running=self._num_running, trained=self.trained_version, served=served
        )
        if refusal:
            return 0, refusal
        if not self.servers.has(served):
            return 0, "no_server"
        if self.servers.awaits_companions(now):
            return 0, "updating"
        free = self.servers.room(served)
        if free == 0:
            return 0, "servers_full"
        return room if free is None else min(room, free), ""

    # ------------------------------------------------------------------------------------- calls of rollout workers

    def allocate(self, requests: Sequence[AllocateRequest], now: float) -> list[AllocateReply]:
        """Return the answers, in the order of the requests. Tickets are granted in turn, so that no request takes them all.

        A request id that came in an earlier call gets the same tickets again, except those that have ended. No id is twice in one
        call.
        """
        self._expire_grace(now)
        asked: list[tuple[AllocateRequest, _Holder | None, list[Ticket]]] = []  # with the tickets that are granted now
        for request in requests:
            asked.append((request, self._holder(request.worker, request.incarnation, now, touch=False), []))
        turn = deque(
            (request, tickets)
            for request, holder, tickets in asked
            if holder is not None and request.request_id not in holder.answers
        )
        refusal = self.refusal(now)
        while turn:
            request, tickets = turn.popleft()
            live = self._grant_one(request, refusal, now)
            if live is None:
                break
            tickets.append(live.ticket)
            if len(tickets) < request.count:
                turn.append((request, tickets))
            if turn:
                refusal = self.refusal(now)
        replies = []
        for request, holder, tickets in asked:
            if holder is not None and tickets:
                self._remember(holder, request.request_id, tickets)
                replies.append(AllocateReply(tickets=tickets, finished=self.finished))
            else:
                replies.append(self._without_new(request, holder, refusal))
        return replies

    def _without_new(self, request: AllocateRequest, holder: _Holder | None, refusal: str) -> AllocateReply:
        """Answer a request that gets no new tickets. If it came before, it gets the same tickets again, except those that have
        ended since."""
        known = holder.answers.get(request.request_id) if holder is not None else None
        if holder is None or known is None:
            return AllocateReply(
                tickets=[], refusal="superseded" if holder is None else refusal, finished=self.finished
            )
        still = []
        for ticket_id in known:
            live = self._evals.get(ticket_id) or self._live.get(ticket_id)
            if live is not None and (live.ticket.kind == "eval" or live.state == "running"):
                still.append(live.ticket)
        return AllocateReply(tickets=still, refusal="" if still else "expired", finished=self.finished)

    def finish(self, request: FinishRequest, now: float) -> FinishReply:
        """Rollouts have ended. Raises ValueError, before any change, for an outcome that does not fit the ticket's kind."""
        for result in request.results:
            if result.ticket_id in self._live and result.outcome == "evaluated":
                raise ValueError(f"ticket {result.ticket_id} is a train ticket; it cannot end as `evaluated`")
            if result.ticket_id in self._evals and result.outcome == "stored":
                raise ValueError(f"ticket {result.ticket_id} is an eval ticket; it cannot end as `stored`")
        if self._holder(request.worker, request.incarnation, now) is None:  # an old process; its tickets were released
            return FinishReply(unknown=[result.ticket_id for result in request.results])
        unknown = []
        for result in request.results:
            if result.ticket_id in self._evals:
                self._finish_eval(self._evals[result.ticket_id], result)
            elif result.ticket_id in self._live:
                self._finish_train(self._live[result.ticket_id], result, now)
            elif not self._finish_adopted(request, result, now):
                unknown.append(result.ticket_id)
        return FinishReply(unknown=unknown)

    def heartbeat(self, request: HeartbeatRequest, now: float) -> HeartbeatReply:
        """A worker is alive and holds these tickets. A ticket of the worker that two consecutive heartbeats omit is lost."""
        holder = self._holder(request.worker, request.incarnation, now)
        if holder is None:
            return HeartbeatReply(revoked=list(request.held), heartbeat_s=self._interval_s)
        self._expire_grace(now)
        self._learn_attempt(request.held)
        if self._cursor is None and self._grace_s > 0.0:
            self._early_held[request.worker] = request
        held = set(request.held)
        revoked = [
            ticket_id
            for ticket_id in request.held
            if not self._holds(request, ticket_id)
            and not self._adopt(request.worker, request.incarnation, ticket_id, now)
        ]
        repeated = now - holder.last_heartbeat < self._heartbeat_s / 2  # a retry: no new information
        if not repeated:
            holder.last_heartbeat = now
            for live in self._running_at(request.worker):
                live.num_missed = 0 if live.ticket.ticket_id in held else live.num_missed + 1
                if live.num_missed >= 2:
                    self._lose(live, "not_listed")
        if self._grace_until is not None:
            self._note_contact(request.worker)
        moved = self._moved_of(request.worker)
        dead = self.servers.dead_urls()
        return HeartbeatReply(revoked=revoked, moved=moved, dead=dead, heartbeat_s=self._interval_s)

    def schedule(self, request: ScheduleRequest, now: float) -> ScheduleReply:
        """Assign another server to a ticket if its server is lost or has a full queue. Tokens generated so far keep their versions.

        With a full queue the ticket moves to a server with room. Without such a server, the answer names the full one again.
        """
        live = self._live.get(request.ticket_id) or self._evals.get(request.ticket_id)
        if live is None or live.state != "running" or live.worker != request.worker:
            return ScheduleReply(reason="unknown_ticket")
        named = self.servers.servers.get(request.lost_server)
        replaced = named is not None and request.lost_url not in ("", named.url)  # by a new process with the same name
        told_before = live.lost_url != "" and live.lost_url == request.lost_url
        if named is not None and not (replaced or told_before or request.busy):
            self.servers.silent(request.lost_server, f"{request.worker} could not reach the server", now)
        live.lost_url = request.lost_url
        min_version = live.ticket.min_version
        here = self.servers.servers.get(live.server)
        stays = here is not None and self.servers.can_serve(here, min_version)
        # Either the ticket has moved already and this call is a retry, or a new process runs under the old name.
        if here is not None and stays and (live.server != request.lost_server or replaced):
            live.lost_url = ""
            return ScheduleReply(server=here.name, server_url=here.url)
        if request.busy and stays:
            server = self.servers.pick(min_version, exclude=request.lost_server) or here
        else:
            server = self.servers.pick_for_moved(min_version, exclude="" if replaced else request.lost_server)
            if server is None and stays and told_before:  # the old server has passed a health probe since the loss
                server = here
        if server is None and self.servers.training:
            live.has_moved = True  # the seconds of training's turn are not the server's
            return ScheduleReply(reason=TRAININGS_TURN)
        if server is None:
            return ScheduleReply(reason="no_server")
        live.lost_url = ""
        if server is not here:
            self._move(live, server, "busy" if request.busy else "")
        return ScheduleReply(server=server.name, server_url=server.url)

    def move_leavers(self, now: float) -> int:
        """Move groups away from leaving servers that have not finished them in time. Returns the number of moved groups.

        Workers learn of the move in the reply to their next heartbeat. The next call tries again with groups that found no server.
        """
        num_moved = 0
        for leaver in self.servers.overdue_leavers(now):
            for live in [*self._live.values(), *self._evals.values()]:
                if live.server != leaver.name or live.state != "running":
                    continue
                server = self.servers.pick_for_moved(live.ticket.min_version, exclude=leaver.name)
                if server is not None:
                    self._move(live, server, "drained")
                    live.moved = True
                    num_moved += 1
            self.servers.handed_over(leaver.name)
        return num_moved

    def expire(self, now: float) -> None:
        """Release the tickets of workers that have been silent for a lease. Must be called several times a lease.

        A gap between calls of more than half a lease means that this process itself stood still and could not receive heartbeats.
        Every worker then gets at least half a lease to send one.
        """
        if self._last_expire is not None and now - self._last_expire > self._lease_s / 2:
            for holder in self._holders.values():
                holder.last_seen = max(holder.last_seen, now - self._lease_s / 2)
        self._last_expire = now
        self._expire_grace(now)
        for worker, holder in self._holders.items():
            if now - holder.last_seen > self._lease_s:
                for live in self._running_at(worker):
                    self._lose(live, "worker_lost")
                holder.answers.clear()

    # ------------------------------------------------------------------------------------------- calls of the master

    def report(self, report: MasterReport, now: float, *, newest_attempt: int | None = None) -> None:
        """Record the master's report of training. newest_attempt: the newest attempt that the run has begun; None: not known.

        Raises StaleAttemptError if the report's attempt is over, and UnreachedError for an attempt or a version that the run cannot
        have reached: a train step produces one version and consumes at least one ticket. On either error the ledger is unchanged.
        """
        if self._attempts.is_over(report.attempt):
            raise StaleAttemptError(f"attempt {report.attempt} is over; the manager serves attempt {self.attempt}")
        if newest_attempt is not None and report.attempt > max(newest_attempt, self.attempt):
            raise UnreachedError(
                f"attempt is {report.attempt}; the newest that the run has begun is {max(newest_attempt, self.attempt)}"
            )
        highest = self.trained_version + max(1, len(set(report.consumed)))
        if report.attempt == self.attempt and self._cursor is not None and report.trained_version > highest:
            raise UnreachedError(f"trained_version is {report.trained_version}; the highest possible one is {highest}")
        self.begin_attempt(report.attempt)
        if self._cursor is None:
            if not report.full:
                return
            self._register(report, now)
        if report.trained_version < self.trained_version:
            return  # an old report that was delivered late
        if report.trained_version > self.trained_version:
            self.trained_version = report.trained_version
            self.revision += 1
        self._take_order(report.order)
        # A report that was delivered late may name tasks that are open by now
        self._closed = [name for name in report.closed if self._closed is None or name in self._closed]
        for ticket_id in report.consumed:
            self._consume(ticket_id)
        for ticket_id in report.stored:
            self._store(ticket_id, now)
        for ticket_id in set(report.revoke).difference(report.stored):
            self._revoke(ticket_id)
        while self._rejected and self._num_forgotten < report.rejected_seen:
            self._rejected.popleft()
            self._num_forgotten += 1
        if report.stop and not self._stopped:
            self._stopped = True
            self.revision += 1

    def _take_order(self, order: Order | None) -> None:
        """Issue the prompts that the step wants. A report that was delivered late has an earlier order, which is ignored."""
        assert self._cursor is not None
        if order is not None and (self._order is None or self._order.before < order.before):
            self._order, self._cursor.before = order, order.before
            self.revision += 1

    def view(self) -> LedgerView:
        """Return the master's view of the ledger."""
        return LedgerView(
            known=self._cursor is not None,
            settled=self.settled,
            revision=self.revision,
            served_version=self.served_version,
            exhausted=self.exhausted,
            live=[
                TicketView(
                    ticket_id=ticket_id,
                    locator=live.ticket.locator,
                    deadline=live.ticket.deadline,
                    state=live.state,
                    worker=live.worker,
                )
                for ticket_id, live in self._live.items()
            ],
            rejected=list(self._rejected),
            servers=self.servers.views(),
            released={reason: count for (what, reason), count in self.counters.items() if what == "released"},
        )

    def evaluate(self, request: EvaluateRequest) -> EvaluateReply:
        """Start the evaluation, unless it was started before. Returns its progress."""
        self._evaluations.begin(request)
        return self._evaluations.reply(request.eval_id, request.after)

    def begin_attempt(self, attempt: int) -> None:
        """The training side has restarted: discard all live tickets. Without effect if `attempt` is not newer than the ledger's."""
        if not self._attempts.adopt(attempt):
            return
        for live in [*self._live.values(), *self._evals.values()]:
            if live.state == "running":
                self.servers.ended(live.server, live.expected_tokens)
        self.trained_version = 0
        self._evaluations.clear()
        self.servers.begin_attempt(attempt)
        self._reset()
        self.revision += 1

    def _register(self, report: MasterReport, now: float) -> None:
        self._cursor = PromptCursor(report.num_prompts, report.num_epochs, start=report.done_cursor, done=report.done)
        self._num_forgotten = report.rejected_seen
        self.revision += 1
        if self._grace_s > 0.0:
            self._begin_grace(now)

    # ------------------------------------------------------------------------------------------------------- grace

    def _begin_grace(self, now: float) -> None:
        """The master has registered. Adopt the tickets and results that workers have reported; no prompt was issued meanwhile."""
        self._grace_until, self._grace_s = now + self._grace_s, 0.0
        early_held, self._early_held = self._early_held, {}
        early_results, self._early_results = self._early_results, {}
        for heartbeat in early_held.values():
            for ticket_id in heartbeat.held:
                self._adopt(heartbeat.worker, heartbeat.incarnation, ticket_id, now)
        for request, result in early_results.values():
            self._finish_adopted(request, result, now)
        for worker in early_held:
            self._note_contact(worker)

    def _note_contact(self, worker: str) -> None:
        self._heard.add(worker)
        if self._num_workers and len(self._heard) >= self._num_workers:
            self._end_grace()

    def _expire_grace(self, now: float) -> None:
        if self._grace_until is not None and now >= self._grace_until:
            self._end_grace()

    def _end_grace(self) -> None:
        self._grace_until = None
        self._heard.clear()
        self.revision += 1

    def _learn_attempt(self, held: Sequence[str]) -> None:
        """Adopt a newer attempt if workers hold tickets of it. That attempt has begun since this manager's config was written, and
        a previous manager has issued those tickets."""
        unknown = [ticket_id for ticket_id in held if ticket_id not in self._live]
        if not unknown:  # nearly always
            return
        newest = max((name.attempt for name in map(self._seal.read, unknown) if name is not None), default=0)
        if newest > self.attempt:
            self.begin_attempt(newest)
            self._grace_s = self._lease_s

    def _adopt(self, worker: str, incarnation: str, ticket_id: str, now: float) -> bool:
        """Adopt a ticket of the previous manager, if the grace period is active. Returns whether the worker may keep it."""
        name = self._seal.read(ticket_id)
        if self._cursor is None:  # decided when the master has reported which prompts are done
            return self._grace_s > 0.0 and (name is None or name.attempt == self.attempt)
        if self._grace_until is None or name is None or name.attempt != self.attempt:
            return False
        if name.locator in self._by_prompt or not self._cursor.withdraw(name.locator):
            return False
        self._add(self._known_again(name, worker, incarnation, now, state="running"))
        return True

    def _finish_adopted(self, request: FinishRequest, result: RolloutResult, now: float) -> bool:
        """Record the result of a previous manager's ticket as if it had been adopted. Returns False if it cannot be adopted."""
        if self._cursor is None and self._grace_s > 0.0 and len(self._early_results) < _MAX_EARLY:
            self._early_results[result.ticket_id] = request, result
            return True
        if result.outcome == "evaluated" or self._grace_until is None:
            return False
        if result.ticket_id not in self._live and not self._adopt(
            request.worker, request.incarnation, result.ticket_id, now
        ):
            return False
        self._finish_train(self._live[result.ticket_id], result, now)
        return True

    # ------------------------------------------------------------------------------------------------------- grants

    def _grant_one(self, request: AllocateRequest, refusal: str, now: float) -> _Live | None:
        """Grant an eval ticket if fewer than eval_limit run, and if evaluations have less than their share of running rollouts or
        train tickets are refused (refusal: why, or ""). Otherwise grant a train ticket. None: neither is possible."""
        if self._evaluations.num_waiting and self.served_version >= 0 and len(self._evals) < self.eval_limit:
            its_turn = len(self._evals) < self._eval_share * (self._num_running + 1)
            server = self.servers.pick(self.served_version) if (refusal or its_turn) else None
            if server is not None:
                return self._grant_eval(request, server, now)
        if refusal:
            return None
        return self._grant_train(request, now)

    def _grant_train(self, request: AllocateRequest, now: float) -> _Live:
        assert self._cursor is not None
        min_version = self.served_version
        server = self.servers.pick(min_version)
        assert server is not None, "refusal() found a server with room"
        locator, issue = self._cursor.take()
        heads = self._heads_of_worker.get(request.worker, self._all_heads)
        head = min(heads, key=lambda head: (self._live_of_head[head], head))
        self._num_train_tickets += 1
        nonce = f"{self._nonce}_{self._num_train_tickets}"
        order = self._order or Order(before=locator)
        ticket_id = self._seal.seal(TicketId(self.attempt, locator, issue, min_version, head, nonce))
        ticket = Ticket(
            ticket_id=ticket_id,
            kind="train",
            locator=locator,
            attempt=self.attempt,
            min_version=min_version,
            deadline=min_version + self.gate.eta,
            server=server.name,
            server_url=server.url,
            head=head,
            issue=issue,
            group_size=order.group_size,
            max_new_tokens=order.max_new_tokens,
            closed=self._closed or [],
        )
        live = _Live(ticket, request.worker, request.incarnation, now, server.name, self._mean_tokens)
        self.servers.granted(server.name, live.expected_tokens)
        self._add(live)
        self._journal("admitted", ticket)
        self.counters["granted", "train"] += 1
        return live

    def _grant_eval(self, request: AllocateRequest, server: Server, now: float) -> _Live:
        item, issue = self._evaluations.take()
        self._num_eval_tickets += 1
        ticket_id = f"eval-a{self.attempt}-{self._num_eval_tickets}-{self._nonce}"
        part = self._evaluations.part(item)
        ticket = Ticket(
            ticket_id=ticket_id,
            kind="eval",
            locator=Locator(0, item.position),
            attempt=self.attempt,
            min_version=self.served_version,
            deadline=self.served_version + self.gate.eta,
            server=server.name,
            server_url=server.url,
            head=0,
            issue=issue,
            eval_id=item.eval_id,
            eval_set=part.eval_set,
            eval_mode=part.mode,
        )
        live = _Live(ticket, request.worker, request.incarnation, now, server.name, self._mean_tokens, item=item)
        self.servers.granted(server.name, live.expected_tokens)
        self._evals[ticket_id] = live
        self._runs(live)
        self.counters["granted", "eval"] += 1
        return live

    @staticmethod
    def _remember(holder: _Holder, request_id: str, tickets: list[Ticket]) -> None:
        holder.answers[request_id] = tuple(ticket.ticket_id for ticket in tickets)
        while len(holder.answers) > _MAX_REQUESTS:
            holder.answers.popitem(last=False)

    # ----------------------------------------------------------------------------------------------------- entries

    def _add(self, live: _Live) -> None:
        ticket = live.ticket
        assert ticket.locator not in self._by_prompt
        self._live[ticket.ticket_id] = live
        self._by_prompt[ticket.locator] = ticket.ticket_id
        self._live_of_head[ticket.head] += 1
        if live.state == "running":
            self._num_running += 1
            self._runs(live)
        self.revision += 1

    def _runs(self, live: _Live) -> None:
        self._running_of.setdefault(live.worker, {})[live.ticket.ticket_id] = live

    def _runs_no_more(self, live: _Live) -> None:
        of_worker = self._running_of[live.worker]
        del of_worker[live.ticket.ticket_id]
        if not of_worker:
            del self._running_of[live.worker]

    def _move(self, live: _Live, server: Server, reason: str) -> None:
        self.servers.ended(live.server, live.expected_tokens)
        self.servers.granted(server.name, live.expected_tokens)
        live.server, live.has_moved = server.name, True
        self.counters["moved", reason] += 1

    def _remove(self, live: _Live) -> None:
        ticket = live.ticket
        self._leave_running(live)
        del self._live[ticket.ticket_id]
        del self._by_prompt[ticket.locator]
        self._live_of_head[ticket.head] -= 1
        self.revision += 1

    def _leave_running(self, live: _Live) -> None:
        if live.state == "running":
            live.state = "stored"
            self.servers.ended(live.server, live.expected_tokens)
            self._num_running -= 1
            self._runs_no_more(live)

    def _finish_train(self, live: _Live, result: RolloutResult, now: float) -> None:
        lengths = result.group.response_lengths if result.group is not None else []
        num_tokens = sum(lengths)
        if not live.has_moved:
            self.servers.group_ended(live.server, num_tokens, now - live.granted_at)
            live.has_moved = True  # count the duration only once
        if live.state == "stored":
            return  # reported before, by the worker or by the master; the master's report is authoritative
        reason = self._reason(result.reason or result.outcome)
        if num_tokens > 0:
            self._mean_tokens = (
                _TOKENS_MEMORY * self._mean_tokens + (1 - _TOKENS_MEMORY) * num_tokens
                if self._mean_tokens
                else float(num_tokens)
            )
        if result.outcome == "stored":
            self.counters["finished", "stored"] += 1
            self._leave_running(live)  # in transit; the ticket stays live until the master has consumed it
            self.revision += 1
        elif result.outcome == "rejected":
            self._reject(live, reason, lengths, result.detail)
        else:
            self._release(live, reason, result.detail)

    def _finish_eval(self, live: _Live, result: RolloutResult) -> None:
        assert live.item is not None
        if result.outcome == "released":
            self._lose(live, self._reason(result.reason or result.outcome))
            return
        self._remove_eval(live)
        self._evaluations.finish(live.item, result)
        self.counters["finished", result.outcome] += 1
        self.revision += 1

    def _lose(self, live: _Live, reason: str) -> None:
        """The worker will not finish this ticket: release it, or put the evaluation's item back."""
        if live.item is None:
            self._release(live, reason)
            return
        self.counters["released", reason] += 1
        self._remove_eval(live)
        self._evaluations.put_back(live.item, live.ticket.issue + 1)
        self.revision += 1

    def _remove_eval(self, live: _Live) -> None:
        del self._evals[live.ticket.ticket_id]
        self._runs_no_more(live)
        self.servers.ended(live.server, live.expected_tokens)

    def _release(self, live: _Live, reason: str, detail: str = "") -> None:
        """Take the ticket back. Its prompt is issued again before new ones. After max_issues issues the prompt is rejected instead.

        A prompt whose reward processes died (REWARD_LOST) is never rejected for that. Reissues stay slow, because a rollout worker
        limits how often it restarts its reward processes.
        """
        assert self._cursor is not None
        self.counters["released", reason] += 1
        if detail:  # a worker sends the detail of each reason once
            self._release_details[reason] = detail
        if reason != REWARD_LOST and live.ticket.issue >= self._max_issues:
            detail = detail or self._release_details.get(reason, "")
            why = f"issued {live.ticket.issue} times, and the last ticket was released: {reason}"
            self._reject(live, "max_issues", [], f"{why} ({detail})" if detail else why)
            return
        self._remove(live)
        self._cursor.put_back(live.ticket.locator, live.ticket.issue + 1)

    def _reject(self, live: _Live, reason: str, lengths: list[int], detail: str) -> None:
        """Reject the prompt: it will not be trained in this epoch."""
        self._remove(live)
        self._rejected.append(
            RejectedPrompt(locator=live.ticket.locator, reason=reason, detail=detail, lengths=lengths)
        )
        self.counters["rejected", reason] += 1
        for length in lengths:
            self.rejected_lengths[reason, max(0, length).bit_length()] += 1

    # --------------------------------------------------------------------------------------- the master's reports

    def _consume(self, ticket_id: str) -> None:
        """The ticket's trajectory was trained. The prompt is finished, and its other tickets are void."""
        live = self._live.get(ticket_id)
        if live is not None:  # a live ticket is the only one of its prompt
            self.counters["consumed", ""] += 1
            self._remove(live)
            return
        name = self._seal.read(ticket_id)
        if name is None or name.attempt != self.attempt:
            return
        self._give_up_others(ticket_id, name.locator)
        if self._cursor is not None:
            self._cursor.withdraw(name.locator)

    def _store(self, ticket_id: str, now: float) -> None:
        """The master has the ticket's trajectory. A released or unknown ticket becomes live again, unless its prompt is finished or
        the master has dropped the trajectory. The first trajectory of a prompt wins: the prompt's other ticket is released."""
        assert self._cursor is not None
        live = self._live.get(ticket_id)
        if live is not None:
            if not live.seen_by_master:
                live.seen_by_master = True
                self._leave_running(live)
                self.revision += 1
            return
        name = self._seal.read(ticket_id)
        if name is None or name.attempt != self.attempt or ticket_id in self._dropped:
            return
        rejected_unseen = any(rejected.locator == name.locator for rejected in self._rejected)
        open_prompt = name.locator in self._by_prompt or self._cursor.is_waiting(name.locator) or rejected_unseen
        if not open_prompt:
            return  # consumed before; this report is old
        self._give_up_others(ticket_id, name.locator)
        self._cursor.withdraw(name.locator)
        self._add(self._known_again(name, "", "", now, state="stored"))

    def _revoke(self, ticket_id: str) -> None:
        live = self._live.get(ticket_id)
        if live is None:
            return
        if live.state == "stored":
            self._dropped[ticket_id] = None
            while len(self._dropped) > _MAX_DROPPED:
                self._dropped.popitem(last=False)
        self._release(live, "overdue")

    def _give_up_others(self, ticket_id: str, locator: Locator) -> None:
        """Release the other live ticket of a prompt whose trajectory has come with `ticket_id`. The prompt is not issued again."""
        other = self._by_prompt.get(locator)
        if other is not None and other != ticket_id:
            self.counters["released", "superseded"] += 1
            self._remove(self._live[other])

    def _known_again(
        self, name: TicketId, worker: str, incarnation: str, now: float, *, state: Literal["running", "stored"]
    ) -> _Live:
        ticket = Ticket(
            ticket_id=str(name),
            kind="train",
            locator=name.locator,
            attempt=name.attempt,
            min_version=name.min_version,
            deadline=name.min_version + self.gate.eta,
            server="",
            server_url="",
            head=name.head,
            issue=name.issue,
        )
        self._journal("adopted", ticket)
        self.counters["accepted_late" if self._grace_until is None else "adopted", ""] += 1
        return _Live(ticket, worker, incarnation, now, "", 0.0, state, seen_by_master=state == "stored")

    # ---------------------------------------------------------------------------------------------------- workers

    @property
    def _interval_s(self) -> float:
        """Seconds between two heartbeats of each worker."""
        return intervals.heartbeat_s(self._heartbeat_s, max(len(self._holders), self._num_workers), self._lease_s)

    def _holder(self, worker: str, incarnation: str, now: float, *, touch: bool = True) -> _Holder | None:
        """Return the worker's record; None if a newer incarnation of the worker is known. touch: this call renews its lease."""
        holder = self._holders.get(worker)
        if holder is None:
            holder = self._holders[worker] = _Holder(IncarnationFence(incarnation), now, now)
        if holder.incarnations.is_over(incarnation):
            return None
        if holder.incarnations.adopt(incarnation):  # restarted: its rollouts died with the old process
            for live in self._running_at(worker):
                self._lose(live, "worker_restarted")
            holder.last_seen = holder.last_heartbeat = now
            holder.answers.clear()
        if touch:
            holder.last_seen = now
        return holder

    def _running_at(self, worker: str) -> list[_Live]:
        return list(self._running_of.get(worker, {}).values())

    def _moved_of(self, worker: str) -> list[MovedTicket]:
        """Return the worker's running tickets that were moved without its request. Every reply lists them: a reply may be lost."""
        servers = self.servers.servers
        return [
            MovedTicket(ticket_id=live.ticket.ticket_id, server=live.server, server_url=servers[live.server].url)
            for live in self._running_at(worker)
            if live.moved and live.server in servers
        ]

    def _holds(self, request: HeartbeatRequest, ticket_id: str) -> bool:
        live = self._live.get(ticket_id) or self._evals.get(ticket_id)
        return live is not None and (live.worker == request.worker or live.seen_by_master)

    def _reason(self, reason: str) -> str:
        """Return the reason as a metric label: at most 64 characters, and at most _MAX_REASONS different values and `other`."""
        reason = reason[:64]
        if reason not in self._reasons and len(self._reasons) < _MAX_REASONS:
            self._reasons.add(reason)
        return reason if reason in self._reasons else "other"
