"""Runs math-verify in separate processes: compares two formulas in bounded time and memory, from any thread.

math-verify passes formulas to a computer algebra system. For a formula like `9^{9^{9^9}}` that would compute for years and take
all memory. math-verify's own time limits are alarm signals. They only work in the main thread of a process, while rewards run in
other threads, and they do not interrupt a long call of a C function, which blocks every thread of its process. So the comparison
runs in child processes, which execute this file. The kernel enforces a limit of CPU time and one of memory for each. A comparison
that exceeds a limit counts as "not equal".

verify(r"\\frac{1}{2}", "0.5") -> True      (the right answer comes first)
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time

CPU_LIMIT_S = 2.0  # of a comparison
WALL_LIMIT_S = 30.0  # limit of a comparison in wall-clock time; only a machine that is busy with other work reaches it
START_LIMIT_S = 60.0  # to start a process, which imports sympy
BUSY_LIMIT_S = 50.0  # to wait for a free process; below rollout.reward_timeout_s, so that the error names the reason
MEMORY_BYTES = 2 << 30
MAX_PROCESSES = 4  # per rollout worker; started on demand
MAX_CHARS = 1000  # of a formula

_READY = b"ready\n"
_DEATH_S = 5.0  # to wait for a process to end after its output has ended


class VerifierError(RuntimeError):
    """The verifier failed, not the answer, so there is no verdict: reject the prompt instead of scoring it."""


class VerifierPool:
    """At most `size` processes.

    waits for: a free process, at most BUSY_LIMIT_S.  unblocked by: the end of another call.
    """

    def __init__(self, size: int = MAX_PROCESSES, *, cpu_limit_s: float = CPU_LIMIT_S) -> None:
        self._cpu_limit_s = cpu_limit_s
        self._free: queue.LifoQueue[_Verifier | None] = queue.LifoQueue()  # None: a process that is not started yet
        for _ in range(size):
            self._free.put(None)

    def verify(self, right: str, found: str) -> bool:
        """Whether both formulas are equal. Raises VerifierError if no process was free within BUSY_LIMIT_S, or if the process was
        alive but gave no verdict within WALL_LIMIT_S."""
        if max(len(right), len(found)) > MAX_CHARS:
            return False
        try:
            verifier = self._free.get(timeout=BUSY_LIMIT_S)
        except queue.Empty:
            raise VerifierError(f"all verifiers have been busy for {BUSY_LIMIT_S:g} s") from None
        try:
            if verifier is not None and not verifier.alive():
                verifier.close()
                verifier = None
            verifier = verifier or _Verifier(self._cpu_limit_s)
            return verifier.ask(right, found)
        finally:
            self._free.put(verifier)

    def close(self) -> None:
        """End the free processes. (When a worker ends, its processes end, too, because their input closes.)"""
        for verifier in [self._free.get() for _ in range(self._free.qsize())]:
            if verifier is not None:
                verifier.close()
            self._free.put(None)


class _Verifier:
    """One process: reads a line of JSON, and writes a line with 0 or 1."""

    def __init__(self, cpu_limit_s: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), str(cpu_limit_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if self._read(START_LIMIT_S) != _READY:
            self.close()
            raise VerifierError(f"no verifier process started within {START_LIMIT_S:g} s")

    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, right: str, found: str) -> bool:
        """Compare two formulas. Returns False also if the comparison kills the process, mostly by its limit of CPU time. Raises
        VerifierError if the process is alive but has not answered after WALL_LIMIT_S, which only happens on an overloaded machine.
        """
        assert self._process.stdin is not None
        answer = b""
        try:
            self._process.stdin.write(json.dumps([right, found]).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._read(WALL_LIMIT_S)
        except BrokenPipeError:
            pass
        if answer not in (b"0\n", b"1\n"):
            starved = self._answers_late()
            self.close()
            if starved:
                raise VerifierError(f"no verdict within {WALL_LIMIT_S:g} s: this machine is busy")
        return answer == b"1\n"

    def _answers_late(self) -> bool:
        """Whether the process is still alive. Waits a moment, because a process that has just died may not be reaped yet."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_DEATH_S)
        return self.alive()

    def _read(self, limit_s: float) -> bytes:
        """Read a line, or the part of it that has arrived when the process ends or the time is over."""
        assert self._process.stdout is not None
        pipe, line = self._process.stdout.fileno(), b""
        poll = select.poll()
        poll.register(pipe, select.POLLIN | select.POLLHUP)
        deadline = time.monotonic() + limit_s
        while not line.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                break
            some = os.read(pipe, 4096)
            if not some:
                break
            line += some
        return line

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # closing flushes input that the process never read
                pipe.close()


_pool: VerifierPool | None = None
_pool_lock = threading.Lock()


def verify(right: str, found: str) -> bool:
    """Call VerifierPool.verify of this process's pool."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = VerifierPool()
    return _pool.verify(right, found)


def check_installed() -> None:
    """Raise ImportError without math-verify, so that a run fails at its start and not at the first formula."""
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("the rewards of examples/math need math-verify: pip install 'asyncrl[math]'")


# -------------------------------------------------------------------------------------------------- the child process


def main() -> None:
    """Answer until the input ends. The kernel kills this process if a comparison exceeds its CPU time."""
    import logging
    import resource
    import signal

    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C; this process ends with its input
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # kills the process, even inside a C function
    cpu_limit_s = float(sys.argv[1])
    from math_verify import LatexExtractionConfig, parse
    from math_verify import verify as are_equal

    parsers = [
        LatexExtractionConfig(boxed_match_priority=0)
    ]  # parse the whole formula, not a number from the middle of it

    def same(right: str, found: str) -> bool:
        gold, target = (
            parse(f"\\boxed{{{text}}}", parsers, fallback_mode="no_fallback", parsing_timeout=None)
            for text in (right, found)
        )
        return bool(gold and target and are_equal(gold, target, timeout_seconds=None))

    same("1", r"\frac{1}{1}")  # triggers late imports before the limits apply
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    sys.stdout = sys.stderr
    out.write(_READY)
    for line in sys.stdin.buffer:
        right, found = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
        try:
            verdict = same(right, found)
        except (Exception, RecursionError, MemoryError):
            verdict = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        out.write(b"1\n" if verdict else b"0\n")


if __name__ == "__main__":
    main()
