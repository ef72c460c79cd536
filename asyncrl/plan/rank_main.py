"""`python -m asyncrl.plan.rank_main`: plans ranks of models.

Reads ShardTasks from stdin and writes their ShardPlans to stdout, in JSON. If one cannot be planned, the last line on stderr says
why.

It imports torch once and forks a process for each run, so it must not start threads.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec

from asyncrl.plan.counts import ShardCounts, extrapolated
from asyncrl.plan.ranks import LIMIT_S, ShardPlan, ShardTask
from asyncrl.plan.result import PlanError
from asyncrl.runtime.process import die_with_parent


def main() -> None:
    die_with_parent()
    result = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print to stdout
    tasks = msgspec.json.decode(sys.stdin.buffer.read(), type=list[ShardTask])
    try:
        plans = plan_tasks(tasks)
    except PlanError as error:
        sys.exit(str(error))
    with result:
        result.write(msgspec.json.encode(plans))


def plan_tasks(tasks: Sequence[ShardTask], *, in_full: bool = False) -> list[ShardPlan]:
    """Run each task in processes, at most one per core at a time. After a failure no further one starts. Raises PlanError.

    in_full: run all layers, and extrapolate nothing but the micro-batches.
    """
    import torch

    from asyncrl.architectures.attention import read_attention
    from asyncrl.model.flops import flops_of
    from asyncrl.model.sharding import Skeleton, load_config
    from asyncrl.plan.layers import sampled_layers
    from asyncrl.plan.shard import shard_plan

    models: dict[tuple[str, str, bool], Any] = {}
    samples, runs = [], []
    for task in tasks:
        try:
            path, kind, lora = task.model.path, task.model.kind, task.model.lora
            key = path, kind, lora is not None
            if key not in models:
                skeleton = Skeleton.of(load_config(path, kind), kind, torch.float32)
                if lora is not None:
                    skeleton.add_adapters(lora, path)
                models[key] = skeleton.model
                read_attention(models[key], path)  # which layers have attention, and over which tokens
            sampled = None if in_full else sampled_layers(task, models[key])
        except Exception as error:
            raise _refused(task, _last_line(error)) from error
        samples.append(sampled)
        runs += [(task, num_layers) for num_layers in (sampled[:2] if sampled else (0,))]
    found = iter(_run_forked(runs))
    plans = []
    for task, sampled in zip(tasks, samples, strict=True):
        counts = extrapolated(next(found), next(found), sampled[2]) if sampled else next(found)
        key = task.model.path, task.model.kind, task.model.lora is not None
        plans.append(shard_plan(task, counts, flops_of(models[key])))
    return plans


def _run_forked(runs: Sequence[tuple[ShardTask, int]]) -> list[ShardCounts]:
    """(task, layers of a stage or 0 for all) -> the counts of the rank."""
    context = multiprocessing.get_context("fork")
    gc.collect()
    gc.freeze()  # the children need not look through the imported modules
    found: dict[int, ShardCounts] = {}
    running: dict[Connection, tuple[int, Any, float]] = {}  # number of the run, process, time limit
    left = iter(enumerate(runs))
    try:
        while len(found) < len(runs):
            while len(running) < len(os.sched_getaffinity(0)) and (following := next(left, None)) is not None:
                number, run = following
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_count, args=(theirs, *run), daemon=True)
                process.start()
                theirs.close()
                running[ours] = number, process, time.monotonic() + LIMIT_S
            first = min(limit for _, _, limit in running.values())
            ready = wait(running, max(0.0, first - time.monotonic()))
            if not ready:
                number = next(number for number, _, limit in running.values() if limit == first)
                raise PlanError(
                    f"the plan of {runs[number][0].name} took longer than {LIMIT_S:g} s; use a smaller grid"
                )
            for connection in ready:
                assert isinstance(connection, Connection)
                number, process, _ = running[connection]
                try:
                    counted, cause = connection.recv()
                    process.join()
                except EOFError:
                    process.join()
                    counted, cause = None, f"its process ended with exit status {process.exitcode}"
                if counted is None:
                    raise _refused(runs[number][0], cause)
                found[number] = msgspec.json.decode(counted, type=ShardCounts)
                del running[connection]
    finally:
        for _, process, _ in running.values():
            process.kill()
            process.join()
    return [found[number] for number in range(len(runs))]


def _count(connection: Connection, task: ShardTask, layers_of_stage: int) -> None:
    die_with_parent()
    from asyncrl.dataflow.topology import ModelPlacement
    from asyncrl.plan.shard import count_shard

    try:
        counts = count_shard(task, layers_of_stage * ModelPlacement.of(task.model).grid.num_stages)
        connection.send((msgspec.json.encode(counts), ""))
    except Exception as error:
        connection.send((None, _last_line(error)))


def _refused(task: ShardTask, cause: str) -> PlanError:
    return PlanError(f"{task.name} ({task.model.path}) cannot be planned: {cause}")


def _last_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[-1]


if __name__ == "__main__":
    main()
