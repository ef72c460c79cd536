"""Weights from 1, 2 and 4 trainer ranks to a server over gloo, beside raw broadcasts of the same bytes.

    python benchmarks/shares.py [--rounds 5] [--size-mb 256] [--bucket-mb 32] [--ranks 1 2 4] [--write-baseline]

asyncrl: from the sender's request for the shares until the receiver has the last bucket. Every rank has an equal share. The sender
collects the shares of the others and broadcasts bucket after bucket, with the code of weights.transport=broadcast
(model/held_weights.py, weights/update_group.py). There is no server around the receiver, so nothing is loaded.
raw_pair: one gloo broadcast of the same bytes from the sender to the receiver, in one piece.
raw_all: the same to all ranks and the receiver, the processes that take part in asyncrl's way.

`value` is asyncrl's GB/s with the most ranks. `ratio.raw_pair` and `ratio.raw_all` are asyncrl's rate over the raw rate, by ranks.
With r ranks (r - 1) / r of the bytes travel twice: to the sender, and to the receiver.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

from common import Child, Numbers, Parent, alternate, children, finish, parser, run_part, say, table

RANKS = (1, 2, 4)
GOAL = "at least half the rate of a raw broadcast to the receiver, from 4 ranks"
_LIMIT_S = 120.0
_HOST = "127.0.0.1"


def make_share(num_bytes: int, bucket_bytes: int) -> Any:
    """A share of random bytes, in buckets of one tensor each."""
    import torch

    from asyncrl.model.trainer_side import HeldShare
    from asyncrl.protocol.versions import WeightVersion
    from asyncrl.protocol.weight_updates import TensorSpecs
    from asyncrl.weights.update_group import Bucket

    buckets = []
    for number, start in enumerate(range(0, num_bytes, bucket_bytes)):
        size = min(bucket_bytes, num_bytes - start)
        specs = TensorSpecs(names=[f"t{number}"], dtypes=["uint8"], shapes=[[size]])
        buckets.append(Bucket(specs, torch.randint(0, 256, (size,), dtype=torch.uint8)))
    return HeldShare(WeightVersion(1, 1), buckets)


def raw_group(address: str, rank: int, size: int) -> Any:
    """A gloo group. Rank 0 serves the store at the address."""
    from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    host, _, port = address.rpartition(":")
    store = TCPStore(host, int(port), is_master=rank == 0, timeout=timedelta(seconds=_LIMIT_S), wait_for_workers=False)
    return ProcessGroupGloo(PrefixStore(f"of {size}", store), rank, size, timedelta(seconds=_LIMIT_S))


def free_address() -> str:
    with socket.create_server((_HOST, 0)) as listener:
        return f"{_HOST}:{listener.getsockname()[1]}"


# -------------------------------------------------------------------------------------------------------------- parts


def part_rank(parent: Parent, *, share_bytes: int, bucket_bytes: int, num_bytes: int, **_: Any) -> None:
    """A further rank of the trainer: it serves its share, and takes part in the raw broadcasts to all."""
    import torch

    from asyncrl.model.held_weights import ShareServer

    torch.set_num_threads(1)
    loop = asyncio.new_event_loop()
    opened = AsyncExitStack()

    async def serve() -> str:
        server = ShareServer(_HOST, torch.device("cpu"))
        server.hold(make_share(share_bytes, bucket_bytes))
        await asyncio.gather(*server.held.digests)
        return await opened.enter_async_context(server.serving())

    url = loop.run_until_complete(serve())
    threading.Thread(target=loop.run_forever, daemon=True).start()
    parent.send(url=url)
    take_part_in_raw(parent, num_bytes)


def part_receiver(parent: Parent, *, num_bytes: int, bucket_sizes: list[int], **_: Any) -> None:
    """The receiving end: a member of the sender's group, and of the raw groups."""
    import torch

    from asyncrl.weights.update_group import GroupMember, store_at

    torch.set_num_threads(1)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    rooms = [torch.empty(size, dtype=torch.uint8) for size in bucket_sizes]
    member = GroupMember("server", "gloo")

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(_LIMIT_S)

    def receive(message: dict[str, Any]) -> None:
        if "store" in message:
            host, _, port = message["store"].rpartition(":")
            device = torch.device("cpu")
            run(
                member.join(
                    lambda: store_at(host, int(port), _LIMIT_S),
                    rank=1,
                    size=2,
                    limit_s=_LIMIT_S,
                    host=_HOST,
                    device=device,
                )
            )
        for room in rooms if message.get("buckets") else []:
            run(member.broadcast(room, _LIMIT_S))

    take_part_in_raw(parent, num_bytes, receive)


