"""Every message on a wire, typed.

All messages are msgspec structs: encoded as MessagePack on ZeroMQ streams and as JSON on HTTP, and validated on
arrival. No data from a socket is unpickled. Tensors travel only in raw frames beside the header (data/sequence.py).
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Struct

from asyncrl.protocol.errors import ErrorClass

# Errors from decoding received bytes. Besides MsgspecError: UnicodeDecodeError (not UTF-8) and RecursionError (nested
# too deeply).
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_VERSION = re.compile(r"a(\d{4,})-v(\d{8,})")
_VERSION_BITS = 40


class WeightVersion(Struct, frozen=True, order=True, array_like=True):
    """Identifies weights everywhere: the attempt that made them and the number of train steps done (0: the initial model)."""

    attempt: int
    version: int

    def __str__(self) -> str:
        return f"a{self.attempt:04d}-v{self.version:08d}"

    @classmethod
    def parse(cls, text: str) -> WeightVersion:
        """Inverse of `str`. Raises ValueError for any other text."""
        match = _VERSION.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a weight version such as a0001-v00000012")
        return cls(int(match[1]), int(match[2]))

    def pack(self) -> int:
        """The version as one int64 that sorts like the pair. Each sampled token carries its version in this form;
        prompt tokens carry -1.
        """
        return (self.attempt << _VERSION_BITS) | self.version

    @classmethod
    def unpack(cls, packed: int) -> WeightVersion:
        """Inverse of `pack`."""
        if packed < 0:
            raise ValueError(f"{packed} is not a packed weight version (tokens that were not sampled carry -1)")
        return cls(packed >> _VERSION_BITS, packed & ((1 << _VERSION_BITS) - 1))


# ---------------------------------------------------------------------------------------------------------------- tickets


class Locator(Struct, frozen=True, order=True, array_like=True):
    """Identifies a prompt: its position in the seeded order of an epoch of the prompt source."""

    epoch: int
    position: int


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
    eval_mode: Literal["", "greedy", "sampled"] = ""


class RolloutResult(Struct, frozen=True, kw_only=True):
    """The result of a ticket at the rollout worker."""

    ticket_id: str
    outcome: Literal["stored", "rejected", "evaluated", "released"]
    reason: str = ""  # of outcome `rejected` or `released`; one of few short words, because it becomes a metric label
    detail: str = ""  # text for people; each worker sends it only with its first result of this reason
    num_tokens: int = 0  # generated tokens, all sequences of the group
    lengths: list[int] = []  # response length of each sequence
    rewards: list[float] = []
    # version_start, version_end: oldest and newest version that sampled a token of the group; -1: no token was sampled
    version_start: int = -1
    version_end: int = -1


# ------------------------------------------------------------------------------------------------- gserver manager (HTTP)


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


class ScheduleReply(Struct, frozen=True, kw_only=True):
    server: str = ""  # empty: none is assigned; `reason` is no_server (ask again) or unknown_ticket
    server_url: str = ""
    reason: str = ""


class TicketView(Struct, frozen=True, kw_only=True):
    """A live ticket, as the manager reports it to the master."""

    ticket_id: str
    locator: Locator
    deadline: int
    state: Literal["running", "stored"]
    worker: str
    age_s: float


class RejectedPrompt(Struct, frozen=True, kw_only=True):
    """A prompt that will not be trained in its epoch, and the reason."""

    locator: Locator
    reason: str
    detail: str = ""  # text for people; "": the rollout worker sent none
    num_tokens: int = 0
    lengths: list[int] = []


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
    exhausted: bool  # every prompt of every epoch is done, live or rejected, so the manager issues no more tickets
    live: list[TicketView]
    rejected: list[RejectedPrompt]  # in order, from rejected_seen on
    servers: list[ServerView]
    settled: bool = (
        True  # False: a new manager that has not yet heard from every rollout worker; `live` may lack their tickets
    )
    damaged: str = ""  # the newest published weight version, while its files do not match its manifest
    devices_free: bool = False  # shared devices: it is training's turn, and every generation server sleeps or has ended


class EvaluateRequest(Struct, frozen=True, kw_only=True):
    """POST /evaluate: start an evaluation (once per eval_id) and wait up to wait_s for its end. Repeat until done."""

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
    ignore_eos: bool = False  # the model's own end token does not stop generation (stop_token_ids still do)


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """POST /generate."""

    input_ids: list[int]
    sampling_params: SamplingParams
    rid: str
    return_logprob: bool = True
    priority: int = 0  # above 0: the request goes to the front of the queue


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
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []  # None: the logprob was not a number


class GenerateReply(Struct, frozen=True, kw_only=True):
    """The stop token stays in output_ids. An aborted request is answered with status 200 and its output so far."""

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
    """POST /fetch_weights, our own endpoint: make the version loadable on this host. The reply is an UpdateWeightsReply."""

    model_path: str  # path of the version on hosts that share its file system
    weight_version: str
    source: str  # base URL of its files: source/version/file
    limit_s: float


class UpdateWeightsReply(Struct, frozen=True, kw_only=True):
    success: bool
    message: str
    num_paused_requests: int = 0
    mismatch: bool = False  # the version is loaded, but the logprob check has found other logprobs than the trainer's
    error_class: ErrorClass = ErrorClass.UNKNOWN  # of a refusal: whether another try of the same version can succeed


class ModelInfo(Struct, frozen=True, kw_only=True):
    """GET /get_model_info (= /model_info)."""

    model_path: str
    weight_version: str
    paused: bool = False  # not in SGLang: generation is paused


class TensorSpecs(Struct, frozen=True, kw_only=True):
    """Tensors in order: names as in a checkpoint, dtypes as torch names them."""

    names: list[str] = []
    dtypes: list[str] = []
    shapes: list[list[int]] = []

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError(
                f"{len(self.names)} names, {len(self.dtypes)} dtypes, {len(self.shapes)} shapes: counts must be equal"
            )


class JoinUpdateGroup(Struct, frozen=True, kw_only=True):
    """POST /init_weights_update_group. The receiver takes one rank for each tensor-parallel rank, beginning at rank_offset."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"
    limit_s: float = 60.0  # not in SGLang: time limit for all members to join


