"""Applies each mutant of mutant_table.py and requires that the mutant's tests find it.

    python tests/oracle/mutants.py               # all of them
    python tests/oracle/mutants.py NAME ...      # these

A mutant is one plausible fault in a decider or an algorithm. Its tests run in a forked process, which compiles the one module
from the changed text; the checkout is not written to. A mutant is killed when a test fails, or when its tests run longer than
LIMIT_S. A test run that ends in any other way (no test found, a module that cannot be imported) is an error, not a kill. The
named tests must also pass without a mutant. The exit code is 1 if a mutant survives or cannot be judged.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_loader
from pathlib import Path
from types import CodeType

from mutant_table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
WORKERS = 2
LIMIT_S = 300  # for one mutant's tests, which take about a second
PRELOADED = ("pytest", "hypothesis", "torch", "transformers.modeling_utils")  # slow to import, and import no asyncrl
OPTIONS = [
    *("-x", "-q", "-p", "no:cacheprovider", "--timeout=0"),
    "--hypothesis-profile=ci",  # the same examples each time
    "-Wignore:Module already imported:pytest.PytestAssertRewriteWarning",  # PRELOADED imports plugins of pytest
]
PASSED, FAILED = 100, 101  # 100 + pytest's exit code, because Python itself exits with 1 on any error, which is no kill


def run_all() -> list[str]:
    """Tests all mutants. Returns a line for each that survives or cannot be judged. The test processes are forked from a new
    process, because the calling process may have imported asyncrl or started threads."""
    done = subprocess.run([sys.executable, __file__], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        return []
    return [line for line in done.stdout.splitlines() if not line.startswith("killed ")] or ["mutants.py failed"]


def anchor_problem(mutant: Mutant) -> str:
    """Return the reason why the mutant cannot be applied; "" if it can."""
    count = (ROOT / mutant.file).read_text().count(mutant.original)
    if count == 1:
        return ""
    return f"{mutant.name}: its original text occurs {count} times in {mutant.file}; re-anchor it in tests/oracle/mutant_table.py"


def _judge_all(mutants: Sequence[Mutant], folder: Path) -> list[str]:
    """Test the mutants. Returns the problems, one or more lines each. The folder receives the output of each process."""
    problems = [problem for mutant in mutants if (problem := anchor_problem(mutant))]
    if problems:
        return problems
    all_tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    waiting: list[tuple[Mutant | None, tuple[str, ...]]] = [(None, all_tests)]  # without a mutant
    waiting += [(mutant, mutant.tests) for mutant in mutants]
    running: dict[int, tuple[Mutant | None, Path]] = {}
    while waiting or running:
        while waiting and len(running) < WORKERS:
            mutant, tests = waiting.pop(0)
            output = folder / (mutant.name if mutant is not None else "unchanged")
            running[_fork(mutant, tests, output)] = mutant, output
        pid, status = os.wait()
        mutant, output = running.pop(pid)
        if problem := _verdict(mutant, os.waitstatus_to_exitcode(status), output):
            problems.append(problem)
    return problems


def _verdict(mutant: Mutant | None, code: int, output: Path) -> str:
    """The problem with a test run, or ""."""
    if mutant is None:
        return "" if code == PASSED else f"the named tests do not pass without a mutant ({code}):\n{output.read_text()}"
    if code == PASSED:
        return f"{mutant.name}: survives in {mutant.file}; it passes {', '.join(mutant.tests)}"
    if code not in (FAILED, -signal.SIGALRM):
        return f"{mutant.name}: its tests end with {code} instead of a failure:\n{output.read_text()}"
    hangs = "" if code == FAILED else f" by its limit: its tests hang for {LIMIT_S} s"
    print(f"killed {mutant.name}{hangs}", flush=True)
    return ""


def _fork(mutant: Mutant | None, tests: Sequence[str], output: Path) -> int:
    """Runs the tests in a new process, which SIGALRM kills after LIMIT_S. Returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.alarm(LIMIT_S)
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        if mutant is not None:
            sys.meta_path.insert(0, _ChangedModule(mutant))
        code = PASSED + importlib.import_module("pytest").main([*OPTIONS, *tests])
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _ChangedModule(MetaPathFinder, SourceFileLoader):
    """Finds and loads the module of a mutant from the changed text. It neither reads nor writes compiled files."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(mutant.file.removesuffix(".py").replace("/", "."), str(ROOT / mutant.file))
        self._text = Path(self.path).read_text().replace(mutant.original, mutant.changed)

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._text, self.path, "exec", dont_inherit=True)


def main(names: Sequence[str]) -> int:
    began = time.monotonic()
    if unknown := set(names) - {mutant.name for mutant in MUTANTS}:
        print(f"there is no mutant {', '.join(sorted(unknown))} in tests/oracle/mutant_table.py")
        return 1
    mutants = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    for module in PRELOADED:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory() as folder:
        problems = _judge_all(mutants, Path(folder))
    for problem in problems:
        print(problem)
    print("killed", "not all" if problems else "all", f"of {len(mutants)} mutants in {time.monotonic() - began:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
