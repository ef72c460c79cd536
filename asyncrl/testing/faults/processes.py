"""Find the processes of a live run by name, from its folder and the system's process table. It does not depend on etcd."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil

from asyncrl.launch.rundir import RUN_DIR_ENV, LaunchError, holder
from asyncrl.launch.supervisor.reaper import processes_with
from asyncrl.rewards import judges

_ENGINE = "sglang.launch_server"
_NURSERY = str(Path(judges.__file__).with_name("judge_main.py"))


class RunProcesses:
    """The live processes of the run in a folder, by name: `master/0`, `rollout_worker/1`, `engine/0`, `etcd`, `launcher`,
    `nursery/rollout_worker/1/reward.py:reward`."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._configs = run_dir / "configs"

    def launcher(self) -> psutil.Process | None:
        """The launcher's process; None if no launcher holds the folder."""
        with contextlib.suppress(LaunchError, ValueError, psutil.NoSuchProcess):
            pid = holder(self._run_dir)
            return None if pid is None else psutil.Process(pid)
        return None

    def by_name(self) -> dict[str, psutil.Process]:
        """All processes that are alive now."""
        launcher = self.launcher()
        found: dict[str, psutil.Process] = {} if launcher is None else {"launcher": launcher}
        workers = self._workers(launcher)
        found |= workers
        for name, process in workers.items():
            kind, _, index = name.partition("/")
            if kind == "generation_server" and (engine := _engine_of(process)) is not None:
                found[f"engine/{index}"] = engine
        if launcher is not None and (etcd := self._etcd(launcher)) is not None:
            found["etcd"] = etcd
        return found

    def of(self, target: str) -> dict[str, psutil.Process]:
        """The processes of this kind, or the one with this name."""
        return {name: process for name, process in self.by_name().items() if target in (name, name.partition("/")[0])}

    def _workers(self, launcher: psutil.Process | None) -> dict[str, psutil.Process]:
        """Workers that the launcher or a user started, and the nurseries (schedule.TARGETS) of their reward functions.

        A worker and its forks have the same command line, and so do a nursery, its forks and its parent. They differ in their
        parent process.
        """
        found: dict[str, psutil.Process] = {}
        nurseries: list[tuple[int, str, psutil.Process]] = []  # parent, reward function
        for pid in processes_with(f"{RUN_DIR_ENV}={self._run_dir}"):
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                command = command_line(process)
                if _NURSERY in command:
                    nurseries.append((process.ppid(), command[-1], process))
                    continue
                name = self._name_of(command)
                if not name or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if name not in found or (launcher is not None and process.ppid() == launcher.pid):
                    found[name] = process
        workers = {process.pid: name for name, process in found.items()}
        wardens = {process.pid: workers[parent] for parent, _, process in nurseries if parent in workers}
        for parent, spec, process in nurseries:
            if parent in wardens:
                found[f"nursery/{wardens[parent]}/{spec}"] = process
        return found

    def _name_of(self, cmdline: list[str]) -> str:
        """The name of a worker, by the config that it was started with; "" for any other process."""
        path = Path(cmdline[-1]) if cmdline else Path()
        if path.suffix != ".yaml" or not path.is_relative_to(self._configs):
            return ""
        kind, _, index = path.stem.rpartition("_")
        return f"{kind}/{index}"

    def _etcd(self, launcher: psutil.Process) -> psutil.Process | None:
        data_dir = f"{self._run_dir}/etcd/"
        is_etcd = (
            child for child in _children(launcher) if any(part.startswith(data_dir) for part in command_line(child))
        )
        return next(is_etcd, None)


def _engine_of(server: psutil.Process) -> psutil.Process | None:
    return next((child for child in _children(server) if _ENGINE in command_line(child)), None)


def _children(process: psutil.Process) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.Error, OSError):
        yield from process.children()


def command_line(process: psutil.Process) -> list[str]:
    """The command of a process; empty if it has ended, or is another user's."""
    try:
        return [argument for argument in process.cmdline() if argument]  # a forked worker's has empty padding
    except (psutil.Error, OSError):
        return []
