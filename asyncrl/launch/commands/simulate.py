"""`asyncrl-launch simulate`."""

from __future__ import annotations

import argparse
import os

from rich.console import Console

from asyncrl.launch.commands.common import CONFIG_ERROR, FAILED, Commands, add_command, print_json

_DESCRIPTION = """Simulate runs: manager, master, rollout workers, generation servers and heads, the real classes, in one process
under a virtual clock, over twins of channel, HTTP, name resolve and disk. A seed decides the shape of the run and what goes
wrong: messages that are lost, doubled, late or damaged; kills, freezes, partitions, power cuts, slow disks. After every event
the invariants of DESIGN.md are checked. It needs no config and starts no run."""

_EPILOG = """examples:
  asyncrl-launch simulate --seeds 10000                       on all cores, until one fails
  asyncrl-launch simulate --trace 4711                        what happens in a seed; with as few faults as still make it fail
  asyncrl-launch simulate --seeds 1000 --bug no_dedupe        can it fail? with a known bug put in
  asyncrl-launch simulate --seeds 1000 --first 50000 --jobs 2

A seed that fails does so again, event for event, with the same code and the same Python. It is simulated again with fewer and
simpler faults until none can be left out; what is printed then is the smallest.

exit code: 0 no seed failed; 1 one did; 2 a wrong argument."""

_SHOWN = 60  # events before the end, where not all were asked for


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "simulate", simulate, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--seeds", metavar="N", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--first", metavar="S", type=int, default=0, help="the first one (default 0)")
    parser.add_argument("--jobs", metavar="J", type=int, default=os.cpu_count() or 1, help="processes (default: cores)")
    parser.add_argument("--bug", metavar="NAME", default="", help="put in a known bug; `list` names them")
    parser.add_argument("--trace", metavar="SEED", type=int, help="one seed, with all its events")
    parser.add_argument("--no-faults", action="store_true", help="nothing goes wrong")


def simulate(arguments: argparse.Namespace, console: Console) -> int:
    """Simulate runs with faults, by the thousand, and check the invariants after every event."""
    from asyncrl.testing.simulation.bugs import BUGS
    from asyncrl.testing.simulation.campaign import Progress, campaign, explain

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if arguments.bug and arguments.bug not in BUGS:
        say(f"--bug {arguments.bug}: use one of {', '.join(BUGS)}")
        return 0 if arguments.bug == "list" else CONFIG_ERROR
    if arguments.seeds < 1 or arguments.jobs < 1:
        say(f"--seeds {arguments.seeds} --jobs {arguments.jobs}: at least one of each")
        return CONFIG_ERROR
    faults = not arguments.no_faults
    failing = arguments.trace
    progress: Progress | None = None
    if failing is None:
        told = 0.0
        for progress in campaign(
            arguments.first, arguments.seeds, jobs=arguments.jobs, bug=arguments.bug, faults=faults
        ):
            if progress.wall_s - told >= 5.0 and not arguments.json:
                told = progress.wall_s
                say(_line(progress))
        assert progress is not None
        if not arguments.json:
            say(_line(progress))
        failing = progress.failed.seed if progress.failed is not None else None
    shown = explain(failing, bug=arguments.bug, faults=faults) if failing is not None else None
    failed = shown is not None and bool(shown.violation)
    if arguments.json:
        print_json(
            {
                "seeds": progress.num_seeds if progress else 1,
                "train_steps": progress.num_steps if progress else None,
                "seconds": progress.wall_s if progress else None,
                "failed": failing if failed else None,
                "violation": shown.violation if shown else "",
                "faults": [str(fault) for fault in shown.scenario.faults] if shown else [],
                "digest": shown.digest if shown else "",
                "events": list(shown.events) if shown else [],
            }
        )
    elif shown is not None:
        for event in shown.events if arguments.trace is not None else shown.events[-_SHOWN:]:
            say(event)
        say(f"\nseed {failing}: {shown.scenario}")
        say("\nfaults:" + "".join(f"\n  {fault}" for fault in shown.scenario.faults) if shown.scenario.faults else "")
        say(f"\n{shown.violation or 'nothing is wrong'} (events {shown.digest[:16]})")
    return FAILED if failed else 0


def _line(progress: object) -> str:
    from asyncrl.testing.simulation.campaign import Progress

    assert isinstance(progress, Progress)
    pace = progress.num_seeds / max(progress.wall_s, 1e-9) * 60
    line = (
        f"{progress.num_seeds} seeds, {progress.num_steps} train steps, {progress.virtual_s / 3600:.1f} simulated hours"
    )
    line += f" in {progress.wall_s:.0f} s: {pace:.0f} seeds a minute"
    return f"{line}; seed {progress.failed.seed} failed" if progress.failed is not None else line
