"""Plans of runs for the commands: the GPU that a plan is for, and the check of the memory of GPUs.

Only a machine with GPUs is judged. A plan there takes seconds to minutes; it runs in processes of its own (plan/ranks.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from asyncrl.config.nearest import did_you_mean
from asyncrl.config.schema import ConfigError
from asyncrl.launch.checks.checklist import Case, Finding
from asyncrl.launch.checks.gpus import Gpu, chosen_gpus, query_gpus
from asyncrl.plan.capacity import RankPlanner, RunPlan, gib, plan_run
from asyncrl.plan.devices import DEFAULT, DEVICES, Device, device_named
from asyncrl.plan.ranks import plan_training
from asyncrl.plan.result import PlanError
from asyncrl.runtime.devices import visible_devices

_MIB = 1 << 20


def choose_device(name: str) -> Device:
    """The kind of GPU that --gpu names; "": that of this machine if the table has it, else an H100. Raises ConfigError."""
    if name:
        if name not in DEVICES:
            raise ConfigError(f"--gpu {name}: {did_you_mean(name, DEVICES)}use one of {', '.join(DEVICES)}")
        return DEVICES[name]
    here = device_here(visible_devices(), query_gpus()) if visible_devices() else None
    return here if here is not None and here.name in DEVICES else DEVICES[DEFAULT]


def device_here(devices: Sequence[str], gpus: Sequence[Gpu] | str) -> Device | None:
    """The machine's smallest GPU among `devices`, with its real memory; None: the driver does not tell it. A kind
    that the table lacks has the speeds of an H100."""
    if isinstance(gpus, str):
        return None
    least = min(chosen_gpus(devices, gpus), key=lambda gpu: gpu.total_mib)
    if not least.total_mib:
        return None
    known = device_named(least.name)
    return replace(known or replace(DEVICES[DEFAULT], name=least.name), memory=int(least.total_mib * _MIB))


def check_plan(case: Case, plan_ranks: RankPlanner = plan_training) -> list[Finding]:
    """Plan the run, and compare it with the memory of the GPUs. No finding without GPUs.

    fail: a process needs more than its GPU has; with plan.enforce=off this is a warning.
    """
    if not case.devices:
        return []
    device, remedy = device_here(case.devices, case.gpus), "the run may run out of memory"
    if device is None:
        return [Finding("plan", "warn", "nvidia-smi does not tell the GPUs' memory", remedy)]
    try:
        plan = plan_run(case.resolved, device, plan_ranks)
    except PlanError as error:
        return [Finding("plan", "warn", f"this config cannot be planned: {error}", remedy)]
    return [judge_plan(plan, enforced=case.config.plan.enforce == "on")]


def judge_plan(plan: RunPlan, *, enforced: bool) -> Finding:
    """The finding about a plan's memory."""
    texts = [
        f"{shortage.process} needs at least {gib(shortage.needed)} of {gib(shortage.memory)}: {shortage.text}"
        for shortage in plan.shortages
        if shortage.fails or plan.fits
    ]
    if plan.fits and texts:
        return Finding("plan", "warn", "; ".join(texts), "fragmentation is not counted, so it may run out of memory")
    if texts:
        remedy = "`asyncrl-launch plan` with the same arguments finds changes that fit"
        anyway = "; plan.enforce=off starts anyway" if enforced else ""
        return Finding("plan", "fail" if enforced else "warn", "; ".join(texts), remedy + anyway)
    return Finding("plan", "ok", f"the fullest GPU needs at least {gib(plan.peak)} of {gib(plan.memory)}")
