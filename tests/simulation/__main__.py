"""`python -m tests.simulation`."""

from __future__ import annotations

import argparse
import os
import sys

from tests.simulation.bugs import BUGS
from tests.simulation.campaign import Progress, campaign, explain

_DESCRIPTION = """Simulate runs: the real classes of manager, master, rollout workers, generation servers and heads, in one process
under a virtual clock, with test doubles of channel, HTTP, name resolve and disk. A seed determines the shape of the run and its
faults: messages that are lost, duplicated, late or damaged; kills, freezes, partitions, power cuts, slow disks. The invariants of
DESIGN.md are checked after every event. The simulation needs no config and starts no processes of a run."""

_EPILOG = """examples:
  python -m tests.simulation --seeds 10000                       on all cores, until a seed fails
  python -m tests.simulation --trace 4711                        print a seed's events; if it fails, with the fewest faults
  python -m tests.simulation --seeds 1000 --bug no_dedupe        plant a known bug, which must be found
  python -m tests.simulation --seeds 1000 --first 50000 --jobs 2

A failing seed fails again, event for event, with the same code and the same Python. It is simulated again with fewer and
simpler faults until none can be left out. The smallest failing scenario is printed.

exit code: 0 no seed failed; 1 a seed failed; 2 a wrong argument."""

_SHOWN = 60  # last events that are printed without --trace


def main() -> int:
    """Simulate thousands of runs with faults, and check the invariants after every event."""
    parser = argparse.ArgumentParser(
        "python -m tests.simulation",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", metavar="N", type=int, default=1000, help="number of seeds (default 1000)")
    parser.add_argument("--first", metavar="S", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--jobs", metavar="J", type=int, default=os.cpu_count() or 1, help="processes (default: cores)")
    parser.add_argument("--bug", choices=BUGS, default="", help="plant a known bug")
    parser.add_argument("--trace", metavar="SEED", type=int, help="simulate one seed and print all its events")
    parser.add_argument("--no-faults", action="store_true", help="inject no faults")
    arguments = parser.parse_args()
    if arguments.seeds < 1 or arguments.jobs < 1:
        parser.error(f"--seeds {arguments.seeds} --jobs {arguments.jobs}: at least one of each")
    faults = not arguments.no_faults
    failing = arguments.trace
    if failing is None:
        told = 0.0
        for progress in campaign(
            arguments.first, arguments.seeds, jobs=arguments.jobs, bug=arguments.bug, faults=faults
        ):
            if progress.wall_s - told >= 5.0:
                told = progress.wall_s
                print(_line(progress), flush=True)
        print(_line(progress))
        if progress.failed is None:
            return 0
        failing = progress.failed.seed
    shown = explain(failing, bug=arguments.bug, faults=faults)
    for event in shown.events if arguments.trace is not None else shown.events[-_SHOWN:]:
        print(event)
    print(f"\nseed {failing}: {shown.scenario}")
    if shown.scenario.faults:
        print("\nfaults:" + "".join(f"\n  {fault}" for fault in shown.scenario.faults))
    print(f"\n{shown.violation or 'nothing is wrong'} (events {shown.digest[:16]})")
    return 1 if shown.violation else 0


def _line(progress: Progress) -> str:
    pace = progress.num_seeds / max(progress.wall_s, 1e-9) * 60
    line = (
        f"{progress.num_seeds} seeds, {progress.num_steps} train steps, {progress.virtual_s / 3600:.1f} simulated hours"
    )
    line += f" in {progress.wall_s:.0f} s: {pace:.0f} seeds a minute"
    return f"{line}; seed {progress.failed.seed} failed" if progress.failed is not None else line


if __name__ == "__main__":
    sys.exit(main())
