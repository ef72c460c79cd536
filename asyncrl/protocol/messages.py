"""Every message on a wire, typed.

All of these are msgspec structs: encoded as MessagePack on ZeroMQ streams and as JSON on HTTP, validated on arrival. Nothing
that came from a socket is unpickled. Tensors never travel here but in raw frames beside the header (data/sequence.py).
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Struct

# What decoding bytes from elsewhere may raise: text that is not UTF-8 is no MsgspecError, nor is what is nested too deeply.
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_VERSION = re.compile(r"a(\d{4,})-v(\d{8,})")
_VERSION_BITS = 40


class WeightVersion(Struct, frozen=True, order=True, array_like=True):
    """Identity of weights everywhere: the attempt that made them and the number of train steps done (0: the initial model)."""

    attempt: int
    version: int

    def __str__(self) -> str:
        return f"a{self.attempt:04d}-v{self.version:08d}"

    @classmethod
    def parse(cls, text: str) -> WeightVersion:
        """Inverse of `str`. Raises ValueError for anything else."""
        match = _VERSION.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a weight version such as a0001-v00000012")
        return cls(int(match[1]), int(match[2]))

    def pack(self) -> int:
        """As one int64, ordered like the pair: how a token carries its version. Prompt tokens carry -1."""
        return (self.attempt << _VERSION_BITS) | self.version

    @classmethod
    def unpack(cls, packed: int) -> WeightVersion:
        """Inverse of `pack`."""
        if packed < 0:
            raise ValueError(f"{packed} is not a packed weight version (tokens nobody sampled carry -1)")
        return cls(packed >> _VERSION_BITS, packed & ((1 << _VERSION_BITS) - 1))


# ---------------------------------------------------------------------------------------------------------------- tickets


class Locator(Struct, frozen=True, order=True, array_like=True):
    """Where a prompt is: the position in the seeded order of an epoch of the prompt source."""

    epoch: int
    position: int


class Ticket(Struct, frozen=True, kw_only=True):
    """The right to roll one prompt out. A prompt handed out again gets a new ticket."""

    ticket_id: str
    kind: Literal["train", "eval"]
    locator: Locator
    attempt: int
    min_version: int  # its first token comes from a server with this version or newer
    deadline: int  # min_version + eta: the last train step it may be part of
    server: str  # generation server name, e.g. "generation_server/0"
    server_url: str
    head: int  # data-parallel rank the trajectory goes to
    issue: int = 1  # how often this prompt has been handed out, this time included
    eval_id: str = ""
    eval_mode: Literal["", "greedy", "sampled"] = ""


class RolloutResult(Struct, frozen=True, kw_only=True):
    """How a ticket ended at the rollout worker."""

    ticket_id: str
    outcome: Literal["stored", "rejected", "evaluated", "released"]
    reason: str = ""  # for rejected and released; short, low cardinality: it becomes a metric label
    detail: str = ""  # for people; given for the first of its reason only, by each worker
    num_tokens: int = 0  # generated tokens, all sequences of the group
    lengths: list[int] = []  # response length of each sequence
    rewards: list[float] = []
    version_start: int = -1  # oldest and newest version that sampled a token
    version_end: int = -1


# ------------------------------------------------------------------------------------------------- gserver manager (HTTP)


class AllocateRequest(Struct, frozen=True, kw_only=True):
    """POST /allocate_rollout. The same request_id gets the same tickets again (a lost answer costs nothing)."""

    request_id: str
    worker: str
    incarnation: str
    count: int
    wait_s: float = 0.0  # how long the answer may wait for admission


class AllocateReply(Struct, frozen=True, kw_only=True):
    """tickets is empty where nothing was admitted in time; refusal then says why (`staleness`, `capacity`, `no_server`, ...)."""

    tickets: list[Ticket]
    refusal: str = ""
    finished: bool = False  # the run needs no more rollouts


class FinishRequest(Struct, frozen=True, kw_only=True):
    """POST /finish_rollout, a batch. Finishing an unknown ticket is accepted and changes nothing."""

    worker: str
    incarnation: str
    results: list[RolloutResult]


class FinishReply(Struct, frozen=True, kw_only=True):
    unknown: list[str] = []


class HeartbeatRequest(Struct, frozen=True, kw_only=True):
    """POST /heartbeat: the tickets a rollout worker holds. A ticket not listed twice in a row is released."""

    worker: str
    incarnation: str
    held: list[str]


class MovedTicket(Struct, frozen=True, kw_only=True):
    """A ticket that goes on at another server, with the tokens it has: its own one leaves the run."""

    ticket_id: str
    server: str
    server_url: str


class HeartbeatReply(Struct, frozen=True, kw_only=True):
    """revoked: tickets of this worker that the manager has taken back; drop them. moved: said again in every reply."""

    revoked: list[str] = []
    moved: list[MovedTicket] = []
    dead: list[str] = []  # URLs of generation servers from which nothing will come: gone, frozen, without weights
    heartbeat_s: float = 2.0


class ScheduleRequest(Struct, frozen=True, kw_only=True):
    """POST /schedule_request: another server for a ticket whose server was lost, or has its queue full."""

    ticket_id: str
    worker: str
    lost_server: str = ""
    lost_url: str = ""  # where it was: one that was started again has the same name, and is not lost
    busy: bool = False  # it answers, but takes no more: nothing is wrong with it, and the answer may name it again


class ScheduleReply(Struct, frozen=True, kw_only=True):
    server: str = ""  # empty: none is healthy now (reason says why); ask again
    server_url: str = ""
    reason: str = ""


class TicketView(Struct, frozen=True, kw_only=True):
    """What the master sees of a live ticket."""

    ticket_id: str
    locator: Locator
    deadline: int
    state: Literal["running", "stored"]
    worker: str
    age_s: float


class RejectedPrompt(Struct, frozen=True, kw_only=True):
    """A prompt that will not be trained in its epoch, and why."""

    locator: Locator
    reason: str
    detail: str = ""  # for people, where the rollout worker gave one
    num_tokens: int = 0
    lengths: list[int] = []


class MasterReport(Struct, frozen=True, kw_only=True):
    """POST /report: the master tells the manager where training is, in one message, and gets the ledger back.

    Idempotent: all fields are absolute but `consumed`, which the manager handles as a set.
    """

    attempt: int
    trained_version: int
    consumed: list[
        str
    ]  # tickets whose train step every rank has returned from, since the last report that was answered
    stored: list[str]  # all tickets whose trajectories the master has accepted and not yet consumed
    revoke: list[str] = []  # overdue tickets to interrupt; their prompts go to the front again
    rejected_seen: int = 0  # how many rejections the master has recorded: the manager forgets those
    done: list[Locator] = []  # at (re-)registration only: see full
    full: bool = False  # a new master or a new manager: `done_cursor` and `done` describe all finished prompts
    done_cursor: Locator = Locator(0, 0)  # every prompt before it is done
    num_prompts: int = 0  # size of the prompt source
    num_epochs: int = 0
    after_revision: int = -1  # answer at once if the ledger's revision is newer, else wait up to wait_s
    wait_s: float = 0.0
    stop: bool = False  # the run needs no more rollouts: admit nothing more


class ServerView(Struct, frozen=True, kw_only=True):
    """What the manager knows of a generation server."""

    server: str
    url: str
    state: Literal["stale", "healthy", "updating", "suspect", "draining", "dead"]
    version: str  # WeightVersion as text; while updating the one it loads; "" if none
    running: int
    update_s: float = 0.0  # for so long it was interrupted by updates that succeeded, since the manager began


class LedgerView(Struct, frozen=True, kw_only=True):
    """Answer to MasterReport. `known` is False where the manager has just started and wants a full report."""

    known: bool
    revision: int
    served_version: int  # -1: no server serves yet
    exhausted: bool  # every prompt of every epoch is done, live or rejected: no more will come
    live: list[TicketView]
    rejected: list[RejectedPrompt]  # in order, from rejected_seen on
    servers: list[ServerView]
    settled: bool = (
        True  # False: a new manager that has not heard all rollout workers yet; `live` may lack what they hold
    )
    damaged: str = ""  # the newest published weight version, while its files do not match its manifest


class EvaluateRequest(Struct, frozen=True, kw_only=True):
    """POST /evaluate: start (once, by eval_id) an evaluation and wait up to wait_s for its end. Ask again until done."""

    eval_id: str
    modes: list[Literal["greedy", "sampled"]]
    num_prompts: int
    wait_s: float = 0.0


class EvaluationResult(Struct, frozen=True, kw_only=True):
    mode: Literal["greedy", "sampled"]
    num_prompts: int
    num_failed: int
    mean_reward: float
    mean_length: float
    version_min: int
    version_max: int


class EvaluateReply(Struct, frozen=True, kw_only=True):
    done: bool
    num_finished: int
    num_total: int
    results: list[EvaluationResult] = []


class VersionReply(Struct, frozen=True, kw_only=True):
    """GET /get_model_version."""

    trained_version: int
    served_version: int
    servers: list[ServerView]


# -------------------------------------------------------------------------------------------- generation server (SGLang's)


class SamplingParams(Struct, frozen=True, kw_only=True):
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    stop_token_ids: list[int] = []
    ignore_eos: bool = False  # the model's own end token does not stop it (stop_token_ids still do)


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """POST /generate."""

    input_ids: list[int]
    sampling_params: SamplingParams
    rid: str
    return_logprob: bool = True
    priority: int = 0  # above 0: before those that wait


class FinishReason(Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: Literal["stop", "length", "abort"]
    matched: int | None = None
    length: int | None = None
    message: str | None = None


class VersionSpan(Struct, frozen=True, kw_only=True):
    """output_ids[start:end] were sampled by this weight version."""

    version: str
    start: int
    end: int


class GenerateMeta(Struct, frozen=True, kw_only=True):
    id: str
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    weight_version: str
    weight_versions: list[VersionSpan]
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []  # None: it was no number


class GenerateReply(Struct, frozen=True, kw_only=True):
    """The stop token stays in output_ids. An aborted request answers 200 with what it has."""

    text: str = ""
    output_ids: list[int]
    meta_info: GenerateMeta


class UpdateWeightsRequest(Struct, frozen=True, kw_only=True):
    """POST /update_weights_from_disk."""

    model_path: str
    weight_version: str
    abort_all_requests: bool = False
    flush_cache: bool = True
    keep_pause: bool = False


class FetchWeightsRequest(Struct, frozen=True, kw_only=True):
    """POST /fetch_weights, of ours: see that the version can be loaded here. Answered by an UpdateWeightsReply."""

    model_path: str  # where it is, on hosts that see it
    weight_version: str
    source: str  # URL below which its files are had: source/version/file
    limit_s: float


class UpdateWeightsReply(Struct, frozen=True, kw_only=True):
    success: bool
    message: str
    num_paused_requests: int = 0
    mismatch: bool = False  # loaded, but the logprobs of the version's text are others than the trainer's


class ModelInfo(Struct, frozen=True, kw_only=True):
    """GET /get_model_info (= /model_info)."""

    model_path: str
    weight_version: str
    paused: bool = False  # ours: somebody updates it, or has begun to


class TensorSpecs(Struct, frozen=True, kw_only=True):
    """Tensors in order: names as in a checkpoint, dtypes as torch calls them."""

    names: list[str] = []
    dtypes: list[str] = []
    shapes: list[list[int]] = []

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError(
                f"{len(self.names)} names, {len(self.dtypes)} dtypes, {len(self.shapes)} shapes: as many of each"
            )


class JoinUpdateGroup(Struct, frozen=True, kw_only=True):
    """POST /init_weights_update_group. The receiver takes the ranks from rank_offset on, one for each tensor parallel rank."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"
    limit_s: float = 60.0  # ours: to meet the others


