"""Fuzz all code that reads from a socket, for any number of inputs.

    python tests/fuzz/fuzz.py [--inputs 1000000] [--seed 0] [--target codec] [--atheris]

The targets (targets.py) take inputs in turn, in separate processes, one a core. A target fails if it raises an exception that its
callers do not handle, takes more than a second of processor time for an input, or allocates more than --memory-mb beyond its
initial memory.
Each failure is printed with the seed and number that reproduce it, and kept in --keep. --atheris: chooses inputs by the branches
that they reach, if atheris is installed (pip install atheris), one target after another.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import multiprocessing
import os
import random
import resource
import sys
import time
import traceback
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # targets.py imports tests.support


def _watched_imports() -> contextlib.AbstractContextManager[None]:
    """atheris instruments modules imported inside this context: asyncrl's. Instrumenting their dependencies would take hours."""
    if "--atheris" not in sys.argv:
        return contextlib.nullcontext()
    import atheris

    return atheris.instrument_imports(include=["asyncrl"])


with _watched_imports():
    from targets import Target, all_targets, mutated

LIMIT_S = 1.0  # processor time for one input
HANG_S = 60.0  # for BATCH inputs: after this time a process dumps its stacks and exits
BATCH = 2000


def input_of(target: Target, seed: int, number: int) -> bytes:
    """Return an input of the target. The same target, seed and number always give the same bytes."""
    return mutated(random.Random(f"{seed} {target.name} {number}"), target.corpus)


def failure_of(target: Target, data: bytes) -> str:
    """The defect that this input reveals in the target, or ""."""
    began = time.process_time()
    try:
        target.try_one(data)
    except Exception:
        return traceback.format_exc()
    took_s = time.process_time() - began
    return f"took {took_s:.1f} s of processor time" if took_s > LIMIT_S else ""


def limit_memory(megabytes: int) -> None:
    """Limit the process's address space to its current size plus this many megabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _work(process: int, processes: int, args: argparse.Namespace, results: multiprocessing.Queue[str]) -> None:
    failures: list[dict[str, object]] = []
    count = 0
    with all_targets() as targets:
        chosen = [target for target in targets if args.target in ("", target.name)]
        for target in chosen:  # warm up caches, so that they do not count as growth
            target.try_one(target.corpus[0])
        limit_memory(args.memory_mb)
        share = -(-args.inputs // len(chosen))
        for target in chosen:
            for number in range(process, share, processes):
                if count % BATCH == 0:
                    faulthandler.dump_traceback_later(HANG_S, exit=True)
                data = input_of(target, args.seed, number)
                count += 1
                if told := failure_of(target, data):
                    failures.append({"target": target.name, "number": number, "data": data.hex()[:2000], "told": told})
                    break  # one failure of this target is enough
    faulthandler.cancel_dump_traceback_later()
    results.put(json.dumps({"count": count, "failures": failures, "peak_mb": _peak_mb()}))


def _peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def _with_atheris(args: argparse.Namespace) -> int:
    """Run each target in a process of its own, because atheris never returns."""
    import atheris

    with all_targets() as targets:
        names = [target.name for target in targets if args.target in ("", target.name)]
    failed = 0
    for name in names:
        child = os.fork()
        if child == 0:
            with all_targets() as targets:
                target = next(target for target in targets if target.name == name)
                folder = args.keep / "corpus" / name.replace(" ", "_")
                folder.mkdir(parents=True, exist_ok=True)
                for number, data in enumerate(target.corpus):
                    (folder / f"honest{number}").write_bytes(data)
                runs = f"-runs={-(-args.inputs // len(names))}"
                options = [runs, "-timeout=10", f"-rss_limit_mb={_peak_mb() + args.memory_mb}", "-max_len=65536"]
                atheris.Setup(["fuzz", *options, f"-artifact_prefix={folder}/failed-", str(folder)], target.try_one)
                atheris.Fuzz()
        failed += os.waitpid(child, 0)[1] != 0
    return 1 if failed else 0


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--inputs", type=int, default=1_000_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--target", default="", help="one of them by name; default: all")
    options.add_argument("--memory-mb", type=int, default=256)
    options.add_argument("--keep", type=Path, default=Path("fuzz_failures"))
    options.add_argument("--atheris", action="store_true")
    args = options.parse_args()
    if args.atheris:
        return _with_atheris(args)
    began = time.monotonic()
    processes = len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[str] = context.Queue()
    workers = [context.Process(target=_work, args=(number, processes, args, results)) for number in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    told = [json.loads(results.get(timeout=10)) for worker in workers if worker.exitcode == 0]
    failures = [failure for one in told for failure in one["failures"]]
    for failure in failures:
        args.keep.mkdir(parents=True, exist_ok=True)
        name = str(failure["target"]).replace(" ", "_")
        (args.keep / f"{name}-{args.seed}-{failure['number']}.json").write_text(json.dumps(failure))
        print(
            f"{failure['target']}, input {failure['number']} of seed {args.seed}:\n{failure['told']}", file=sys.stderr
        )
    hung = sum(worker.exitcode != 0 for worker in workers)
    print(
        json.dumps(
            {
                "inputs": sum(one["count"] for one in told),
                "failures": len(failures),
                "processes_that_hung_or_died": hung,
                "seconds": round(time.monotonic() - began, 1),
                "peak_mb": max((one["peak_mb"] for one in told), default=0),
            }
        )
    )
    return 1 if failures or hung else 0


if __name__ == "__main__":
    sys.exit(main())
