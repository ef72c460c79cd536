"""HTTP of the gserver manager: tickets for rollout workers, and the ledger for the master."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from asyncrl.protocol.trajectories import GroupSummary, Locator


class Order(Struct, frozen=True, kw_only=True):
    """What the train step that runs or comes next wants generated. A later order of an attempt has a later prompt in `before`."""

    before: Locator  # train tickets are for prompts before this one
    group_size: int = 0  # responses of each prompt; 0: rollout.group_size
    max_new_tokens: int = 0  # of each response; 0: rollout.sampling.max_new_tokens


class Ticket(Struct, frozen=True, kw_only=True):
    """Permission to roll out one prompt. A prompt that is handed out again gets a new ticket."""

    ticket_id: str
    kind: Literal["train", "eval"]
    locator: Locator
    attempt: int
    min_version: int  # the server that samples the first token has this version or a newer one
    deadline: int  # min_version + eta: the last train step that may use it
    server: str  # generation server name, e.g. "generation_server/0"
    server_url: str
    head: int  # data-parallel rank that receives the trajectory
    issue: int = 1  # number of tickets granted for this prompt so far, this one included
    eval_id: str = ""
    eval_set: str = ""  # name of the evaluation set (config/schema.py: evaluation_sets)
    eval_mode: Literal["", "greedy", "sampled"] = ""
    group_size: int = 0  # as in Order
    max_new_tokens: int = 0
    closed: list[str] = []  # tasks whose prompts are rejected (master/curriculum.py)


class RolloutResult(Struct, frozen=True, kw_only=True):
    """The result of a ticket at the rollout worker."""

    ticket_id: str
    outcome: Literal["stored", "rejected", "evaluated", "released"]
    reason: str = ""  # of outcome `rejected` or `released`; one of few short words, because it becomes a metric label
    detail: str = ""  # text for people; each worker sends it only with its first result of this reason
    group: GroupSummary | None = None  # None: there is no trajectory


class AllocateRequest(Struct, frozen=True, kw_only=True):
    """POST /allocate_rollout. A repeated request_id gets the same tickets, so the worker may retry after a lost reply."""

    request_id: str
    worker: str
    incarnation: str
    count: int
    wait_s: float = 0.0  # how long the manager may hold the reply until it can admit prompts


class AllocateReply(Struct, frozen=True, kw_only=True):
    """`tickets` is empty if the manager admitted nothing in time. `refusal` gives the reason (`staleness`, `capacity`,
    `no_server`, ...).
    """

    tickets: list[Ticket]
    refusal: str = ""
    finished: bool = False  # the run needs no more rollouts


class FinishRequest(Struct, frozen=True, kw_only=True):
    """POST /finish_rollout: results of several tickets. The reply names the tickets that the manager does not know.

    Results of unknown tickets have no effect.
    """

    worker: str
    incarnation: str
    results: list[RolloutResult]


class FinishReply(Struct, frozen=True, kw_only=True):
    unknown: list[str] = []


class HeartbeatRequest(Struct, frozen=True, kw_only=True):
    """POST /heartbeat: the tickets that a rollout worker holds. A ticket missing from two consecutive heartbeats is released."""

    worker: str
    incarnation: str
    held: list[str]


class MovedTicket(Struct, frozen=True, kw_only=True):
    """A ticket that continues at another server, with its tokens so far, because its own server leaves the run."""

    ticket_id: str
    server: str
    server_url: str


class HeartbeatReply(Struct, frozen=True, kw_only=True):
    """revoked: tickets of this worker that the manager has taken back; the worker drops them. moved: tickets that continue
    at another server; every reply lists them all, because a reply may be lost."""

    revoked: list[str] = []
    moved: list[MovedTicket] = []
    dead: list[str] = []  # URLs of generation servers that will not answer: gone, frozen, or without weights
    heartbeat_s: float = 2.0


class ScheduleRequest(Struct, frozen=True, kw_only=True):
    """POST /schedule_request: ask for another server for a ticket whose server is lost or has a full queue."""

    ticket_id: str
    worker: str
    lost_server: str = ""
    lost_url: str = ""  # URL of the lost server; the name is not enough, because a restarted server has the same name
    busy: bool = False  # the present server is healthy, but its queue is full; the reply may name this server again


TRAININGS_TURN = "trainings_turn"


class ScheduleReply(Struct, frozen=True, kw_only=True):
    # Empty: none is assigned. `reason` is no_server (ask again), TRAININGS_TURN (training uses the servers' devices: ask again) or
    # unknown_ticket
    server: str = ""
    server_url: str = ""
    reason: str = ""


class TicketView(Struct, frozen=True, kw_only=True):
    """A live ticket, as the manager reports it to the master."""

    ticket_id: str
    locator: Locator
    deadline: int
    state: Literal["running", "stored"]
    worker: str


class RejectedPrompt(Struct, frozen=True, kw_only=True):
    """A prompt that will not be trained in its epoch, and the reason."""

    locator: Locator
    reason: str
    detail: str = ""  # text for people; "": the rollout worker sent none
    lengths: list[int] = []  # response lengths; empty: it has no trajectory


class MasterReport(Struct, frozen=True, kw_only=True):
    """POST /report: the master reports the state of training in one message, and the manager replies with its ledger.

    Idempotent: every field is absolute, except `consumed`, which the manager treats as a set.
    """

    attempt: int
    trained_version: int
    consumed: list[str]  # tickets whose train step has returned on every rank, since the last report that was answered
    stored: list[str]  # all tickets whose trajectories the master has accepted and not yet consumed
    revoke: list[str] = []  # overdue tickets to interrupt; their prompts return to the front of the queue
    rejected_seen: int = 0  # how many rejections the master has recorded: the manager forgets those
    done: list[Locator] = []  # finished prompts after done_cursor; only if `full`
    full: bool = False  # a new master or a new manager: `done_cursor` and `done` describe all finished prompts
    done_cursor: Locator = Locator(0, 0)  # every prompt before it is done
    num_prompts: int = 0  # size of the prompt source
    num_epochs: int = 0
    after_revision: int = -1  # reply at once if the ledger's revision is newer, otherwise wait up to wait_s
    wait_s: float = 0.0
    stop: bool = False  # the run needs no more rollouts: admit no more prompts
    # Shared devices: which side may use them. In training's turns the generation servers sleep. "": no devices are shared
    turn: Literal["", "generation", "training"] = ""
    closed: list[str] = []  # tasks that are closed; within an attempt a task opens at most once
    order: Order | None = None  # null: the steps do not order their prompts, and all prompts may be issued


class ServerView(Struct, frozen=True, kw_only=True):
    """The manager's view of a generation server."""

    server: str
    url: str
    state: Literal["stale", "healthy", "updating", "suspect", "draining", "dead"]
    version: str  # WeightVersion as text; the version being loaded while updating; "" if none
    running: int
    update_s: float = 0.0  # total time that successful updates interrupted it, since this manager process started


