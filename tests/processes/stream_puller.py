"""A head as a separate process, for test_streams.py: it pulls, writes each new ticket to a journal, and acknowledges it.

It prints its endpoint, and the test publishes it, because the two processes share no name resolve.
"""

import asyncio
import os
import sys

from asyncrl.config.schema import RuntimeConfig
from asyncrl.protocol.names import Names
from asyncrl.protocol.trajectories import StoreVerdict
from asyncrl.runtime.process import die_with_parent
from asyncrl.streams.push_pull import NameResolvingZmqPuller
from tests.support.memory_names import MemoryNameResolver


async def main(journal_path: str) -> None:
    names, resolver = Names("e", "t"), MemoryNameResolver("child")
    runtime = RuntimeConfig(push_credit_items=8, resend_after_s=0.2)
    puller = NameResolvingZmqPuller(resolver, names, puller_index=0, runtime=runtime)
    await puller.start()
    journal = os.open(journal_path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    stored = set(os.read(journal, 1 << 20).decode().split())
    print(resolver.get(names.stream("puller0")), flush=True)
    while True:
        pulled = await puller.pull()
        ticket = pulled.meta.ticket_id
        assert pulled.sample.data["packed_input_ids"].sum() == int(ticket) * 3000
        if ticket in stored:
            pulled.ack(StoreVerdict(verdict="duplicate"))
            continue
        stored.add(ticket)
        os.write(journal, f"{ticket}\n".encode())
        pulled.ack(StoreVerdict(verdict="stored"))


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(main(sys.argv[1]))
