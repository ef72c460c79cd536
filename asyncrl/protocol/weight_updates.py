"""Weights for generation servers: the manager's and the trainer's requests to a server (SGLang's), and the manager's
request to the trainer for a broadcast.
"""

from __future__ import annotations

from msgspec import Struct

from asyncrl.protocol.errors import ErrorClass


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


class SendShare(Struct, frozen=True, kw_only=True):
    """POST /held_weights, from the sender to another rank of the trainer: join this group, unless it is the one of the last time,
    and send the share of this version to its rank 0. The answer begins when the share is found. Its body is the digest of each
    bucket, and "all sent"."""

    weight_version: str
    group: JoinUpdateGroup


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