def take_part_in_raw(parent: Parent, num_bytes: int, other: Any = None) -> None:
    """Answer each message once its work is done: joining a raw group, a raw broadcast, or what `other` does."""
    import torch

    groups: dict[int, Any] = {}
    buffer = torch.zeros(num_bytes, dtype=torch.uint8)
    while (message := parent.receive()) is not None:
        if "join" in message:
            groups[message["size"]] = raw_group(message["join"], message["rank"], message["size"])
        elif "raw" in message:
            groups[message["raw"]].broadcast([buffer]).wait()
        elif other is not None:
            other(message)
        parent.send(done_at=time.monotonic())
    os._exit(0)  # the threads of gloo do not end by themselves


# --------------------------------------------------------------------------------------------------------------- sender


class Sender:
    """The first rank of the trainer."""

    def __init__(self, ranks: list[Child], receiver: Child, *, size: int, share_bytes: int, bucket_bytes: int) -> None:
        import torch

        torch.set_num_threads(1)
        self._ranks, self._receiver = ranks, receiver
        self._loop = asyncio.new_event_loop()
        self._urls = [str(rank.receive(_LIMIT_S)["url"]) for rank in ranks]
        self._bytes = torch.randint(0, 256, (size,), dtype=torch.uint8)
        self._groups = {2: self._raw([receiver])}
        if ranks:
            self._groups[2 + len(ranks)] = self._raw([*ranks, receiver])
        self._opened = AsyncExitStack()
        self._loop.run_until_complete(self._open(share_bytes, bucket_bytes))

    def _raw(self, others: list[Child]) -> Any:
        address, size = free_address(), 1 + len(others)
        for rank, child in enumerate(others, start=1):
            child.send(join=address, rank=rank, size=size)
        group = raw_group(address, 0, size)
        for child in others:
            child.receive(_LIMIT_S)
        return group

    async def _open(self, share_bytes: int, bucket_bytes: int) -> None:
        import torch

        from asyncrl.model.held_weights import ShareReader
        from asyncrl.runtime.http_client import open_session
        from asyncrl.weights.update_group import GroupMember, serve_store

        async def url_of(worker: int) -> str:
            return self._urls[worker - 1]

        self._held = make_share(share_bytes, bucket_bytes)
        self._held.others.update(
            {worker: [bucket.specs for bucket in self._held.buckets] for worker in range(1, 1 + len(self._urls))}
        )
        self._held.begin_digests()
        await asyncio.gather(*self._held.digests)
        session = await self._opened.enter_async_context(open_session(max_connections=0))
        cpu = torch.device("cpu")
        self._reader = ShareReader(session, url_of, host=_HOST, device=cpu, backend="gloo")
        self._member = GroupMember("server", "gloo")
        store, address = serve_store(_HOST, _LIMIT_S)
        self._receiver.send(store=address)
        await self._member.join(lambda: store, rank=0, size=2, limit_s=_LIMIT_S, host=_HOST, device=cpu)
        self._receiver.receive(_LIMIT_S)

    def asyncrl(self) -> float:
        """Seconds until the receiver has all buckets of all ranks."""
        self._receiver.send(buckets=True)
        start = time.monotonic()
        self._loop.run_until_complete(self._send())
        return float(self._receiver.receive(_LIMIT_S)["done_at"]) - start

    async def _send(self) -> None:
        async with AsyncExitStack() as opened:
            shares = await self._reader.open(self._held, opened, _LIMIT_S)
            async with self._reader.buckets(self._held, shares) as buckets:
                async for bucket in buckets:
                    await self._member.broadcast(bucket.flat, _LIMIT_S)

    def raw(self, size: int) -> float:
        """Seconds of a raw broadcast in the group of this size."""
        others = [self._receiver] if size == 2 else [*self._ranks, self._receiver]
        for child in others:
            child.send(raw=size)
        start = time.monotonic()
        self._groups[size].broadcast([self._bytes]).wait()
        return max(float(child.receive(_LIMIT_S)["done_at"]) for child in others) - start

    def close(self) -> None:
        self._loop.run_until_complete(self._opened.aclose())


