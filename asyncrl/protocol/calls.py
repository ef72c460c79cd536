"""Calls of the master to model workers, and the data that model workers request from each other."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from asyncrl.protocol.manager import RejectedPrompt
from asyncrl.protocol.model_flops import ModelFlops
from asyncrl.protocol.trajectories import Locator, TrajectoryMeta
from asyncrl.protocol.versions import WrittenFile


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
        ""  # not empty: an MFC that generates makes responses to evaluation prompts, and stores none
    )
    eval_set: str = ""  # then the evaluation set of the prompts (config/schema.py: evaluation_sets)


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


class KeepWeights(Struct, frozen=True, kw_only=True, tag=True):
    """Keep weights in memory for a model of another worker group, at every worker of the source model. They replace those
    that were kept for the same target.

    kept <- share * source + (1 - share) * kept, in train.dtype. Before the first such call a share below 1 begins with
    the weights at the target's path.
    """

    source: str
    target: str
    weight_version: str  # name of these weights in FetchWeights
    share: float = 1.0
    # Not "": the name of a checkpoint's folder in the run; keep the target's weights in this checkpoint instead.
    # `num_bytes` in the result is 0 if it has none
    checkpoint: str = ""


class FetchWeights(Struct, frozen=True, kw_only=True, tag=True):
    """Replace a model's weights by those that workers of the trainer group keep for it, at every worker of the model.
    Layouts may differ. `unfetched` in the result reports missing data.
    """

    model: str
    weight_version: str
    sources: list[int]  # all workers that keep parts


class KeptWeightsRequest(Struct, frozen=True, kw_only=True):
    """POST /kept_weights (MessagePack), from a worker that executes FetchWeights to one that has executed KeepWeights
    (model/kept_weights.py). `parts` of tensors: name, first index, size. Without parts the reply says which parts the
    worker keeps.
    """

    model: str
    weight_version: str
    parts: list[tuple[str, list[int], list[int]]] = []


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
    """Inverse of SaveCheckpoint, at every worker of a worker group."""

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
    | KeepWeights
    | FetchWeights
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
    files: list[WrittenFile] = []  # WriteWeights, SaveModel, SaveCheckpoint
    # Redistribute, Reallocate: bytes sent by this worker; FetchData, FetchWeights: bytes received; KeepWeights: bytes
    # kept; EndProfile: bytes of its file
    num_bytes: int = 0
    metas: list[
        TrajectoryMeta
    ] = []  # an MFC that generates groups: metadata of the groups that this worker stores (in an evaluation: none)
    rejected: list[RejectedPrompt] = []  # the prompts for which it generated no group
    unfetched: str = ""  # FetchData, FetchWeights: the missing data and the reason; a retry is safe and changes nothing
    flops: int = 0  # an MFC, from heads: model FLOPs of training on this replica's groups (model_flops.py)
    # An MFC, from heads: tokens of this replica's sequences, once for each pass over them; of them, those that another sequence of
    # their group computed (train.share_prefix)
    num_tokens: int = 0
    num_tokens_shared: int = 0
    model_flops: dict[str, ModelFlops] = {}  # Ping: of each model of which this worker has a rank
    peak_flops: float = 0.0  # an MFC: peak FLOP/s of this worker's device; 0: a CPU, or a GPU that is not in the table
    memory_bytes: int = 0  # an MFC: the worker's peak memory so far (runtime/devices.py)
    values: list[list[Any]] = []  # ReadValues: by id, by sequence: a list of numbers, or the value of a key with words
    state: dict[str, float] = {}  # an MFC, from heads: the state of its function after the call
