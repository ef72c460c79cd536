"""Repeatedly request the stacks of a process with busy threads: `python tests/processes/many_dumps.py --dumps 10000`.

The process has a gRPC server and clients, an asyncio loop, threads that recurse, and threads that start and end.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import threading
import time
from concurrent import futures
from pathlib import Path

import grpc

from asyncrl.runtime.stacks import SUFFIX, answer_requests, ask_all

_NUM_SERVER_THREADS, _NUM_CLIENTS, _NUM_RECURSING, _NUM_SHORT = 6, 4, 5, 3
_LIMIT_S = 60.0  # for one answer, on a busy machine


def ask_again_and_again(folder: Path, num_dumps: int) -> int:
    """Ask the process num_dumps times, or until it dies. Return the number of requests that it answered."""
    command = [sys.executable, __file__, "--program", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            for number in range(num_dumps):
                (stacks,) = ask_all([folder], _LIMIT_S)
                if stacks.state == "gone":
                    print(f"exit code {process.wait()} after request {number + 1}", flush=True)
                    return number
                assert stacks.state == "answered", stacks
                assert "in recurse" in stacks.threads or "in go_deep" in stacks.threads, stacks
            return num_dumps
        finally:
            process.kill()


def recurse(depth: int) -> int:
    return 0 if depth == 0 else 1 + recurse(depth - 1)


def run_program(folder: Path) -> None:
    answer_requests(folder / f"threads{SUFFIX}", "threads")

    def echo(request: bytes, _context: grpc.ServicerContext) -> bytes:
        return bytes(recurse(10)) + request

    server = grpc.server(futures.ThreadPoolExecutor(_NUM_SERVER_THREADS))
    handler = grpc.method_handlers_generic_handler("test", {"Echo": grpc.unary_unary_rpc_method_handler(echo)})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    def call() -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            while True:
                channel.unary_unary("/test/Echo")(b"x")

    def go_deep() -> None:
        while True:
            recurse(200)
            time.sleep(0.001)

    def start_threads() -> None:
        while True:
            thread = threading.Thread(target=recurse, args=(50,))
            thread.start()
            thread.join()

    for target, count in ((call, _NUM_CLIENTS), (go_deep, _NUM_RECURSING), (start_threads, _NUM_SHORT)):
        for _ in range(count):
            threading.Thread(target=target, daemon=True).start()

    async def turn() -> None:
        while True:
            await asyncio.sleep(0.001)
            await asyncio.to_thread(recurse, 20)

    async def main() -> None:
        tasks = [asyncio.create_task(turn()) for _ in range(3)]
        print("ready", flush=True)
        await asyncio.gather(*tasks)

    asyncio.run(main())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dumps", type=int, default=10_000)
    parser.add_argument("--program", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.program is not None:
        run_program(arguments.program)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        answered = ask_again_and_again(Path(folder), arguments.dumps)
        print(f"{answered} of {arguments.dumps} requests answered in {time.monotonic() - begun:.1f} s")
    return 0 if answered == arguments.dumps else 1


if __name__ == "__main__":
    sys.exit(main())
