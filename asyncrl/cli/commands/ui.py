"""`asyncrl-launch ui`."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from asyncrl.cli.commands.common import Commands, add_command, print_json, say
from asyncrl.cli.commands.which_run import run_dir_of
from asyncrl.cli.page import OPEN_PATHS, Page
from asyncrl.cli.run_files import distinct_names
from asyncrl.config.schema import ConfigError
from asyncrl.launch.rundir import LaunchError
from asyncrl.runtime.clock import Clock
from asyncrl.runtime.http_server import listen_routes
from asyncrl.runtime.security import Secrets, Security, secure

_HOST = "127.0.0.1"

_DESCRIPTION = """Show runs on a web page: curves, time, processes, trajectories token by token, advice. It only reads the folders
of the runs, in a process of its own: it works while a run is running and after its end, for copies, and for several
runs beside each other. It shows nothing to a client without the token in the printed URL, and listens on 127.0.0.1 only."""

_EPILOG = """examples:
  asyncrl-launch ui runs/sloppy-sorter/t0                  prints the URL; Ctrl-C ends the page, not the run
  asyncrl-launch ui runs/sloppy-sorter/*                   several runs beside each other
  asyncrl-launch run CONFIG --ui                           a run and its page
  ssh -L 8800:127.0.0.1:8800 HOST asyncrl-launch ui RUN --port 8800      the page of another machine

exit codes: 0 ended by its parent; 1 the port is taken; 2 wrong arguments; 130 Ctrl-C."""


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "ui", ui, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="*",
        help="folder of a run, or the CONFIG that it was started from (default: the only run under ./runs)",
    )
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: a free one)")


def ui(arguments: argparse.Namespace, console: Console) -> int:
    """Show runs on a web page: curves, time, processes, trajectories, advice."""
    if not 0 <= arguments.port < 2**16:
        raise ConfigError(f"--port {arguments.port}: use 0 to 65535")
    overrides = [target for target in arguments.runs if "=" in target and not Path(target).exists()]
    targets = [target for target in arguments.runs if target not in overrides]
    run_dirs = list({run_dir_of(target, overrides).resolve(): None for target in targets or [None]})
    try:
        asyncio.run(_serve(run_dirs, arguments, console, arguments.clock))
    except OSError as error:
        raise LaunchError(f"port {arguments.port} cannot be used: {error}; choose another with --port") from error
    return 0


async def _serve(run_dirs: Sequence[Path], arguments: argparse.Namespace, console: Console, clock: Clock) -> None:
    """waits for: requests, without a limit. unblocked by: Ctrl-C, the end of the parent."""
    secrets = Secrets.make()
    secure(Security(secrets))
    page = Page(dict(zip(distinct_names(run_dirs), run_dirs, strict=True)), clock)
    async with listen_routes(*page.routes(), host=_HOST, port=arguments.port, open_paths=OPEN_PATHS) as url:
        shown = f"{url}/#{secrets.token}"
        if arguments.json:
            print_json({"url": shown, "run_dirs": list(map(str, run_dirs))})
        else:
            say(console, f"the page: {shown}", "Ctrl-C ends it; the runs go on")
        await asyncio.Event().wait()
