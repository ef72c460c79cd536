"""Makes the executor of a step without the rest of a master."""

from __future__ import annotations

import math
from collections.abc import Sequence

from asyncrl.dataflow.graph import DataflowGraph
from asyncrl.dataflow.topology import ModelPlacement
from asyncrl.dataflow.worker_groups import WorkerGroups
from asyncrl.master.balance import Balance
from asyncrl.master.buffer import AsyncIOSequenceBuffer, StorageTracker
from asyncrl.master.calls import WorkerCaller
from asyncrl.master.detached import DetachedGroups
from asyncrl.master.executor import FunctionExecutor
from asyncrl.master.homes import homes_of
from asyncrl.master.parameter_hooks import ParameterHooks
from asyncrl.master.refresh import Refresher
from asyncrl.master.step_function import StepFunction
from asyncrl.streams.request_reply import NameResolvingRequestClient


def executor_of(
    graph: DataflowGraph,
    placements: Sequence[ModelPlacement],
    buffer: AsyncIOSequenceBuffer,
    tracker: StorageTracker,
    caller: WorkerCaller,
    client: NameResolvingRequestClient,
    hooks: ParameterHooks,
    *,
    records: bool = False,
    function: StepFunction | None = None,
    detached: DetachedGroups | None = None,
    refresher: Refresher | None = None,
    balance: Balance | None = None,
) -> FunctionExecutor:
    """function: None: the shipped one. detached, refresher: None: all workers are in the trainer group. balance: None: one by
    tokens."""
    by_name = {placement.name: placement for placement in placements}
    balance = balance or Balance(graph.mfcs.values(), hooks.train, seed=1)
    detached = detached or DetachedGroups(WorkerGroups(), client, caller, 60.0)
    refresher = refresher or Refresher(by_name, detached, caller, 1, hooks.train)
    return FunctionExecutor(
        homes_of(graph, by_name, caller, hooks, detached, refresher, tracker, buffer, balance),
        refresher,
        buffer,
        tracker,
        caller,
        hooks,
        function or StepFunction("", math.inf),
        placements[0].heads,
        balance,
        records=records,
    )