class BeginWeightUpdate(Struct, frozen=True, kw_only=True):
    """POST /begin_weight_update. SGLang reads none of this: it says what will come, so that it can be refused before it comes."""

    weight_version: str = ""
    specs: TensorSpecs = TensorSpecs()
    probe_ids: list[int] = []  # what weights.verify_logprobs compares (weights.ScoredText)
    probe_logprobs: list[float] = []


class ReceiveWeights(TensorSpecs, frozen=True, kw_only=True):
    """POST /update_weights_from_distributed: a bucket comes from rank 0 of the group now."""

    group_name: str = "weight_update_group"
    flush_cache: bool = True
    weight_version: str | None = None  # with the last bucket
    load_format: str | None = None  # flattened_bucket is the only one that is sent
    limit_s: float = 60.0  # ours


class EndWeightUpdate(Struct, frozen=True, kw_only=True):
    """POST /end_weight_update. SGLang reads nothing of it."""

    xxh3: list[str] = []  # of the buckets that were sent, in order


class LeaveUpdateGroup(Struct, frozen=True, kw_only=True):
    """POST /destroy_weights_update_group."""

    group_name: str = "weight_update_group"


class Load(Struct, frozen=True, kw_only=True):
    """Of one scheduler (SGLang has one a data-parallel rank), those of SGLang's fields that are used here."""

    dp_rank: int = 0
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int  # of the KV cache
    num_total_tokens: int  # and what waiting requests will hold at first


