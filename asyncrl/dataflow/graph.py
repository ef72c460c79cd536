"""The dataflow of one train step: model function calls (MFCs), joined by the keys they read and write.

An MFC starts when all ids of the batch have all input keys of the MFC. Keys that no MFC writes come with the trajectories. Adding
an MFC takes a function and its declaration (here, or with @mfc in a file of the user's). No other code has to name the new MFC.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter

from asyncrl.config.modes import mode_of
from asyncrl.config.schema import (
    CRITIC,
    REF,
    REWARD,
    TEACHER,
    TrainConfig,
    model_settings,
    needs_whole_batch,
    reward_models,
)
from asyncrl.data.routes import ROUTES
from asyncrl.data.sequence import is_words
from asyncrl.dataflow.mfc import ADVANTAGES, LOGPROBS, PPO_ACTOR, PPO_CRITIC, SCORES, VALUES, MFCDef, declared
from asyncrl.protocol.names import ACTOR

TRAIN_MFC = "actor_train"  # the node that produces new weights
GENERATE_MFC = "actor_gen"  # the node that produces trajectories in a synchronous graph
ADVANTAGES_MFC = "advantages"  # the node that computes advantages and the training mask

# Keys that every trajectory carries. KEY_SPECS in data/sequence.py describes each.
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
DENSE_REWARDS = "dense_rewards"  # comes with the trajectories (train.dense_rewards), or an MFC of train.mfcs writes it
SESSIONS, SEATS = "sessions", "seats"  # come with the trajectories (train.branches)
TASK_IDS = "task_ids"  # numbers of the tasks by name


class DataflowGraph:
    """MFCs and the edges that their keys imply. Raises ValueError if the MFCs do not form a valid graph."""

    def __init__(self, mfcs: Sequence[MFCDef], dataset_keys: Sequence[str] = TRAJECTORY_KEYS) -> None:
        self.mfcs = {mfc.name: mfc for mfc in mfcs}
        if len(self.mfcs) != len(mfcs):
            raise ValueError(f"two MFCs have the same name: {sorted(mfc.name for mfc in mfcs)}")
        producer: dict[str, str] = {}
        for mfc in mfcs:
            for key in mfc.output_keys:
                if key in dataset_keys:
                    raise ValueError(
                        f"MFC {mfc.name!r} writes {key!r}, a key that every trajectory already has; choose another key"
                    )
                if key in producer:
                    raise ValueError(f"MFCs {producer[key]!r} and {mfc.name!r} both write {key!r}")
                producer[key] = mfc.name
        self.parents: dict[str, frozenset[str]] = {}
        for mfc in mfcs:
            unknown = [key for key in mfc.input_keys if key not in producer and key not in dataset_keys]
            if unknown:
                known = sorted({*producer, *dataset_keys})
                raise ValueError(f"MFC {mfc.name!r} reads {unknown}, which no MFC writes; available keys: {known}")
            self.parents[mfc.name] = frozenset(producer[key] for key in mfc.input_keys if key in producer)
        try:
            # Sorted, so that all processes get the same order: set order depends on hashes, which differ between processes
            sorter = TopologicalSorter({name: sorted(parents) for name, parents in self.parents.items()})
            self.order = tuple(sorter.static_order())
        except CycleError as error:
            raise ValueError(f"MFCs depend on each other in a cycle: {' -> '.join(error.args[1])}") from None

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the models that the MFCs run on, in order of first use."""
        return tuple(dict.fromkeys(self.mfcs[name].role for name in self.order))

    @property
    def trained_roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(mfc.role for mfc in self.mfcs.values() if mfc.kind == "train_step"))


def build_dataflow(train: TrainConfig, mode: str = "async") -> DataflowGraph:
    """Build the graph of a training run from its config. Raises ValueError if the MFCs do not form a valid graph.

    Trajectories come from outside the graph. The exception is mode=sync: the first node generates them, and the other nodes
    read its output keys.
    """
    if not mode_of(mode).workers_generate:
        return DataflowGraph(training_mfcs(train), trajectory_keys(train))
    generate = MFCDef(GENERATE_MFC, "actor", "generate", "", (), TRAJECTORY_KEYS)
    return DataflowGraph([generate, *training_mfcs(train)], dataset_keys=())


def trajectory_keys(train: TrainConfig) -> tuple[str, ...]:
    """The keys that every trajectory of a run carries."""
    dense = (DENSE_REWARDS,) if train.dense_rewards else ()
    routes = (ROUTES,) if uses_routes(train) else ()
    return (*TRAJECTORY_KEYS, *dense, *((SESSIONS, SEATS) if train.branches else ()), *routes, *train.words)


