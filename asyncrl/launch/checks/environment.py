"""Checks of inherited environment variables that break a run, before anything starts.

Variables that the processes of a run do not read, or that they replace, are not checked: those of torchrun (the process groups get
their ranks and stores from the launcher), OMP_NUM_THREADS (train.torch_threads), proxies (asyncrl's clients use none), ETCD_*.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from asyncrl.config.modes import mode_of
from asyncrl.config.schema import ConfigError, ExperimentConfig
from asyncrl.dataflow.phases import phases
from asyncrl.dataflow.topology import allocation_of
from asyncrl.launch.checks.checklist import Finding
from asyncrl.launch.program import placed_groups
from asyncrl.runtime.interfaces import GLOO, NCCL, TENSORPIPE, wrong_interface


def judge_environment(
    config: ExperimentConfig, environment: Mapping[str, str], interfaces: Sequence[str], *, on_gpu: bool
) -> Iterator[ConfigError | Finding]:
    """Judge the variables with which the processes of this config would start. A ConfigError: the run would fail on this machine. A
    Finding: it may fail, or only if processes run on other machines. Pure."""
    communicates = any(_communicates(phase) for phase in phases(config))
    here = config.cluster == "local" and not config.hosts
    for variable, is_used in ((GLOO, communicates), (NCCL, communicates and on_gpu), (TENSORPIPE, False)):
        if not (text := wrong_interface(variable, environment, interfaces)):
            continue
        if is_used and here:
            yield ConfigError(text)
        else:
            value, _, remedy = text.partition(". ")
            why = "the processes on this machine cannot use it" if is_used else "this config does not use it"
            yield Finding("environment", "warn", f"{value}; {why}", remedy)
    if environment.get("PYTHONOPTIMIZE", "") not in ("", "0", "1"):
        yield ConfigError(
            f"PYTHONOPTIMIZE={environment['PYTHONOPTIMIZE']}: it removes docstrings, and transformers reads them; unset it"
        )
    debug = environment.get("TORCH_DISTRIBUTED_DEBUG", "OFF")
    if debug.upper() not in ("OFF", "INFO", "DETAIL"):
        yield ConfigError(f"TORCH_DISTRIBUTED_DEBUG={debug}: torch accepts OFF, INFO and DETAIL; unset it")


def _communicates(config: ExperimentConfig) -> bool:
    """Whether a torch.distributed process group is formed. SGLang and vLLM form one even for themselves."""
    if not mode_of(config.mode).replays and allocation_of(config).traits.program is not None:
        return True
    groups, _ = placed_groups(config)
    return any(len(members) > 1 for members in groups.all)
