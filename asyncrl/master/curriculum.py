"""Which tasks of a run are closed (pure). A task with a gate opens for good when another task's pass rate reaches the gate.

The pass rate is over the newest trained groups of that task, in the order of training. So the state is a function of the trained
groups, and a checkpoint has it. The gserver manager names the closed tasks in its tickets (`Ticket.closed`), and a rollout worker
rejects their prompts (`task_closed`): they count in no limit of rejections, and come again in the next epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from asyncrl.config.schema import GateConfig
from asyncrl.protocol.trajectories import TrajectoryMeta
from asyncrl.weights.checkpoints import CurriculumState


@dataclass
class _Gate:
    config: GateConfig
    shares: deque[float]  # of the newest groups: the share of responses that passed
    is_open: bool = False


class Curriculum:
    def __init__(
        self, tasks: Sequence[str], gates: Mapping[str, GateConfig], state: CurriculumState | None = None
    ) -> None:
        """tasks: names by task id. gates: by the name of the task that they open."""
        self._tasks = tasks
        state = state or CurriculumState()
        self._gates = {
            name: _Gate(gate, deque(state.shares.get(name, ()), maxlen=gate.groups), name in state.opened)
            for name, gate in gates.items()
        }

    @property
    def closed(self) -> list[str]:
        return [name for name, gate in self._gates.items() if not gate.is_open]

    def train(self, metas: Iterable[TrajectoryMeta]) -> list[str]:
        """Count the groups of a step, and return the tasks that open now."""
        opened = []
        for meta in metas:
            for gate in self._gates.values():
                if self._tasks[meta.task_id] == gate.config.task:
                    gate.shares.append(fmean(reward >= gate.config.passes for reward in meta.rewards))
        for name, gate in self._gates.items():
            is_full = len(gate.shares) == gate.config.groups
            if not gate.is_open and is_full and fmean(gate.shares) >= gate.config.pass_rate:
                gate.is_open = True
                opened.append(name)
        return opened

    def metrics(self) -> dict[str, float]:
        """By gate: whether it is open, and the pass rate at which it looks once a group has been trained."""
        found = {f"curriculum/{name}_open": float(gate.is_open) for name, gate in self._gates.items()}
        rates = {name: fmean(gate.shares) for name, gate in self._gates.items() if gate.shares}
        return found | {f"curriculum/{name}_pass_rate": rate for name, rate in rates.items()}

    def state(self) -> CurriculumState:
        return CurriculumState(
            opened=[name for name, gate in self._gates.items() if gate.is_open],
            shares={name: list(gate.shares) for name, gate in self._gates.items()},
        )