class BeginWeightUpdate(Struct, frozen=True, kw_only=True):
    """POST /begin_weight_update. SGLang ignores this body. Our server reads it, so it can refuse
    the update before tensors are sent."""

    weight_version: str = ""
    specs: TensorSpecs = TensorSpecs()
    probe_ids: list[int] = []  # the tokens of the logprob check (weights.verify_logprobs, weights.ScoredText)
    probe_logprobs: list[float] = []


class ReceiveWeights(TensorSpecs, frozen=True, kw_only=True):
    """POST /update_weights_from_distributed: rank 0 of the group now sends a bucket."""

    group_name: str = "weight_update_group"
    flush_cache: bool = True
    weight_version: str | None = None  # set only in the request for the last bucket
    load_format: str | None = None  # only flattened_bucket is sent
    limit_s: float = 60.0  # not in SGLang


class EndWeightUpdate(Struct, frozen=True, kw_only=True):
    """POST /end_weight_update. SGLang ignores this body."""

    xxh3: list[str] = []  # hashes of the buckets sent, in order


class LeaveUpdateGroup(Struct, frozen=True, kw_only=True):
    """POST /destroy_weights_update_group."""

    group_name: str = "weight_update_group"


class Load(Struct, frozen=True, kw_only=True):
    """The load of one scheduler (SGLang has one for each data-parallel rank); only those of SGLang's fields that asyncrl uses."""

    dp_rank: int = 0
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int  # of the KV cache
    num_total_tokens: int  # num_used_tokens plus the need of waiting requests, which our server estimates


class LoadsReply(Struct, frozen=True, kw_only=True):
    """GET /v1/loads."""

    timestamp: str
    version: str  # of the program that answers
    loads: list[Load]