class LedgerView(Struct, frozen=True, kw_only=True):
    """The reply to MasterReport. `known` is False if the manager has just started and needs a full report."""

    known: bool
    revision: int
    served_version: int  # -1: no server serves yet
    # Every prompt of every epoch, or of the order, is done, live or rejected, so the manager issues no more tickets
    exhausted: bool
    live: list[TicketView]
    rejected: list[RejectedPrompt]  # in order, from rejected_seen on
    servers: list[ServerView]
    settled: bool = (
        True  # False: a new manager that has not yet heard from every rollout worker; `live` may lack their tickets
    )
    damaged: str = ""  # the newest published weight version, while its files do not match its manifest
    released: dict[str, int] = {}  # tickets that it has taken back, by reason
    devices_free: bool = False  # shared devices: it is training's turn, and every generation server sleeps or has ended


class EvalPart(Struct, frozen=True, kw_only=True):
    """The prompts of one set in one mode."""

    eval_set: str
    mode: Literal["greedy", "sampled"]
    num_prompts: int


class EvaluateRequest(Struct, frozen=True, kw_only=True):
    """POST /evaluate: start an evaluation (once per eval_id) and wait up to wait_s for its end. Repeat until done and until all
    results are there."""

    eval_id: str
    parts: list[EvalPart]
    after: int = 0  # number of results that the sender has
    wait_s: float = 0.0


class EvaluatedPrompt(Struct, frozen=True, kw_only=True):
    """The result of one prompt of a part."""

    part: int  # index in the request's parts
    position: int  # in the order of the set's prompts
    group: GroupSummary | None  # null: the prompt failed
    reason: str = ""  # why it failed


class EvaluateReply(Struct, frozen=True, kw_only=True):
    """results: of a finished evaluation, in order of part and position, those after the request's `after`, but not more than fit a
    reply."""

    done: bool
    num_finished: int
    num_total: int
    results: list[EvaluatedPrompt] = []


class VersionReply(Struct, frozen=True, kw_only=True):
    """GET /get_model_version."""

    trained_version: int
    served_version: int
    servers: list[ServerView]