def uses_routes(train: TrainConfig) -> bool:
    """Whether trajectories carry the experts of each token."""
    return train.routes != "off"


def without_generation(mfcs: Sequence[MFCDef]) -> DataflowGraph:
    """The graph of these MFCs without the generate node: the MFCs that process existing trajectories."""
    kept = [mfc for mfc in mfcs if mfc.kind != "generate"]
    made = {key for mfc in kept for key in mfc.output_keys}
    words = {key for mfc in kept for key in mfc.input_keys if is_words(key)} - made
    dense = () if DENSE_REWARDS in made else (DENSE_REWARDS,)
    return DataflowGraph(kept, (*TRAJECTORY_KEYS, SESSIONS, SEATS, ROUTES, *dense, *sorted(words)))


def training_mfcs(train: TrainConfig) -> list[MFCDef]:
    """The MFCs that process a batch of trajectories, in every mode:

        actor_inf   proximal_logprobs    ---+
        ref_inf     packed_ref_logprobs  ---+                      +--> actor_train
        critic_inf  values               ---+--> advantages -------+
        rew_inf     model_rewards        ---+                      +--> critic_train
        rew_inf_X   model_rewards_X      ---+
        teacher_inf packed_teacher_logprobs +

    The config decides which inference MFCs exist. `advantages` reads the keys that they write; an exception is `proximal_logprobs`,
    which it reads only for a KL penalty or a teacher. If steps may go on without actor_inf, it then reads the servers' logprobs,
    too. It also reads the keys `dense_rewards` and `values` if an MFC of train.mfcs writes them. With train.dense_rewards the
    trajectories have `dense_rewards`, and with train.branches `sessions` and `seats`. With train.tasks it reads `task_ids`.
    `actor_train` also reads `proximal_logprobs`, if actor_inf exists.
    """
    ppo = train.ppo
    inference: list[MFCDef] = []
    anchor: tuple[str, ...] = ()
    extra = [declared(spec) for spec in train.mfcs]
    if _runs_actor_inf(train, extra):
        inputs = ("packed_input_ids", *((ROUTES,) if train.routes == "replay" else ()))
        inference.append(MFCDef("actor_inf", "actor", "inference", LOGPROBS, inputs, ("proximal_logprobs",)))
        anchor = ("proximal_logprobs",)
    if ppo.kl_coef > 0:
        inference.append(_inference("ref_inf", "ref", LOGPROBS, "packed_ref_logprobs"))
    if train.critic is not None:
        inference.append(_inference("critic_inf", "critic", VALUES, "values"))
    for role in reward_models(train):
        name = role.removeprefix(REWARD)  # "", or _NAME
        inference.append(_inference(f"rew_inf{name}", role, SCORES, f"model_rewards{name}"))
    if train.teacher is not None:
        inference.append(_inference("teacher_inf", "teacher", LOGPROBS, "packed_teacher_logprobs"))
    _check_roles(extra, train)

    reads_anchor = _advantages_read_anchor(train)
    judged = [key for mfc in inference for key in mfc.output_keys if reads_anchor or key != "proximal_logprobs"]
    if reads_anchor and (not anchor or train.actor_inf_on_missing == "continue"):
        judged.append("packed_logprobs")
    made_by_extra = {key for mfc in extra for key in mfc.output_keys}
    judged += [key for key in (DENSE_REWARDS, "values") if key in made_by_extra and key not in judged]
    judged += [DENSE_REWARDS] if train.dense_rewards and DENSE_REWARDS not in judged else []
    judged += [SESSIONS, SEATS] if train.branches else []
    judged += [TASK_IDS] if train.tasks else []
    advantages = MFCDef(
        ADVANTAGES_MFC,
        "actor",
        "inference",
        ADVANTAGES,
        ("packed_input_ids", "loss_mask", "prompt_mask", "seq_no_eos_mask", "rewards", *judged),
        ("advantages", "trained_mask", *(("returns", "value_mask") if train.critic is not None else ())),
    )
    actor_keys: tuple[str, ...] = ("packed_input_ids", "packed_logprobs", *anchor, "advantages", "trained_mask")
    if ppo.kl_coef > 0 and ppo.kl_in == "loss":
        actor_keys += ("packed_ref_logprobs",)
    if uses_routes(train):
        actor_keys += (ROUTES,)
    actor_keys = tuple(dict.fromkeys((*actor_keys, *train.extra_train_keys)))
    training = [MFCDef(TRAIN_MFC, "actor", "train_step", PPO_ACTOR, actor_keys)]
    if train.critic is not None:
        critic_keys = ("packed_input_ids", "values", "returns", "value_mask")
        training.append(MFCDef("critic_train", "critic", "train_step", PPO_CRITIC, critic_keys))
    return [*inference, *extra, advantages, *training]