# ------------------------------------------------------------------------------------------------------ elastic servers


class ScaleRequest(Struct, frozen=True, kw_only=True):
    """POST /scale of the gserver manager: the desired number of generation servers. Repeating a request changes nothing."""

    generation: int


class ServersReply(Struct, frozen=True, kw_only=True):
    """The reply to GET /servers and POST /scale. A server with an index of `target` or more is leaving the run."""

    target: int  # desired number of generation servers
    servers: list[ServerView]  # without servers that have left the run
    missing: list[str]  # desired servers that the manager has not seen: they are starting, or could not start


class DesiredServers(Struct, frozen=True, kw_only=True):
    """The desired number of generation servers. `asyncrl-launch scale` and POST /scale write it to name resolve."""

    count: Annotated[int, msgspec.Meta(ge=1)]
    id: str  # id of this request; a server that drained under an older id does not count as drained


# ---------------------------------------------------------------------------- weights over the network (manager -> trainer)


MOST_PROFILED_STEPS = 10  # the events of all steps are in the workers' memory until they are written


class ProfileRequest(Struct, frozen=True, kw_only=True):
    """A request of `asyncrl-launch profile`, in name resolve. The master removes it when it is answered, the command when it
    ends."""

    id: str  # unique
    steps: Annotated[int, msgspec.Meta(ge=1, le=MOST_PROFILED_STEPS)]  # number of train steps to record


class ProfileAnswer(Struct, frozen=True, kw_only=True):
    """The master's answer to a ProfileRequest, in name resolve: when the recording begins, and again when it is complete."""

    id: str  # of the request
    first_step: int
    last_step: int
    folder: str  # name of the folder in the run that has a file of each worker
    num_workers: int
    is_complete: bool = False
    failed: list[str] = []  # workers without a file


class BroadcastTarget(Struct, frozen=True, kw_only=True):
    """A paused server that waits for weights."""

    server: str
    url: str


class BroadcastRequest(Struct, frozen=True, kw_only=True):
    """POST /broadcast_weights, to the model worker that holds the newest weights in memory."""

    weight_version: str
    targets: list[BroadcastTarget]
    limit_s: float


class BroadcastReply(Struct, frozen=True, kw_only=True):
    """The errors by server. A server that is not named has loaded the version."""

    errors: dict[str, str] = {}
    mismatched: list[str] = []  # servers among these that loaded the version but failed the logprob check


# ------------------------------------------------------------------------------------------ trajectories (head -> master)


class TrajectoryMeta(Struct, frozen=True, kw_only=True):
    """A trajectory without its tensors. The rollout worker sends it with them to a head; the head sends only it to the master."""

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
    birth_time: float  # start of the rollout, in seconds since the epoch; see data/sequence.py
    task_id: int = 0


class StoreVerdict(Struct, frozen=True, kw_only=True):
    """The acknowledgement of a trajectory, from the master through the head to the rollout worker."""

    verdict: Literal["stored", "duplicate", "refused"]
    reason: str = ""


# --------------------------------------------------------------------------------- MFC calls (master <-> model workers)


class WrittenFile(Struct, frozen=True, array_like=True):
    """A file of a weight version, model or checkpoint that is not committed yet."""

    name: str
    size: int
    xxh3: str
    tensors: list[str]  # names of the tensors in the file


class ExecuteMFC(Struct, frozen=True, kw_only=True, tag=True):
    """Run one MFC on a batch, or on one part of a step's batch (train.streaming), at every worker of its model. `ids` is the whole
    batch or the part, in canonical order."""

    mfc: str
    version: int
    ids: list[str]
    ends_step: bool = True  # no further part of the batch follows
    batch: list[str] = []  # with the last of several parts: the ids of all parts, in canonical order
    parts: list[
        list[str]
    ] = []  # the ids of each data-parallel rank, in canonical order; all workers of a rank hold the input keys
    on_policy: bool = (
        False  # actor_train: the weights in training sampled all tokens, and have not been trained in this attempt
    )
    missing: list[str] = []  # input keys that do not exist in this step, because the group that computes them is down
    state: dict[str, float] | None = None  # of the MFC's function after the previous call; null: the one it begins with
    locators: list[Locator] = []  # one for each of `ids`: the prompts from which the MFC generates groups
    eval_mode: Literal["", "greedy", "sampled"] = (
        ""  # not empty: an MFC that generates makes one response for each evaluation prompt, and stores none
    )