class LoadsReply(Struct, frozen=True, kw_only=True):
    """GET /v1/loads."""

    timestamp: str
    version: str  # of the program that answers
    loads: list[Load]


# ------------------------------------------------------------------------------------------------ servers that come and go


class DesiredServers(Struct, frozen=True, kw_only=True):
    """The desired number of generation servers, as `asyncrl-launch scale` puts it into name resolve."""

    count: Annotated[int, msgspec.Meta(ge=1)]
    id: str  # of this request: servers that have drained under an older one do not count under it


# ---------------------------------------------------------------------------- weights over the network (manager -> trainer)


class BroadcastTarget(Struct, frozen=True, kw_only=True):
    """A server that is paused and waits for weights."""

    server: str
    url: str


class BroadcastRequest(Struct, frozen=True, kw_only=True):
    """POST /broadcast_weights, to the model worker that holds the newest weights in memory."""

    weight_version: str
    targets: list[BroadcastTarget]
    limit_s: float


class BroadcastReply(Struct, frozen=True, kw_only=True):
    """What went wrong, by server; a server that is not named has loaded the version."""

    errors: dict[str, str] = {}
    mismatched: list[str] = []  # of these: loaded, but it scores the version's text otherwise than the trainer


# ------------------------------------------------------------------------------------------ trajectories (head -> master)


