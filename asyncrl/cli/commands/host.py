"""`asyncrl-launch host`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console

from asyncrl.cli.commands.common import Commands, add_config_command, say, supervises
from asyncrl.config.nearest import did_you_mean
from asyncrl.config.resolve import with_absolute_paths
from asyncrl.config.schema import ConfigError, ExperimentConfig, NameResolveConfig
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.hosts.addresses import address_of, own_host
from asyncrl.launch.hosts.daemon import HostDaemon, StopSignal
from asyncrl.launch.program import run_directory
from asyncrl.launch.rundir import LaunchError, is_folder, read_record
from asyncrl.launch.slurm import own_start
from asyncrl.launch.worker_main import PARENT_ENV
from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.protocol.hosts import LauncherRecord
from asyncrl.protocol.names import Names
from asyncrl.runtime.clock import Clock
from asyncrl.runtime.names.etcd.resolver import open_name_resolver
from asyncrl.runtime.names.interface import NameResolveError, NameResolver
from asyncrl.runtime.process import die_with_parent

_LOOK_S = 0.5
_TRY_S = 2.0  # limit for one endpoint; short, because the endpoint's run may have ended

_DESCRIPTION = """Start the host daemon, which runs a launcher's processes on this host, with cluster=hosts or cluster=slurm.

Start it on every host with the config and the overrides of the run, in the same folder, except on the launcher's own
host. It finds the launcher through name_resolve.endpoints or, without them, through the run's folder, which all hosts
must then share. It ends with the run. If the launcher dies, or this host loses its connection to it, the daemon stops
all processes of the run on this host."""

_EPILOG = """

examples:
  asyncrl-launch host my_run.yaml cluster=hosts hosts=[node1,node2]
  asyncrl-launch host my_run.yaml cluster=hosts hosts=[node1,node2] name_resolve.endpoints=[node1:2379]
  asyncrl-launch host my_run.yaml --host node2 --address 10.0.0.2     if this host is not recognized by its name

exit codes: 0 the run has ended; 1 no launcher was found, or it died; 2 the config cannot work; 128 + N stopped by signal N."""


def add_to(commands: Commands) -> None:
    parser = add_config_command(commands, "host", host_command, description=_DESCRIPTION, epilog=_EPILOG)
    supervises(parser)
    parser.add_argument("--host", metavar="NAME", default="", help="name of this host in the config's hosts")
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        default="",
        help="address that the processes here bind (default: the address of the host's name)",
    )


def host_command(arguments: argparse.Namespace, console: Console) -> int:
    """Start the host daemon, which runs processes on this host for a launcher on another host."""
    parent = os.environ.pop(PARENT_ENV, "")
    if parent:  # this is the daemon of the launcher's own host
        die_with_parent()
        if os.getppid() != int(parent):
            return 1
    config = load_experiment(arguments.config, arguments.overrides)
    if config.cluster == "local":
        raise ConfigError("cluster='local': a run on one machine has no host daemons; use cluster=hosts hosts=[...]")
    host = arguments.host or own_host(config.hosts)
    if config.hosts and host not in config.hosts:
        hint = did_you_mean(host, config.hosts)
        raise ConfigError(f"--host {host}: not in hosts={list(config.hosts)}; {hint}use one of these names")
    run_dir = run_directory(config)

    def tell(text: str) -> None:
        say(console, f"host daemon {host}: {text}")

    with _join(config, run_dir, tell, arguments.clock) as resolver:
        config = replace(config, name_resolve=_names_at(config, run_dir) or config.name_resolve)
        towards = [endpoint.rpartition(":")[0] for endpoint in config.name_resolve.endpoints]
        address = arguments.address or address_of(host, towards=towards)
        tell(f"joins at {address}")
        with StopSignal.caught() as stop:
            daemon = HostDaemon(
                config,
                resolver,
                host=host,
                address=address,
                run_dir=run_dir,
                stop=stop,
                say=tell,
                clock=arguments.clock,
            )
            code = daemon.run()
    tell("the run has ended" if code == 0 else "stopped")
    return code


def _join(config: ExperimentConfig, run_dir: Path, say: Callable[[str], None], clock: Clock) -> NameResolver:
    """Open name resolve once it answers. In a Slurm job, also wait until it has the record of the launcher that belongs to the
    same start of the job as this process: Slurm may have started the job more than once.

    waits for: the launcher, which may start later; at most network.hosts_limit_s. Raises LaunchError after that.
    """
    limit_s, start = config.network.hosts_limit_s, own_start() if config.cluster == "slurm" else ""
    deadline = clock.monotonic() + limit_s
    met, earlier = f"there is no run in {run_dir} yet", ""
    while True:
        names_at = _names_at(config, run_dir)
        if names_at is not None:
            try:
                resolver = open_name_resolver(names_at, _TRY_S)
                leader = _leader_at(resolver, config)
                led = leader.start if leader is not None and start else ""
                if leader is not None and not config.name_resolve.endpoints and not is_folder(leader.run_dir, run_dir):
                    resolver.close()
                    raise LaunchError(
                        f"{run_dir} is the copy of a run that is running in {leader.run_dir}; start the launcher of the copy first"
                    )
                if led == start:
                    return resolver
                # This name resolve may be that of the job's previous start, which can end at any time
                resolver.close()
                met = f"the launcher of job {start} (job.restarts) has not started"
                if led not in ("", earlier):
                    earlier = led
                    say(f"the launcher of job {led} is still running; waiting for that of {start} (job.restarts)")
            except (NameResolveError, ValueError) as error:
                met = str(error)
        if clock.monotonic() > deadline:
            raise LaunchError(
                f"found no launcher within {limit_s:g} s (network.hosts_limit_s): {met}. If the hosts share no folder, set "
                "name_resolve.endpoints=[host:port] for launcher and host daemons"
            )
        clock.sleep(_LOOK_S)


def _leader_at(resolver: NameResolver, config: ExperimentConfig) -> LauncherRecord | None:
    """The launcher that is registered in name resolve; None: there is none, or name resolve does not answer."""
    try:
        return msgspec.json.decode(resolver.get(Names(config.experiment, config.trial).launcher()), type=LauncherRecord)
    except (NameResolveError, *DECODE_ERRORS):
        return None


def _names_at(config: ExperimentConfig, run_dir: Path) -> NameResolveConfig | None:
    """Where name resolve is; None if that is not known yet."""
    if config.name_resolve.endpoints:
        return with_absolute_paths(config.name_resolve)
    record = read_record(run_dir)
    return record.names_at if record else None
