"""The dataflow of one train step: model function calls (MFCs), joined by the keys they read and write.

An MFC starts when the batch's ids have all its input keys. Keys that no MFC writes come with the trajectories. Adding an MFC
takes a definition (here, or `train.extra_mfcs` in the config) and a function; nothing else names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from asyncrl.config import TrainConfig

TRAIN_MFC = "actor_train"  # the node that makes new weights

# Keys that every trajectory carries (KEY_SPECS in data/sequence.py says what each is).
TRAJECTORY_KEYS = (
    "packed_input_ids",
    "packed_prompts",
    "packed_logprobs",
    "prompt_mask",
    "loss_mask",
    "seq_no_eos_mask",
    "rewards",
    "task_ids",
    "versions",
    "version_start",
    "version_end",
    "birth_time",
)


@dataclass(frozen=True)
class MFCDef:
    """One node: what runs on whose model, what it reads and what it writes."""

    name: str
    role: str
    kind: str  # inference | train_step
    interface: str  # `actor_logprobs`, `ppo_actor` or `package.module:function`
    input_keys: tuple[str, ...]
    output_keys: tuple[str, ...] = ()


class DataflowGraph:
    """MFCs and the edges that their keys imply. Raises ValueError where they do not fit together."""

    def __init__(self, mfcs: Sequence[MFCDef], dataset_keys: Sequence[str] = TRAJECTORY_KEYS) -> None:
        self.mfcs = {mfc.name: mfc for mfc in mfcs}
        if len(self.mfcs) != len(mfcs):
            raise ValueError(f"two MFCs have the same name: {sorted(mfc.name for mfc in mfcs)}")
        producer: dict[str, str] = {}
        for mfc in mfcs:
            for key in mfc.output_keys:
                if key in dataset_keys:
                    raise ValueError(
                        f"MFC {mfc.name!r} writes {key!r}, which comes with every trajectory; choose another key"
                    )
                if key in producer:
                    raise ValueError(f"MFCs {producer[key]!r} and {mfc.name!r} both write {key!r}")
                producer[key] = mfc.name
        self.parents: dict[str, frozenset[str]] = {}
        for mfc in mfcs:
            unknown = [key for key in mfc.input_keys if key not in producer and key not in dataset_keys]
            if unknown:
                known = sorted({*producer, *dataset_keys})
                raise ValueError(f"MFC {mfc.name!r} reads {unknown}, which nothing writes; there are {known}")
            self.parents[mfc.name] = frozenset(producer[key] for key in mfc.input_keys if key in producer)
        try:
            self.order = tuple(TopologicalSorter(self.parents).static_order())
        except CycleError as error:
            raise ValueError(f"MFCs wait for one another in a circle: {' -> '.join(error.args[1])}") from None

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles whose models the MFCs run on, in order of first use."""
        return tuple(dict.fromkeys(self.mfcs[name].role for name in self.order))

    @property
    def trained_roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(mfc.role for mfc in self.mfcs.values() if mfc.kind == "train_step"))


def build_dataflow(train: TrainConfig) -> DataflowGraph:
    """The graph of asynchronous PPO as the config asks for it."""
    ppo = train.ppo
    mfcs: list[MFCDef] = []
    actor_inputs = [
        "packed_input_ids",
        "packed_logprobs",
        "loss_mask",
        "prompt_mask",
        "seq_no_eos_mask",
        "rewards",
        "versions",
    ]
    if ppo.use_decoupled_loss or ppo.recompute_logprob:
        mfcs.append(
            MFCDef("actor_inf", "actor", "inference", "actor_logprobs", ("packed_input_ids",), ("proximal_logprobs",))
        )
        actor_inputs.append("proximal_logprobs")
    if ppo.kl_coef > 0:
        mfcs.append(
            MFCDef("ref_inf", "ref", "inference", "ref_logprobs", ("packed_input_ids",), ("packed_ref_logprobs",))
        )
        actor_inputs.append("packed_ref_logprobs")
    for name, extra in train.extra_mfcs.items():
        mfcs.append(
            MFCDef(name, extra.role, extra.kind, extra.interface, tuple(extra.input_keys), tuple(extra.output_keys))
        )
    actor_inputs.extend(train.extra_train_keys)
    mfcs.append(MFCDef(TRAIN_MFC, "actor", "train_step", "ppo_actor", tuple(actor_inputs)))
    return DataflowGraph(mfcs)


def build_recording_dataflow() -> DataflowGraph:
    """The graph of mode=rollout_only: a batch is written to disk, and that is all."""
    return DataflowGraph([MFCDef("record", "actor", "inference", "record", TRAJECTORY_KEYS)])
