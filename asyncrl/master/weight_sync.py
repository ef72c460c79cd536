"""Which weights are copied between models before an MFC and after a step, and which MFCs a step leaves out. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.config.schema import REF, TrainConfig
from asyncrl.dataflow.graph import TRAIN_MFC, MFCDef
from asyncrl.protocol.messages import Reallocate
from asyncrl.protocol.names import ACTOR


class ParameterHooks:
    """A role may have several models: one is trained, the others (`actor@1`) get its weights before they are used again.

    Every MFC of a step sees the weights that the step began with on a model that is not itself trained. The reference is
    refreshed from the actor every train.ref.update_interval steps.
    """

    def __init__(self, mfcs: Iterable[MFCDef], train: TrainConfig) -> None:
        self._mfcs = list(mfcs)
        self._train = train
        self._trained_model = {mfc.role: mfc.model for mfc in self._mfcs if mfc.kind == "train_step"}
        self._refs = list(dict.fromkeys(mfc.model for mfc in self._mfcs if mfc.role == REF))
        self._stale: set[str] = set()  # models whose role has been trained elsewhere since they got its weights

    def left_out(self, version: int) -> frozenset[str]:
        """MFCs that the step from this version on does without: the first steps may train the critic alone."""
        return frozenset([TRAIN_MFC]) if version < self._train.num_critic_only_steps else frozenset()

    def before(self, mfc: MFCDef) -> list[Reallocate]:
        """What precedes an MFC. To be sent at once: it counts as done."""
        if mfc.model not in self._stale:
            return []
        self._stale.remove(mfc.model)
        return [Reallocate(source=self._trained_model[mfc.role], target=mfc.model)]

    def loaded(self) -> None:
        """A checkpoint has been loaded into the models that are trained: the others of their roles are to get its weights."""
        trained = self._trained_model
        self._stale = {mfc.model for mfc in self._mfcs if mfc.role in trained and mfc.model != trained[mfc.role]}

    def after_step(self, version: int) -> list[Reallocate]:
        """What follows the step that made this version. To be sent at once: it counts as done."""
        left_out = self.left_out(version - 1)
        trained = {mfc.role for mfc in self._mfcs if mfc.kind == "train_step" and mfc.name not in left_out}
        self._stale |= {
            mfc.model for mfc in self._mfcs if mfc.role in trained and mfc.model != self._trained_model[mfc.role]
        }
        ref, source = self._train.ref, self._trained_model.get(ACTOR)
        if source is None or ref.update_interval < 1 or version % ref.update_interval:
            return []
        return [Reallocate(source=source, target=target, share=ref.update_share) for target in self._refs]