class RedistribStep(Struct, frozen=True, array_like=True):
    """One step that moves keys of groups between model workers. A worker that already holds a pair (id, key) does not
    receive it again.
    """

    kind: Literal["bcast", "gather", "scatter"]
    root: int  # bcast: sends the same to all `workers`; scatter: sends each its own; gather: receives from each
    workers: list[int]
    ids: list[list[str]]  # bcast: one list; otherwise one list for each of `workers`
    keys: list[str]


class Redistribute(Struct, frozen=True, kw_only=True, tag=True):
    """Move MFC data step by step, at every worker that takes part in any step."""

    steps: list[RedistribStep]


class HeldDataRequest(Struct, frozen=True, kw_only=True):
    """POST /held_data (MessagePack), from a model worker to one of another worker group: request these keys of these
    ids.

    The reply (model/fetching.py) contains as many of the ids, in order, as fit into a message, and at least one.
    """

    ids: list[str]
    keys: list[str]


class FetchPart(Struct, frozen=True, array_like=True):
    """Keys of response groups that a worker of another worker group holds."""

    source: int
    group_incarnation: int  # of the source's worker group
    ids: list[str]
    keys: list[str]


class FetchData(Struct, frozen=True, kw_only=True, tag=True):
    """Fetch data from workers of other groups and store it (model/fetching.py). `unfetched` in the result reports
    missing data.
    """

    parts: list[FetchPart]


class Reallocate(Struct, frozen=True, kw_only=True, tag=True):
    """Copy a model's weights into another model of the same architecture, at every worker of both. Layouts may differ.

    target <- share * source + (1 - share) * target
    """

    source: str
    target: str
    share: float = 1.0


class ShareWeights(Struct, frozen=True, kw_only=True, tag=True):
    """Write a model's parameters in checkpoint format for a model of another worker group, at every worker of the
    model. Each worker replies with `files` when its files are on disk. CommitCheckpoint follows.
    """

    model: str
    folder: str  # name of this folder in the run (run_folder.py)


class TakeWeights(Struct, frozen=True, kw_only=True, tag=True):
    """Load the parameters written by ShareWeights into a model, at every worker of the model. Layouts may differ.

    target <- share * (parameters in folder) + (1 - share) * target
    """

    model: str
    folder: str  # name of this folder in the run (run_folder.py)
    share: float = 1.0


class WriteWeights(Struct, frozen=True, kw_only=True, tag=True):
    """Snapshot a model's weights, at every worker of the model. Each worker replies with `files` when its files are on
    disk.

    rewrite: the version was published before and is damaged on disk; its folder is replaced.
    """

    role: str
    weight_version: str
    folder: str  # name of this folder in the run (run_folder.py)
    rewrite: bool = False


class CommitWeights(Struct, frozen=True, kw_only=True, tag=True):
    """To the model's first worker, when all files of a version are on disk: write the manifest, sync, rename to the
    final name.

    weight_version: "" for a model saved for the user (SaveModel). rewrite: as in WriteWeights.
    """

    role: str
    weight_version: str
    folder: str  # name of this folder in the run (run_folder.py)
    files: list[WrittenFile]
    rewrite: bool = False


class HoldWeights(Struct, frozen=True, kw_only=True, tag=True):
    """To each worker: keep a copy of your share of the role's weights in memory, for sending over the network. The reply
    comes when the copy is complete.
    """

    role: str
    weight_version: str


class SaveModel(Struct, frozen=True, kw_only=True, tag=True):
    """Like WriteWeights, but for the user: Hugging Face format, which transformers can load."""

    role: str
    folder: str  # name of this folder in the run (run_folder.py)