class TrajectoryMeta(Struct, frozen=True, kw_only=True):
    """What the master holds of a stored trajectory: everything but the tensors."""

    ticket_id: str
    locator: Locator
    attempt: int
    head: int
    keys: list[str]
    seqlens: list[int]  # full length (prompt + response) of each sequence of the group
    response_lengths: list[int]
    rewards: list[float]
    version_start: list[int]  # packed WeightVersion per sequence: oldest sampled token
    version_end: list[int]  # newest sampled token
    birth_time: float  # seconds since the epoch, when the ticket was granted
    task_id: int = 0


class StoreVerdict(Struct, frozen=True, kw_only=True):
    """The acknowledgement of a trajectory, from the master through the head to the rollout worker."""

    verdict: Literal["stored", "duplicate", "refused"]
    reason: str = ""


# --------------------------------------------------------------------------------- MFC calls (master <-> model workers)


class WrittenFile(Struct, frozen=True, array_like=True):
    """A file of a weight version, not committed yet."""

    name: str
    size: int
    xxh3: str
    tensors: list[str]  # that are in it


class ExecuteMFC(Struct, frozen=True, kw_only=True, tag=True):
    """Run one MFC on a batch, at every worker of its model. `ids` is the whole batch in canonical order."""

    mfc: str
    version: int
    ids: list[str]
    parts: list[
        list[str]
    ] = []  # the ids of each data-parallel rank, in canonical order; all their workers hold the input keys
    locators: list[Locator] = []  # of ids: prompts that the MFC is to make groups of
    eval_mode: Literal["", "greedy", "sampled"] = (
        ""  # of such an MFC: one response to each evaluation prompt, to be kept nowhere
    )


class RedistribStep(Struct, frozen=True, array_like=True):
    """Groups' keys on their way between model workers. Who already has a pair (id, key) is not sent it."""

    kind: Literal["bcast", "gather", "scatter"]
    root: int  # bcast: sends the same to all `workers`; scatter: sends each its own; gather: receives from each
    workers: list[int]
    ids: list[list[str]]  # bcast: one list; else one for each of `workers`
    keys: list[str]


class Redistribute(Struct, frozen=True, kw_only=True, tag=True):
    """Move data of MFCs, step by step, at every worker that takes part in any of the steps."""

    steps: list[RedistribStep]


class HeldDataRequest(Struct, frozen=True, kw_only=True):
    """POST /held_data (MessagePack), from a model worker to one of another worker group: these keys of these ids.

    The answer (model/fetching.py) has as many of the ids, in order, as fit into a message, and at least one.
    """

    ids: list[str]
    keys: list[str]


