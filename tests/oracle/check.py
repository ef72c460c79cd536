"""Compare this checkout with the oracle: python tests/oracle/check.py [SECTION ...] [--base REV]

Prints one line for each section, and below it a line for each difference. Exits with 1 if there is any. README.md says what is
compared and with which tolerance.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

import mutants
import surface
import weights

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))  # sections import this checkout's asyncrl, not an installed one

BASE = "8013ca13df37b7fc8c3b798f425978bf23978fd9"
NUM_SEEDS = 1000
BUG_SEEDS = 1000  # each planted bug must be found within this number of seeds
PLANTED_BUGS = {
    "gate_forgets_transit",
    "acknowledge_before_storing",
    "no_dedupe",
    "lease_never_returned",
    "first_finished_first_trained",
    "published_before_rename",
    "lower_attempt_accepted",
    "readmitted_without_load",
    "done_after_checkpoint",
    "waiter_granted_twice",
    "empty_part_is_processed",
    "last_part_begins_anew",
    "taken_again",
    "devices_stay_taken",
    "base_pruned",
}
JOBS = os.cpu_count() or 1
MAX_SHOWN = 20  # printed differences of a section

Answer = tuple[list[str], str]  # differences, and figures to print


def train_only(arguments: argparse.Namespace) -> Answer:
    return _same_weights(["group", "critic"], arguments.base, with_committed=True)


def sync(arguments: argparse.Namespace) -> Answer:
    return _same_weights(["sync"], arguments.base, with_committed=False)


def simulation(arguments: argparse.Namespace) -> Answer:
    from tests.simulation.campaign import campaign
    from tests.simulation.scenario import NUM_STEPS

    *_, last = campaign(0, arguments.seeds, jobs=JOBS)
    figures = f"{last.num_seeds} of {NUM_SEEDS} seeds, {last.num_steps} train steps"
    if last.failed is not None:
        return [f"seed {last.failed.seed}: {last.failed.violation}"], figures
    if last.num_seeds != arguments.seeds or last.num_steps < NUM_STEPS * arguments.seeds:
        return [f"expected {arguments.seeds} seeds of {NUM_STEPS} train steps or more"], figures
    return [], figures


def planted_bugs(_: argparse.Namespace) -> Answer:
    from tests.simulation.bugs import BUGS
    from tests.simulation.campaign import campaign

    problems = [f"{bug} cannot be planted any more" for bug in sorted(PLANTED_BUGS - BUGS.keys())]
    seeds = []
    for bug in sorted(PLANTED_BUGS & BUGS.keys()):
        *_, last = campaign(0, BUG_SEEDS, jobs=JOBS, bug=bug)
        if last.failed is None:
            problems.append(f"{bug} was not found in {BUG_SEEDS} seeds")
        else:
            seeds.append(last.failed.seed)
    return problems, f"{len(seeds)} of {len(PLANTED_BUGS)} found, the last by seed {max(seeds, default=-1)}"


def same_update(_: argparse.Namespace) -> Answer:
    """Compare the names of the passed tests of equal updates with those in same_update.txt."""
    listed = set((HERE / "same_update.txt").read_text(encoding="utf-8").splitlines())
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        test = "tests/processes/test_same_update.py"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", test]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        if not report.exists():
            return [f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}"], "no report"
        cases = ElementTree.parse(report).getroot().iter("testcase")
    bad = {"failure", "error", "skipped"}
    passed = {case.attrib["name"] for case in cases if not bad & {element.tag for element in case}}
    problems = [f"{name} did not pass" for name in sorted(listed - passed)]
    problems += [f"{name} is not in same_update.txt" for name in sorted(passed - listed)]
    return problems, f"{len(passed)} cases passed, {len(listed)} are listed"


def the_surface(_: argparse.Namespace) -> Answer:
    return surface.check()


def the_mutants(_: argparse.Namespace) -> Answer:
    return mutants.run_all(), f"{len(mutants.MUTANTS)} mutants"


# A section is one function. It returns a list of the differences that it found (between this checkout and the oracle, or between
# an expected outcome and the actual one), and a text with numbers to print.
SECTIONS: dict[str, Callable[[argparse.Namespace], Answer]] = {
    "surface": the_surface,
    "train_only": train_only,
    "sync": sync,
    "same_update": same_update,
    "simulation": simulation,
    "planted_bugs": planted_bugs,
    "mutants": the_mutants,
}


def _same_weights(runs: list[str], base: str, *, with_committed: bool) -> Answer:
    with tempfile.TemporaryDirectory(prefix="oracle_") as name, ThreadPoolExecutor(2) as pool:
        folder = Path(name).resolve()
        trees = {"base": weights.extract(base, folder / "base_tree"), "checkout": ROOT}
        started = {
            (run, which): pool.submit(weights.train, tree, run, folder / run / which)
            for run in runs
            for which, tree in trees.items()
        }
        found = {key: future.result() for key, future in started.items()}
    problems, figures = [], []
    for run in runs:
        others = [("base", found[run, "base"], weights.BASE_TOLERANCE)]
        if with_committed:
            others.append(("file", weights.committed(run), weights.FILE_TOLERANCE))
        for other, expected, tolerance in others:
            largest, differing = weights.compare(expected, found[run, "checkout"], tolerance)
            figures.append(f"{run} {largest:.2g} from {other}")
            problems += [f"{run}, {other}, tolerance {tolerance:g}: {problem}" for problem in differing]
    return problems, ", ".join(figures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--base", metavar="REV", default=BASE, help="compare weights with this commit")
    parser.add_argument(
        "--seeds",
        metavar="N",
        type=int,
        default=NUM_SEEDS,
        help=f"simulate this number of seeds instead of {NUM_SEEDS}",
    )
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.sections if name not in SECTIONS]:
        parser.error(f"unknown section {unknown[0]!r}; use {', '.join(SECTIONS)}")
    failed = False
    for name in arguments.sections or SECTIONS:
        began = time.monotonic()
        try:
            problems, figures = SECTIONS[name](arguments)
        except Exception as error:
            problems, figures = [f"{type(error).__name__}: {error}"], "not compared"
        failed |= bool(problems)
        said = "ok" if not problems else f"{len(problems)} differences"
        print(f"{name:13} {said}: {figures}, {time.monotonic() - began:.0f} s", flush=True)
        for problem in problems[:MAX_SHOWN]:
            print(f"    {problem}", flush=True)
        if len(problems) > MAX_SHOWN:
            print(f"    and {len(problems) - MAX_SHOWN} more", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