class SaveCheckpoint(Struct, frozen=True, kw_only=True, tag=True):
    """Write the state that training needs to resume (models, optimizers, random number generators), at every worker of
    the trainer group. The checkpoint can be loaded in another layout. Each worker replies when its files are on disk,
    with `files`, and with the state of its interfaces in `stats`.
    """

    folder: str  # name of this folder in the run (run_folder.py)


class CommitCheckpoint(Struct, frozen=True, kw_only=True, tag=True):
    """To any one worker, when all files of a checkpoint are on disk: write the manifest, sync, rename to the final name."""

    folder: str  # name of this folder in the run (run_folder.py)
    files: list[WrittenFile]
    master: str = ""  # JSON: the state that the master needs to resume (checkpoints.MasterState)


class LoadCheckpoint(Struct, frozen=True, kw_only=True, tag=True):
    """Inverse of SaveCheckpoint, at every worker of the trainer group, or of a detached group."""

    folder: str  # name of this folder in the run (run_folder.py)


class SaveBatch(Struct, frozen=True, kw_only=True, tag=True):
    """Write a batch with all its keys into a folder (data/bad_batches.py). Each head writes its own groups."""

    folder: str  # name of this folder in the run (run_folder.py)
    version: int  # the weight version at which the step began
    metas: list[TrajectoryMeta]  # metadata of all groups of the batch, in canonical order


class ReadValues(Struct, frozen=True, kw_only=True, tag=True):
    """Return the values of a key of these ids, all of which this worker holds."""

    ids: list[str]
    key: str


class ClearData(Struct, frozen=True, kw_only=True, tag=True):
    """Forget all keys of these ids, because their step is over or the master refused them."""

    ids: list[str]


class ReleaseDevices(Struct, frozen=True, kw_only=True, tag=True):
    """Move parameters, gradients and optimizer state off the device. The next call that needs a model moves it back."""


class BeginProfile(Struct, frozen=True, kw_only=True, tag=True):
    """Begin to record the work of the compute thread with torch's profiler."""


class EndProfile(Struct, frozen=True, kw_only=True, tag=True):
    """Stop recording. `folder` is the name of the folder of the run that gets the worker's file; "": the recording is discarded."""

    folder: str = ""


class Ping(Struct, frozen=True, kw_only=True, tag=True):
    """A no-op. The compute thread answers it in order with the other calls."""


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
    | ReadValues
    | ClearData
    | ReleaseDevices
    | BeginProfile
    | EndProfile
    | Ping
)


class CallResult(Struct, frozen=True, kw_only=True):
    """The result of a call. For an MFC: the ids this worker ran on, the keys it made and stored, and its statistics
    (reduced over ranks).

    Only heads return ids and statistics for an MFC.
    """

    ids: list[str] = []
    keys: list[str] = []
    stats: dict[str, float] = {}
    seconds: float = 0.0
    files: list[WrittenFile] = []  # WriteWeights, SaveModel, SaveCheckpoint, ShareWeights
    # Redistribute, Reallocate: bytes sent by this worker; FetchData: bytes received; EndProfile: bytes of its file
    num_bytes: int = 0
    metas: list[
        TrajectoryMeta
    ] = []  # an MFC that generates groups: metadata of the groups that this worker stores (in an evaluation: none)
    rejected: list[RejectedPrompt] = []  # the prompts for which it generated no group
    unfetched: str = ""  # FetchData: the missing data and the reason; a retry is safe and changes nothing
    flops: int = 0  # an MFC, from heads: model FLOPs of training on this replica's groups (model/flops.py)
    peak_flops: float = 0.0  # an MFC: peak FLOP/s of this worker's device; 0: a CPU, or a GPU that is not in the table
    memory_bytes: int = 0  # an MFC: the worker's peak memory so far (runtime/devices.py)
    values: list[list[list[float]]] = []  # ReadValues: by id, by sequence
    state: dict[str, float] = {}  # an MFC, from heads: the state of its function after the call