class FetchPart(Struct, frozen=True, array_like=True):
    """Keys of groups of responses that a worker of another worker group holds."""

    source: int
    group_incarnation: int  # of the source's worker group
    ids: list[str]
    keys: list[str]


class FetchData(Struct, frozen=True, kw_only=True, tag=True):
    """Ask workers of other groups for data, and store it (model/fetching.py). What could not be had is told in `unfetched`."""

    parts: list[FetchPart]


class Reallocate(Struct, frozen=True, kw_only=True, tag=True):
    """Copy a model's weights into another of the same architecture, at every worker of both. Layouts may differ.

    target <- share * source + (1 - share) * target
    """

    source: str
    target: str
    share: float = 1.0


class ShareWeights(Struct, frozen=True, kw_only=True, tag=True):
    """Write a model's parameters for a model of another worker group, at every worker of it, in a checkpoint's format. The reply
    comes when this worker's files are on disk, with `files`; CommitCheckpoint follows."""

    model: str
    folder: str  # its name in the run (run_folder.py)


class TakeWeights(Struct, frozen=True, kw_only=True, tag=True):
    """Have a model take what ShareWeights has written, at every worker of it; layouts may differ.

    target <- share * what is in folder + (1 - share) * target
    """

    model: str
    folder: str  # its name in the run (run_folder.py)
    share: float = 1.0


class WriteWeights(Struct, frozen=True, kw_only=True, tag=True):
    """Snapshot a model's weights, at every worker of it; the reply comes when this worker's files are on disk, with `files`.

    rewrite: the version was published before and is damaged on disk; its folder is replaced.
    """

    role: str
    weight_version: str
    folder: str  # its name in the run (run_folder.py)
    rewrite: bool = False


class CommitWeights(Struct, frozen=True, kw_only=True, tag=True):
    """To the model's first worker, when all files of a version are on disk: manifest, sync, final name.

    weight_version: "" for a model for the user (SaveModel). rewrite: as in WriteWeights.
    """

    role: str
    weight_version: str
    folder: str  # its name in the run (run_folder.py)
    files: list[WrittenFile]
    rewrite: bool = False


class HoldWeights(Struct, frozen=True, kw_only=True, tag=True):
    """Keep the role's weights in memory, to be sent over the network. The reply comes when they are there."""

    role: str
    weight_version: str


class SaveModel(Struct, frozen=True, kw_only=True, tag=True):
    """Like WriteWeights, for the user: Hugging Face format, which transformers loads."""

    role: str
    folder: str  # its name in the run (run_folder.py)


class SaveCheckpoint(Struct, frozen=True, kw_only=True, tag=True):
    """Write what training needs to go on (models, optimizers, random numbers), at every worker; loadable in another layout.
    The reply comes when this worker's files are on disk, with `files`, and in `stats` what its interfaces remember."""

    folder: str  # its name in the run (run_folder.py)


class CommitCheckpoint(Struct, frozen=True, kw_only=True, tag=True):
    """To any one worker, when all files of a checkpoint are on disk: manifest, sync, final name."""

    folder: str  # its name in the run (run_folder.py)
    files: list[WrittenFile]
    state: dict[str, float]  # of interfaces, from the replies of all
    master: str = ""  # JSON: what the master has to know to go on (checkpoints.MasterState)


class LoadCheckpoint(Struct, frozen=True, kw_only=True, tag=True):
    """Inverse of SaveCheckpoint, at every worker."""

    folder: str  # its name in the run (run_folder.py)


class SaveBatch(Struct, frozen=True, kw_only=True, tag=True):
    """Write a batch with all its keys into a folder (data/bad_batches.py), at the heads, each its own groups."""

    folder: str  # its name in the run (run_folder.py)
    version: int  # the step began from
    metas: list[TrajectoryMeta]  # of the whole batch, in canonical order


class ClearData(Struct, frozen=True, kw_only=True, tag=True):
    """Forget all keys of these ids (the step that used them is over, or the master refused them)."""

    ids: list[str]


class Ping(Struct, frozen=True, kw_only=True, tag=True):
    """Answered in order, by the compute thread."""


CallBody = (
    ExecuteMFC
    | Redistribute
    | FetchData
    | Reallocate
    | ShareWeights
    | TakeWeights
    | HoldWeights
    | WriteWeights
    | CommitWeights
    | SaveModel
    | SaveCheckpoint
    | CommitCheckpoint
    | LoadCheckpoint
    | SaveBatch
    | ClearData
    | Ping
)