@contextlib.contextmanager
def sender(size: int, bucket_bytes: int, num_ranks: int) -> Iterator[Sender]:
    share = size // num_ranks
    sizes = [min(bucket_bytes, share - start) for start in range(0, share, bucket_bytes)] * num_ranks
    settings = {"share_bytes": share, "bucket_bytes": bucket_bytes, "num_bytes": size, "bucket_sizes": sizes}
    with children(__file__, *["rank"] * (num_ranks - 1), "receiver", **settings) as (*ranks, receiver):
        made = Sender(ranks, receiver, size=size, share_bytes=share, bucket_bytes=bucket_bytes)
        yield made
        made.close()


def main() -> None:
    options = parser(__doc__.split("\n")[0], quick={"size_mb": 8, "bucket_mb": 1, "ranks": [1, 2]})
    options.add_argument("--size-mb", type=int, default=256, help="bytes of the version (default 256 MB)")
    options.add_argument("--bucket-mb", type=int, default=32, help="weights.bucket_bytes (default 32 MB)")
    options.add_argument("--ranks", type=int, nargs="+", default=list(RANKS), help="numbers of trainer ranks")
    args = options.parse_args()
    size, cases = args.size_mb * 1_000_000 // 4 * 4, {}
    for count in args.ranks:
        say(args, f"{count} ranks")
        with sender(size, args.bucket_mb * 1_000_000, count) as side:
            everyone = count + 1
            sides: dict[str, Any] = {
                "asyncrl": lambda side=side: rate(size, side.asyncrl()),
                "raw_pair": lambda side=side: rate(size, side.raw(2)),
                "raw_all": lambda side=side, everyone=everyone: rate(size, side.raw(everyone)),
            }
            cases[str(count)] = alternate(args, sides)
    ratio = {
        peer: {count: rounds.ratio("asyncrl", peer, "GB/s") for count, rounds in cases.items()}
        for peer in ("raw_pair", "raw_all")
    }
    rows = [
        [
            count,
            *(rounds.median(name, "GB/s") for name in ("asyncrl", "raw_pair", "raw_all")),
            ratio["raw_pair"][count],
            ratio["raw_all"][count],
        ]
        for count, rounds in cases.items()
    ]
    table(args, "GB/s", ["ranks", "asyncrl", "raw_pair", "raw_all", "of raw_pair", "of raw_all"], rows)
    last = cases[str(args.ranks[-1])]
    finish(
        args,
        name="shares",
        value=last.median("asyncrl", "GB/s"),
        unit="GB/s",
        ratio=ratio,
        spread=last.spread("asyncrl", "GB/s"),
        goal=GOAL,
        cases={count: rounds.summary() for count, rounds in cases.items()},
        peers_missing=[],
    )


def rate(num_bytes: int, seconds: float) -> Numbers:
    return {"GB/s": num_bytes / seconds / 1e9}


if __name__ == "__main__":
    if not run_part({"rank": part_rank, "receiver": part_receiver}):
        main()
