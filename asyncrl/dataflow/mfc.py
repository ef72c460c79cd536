"""A model function call (MFC): its declaration, and how a function of a user's is declared as one.

    from asyncrl.dataflow.mfc import mfc

    @mfc(role="ref", input_keys=["packed_input_ids"], output_keys=["surprise"])
    def surprise(engine, sample, train):
        ...

`train.mfcs` lists such functions. The config adds nothing to a declaration, so its function and its keys change in one place. The
functions that every run has are declared in graph.py in the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from asyncrl.config.import_object import import_object
from asyncrl.config.nearest import did_you_mean
from asyncrl.config.processes import PlacedMFC
from asyncrl.config.schema import ConfigError
from asyncrl.protocol.names import ACTOR

KINDS = ("inference", "train_step")
# Which groups of a call each data rank of the model gets.
# data_parallel: each group goes to one rank. The ranks get about the same number of FLOPs, whatever number of groups that is
# rank_zero: all groups go to rank 0    one_to_all: all groups go to each rank
# all_to_all: the call has a batch for each rank, in rank order
DISPATCHES = ("data_parallel", "rank_zero", "one_to_all", "all_to_all")
ON_CPU = "@cpu"  # end of the name of a placement without a model
_SHIPPED = "asyncrl.model.interfaces"
LOGPROBS, SCORES, VALUES = f"{_SHIPPED}:LogprobsInterface", f"{_SHIPPED}:ScoresInterface", f"{_SHIPPED}:ValuesInterface"
ADVANTAGES = f"{_SHIPPED}:AdvantagesInterface"
PPO_ACTOR, PPO_CRITIC = f"{_SHIPPED}:PPOActorInterface", f"{_SHIPPED}:PPOCriticInterface"
_Declared = TypeVar("_Declared", bound=Callable[..., object])


@dataclass(frozen=True)
class MFCDef:
    """One node of the dataflow: its function, the role of its model, the keys it reads and the keys it writes."""

    name: str
    role: str
    kind: str  # inference | train_step | generate
    interface: str  # `package.module:name` or `path/to/file.py:name` of a subclass of Interface, or of a function
    input_keys: tuple[str, ...]
    output_keys: tuple[str, ...] = ()
    model: str = ""  # name of the role's model that it runs on (topology.ModelPlacement); "": not placed yet
    dispatch: str = "data_parallel"  # one of DISPATCHES

    @property
    def has_model(self) -> bool:
        """False: it runs on CPU workers without a model (`advantages:cpu2` in the allocation)."""
        return not self.model.endswith(ON_CPU)

    @property
    def needs_weights(self) -> bool:
        """Whether it cannot run on CPU workers without a model. Of a user's function only its run shows that (CpuRanks)."""
        is_shipped = self.interface.startswith(f"{_SHIPPED}:") and self.interface != ADVANTAGES
        return self.kind != "inference" or is_shipped

    @property
    def function(self) -> str:
        """Its name among the functions of its role: `inf` of actor_inf."""
        return "inf" if self.interface == SCORES else self.name.removeprefix(f"{self.role}_")

    @classmethod
    def of(cls, placed: PlacedMFC) -> MFCDef:
        """Make the MFC from its form in process configs (PlacedMFC)."""
        keys = tuple(placed.input_keys), tuple(placed.output_keys)
        return cls(placed.name, placed.role, placed.kind, placed.interface, *keys, placed.model, placed.dispatch)

    def placed(self, model: str) -> PlacedMFC:
        """Return this MFC, placed on `model`, in its form in process configs (PlacedMFC)."""
        keys = list(self.input_keys), list(self.output_keys)
        return PlacedMFC(self.name, self.role, model, self.kind, self.interface, *keys, self.dispatch)


def mfc(
    *,
    input_keys: Sequence[str],
    output_keys: Sequence[str] = (),
    role: str = ACTOR,
    kind: str = "inference",
    dispatch: str = "data_parallel",
    name: str = "",
) -> Callable[[_Declared], _Declared]:
    """Declare a function, or a subclass of asyncrl.model.interfaces.Interface, as an MFC.

    A function is called as function(engine, sample, train: TrainConfig) on every rank of the model. `sample` has the input keys of
    the rank's groups. The result is a SequenceSample with the output keys of the same groups. A class can also keep a state that
    checkpoints contain, and take optimizer steps, for which it needs the version (Interface.run).

    role: of the model that it runs on.  kind: inference, or train_step if it changes the weights.  dispatch: the groups that each
    data rank gets (DISPATCHES).  name: in metrics, logs and allocations; "": the function's own.
    Raises ConfigError for a kind or dispatch that does not exist.
    """
    for field, value, allowed in (("kind", kind, KINDS), ("dispatch", dispatch, DISPATCHES)):
        if value not in allowed:
            raise ConfigError(
                f"@mfc({field}={value!r}): {did_you_mean(str(value), allowed)}one of {', '.join(allowed)}"
            )

    def declare(function: _Declared) -> _Declared:
        own = name or getattr(function, "__name__", "")
        declaration = MFCDef(own, role, kind, "", tuple(input_keys), tuple(output_keys), dispatch=dispatch)
        function.__mfc__ = declaration  # type: ignore[attr-defined]  # read by `declared`
        return function

    return declare


def declared(spec: str) -> MFCDef:
    """Return the declaration of an entry of train.mfcs. Imports its file. Raises ConfigError."""
    what = f"train.mfcs: {spec}"
    try:
        declaration = getattr(import_object(spec, what), "__mfc__", None)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what}: importing it failed: {type(error).__name__}: {error}") from error
    if declaration is None:
        raise ConfigError(f"{what} is not declared; put @mfc(...) above it (asyncrl.dataflow.mfc)")
    assert isinstance(declaration, MFCDef)
    return replace(declaration, interface=spec)