# ------------------------------------------------------------------------------------------------------------ worker status


class Wait(Struct, frozen=True, kw_only=True):
    """A named wait: the awaited event, its source, the time waited so far, and the limit."""

    what: str
    on: str
    since_s: float  # seconds waited so far
    limit_s: float | None  # at this limit the wait ends or fails; None: no limit


class WorkerStatus(Struct, frozen=True, kw_only=True):
    """A worker's status, as `asyncrl-launch status` shows it."""

    worker: str
    pid: int
    attempt: int
    state: Literal[
        "starting", "running", "stopping", "stopped", "done", "error"
    ]  # stopped: stopped on request before its work was done
    time: float  # seconds since the epoch
    progress: int  # counts signs of life: units of work, and status reports, which need a turn of the event loop
    waits: list[Wait] = []
    queues: dict[str, int] = {}
    version: str = ""
    error: str = ""
    fatal: bool = False  # the cause lies in the user's input (config, data) or the disk: it would recur after a restart
    notes: list[str] = []  # what the user should know as long as it holds; the terminal shows each once
    restarts: int = 0  # how often the launcher has restarted this worker
    host: str = ""  # host of this worker, in a run with several hosts; the launcher fills it in
    memory_bytes: int = 0  # peak memory so far (runtime/devices.py)
    # A model worker: the number of collectives that it has entered in each of its groups of ranks. All ranks of a group call the
    # same collectives, so one with a lower number has not entered the collective in which the others wait
    collectives: dict[str, int] = {}


# -------------------------------------------------------------------- launcher <-> host daemons, through name resolve


class LauncherRecord(Struct, frozen=True, kw_only=True):
    """The launcher that leads the run. A host daemon refuses the desired state of an earlier launcher incarnation."""

    incarnation: str
    host: str
    run_dir: str
    attempt: int
    start: str = ""  # identifies one start of a batch job; a requeued job starts new host daemons and a new launcher
    ends: bool = False  # the run is over: host daemons exit


class HostRecord(Struct, frozen=True, kw_only=True):
    """A host that is ready to run processes."""

    host: str  # its name in the config
    incarnation: str
    address: str  # its processes bind this address, and processes on other hosts connect to it
    gpus: list[str] = []  # as in CUDA_VISIBLE_DEVICES
    cores: int
    memory_bytes: int
    pid: int


class DesiredProcess(Struct, frozen=True, kw_only=True):
    """The desired state of a process on a host."""

    launcher: str  # the launcher's incarnation
    host_daemon: str  # incarnation of the intended host daemon; a later host daemon does not start this process
    attempt: int
    name: str
    incarnation: Annotated[int, msgspec.Meta(ge=1)]  # counts the starts of all processes; a higher one replaces a lower
    state: Literal["run", "stop", "kill"] = "run"  # stop: ask the process to end
    config: str  # its resolved config, YAML
    env: dict[str, str] = {}
    lease: int
    computes: bool


class ObservedProcess(Struct, frozen=True, kw_only=True):
    """The observed state of a process, as its host daemon sees it."""

    name: str
    incarnation: int
    pid: int = 0  # 0: not forked yet
    log: str = ""
    status: WorkerStatus | None = None
    cpu_s: float = 0.0  # CPU time of a live process, in whole seconds, because each change of a report is sent
    returncode: int | None = None  # exit code of a process that has ended or could not be started
    ended: float = 0.0  # unix seconds
    how: str = ""  # how it ended, in one line
    tail: str = ""  # end of its log, once it has ended


class HostReport(Struct, frozen=True, kw_only=True):
    """The observed state of a host, published a few times a second. It lists an ended process until its desired state
    is removed.
    """

    host_daemon: str  # the host daemon's incarnation
    launcher: str  # incarnation of the launcher that the host daemon obeys
    processes: list[ObservedProcess] = []
    notices: list[tuple[int, str]] = []  # messages for the user: the newest ones, numbered