def is_one_update(train: TrainConfig) -> bool:
    """Whether a step updates the actor once, with all of its groups: the policy in the loss is then the proximal one, which the
    step begins with. Parts of a batch (train.streaming) add up to one update. A user's step function may call actor.train twice.
    """
    return train.ppo.minibatches == train.ppo.epochs == 1 and not train.step


def _runs_actor_inf(train: TrainConfig, extra: Sequence[MFCDef]) -> bool:
    """Whether actor_inf computes the proximal logprobs: a loss reads them, and does not have them itself, or something else needs
    them before the loss. extra: the MFCs of train.mfcs."""
    ppo = train.ppo
    if not (ppo.use_decoupled_loss or ppo.recompute_logprob):
        return False
    is_read = _advantages_read_anchor(train) or "proximal_logprobs" in train.extra_train_keys
    is_read |= any("proximal_logprobs" in mfc.input_keys for mfc in extra)
    moves_before = any(mfc.kind == "train_step" and mfc.role == ACTOR for mfc in extra)
    asked = ppo.proximal_pass == "always" or bool(train.actor_inf_on_missing)
    return asked or is_read or moves_before or not is_one_update(train)


def _advantages_read_anchor(train: TrainConfig) -> bool:
    return train.ppo.kl_coef > 0 or train.teacher is not None


def _inference(name: str, role: str, interface: str, output_key: str) -> MFCDef:
    return MFCDef(name, role, "inference", interface, ("packed_input_ids",), (output_key,))


def _check_roles(extra: Sequence[MFCDef], train: TrainConfig) -> None:
    """Raise ValueError if this run does not have the role of an MFC of train.mfcs, or if one trains a frozen model.

    The roles actor and ref always exist. The others exist only if the config defines them.
    """
    roles = ["actor", *model_settings(train)]
    for mfc in extra:
        if mfc.role not in roles:
            raise ValueError(
                f"train.mfcs: {mfc.interface} has the role {mfc.role!r}; the roles of this run are {roles} "
                "(critic with train.critic, reward with train.reward_model, teacher with train.teacher, others with train.roles)"
            )
        if mfc.kind == "train_step" and mfc.role in (REF, TEACHER, *reward_models(train)):
            raise ValueError(f"train.mfcs: {mfc.interface} trains the role {mfc.role!r}, whose model is frozen")
    if idle := sorted(set(train.roles).difference(mfc.role for mfc in extra)):
        raise ValueError(f"train.roles.{idle[0]}: no function of train.mfcs has the role {idle[0]!r}; leave it out")


def build_recording_dataflow() -> DataflowGraph:
    """The graph of mode=rollout_only. Its only node writes each batch to disk."""
    return DataflowGraph([MFCDef("record", "actor", "inference", "", TRAJECTORY_KEYS)])


def steps_early(mfc: MFCDef, mfcs: Iterable[MFCDef], train: TrainConfig) -> bool:
    """Whether an MFC takes optimizer steps before the last part of a batch has arrived (train.streaming): it has several
    minibatches, and no MFC of the step computes with the weights of its model. mfcs: placed."""
    num = train.critic.minibatches if mfc.role == CRITIC and train.critic is not None else train.ppo.minibatches
    uses = [other for other in mfcs if other.model == mfc.model and other.kind != "train_step"]
    waits = needs_whole_batch(train) or any(other.interface != ADVANTAGES for other in uses)
    return train.streaming and mfc.kind == "train_step" and num > 1 and not waits


def waiting_for_batch(mfcs: Iterable[MFCDef], train: TrainConfig) -> frozenset[str]:
    """The MFCs that run once, on the whole batch, when its last part has arrived (train.streaming): if a target needs the whole
    batch, `advantages`, those that read what these make, and all that train. Empty: all MFCs run on each part. mfcs: in the order
    of their keys."""
    waiting: list[str] = []
    late: set[str] = set()  # keys that they make
    for mfc in mfcs if train.streaming and needs_whole_batch(train) else ():
        if mfc.kind == "train_step" or mfc.interface == ADVANTAGES or not late.isdisjoint(mfc.input_keys):
            waiting.append(mfc.name)
            late.update(mfc.output_keys)
    return frozenset(waiting)
