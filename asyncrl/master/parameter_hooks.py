"""Which weights are copied between models before an MFC and after a step, and which MFCs a step leaves out. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from asyncrl.config.schema import EMA, REF, TrainConfig
from asyncrl.dataflow.graph import TRAIN_MFC
from asyncrl.dataflow.mfc import MFCDef
from asyncrl.protocol.calls import Reallocate
from asyncrl.protocol.names import ACTOR


class ParameterHooks:
    """Decides the copies and the MFCs of each step. Pure.

    A role may have several models. One is trained; the others (`actor@1`) get its weights before they are used again or, with
    train.actor_inf_on_missing, after each step.

    On a model that is not trained, every MFC of a step uses the weights with which the step began. The reference is refreshed from
    the actor every train.ref.update_interval steps. The actor's moving average (train.ema) is updated after each step that trains
    the actor.
    """

    def __init__(self, mfcs: Iterable[MFCDef], train: TrainConfig) -> None:
        self._mfcs = [mfc for mfc in mfcs if mfc.has_model]
        self.train = train
        self._trained_model = {mfc.role: mfc.model for mfc in self._mfcs if mfc.kind == "train_step"}
        self._refs = list(dict.fromkeys(mfc.model for mfc in self._mfcs if mfc.role == REF))
        others = [mfc.model for mfc in self._mfcs if mfc.role == ACTOR and mfc.model != self._trained_model.get(ACTOR)]
        self._actors_after_step = list(dict.fromkeys(others)) if train.actor_inf_on_missing else []
        self._stale: set[str] = set()  # models with weights older than those of their role's trained model

    def left_out(self, version: int) -> frozenset[str]:
        """MFCs that the step from this version leaves out: the first num_critic_only_steps steps train only the critic."""
        return frozenset([TRAIN_MFC]) if version < self.train.num_critic_only_steps else frozenset()

    def before(self, mfc: MFCDef) -> list[Reallocate]:
        """Return the copies that must precede an MFC. The caller must send them at once, because they count as done. With
        train.streaming an MFC that trains may change the weights before the last part of a batch: the other models of its role then
        get those with which the step began."""
        streams = mfc.kind == "train_step" and self.train.streaming
        stale = sorted(self._stale & (self._others([mfc.role]) if streams else {mfc.model}))
        self._stale -= set(stale)
        return [Reallocate(source=self._trained_model[mfc.role], target=model) for model in stale]

    def trained(self, mfc: MFCDef) -> None:
        """Call after an MFC has taken optimizer steps. A later call of the step on another model of its role has the new weights,
        as if it ran on the trained model."""
        self._stale |= self._others([mfc.role])

    def gets_weights_after_step(self, mfc: MFCDef) -> bool:
        """Whether the model of this MFC gets the trained weights only after a step."""
        return mfc.model in self._actors_after_step

    def loaded(self) -> list[Reallocate]:
        """Call after a checkpoint has been loaded into the trained models. Each other model of a trained role then gets the trained
        model's weights before its next MFC. Returns the copies to models that otherwise get them after each step. These copies
        must be made at once."""
        self._stale = self._others(self._trained_model)
        return self._to_actors()

    def _others(self, roles: Collection[str]) -> set[str]:
        """The models of these roles that are not trained and get the trained model's weights before they are used again."""
        others = {mfc.model for mfc in self._mfcs if mfc.role in roles}
        return others.difference(self._trained_model.values(), self._actors_after_step)

    def _to_actors(self) -> list[Reallocate]:
        return [Reallocate(source=self._trained_model[ACTOR], target=model) for model in self._actors_after_step]

    def after_step(self, version: int) -> list[Reallocate]:
        """Return the copies that follow the step that produced this version. The caller must send them at once, because they count
        as done."""
        left_out = self.left_out(version - 1)
        trained = {mfc.role for mfc in self._mfcs if mfc.kind == "train_step" and mfc.name not in left_out}
        self._stale |= self._others(trained)
        ref, ema, source = self.train.ref, self.train.ema, self._trained_model.get(ACTOR)
        if source is None:
            return []
        copies = self._to_actors() if ACTOR in trained else []
        if ema is not None and TRAIN_MFC not in left_out:
            copies.append(Reallocate(source=source, target=EMA, share=1.0 - ema.decay))
        if ref.update_interval >= 1 and version % ref.update_interval == 0:
            copies += [Reallocate(source=source, target=target, share=ref.update_share) for target in self._refs]
        return copies
