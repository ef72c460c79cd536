"""math-verify in processes of its own: whether two formulas mean the same, in bounded time and memory, from any thread.

math-verify hands formulas to a computer algebra system, which takes a formula like `9^{9^{9^9}}` as work for years and all memory.
Its own time limits are alarm signals, which only work in the main thread of a process (rewards run in others), and which no long
step inside a C function heeds, while that step holds up every thread of its process. So the work is done next door, by programs of
this file: each has a limit of CPU time, kept by the kernel, and one of memory; who outlives its limit has said no.

verify(r"\\frac{1}{2}", "0.5") -> True      (the right one first)
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
WALL_LIMIT_S = 30.0  # of a comparison, on a machine that is busy with other things
START_LIMIT_S = 60.0  # of a process: it imports sympy
BUSY_LIMIT_S = 50.0  # for a process that is free; below rollout.reward_timeout_s, so that its reason is told
MEMORY_BYTES = 2 << 30
MAX_PROCESSES = 4  # of a rollout worker; as many as are needed at the same time are started
MAX_CHARS = 1000  # of a formula

_READY = b"ready\n"
_DEATH_S = 5.0  # between the end of a process's output and its end


class VerifierError(RuntimeError):
    """There is no verdict, through no fault of the answer: its prompt is to be rejected, not judged."""


class VerifierPool:
    """At most `size` processes. A call waits for a free one, for at most BUSY_LIMIT_S; unblocked by the end of another call."""

    def __init__(self, size: int = MAX_PROCESSES, *, cpu_limit_s: float = CPU_LIMIT_S) -> None:
        self._cpu_limit_s = cpu_limit_s
        self._free: queue.LifoQueue[_Verifier | None] = queue.LifoQueue()  # None: one that was never started
        for _ in range(size):
            self._free.put(None)

    def verify(self, right: str, found: str) -> bool:
        """Whether both mean the same. Raises VerifierError where that could not be asked."""
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
        """End the processes that are free. (Those of a worker end with it: their input closes.)"""
        for verifier in [self._free.get() for _ in range(self._free.qsize())]:
            if verifier is not None:
                verifier.close()
            self._free.put(None)


class _Verifier:
    """One process: a line of JSON in, a line with 0 or 1 out."""

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
            raise VerifierError(f"no verifier could be started within {START_LIMIT_S:g} s")

    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, right: str, found: str) -> bool:
        """False also where it dies of the question: of its limit of CPU time, mostly. Waits for WALL_LIMIT_S, which a process that
        is given cores never needs; raises VerifierError then."""
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
        """It lives still. One that has just died may take a moment to be seen dead."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_DEATH_S)
        return self.alive()

    def _read(self, limit_s: float) -> bytes:
        """A line, or what there is of it when the process ends or the time is over."""
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
            with contextlib.suppress(BrokenPipeError):  # of what it had not read
                pipe.close()


_pool: VerifierPool | None = None
_pool_lock = threading.Lock()


def verify(right: str, found: str) -> bool:
    """VerifierPool.verify, with the pool of this process."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = VerifierPool()
    return _pool.verify(right, found)


def check_installed() -> None:
    """Said when a run starts, not when the first formula comes."""
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("the rewards of examples/math need math-verify: pip install 'asyncrl[math]'")


# ------------------------------------------------------------------------------------------------ the process next door


def main() -> None:
    """Answer until the input ends. The kernel ends this process where a comparison takes more CPU time than it may."""
    import logging
    import resource
    import signal

    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher; the input's end is for this one
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, also inside a C function
    cpu_limit_s = float(sys.argv[1])
    from math_verify import LatexExtractionConfig, parse
    from math_verify import verify as are_equal

    parsers = [
        LatexExtractionConfig(boxed_match_priority=0)
    ]  # the whole formula, and no number out of the middle of it

    def same(right: str, found: str) -> bool:
        gold, target = (
            parse(f"\\boxed{{{text}}}", parsers, fallback_mode="no_fallback", parsing_timeout=None)
            for text in (right, found)
        )
        return bool(gold and target and are_equal(gold, target, timeout_seconds=None))

    same("1", r"\frac{1}{1}")  # what is imported late is imported now
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
