"""Entry point of every worker process: `python -m asyncrl.launch.worker_main CONFIG.yaml`.

The launcher starts processes this way, or a fork server runs the same code in a forked process (supervisor/fork_server.py). You can
rerun one process of a run the same way under a debugger, from its resolved config.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

from asyncrl.config.import_object import no_terminal
from asyncrl.config.processes import WorkerInfo
from asyncrl.launch.program import ProcessConfig, load_process_config
from asyncrl.launch.rundir import logs_dir
from asyncrl.runtime import security, unix_sockets
from asyncrl.runtime.process import die_with_parent
from asyncrl.runtime.stacks import SUFFIX, answer_requests
from asyncrl.runtime.user_output import limit_streams
from asyncrl.runtime.worker import Worker, configure_logging, run_worker

PARENT_ENV = "ASYNCRL_PARENT"  # pid of the launcher; unset: no launcher started this process


def make_worker(config: ProcessConfig) -> Worker:
    """Return the worker of a config. Heavy imports happen here, after the arguments are checked."""
    kind = config.worker.kind
    if kind == "master":
        from asyncrl.master.worker import MasterWorker

        return MasterWorker(config)  # type: ignore[arg-type]
    if kind == "model_worker":
        from asyncrl.model.worker import ModelWorker

        return ModelWorker(config)  # type: ignore[arg-type]
    if kind == "generation_server":
        from asyncrl.generation.worker import GenerationServer

        return GenerationServer(config)  # type: ignore[arg-type]
    if kind == "gserver_manager":
        from asyncrl.manager.worker import GserverManager

        return GserverManager(config)  # type: ignore[arg-type]
    if kind == "rollout_worker":
        from asyncrl.rollout.worker import RolloutWorker

        return RolloutWorker(config)  # type: ignore[arg-type]
    if kind == "recorder":
        from asyncrl.model.recorder import Recorder

        return Recorder(config)  # type: ignore[arg-type]
    if kind == "replayer":
        from asyncrl.rollout.replayer import Replayer

        return Replayer(config)  # type: ignore[arg-type]
    raise AssertionError(kind)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m asyncrl.launch.worker_main",
        description="Run one process of an asyncrl run from its resolved config.",
    )
    parser.add_argument("config", type=Path, help="<run>/configs/attempt_N/<worker>.yaml")
    arguments = parser.parse_args()
    parent = os.environ.get(PARENT_ENV)
    if parent:
        die_with_parent()
        if os.getppid() != int(parent):
            return 1  # the launcher is gone already
    return run_config(arguments.config, launched=bool(parent))


def run_config(path: Path, *, launched: bool) -> int:
    """Run the worker of a config to its end. Returns its exit code. launched: the launcher started it, not a person."""
    config = load_process_config(path)
    configure_logging(config.worker)
    if launched:
        sys.breakpointhook = no_terminal
        limit_streams(config.worker.name)
    with contextlib.suppress(OSError):  # the worker works even if it cannot answer requests for its stacks
        answer_requests(
            logs_dir(Path(config.worker.run_dir), config.worker.attempt) / f"{path.stem}{SUFFIX}", config.worker.name
        )
    join_network(config.worker)
    return run_worker(make_worker(config))


def join_network(info: WorkerInfo) -> None:
    """Make this process use the run's secrets and sockets. Call it before the process opens any socket. Raises ConfigError."""
    security.secure(security.open_security(Path(info.run_dir), info.network))
    unix_sockets.use(info.network.socket_dir)


def end_process(code: int) -> NoReturn:
    """Exit now, without the interpreter's shutdown, which takes a second with torch loaded. The worker is already closed, and a
    thread in a collective or in a user's code does not delay the exit."""
    atexit._run_exitfuncs()  # users' code may have registered exit functions
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end_process(main())