class CallResult(Struct, frozen=True, kw_only=True):
    """What a call gave. For an MFC: the ids this worker ran on, the keys it made and stored, its statistics (reduced over ranks).

    Only heads answer an MFC with ids and statistics.
    """

    ids: list[str] = []
    keys: list[str] = []
    stats: dict[str, float] = {}
    seconds: float = 0.0
    files: list[WrittenFile] = []  # WriteWeights, SaveModel, SaveCheckpoint
    num_bytes: int = 0  # Redistribute, Reallocate: sent by this worker; FetchData: received
    metas: list[
        TrajectoryMeta
    ] = []  # an MFC that makes groups: those of `ids`, stored here (of an evaluation: nowhere)
    rejected: list[RejectedPrompt] = []  # ... and the prompts that gave none
    unfetched: str = ""  # FetchData: what could not be had, and why; nothing is changed by asking again


# ------------------------------------------------------------------------------------------------------------ worker status


class Wait(Struct, frozen=True, kw_only=True):
    """A named wait: what a process waits for, what it waits on, how long it has waited, and its limit."""

    what: str
    on: str
    since_s: float  # seconds waited so far
    limit_s: float | None  # it is over then, or has failed; None: it has no limit


class WorkerStatus(Struct, frozen=True, kw_only=True):
    """What `asyncrl-launch status` shows of a worker."""

    worker: str
    pid: int
    attempt: int
    state: Literal[
        "starting", "running", "stopping", "stopped", "done", "error"
    ]  # stopped: told to end before it was done
    time: float  # seconds since the epoch
    progress: int  # grows while the worker's loop turns
    waits: list[Wait] = []
    queues: dict[str, int] = {}
    version: str = ""
    error: str = ""
    fatal: bool = False  # the error lies in what the user gave (config, data, disk): starting again would meet it again
    restarts: int = 0  # how often the launcher has started it again
    host: str = ""  # where it runs, on a run of more than one host; filled in by the launcher


# -------------------------------------------------------------------- launcher <-> host daemons, through name resolve


class LauncherRecord(Struct, frozen=True, kw_only=True):
    """The launcher that leads the run. A host daemon refuses what an earlier incarnation of it has left."""

    incarnation: str
    host: str
    run_dir: str
    attempt: int
    start: str = ""  # of a batch job, which may be queued again: each start has host daemons and a launcher of its own
    ends: bool = False  # the run is over: host daemons end


class HostRecord(Struct, frozen=True, kw_only=True):
    """A host that is ready to run processes."""

    host: str  # as the config names it
    incarnation: str
    address: str  # what its processes bind, and the others connect to
    gpus: list[str] = []  # as CUDA_VISIBLE_DEVICES names them
    cores: int
    memory_bytes: int
    pid: int


class DesiredProcess(Struct, frozen=True, kw_only=True):
    """The desired state of a process on a host."""

    launcher: str  # its incarnation
    host_daemon: str  # incarnation of the one that is meant: a later one starts nothing that was meant for it
    attempt: int
    name: str
    incarnation: Annotated[int, msgspec.Meta(ge=1)]  # counts starts, of all processes: a higher one replaces a lower
    state: Literal["run", "stop", "kill"] = "run"  # stop: it is asked to end
    config: str  # its resolved config, YAML
    env: dict[str, str] = {}
    lease: int
    computes: bool


class ObservedProcess(Struct, frozen=True, kw_only=True):
    """The observed state of a process on a host, as its host daemon sees it."""

    name: str
    incarnation: int
    pid: int = 0  # 0: not forked yet
    log: str = ""
    status: WorkerStatus | None = None
    cpu_s: float = 0.0  # CPU time of one that lives, in whole seconds: each change of a report is sent
    returncode: int | None = None  # of one that has ended, or could not be started
    ended: float = 0.0  # unix seconds
    how: str = ""  # it ended, in a line
    tail: str = ""  # of its log, once it has ended


class HostReport(Struct, frozen=True, kw_only=True):
    """The observed state of a host, a few times a second. An end is in it until the process has no desired state any more."""

    host_daemon: str  # its incarnation
    launcher: str  # the one that it obeys
    processes: list[ObservedProcess] = []
    notices: list[tuple[int, str]] = []  # what a person should know: the newest, numbered
