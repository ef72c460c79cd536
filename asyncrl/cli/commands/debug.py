"""`asyncrl-launch debug`."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import pdb
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from asyncrl.cli.commands.common import Commands, add_command, print_json, say
from asyncrl.config.processes import RolloutWorkerConfig
from asyncrl.config.schema import ConfigError, NameResolveConfig
from asyncrl.launch.program import ProcessConfig, load_process_config
from asyncrl.launch.rundir import LaunchError, is_running
from asyncrl.launch.worker_main import end_process, join_network, make_worker
from asyncrl.protocol.names import Names
from asyncrl.protocol.status import WorkerStatus
from asyncrl.runtime.clock import wait_until
from asyncrl.runtime.names.etcd.resolver import open_name_resolver
from asyncrl.runtime.names.etcd.server import EtcdServer, EtcdServerError
from asyncrl.runtime.names.interface import NameEntryNotFound, NameResolveError
from asyncrl.runtime.worker import configure_logging, run_worker

_LOOK_EVERY_S = 1.0

_DESCRIPTION = """Run one process of a run in this terminal, from its resolved config. breakpoint() works, Ctrl-C stops it.

The process joins the run that its config names. To let a run wait for your process, start the run with
debug.leave_out=[rollout_worker/0]: it prints the command to type here, and waits. The process stops when that run ends.
If that run is not running, the process gets a private etcd and runs alone: enough to see it start, load and serve."""

_EPILOG = """examples:
  asyncrl-launch run my_run.yaml 'debug.leave_out=[rollout_worker/0]'          in one terminal; then in another
  asyncrl-launch debug runs/mine/t0/configs/attempt_1/rollout_worker_0.yaml --pdb
  asyncrl-launch run my_run.yaml --dry-run --output dry                        write resolved configs, start nothing
  asyncrl-launch debug dry/generation_server_0.yaml                            one server alone

exit codes: 0 it ended or was stopped; 1 it failed, the traceback is printed; 2 the file is not a process's config."""


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "debug", debug, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("config", metavar="CONFIG_OF_PROCESS", help="<run>/configs/attempt_N/<worker>.yaml")
    parser.add_argument("--pdb", action="store_true", help="if the process fails, open pdb where it failed")


def debug(arguments: argparse.Namespace, console: Console) -> int:
    """Run one process of a run in this terminal, from its resolved config, optionally with pdb."""
    config = _load(Path(arguments.config))
    run_dir = Path(config.worker.run_dir)
    # Checked before the slow imports: if the run ends during them, _stop_with_run must still end this process
    joins = is_running(run_dir)
    with _name_service(config, console) as name_resolve:
        config = replace(config, worker=replace(config.worker, name_resolve=name_resolve))
        # Call reward functions on threads of this process, so that their breakpoint() can use this terminal
        if isinstance(config, RolloutWorkerConfig):
            config = replace(config, rollout=replace(config.rollout, reward_isolation="thread"))
        configure_logging(config.worker)
        if joins:
            join_network(config.worker)
        on_error = _post_mortem if arguments.pdb else None
        try:
            made = make_worker(config)
        except Exception as error:
            if on_error is None:
                raise
            on_error(error)
            code = 1
        else:
            if joins:
                threading.Thread(target=_stop_with_run, args=(run_dir,), daemon=True).start()
            code = run_worker(made, on_error=on_error)
    if arguments.json:
        print_json({"worker": config.worker.name, "exit_code": code})
    end_process(code)  # exits even if a thread hangs, so that the terminal is free again


def _load(path: Path) -> ProcessConfig:
    try:
        return load_process_config(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise ConfigError(
            f"{path} is not the resolved config of a process: {str(error).splitlines()[0]}; a run has them in "
            "<run>/configs/attempt_N/, and `asyncrl-launch run CONFIG --dry-run` writes them too"
        ) from error


@contextlib.contextmanager
def _name_service(config: ProcessConfig, console: Console) -> Iterator[NameResolveConfig]:
    """The name resolve of the run, if it answers; else a private etcd, which runs as long as this process."""
    name_resolve = config.worker.name_resolve
    where = name_resolve.where
    if where and _answers(config, name_resolve):
        yield name_resolve
        return
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-debug-"))
    etcd = None
    try:
        etcd = EtcdServer(folder / "etcd", folder / "etcd.log", name_resolve.binary)
        etcd.start()
        gone = f"nothing answers at {where}" if where else "its run is not running"
        say(console, f"{config.worker.name}: {gone}; it runs alone, with a private etcd at {etcd.endpoint}")
        yield NameResolveConfig(endpoints=[etcd.endpoint])
    except EtcdServerError as error:
        raise LaunchError(f"no run to join is running, and a private etcd cannot be started: {error}") from error
    finally:
        if etcd is not None:
            etcd.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _answers(config: ProcessConfig, name_resolve: NameResolveConfig) -> bool:
    """Whether the run's name resolve answers. Raises LaunchError if a process of this name, which has not ended, is registered in
    it."""
    worker = config.worker
    key = Names(worker.experiment, worker.trial).status(worker.name)
    try:
        with open_name_resolver(name_resolve) as resolver:
            status = msgspec.json.decode(resolver.get(key), type=WorkerStatus)
    except NameEntryNotFound:
        return True
    except NameResolveError:
        return False
    if status.state in ("done", "stopped", "error"):
        return True
    raise LaunchError(
        f"{worker.name} is already running (process {status.pid}); to start it yourself, start the run with "
        f"debug.leave_out=[{worker.name}]"
    )


def _stop_with_run(run_dir: Path) -> None:
    """Stop this process when the run that it joined ends, however the launcher ends.

    waits for: the release of the launcher's lock. In a debugger the signal takes effect only when the event loop continues.
    """
    wait_until(lambda: not is_running(run_dir), limit_s=math.inf, every_s=_LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _post_mortem(error: BaseException) -> None:
    place: Any = error if sys.version_info >= (3, 13) else error.__traceback__  # newer Pythons show chained errors
    pdb.post_mortem(place)
