"""Targets for bytes from strangers. Each takes any bytes, and may raise only exceptions that its callers answer with a refusal.

A corpus holds messages of honest peers, and `mutated` turns them into malformed ones. If a checksum guards a message (a channel's
first frame), the checksum is recomputed, because any sender can do that.
"""

from __future__ import annotations

import asyncio
import logging
import random
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from asyncrl.config.schema import GenerationConfig, RuntimeConfig, SamplingConfig
from asyncrl.data.sequence import SequenceSample, decode_sample, encode_sample, is_words
from asyncrl.generation.engine import EngineUnavailable, RequestRefused
from asyncrl.generation.http import GenerationHTTP
from asyncrl.manager.http import ManagerService
from asyncrl.manager.ledger import Ledger, StaleAttemptError
from asyncrl.manager.routing import ServerTable
from asyncrl.manager.scaling import ServerTarget
from asyncrl.model.fetching import pack_sample, read_request, unpack_sample
from asyncrl.model.kept_weights import Kept, pack
from asyncrl.model.shards import Box, Holding, Piece
from asyncrl.protocol.calls import CallResult, ExecuteMFC, HeldDataRequest, KeptWeightsRequest
from asyncrl.protocol.errors import DECODE_ERRORS, CodecError
from asyncrl.protocol.generation import GenerateRequest, SamplingParams
from asyncrl.protocol.hosts import DesiredProcess, HostReport, ObservedProcess
from asyncrl.protocol.manager import (
    AllocateRequest,
    EvalPart,
    EvaluateRequest,
    FinishRequest,
    HeartbeatRequest,
    MasterReport,
    ScheduleRequest,
)
from asyncrl.protocol.names import MASTER_META, Names
from asyncrl.protocol.scaling import ScaleRequest
from asyncrl.protocol.status import WorkerStatus
from asyncrl.protocol.trajectories import Locator, StoreVerdict, TrajectoryMeta
from asyncrl.rollout.openai_api import DIALECTS
from asyncrl.rollout.openai_request import RequestError, RequestRules, chat_request, fields_of
from asyncrl.runtime import channel_protocol
from asyncrl.runtime.channel import ChannelReceiver, ChannelSender
from asyncrl.runtime.channel_protocol import ChannelRefused, Endpoint
from asyncrl.runtime.clock import SYSTEM_CLOCK
from asyncrl.runtime.names.interface import NameResolver
from asyncrl.runtime.transport import PullSocket
from asyncrl.streams.push_pull import MetaPuller, NameResolvingZmqPuller, puller_stream
from asyncrl.streams.request_reply import (
    NameResolvingReplyServer,
    NameResolvingRequestClient,
    RemoteCallError,
    request_stream,
)
from tests.support.memory_names import MemoryNameResolver, MemoryStore
from tests.support.memory_transport import MemoryTransport
from tests.support.paced_engine import LongTail, PacedEngine

MAX_BYTES = 1 << 20  # size limit of a message here
LIMIT_S = 20.0  # for one wait for a message in memory
RUNTIME = RuntimeConfig(max_message_bytes=MAX_BYTES)
_CALL = ExecuteMFC(mfc="actor_train", version=1, ids=["a", "b"])
_INTERESTING = (0, 1, 2, 0x7F, 0x80, 0x90, 0x91, 0x9F, 0xC0, 0xC1, 0xC4, 0xC6, 0xC9, 0xD9, 0xDC, 0xDD, 0xDE, 0xDF, 0xFF)
_LENGTHS = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xdc\xff\xff",
)
_NUMBERS = (
    b"1e999",
    b"-1",
    b"18446744073709551616",
    b"9223372036854775807",
    b"NaN",
    b"null",
    b"true",
    b'""',
    b"[]",
    b"{}",
)
MAX_NESTING = 60_000


@dataclass(frozen=True)
class Target:
    """`run` takes bytes. An exception other than `allowed` is a defect."""

    name: str
    corpus: Sequence[bytes]
    run: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...] = ()

    def try_one(self, data: bytes) -> None:
        """Raise every exception that is a defect."""
        with suppress(*self.allowed):
            self.run(data)


def mutated(rng: random.Random, corpus: Sequence[bytes]) -> bytes:
    """A message from the corpus with a few random changes."""
    data = bytearray(rng.choice(corpus))
    for _ in range(1 + int(rng.expovariate(0.5))):
        place = rng.randrange(len(data) + 1)
        kind = rng.randrange(10)
        if kind == 0:
            data[place:place] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 1:
            del data[place : place + rng.randrange(1, 17)]
        elif kind == 2 and data:
            data[place % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 3 and data:
            data[place % len(data)] = rng.choice(_INTERESTING)
        elif kind == 4:
            other = rng.choice(corpus)
            start = rng.randrange(len(other) + 1)
            data[place:] = other[start:]
        elif kind == 5:
            data[place:place] = rng.choice(_LENGTHS)
        elif kind == 6:
            data[place : place + rng.randrange(4)] = rng.choice(_NUMBERS)
        elif kind == 7:
            start = rng.randrange(len(data) + 1)
            data[place:place] = data[start : start + rng.randrange(1, 64)]
        elif kind == 8 and rng.random() < 0.02:
            data[place:place] = rng.choice((b"[", b"\x91", b'{"a":', b"\x81\xa1a")) * rng.randrange(1, MAX_NESTING)
        elif kind == 9:
            del data[place:]
    return bytes(data)


@contextmanager
def all_targets() -> Iterator[list[Target]]:
    """Yield all targets. Those with sockets use in-memory sockets, on an event loop that lives as long as the targets."""
    loop = asyncio.new_event_loop()
    logging.disable(logging.WARNING)  # a million refusals would fill the log
    try:
        yield [
            _codec(),
            *_held_data(),
            _kept_weights(),
            *_streams(loop),
            *_channel(loop),
            *_manager(loop),
            _generation(loop),
            _chat(),
            *_name_resolve(),
        ]
    finally:
        logging.disable(logging.NOTSET)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


# ------------------------------------------------------------------------------------------------------------------ streams


def _sample(lengths: Sequence[int] = (3, 2)) -> SequenceSample:
    return SequenceSample.from_groups(
        ["1"],
        [
            {
                "packed_input_ids": [np.arange(n, dtype=np.int64) for n in lengths],
                "packed_logprobs": [np.zeros(n, dtype=np.float32) for n in lengths],
                "loss_mask": [np.ones(n, dtype=np.bool_) for n in lengths],
                "rewards": [0.5] * len(lengths),
                "words_found": [{"answer": "3\u00b7x", "tools": [None, n, 0.5]} for n in lengths],
                "prompt_words_answer": "42",
            }
        ],
    )


def _meta() -> TrajectoryMeta:
    return TrajectoryMeta(
        ticket_id="1",
        locator=Locator(0, 1),
        attempt=1,
        head=0,
        keys=["packed_input_ids", "rewards"],
        seqlens=[3, 2],
        response_lengths=[3, 2],
        rewards=[0.5, 0.5],
        version_start=[0, 0],
        version_end=[1, 1],
        birth_time=1.7e9,
    )


def _joined(header: bytes, frames: Sequence[memoryview]) -> bytes:
    """Return one input: the length of the header, the header, then frames with the sizes that the header lists."""
    parts = [len(header).to_bytes(2, "little"), header, bytes([len(frames)])]
    parts += [frame.nbytes.to_bytes(2, "little") for frame in frames]
    return b"".join([*parts, *frames])


def _parted(data: bytes) -> tuple[bytes, list[bytes]]:
    size = int.from_bytes(data[:2], "little")
    header, rest = data[2 : 2 + size], data[2 + size :]
    count, rest = rest[0] if rest else 0, rest[1:]
    sizes = [int.from_bytes(rest[2 * i : 2 * i + 2], "little") for i in range(count)]
    rest, frames = rest[2 * count :], []
    for size in sizes:
        frames.append(rest[:size])
        rest = rest[size:]
    return header, frames


def _words_of(sample: SequenceSample) -> dict[str, list[list[Any]]]:
    """All words of a sample. Bytes that are no JSON are refused when they are read."""
    found = {}
    for key in filter(is_words, sample.data):
        with suppress(ValueError):
            found[key] = sample.words(key)
    return found


def _codec() -> Target:
    def run(data: bytes) -> None:
        header, frames = _parted(data)
        sample = decode_sample(header, frames, max_bytes=MAX_BYTES)
        again = decode_sample(*encode_sample(sample), max_bytes=MAX_BYTES)
        assert again.ids == sample.ids
        assert list(again.data) == list(sample.data)
        assert _words_of(again) == _words_of(sample)

    corpus = [_joined(*encode_sample(_sample(lengths))) for lengths in ((3, 2), (1,), (0, 40), (7,) * 9)]
    return Target("codec", corpus, run, (CodecError,))


def _held_data() -> Iterator[Target]:
    """Requests and replies between model workers of different groups."""

    def run(data: bytes) -> None:
        sample = unpack_sample(data, max_bytes=MAX_BYTES)
        assert unpack_sample(pack_sample(sample), max_bytes=MAX_BYTES).ids == sample.ids

    asked = HeldDataRequest(ids=["a1-e0-p1-i1-v0", "b"], keys=["packed_input_ids", "rewards"])
    yield Target("held data: request", [msgspec.msgpack.encode(asked)], read_request, (*DECODE_ERRORS, ValueError))
    told = [pack_sample(_sample(lengths)) for lengths in ((3, 2), (1,), (0, 40), (7,) * 9)]
    yield Target("held data: answer", told, run, (CodecError,))


def _kept_weights() -> Target:
    """Requests for weights, from model workers of other groups."""
    boxes = {"w": Box((2, 0), (4, 3)), "b": Box((0,), (5,))}
    pieces = {name: Piece("bfloat16", tuple(np.add(box.start, box.size).tolist()), box) for name, box in boxes.items()}
    parts = {name: torch.zeros(box.size, dtype=torch.bfloat16) for name, box in boxes.items()}
    kept, decode = Kept("a1-v1", Holding(0, pieces), parts), msgspec.msgpack.Decoder(KeptWeightsRequest).decode
    wanted = ([("w", [3, 1], [2, 2])], [("b", [0], [5]), ("w", [2, 0], [4, 3])])
    corpus = [
        msgspec.msgpack.encode(KeptWeightsRequest(model="ref", weight_version="a1-v1", parts=each)) for each in wanted
    ]
    return Target("kept weights", corpus, lambda data: pack(kept, decode(data), data), (*DECODE_ERRORS, ValueError))


def _streams(loop: asyncio.AbstractEventLoop) -> Iterator[Target]:
    """Messages to the receiver of a stream, and replies to the caller of a worker. A refusal is the only allowed result."""
    transport, resolver, names = MemoryTransport(), MemoryNameResolver(MemoryStore()), Names("fuzzed", "streams")
    common: dict[str, Any] = {"runtime": RUNTIME, "transport": transport}
    stored, encode = StoreVerdict(verdict="stored"), msgspec.msgpack.encode
    puller = NameResolvingZmqPuller(resolver, names, puller_index=0, **common)
    meta_puller = MetaPuller(resolver, names, **common)
    server = NameResolvingReplyServer(resolver, names, index=0, **common)

    async def take_trajectory() -> None:
        (await puller.pull()).ack(stored)

    async def take_metadata() -> None:
        (await meta_puller.pull_meta())[1](stored)

    async def take_call() -> None:
        (await server.receive()).reply(CallResult())

    header, frames = encode_sample(_sample())
    trajectory = _joined(encode([_meta(), header]), frames)
    call = _joined(encode([1, _CALL]), [])
    for name, receiver, stream, take, message in (
        ("trajectory", puller, puller_stream(0), take_trajectory, trajectory),
        ("metadata", meta_puller, MASTER_META, take_metadata, _joined(encode(_meta()), [])),
        ("call", server, request_stream(0), take_call, call),
    ):
        loop.run_until_complete(receiver.start())
        endpoint = msgspec.json.decode(resolver.get(names.stream(stream)), type=Endpoint)
        sender = ChannelSender("s", stream, "i", runtime=RUNTIME, transport=transport)
        loop.run_until_complete(sender.start())
        sender.connect(endpoint)
        yield Target(name, [message], _sent(loop, sender, take), (ChannelRefused,))
    yield _reply(loop, resolver, common)


def _sent(
    loop: asyncio.AbstractEventLoop, sender: ChannelSender, take: Callable[[], Awaitable[None]]
) -> Callable[[bytes], None]:
    """Send an input to a receiver. `take` takes the next message from it."""

    async def send(data: bytes) -> None:
        header, frames = _parted(data)
        sending = asyncio.ensure_future(sender.send(header, frames, timeout_s=LIMIT_S, what="an input"))
        taking = asyncio.ensure_future(take())
        await asyncio.wait({sending, taking}, return_when=asyncio.FIRST_COMPLETED)
        if taking.done():
            taking.result()  # an unreadable message would end the stream for all senders here
        taking.cancel()
        await sending

    return lambda data: loop.run_until_complete(send(data))


def _reply(loop: asyncio.AbstractEventLoop, resolver: NameResolver, common: dict[str, Any]) -> Target:
    """A worker's reply to the master's call."""
    names, stream, encode = Names("fuzzed", "replies"), request_stream(0), msgspec.msgpack.encode
    worker = ChannelReceiver(stream, runtime=RUNTIME, transport=common["transport"])
    client = NameResolvingRequestClient(resolver, names, num_workers=1, handler_routing={}, incarnation="c", **common)

    async def start() -> None:
        endpoint = await worker.start()
        resolver.publish(names.stream(stream), msgspec.json.encode(endpoint).decode(), limit_s=LIMIT_S)
        await client.start()

    async def answer(data: bytes) -> None:
        (reply,) = client.call_nowait([0], [_CALL])
        (await worker.receive()).ack(data)
        try:
            async with asyncio.timeout(LIMIT_S):
                await reply
        except RemoteCallError as error:  # a well-formed reply that reports a failed call raises it, too
            if "its reply cannot be read" in error.message:
                raise

    loop.run_until_complete(start())
    corpus = [encode(["error", "model_worker/0", "message", "traceback"]), encode(["result", CallResult(ids=["a"])])]
    return Target("reply", corpus, lambda data: loop.run_until_complete(answer(data)), (RemoteCallError,))


class _OpenSocket(PullSocket):
    """A socket without a wire. `deliver` is the function with which the socket's owner reads messages: a call raises what the
    owner raises."""

    def __init__(self, address: str) -> None:
        self.address = address

    def listen(self, deliver: Callable[[Sequence[Any]], None], failed: Callable[[Exception], None]) -> None:
        self.deliver = deliver

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def close(self) -> None: ...


class OpenTransport(MemoryTransport):
    """Receiving sockets that take messages by hand, in the order in which they were bound. Sent messages are discarded."""

    def __init__(self) -> None:
        super().__init__()
        self.sockets: list[_OpenSocket] = []

    def bind_pull(self, host: str, *, queue_messages: int, max_frame_bytes: int) -> PullSocket:
        self.sockets.append(_OpenSocket(f"mem://{host}:{len(self.sockets)}"))
        return self.sockets[-1]


def _channel(loop: asyncio.AbstractEventLoop) -> Iterator[Target]:
    """Both ends of a channel, behind the socket. No exception may escape: it would end the stream for all senders."""
    transport = OpenTransport()
    runtime = RUNTIME
    receiver = ChannelReceiver("r", runtime=runtime, transport=transport)
    sender = ChannelSender("s", "r", "i", runtime=runtime, transport=transport)

    async def start() -> tuple[str, str]:
        endpoint = await receiver.start()
        await sender.start()
        sent: list[Any] = []
        probes = MemoryTransport.bind_pull(transport, "probes", queue_messages=8, max_frame_bytes=MAX_BYTES)
        probes.listen(sent.append, sent.append)
        sender.connect(Endpoint(probes.address, endpoint.incarnation, MAX_BYTES))
        await asyncio.sleep(0)
        probes.close()
        return endpoint.incarnation, channel_protocol.decode_forward(sent[0][0]).source

    target, source = loop.run_until_complete(start())
    header, frames = encode_sample(_sample())
    digest = channel_protocol.digest_of(channel_protocol.pack(frames, [frame.nbytes for frame in frames]))
    data = channel_protocol.Data(target, "s.1", "s", "mem://h:1", 0, 1, [f.nbytes for f in frames], header, digest)
    query = channel_protocol.ResendQuery(target, "s.1", "s", "mem://h:1", 0, [1, 2])
    report = channel_protocol.Report(source, target, [(0, False, b"done")], [1])
    body = b"".join(frames)
    to_receiver, to_sender = transport.sockets

    def guarded(data: bytes) -> bytes:
        return zlib.crc32(data).to_bytes(4, "little") + data

    def arrive(data: bytes) -> None:
        first, rest = _parted(data)
        to_receiver.deliver([guarded(first), *rest])
        while receiver.num_queued:
            loop.run_until_complete(receiver.receive()).refuse("fuzzed")
        loop.run_until_complete(asyncio.sleep(0))

    def answered(data: bytes) -> None:
        to_sender.deliver([guarded(data)])
        loop.run_until_complete(asyncio.sleep(0))

    corpus = [
        _joined(channel_protocol.encode(data)[4:], [memoryview(body)]),
        _joined(channel_protocol.encode(query)[4:], []),
    ]
    yield Target("arrival at a receiver", corpus, arrive)
    yield Target("report to a sender", [channel_protocol.encode(report)[4:]], answered)


# --------------------------------------------------------------------------------------------------------------------- HTTP


def _manager(loop: asyncio.AbstractEventLoop) -> Iterator[Target]:
    """Bodies of requests to the manager, applied to its ledger. No request waits: wait_s is 0."""
    target = ServerTarget(MemoryNameResolver("fuzz"), Names("e", "t"), allocated=1, new_id=lambda: "i")
    fleet: Any = SimpleNamespace(damaged=None, devices_free=False, take_turn=lambda turn, version: None)

    async def newest_attempt() -> int:
        return 1 << 62

    service = ManagerService(
        Ledger(ServerTable(), batch_size=4, eta=1, nonce="x"),
        target,
        fleet,
        SYSTEM_CLOCK,
        newest_attempt=newest_attempt,
    )
    encode = msgspec.json.encode
    requests = (
        (AllocateRequest(request_id="r", worker="rollout_worker/0", incarnation="i", count=2), service.allocate),
        (FinishRequest(worker="rollout_worker/0", incarnation="i", results=[]), service.finish),
        (HeartbeatRequest(worker="rollout_worker/0", incarnation="i", held=[]), service.heartbeat),
        (MasterReport(attempt=1, trained_version=0, consumed=["t"], stored=[]), service.report),
        (ScaleRequest(generation=2), service.scale),
    )
    for request, handle in requests:
        kind = type(request)
        decode = msgspec.json.Decoder(kind).decode

        def run(data: bytes, decode=decode, handle=handle) -> None:
            message = decode(data)
            if hasattr(message, "wait_s"):
                message = msgspec.structs.replace(message, wait_s=min(message.wait_s, 0.0))
            loop.run_until_complete(handle(message))

        yield Target(kind.__name__, [encode(request)], run, (ValueError, RecursionError, StaleAttemptError))
    for other in (
        ScheduleRequest(ticket_id="t", worker="rollout_worker/0", lost_server="s"),
        EvaluateRequest(eval_id="e", parts=[EvalPart(eval_set="s", mode="greedy", num_prompts=2)]),
    ):
        kind = type(other)
        yield Target(kind.__name__, [encode(other)], msgspec.json.Decoder(kind).decode, DECODE_ERRORS)


def _generation(loop: asyncio.AbstractEventLoop) -> Target:
    """Bodies of /generate. The engine has no weights and refuses every request."""
    engine = PacedEngine(LongTail(seed=1, prompt_tokens=1), GenerationConfig(), tokens_per_s=1.0)
    routes = GenerationHTTP(engine, engine_name="paced", settings={}).routes()
    (generate,) = (route.handler for route in routes if route.path == "/generate")

    def run(body: bytes) -> None:
        async def read() -> bytes:
            return body

        request: Any = SimpleNamespace(read=read)
        with suppress(EngineUnavailable):
            loop.run_until_complete(generate(request))

    params = SamplingParams(max_new_tokens=4)
    corpus = [
        msgspec.json.encode(GenerateRequest(rid="r", input_ids=[1, 2], sampling_params=params)),
        b'{"input_ids":[[1,2],[3]],"sampling_params":[{"max_new_tokens":4},{"temperature":0.5}],"rid":["a","b"]}',
        b'{"input_ids": [ [1], [2] ], "sampling_params": {"top_p": 0.5, "stop_token_ids": [3]}, "stream": false}',
    ]
    return Target("generate", corpus, run, (*DECODE_ERRORS, RequestRefused))


def _chat() -> Target:
    rules = RequestRules(SamplingConfig())
    corpus = [
        b'{"model":"policy","messages":[{"role":"user","content":"hello"}],"max_tokens":5,"stop":["a"],"stream":true}',
        b'{"messages":[{"role":"user","content":[{"type":"text","text":"x"}]},{"role":"assistant","content":null,'
        b'"tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}]},'
        b'{"role":"tool","tool_call_id":"c","content":"1"}],"tools":[{"type":"function","function":{"name":"f"}}]}',
    ]
    corpus += [
        b'{"model":"m","max_tokens":5,"system":[{"type":"text","text":"s"}],"stop_sequences":["a"],"tool_choice":{"type":"auto"},'
        b'"tools":[{"name":"f","input_schema":{}}],"messages":[{"role":"user","content":"x"},{"role":"assistant","content":['
        b'{"type":"text","text":"y"},{"type":"tool_use","id":"c","name":"f","input":{"a":1}}]},{"role":"user","content":['
        b'{"type":"tool_result","tool_use_id":"c","content":[{"type":"text","text":"1"}]}]}]}',
        b'{"input":[{"role":"user","content":[{"type":"input_text","text":"x"}]},{"type":"function_call","call_id":"c","name":"f",'
        b'"arguments":"{}"},{"type":"function_call_output","call_id":"c","output":"1"}],"instructions":"s","max_output_tokens":5,'
        b'"tools":[{"type":"function","name":"f"}],"previous_response_id":"r","text":{"format":{"type":"text"}},"include":[]}',
    ]
    earlier = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
    ]

    def run(body: bytes) -> None:
        refused = 0
        for dialect in DIALECTS:
            try:
                chat_request(dialect.chat_fields(fields_of(body, rules), lambda _: earlier), rules)
            except RequestError as error:
                msgspec.json.encode(dialect.error(error))
                refused += 1
        if refused == len(DIALECTS):
            raise RequestError("every API refuses it")

    return Target("requests of agents", corpus, run, (RequestError,))


# -------------------------------------------------------------------------------------------------------------- name resolve


def _name_resolve() -> Iterator[Target]:
    """Values read from name resolve."""
    wanted = DesiredProcess(
        name="rollout_worker/0",
        attempt=1,
        incarnation=1,
        launcher="l",
        host_daemon="a",
        state="run",
        config="worker: {}",
        env={},
        computes=False,
        lease=1,
    )
    status = WorkerStatus(worker="w/0", pid=1, attempt=1, state="running", time=1.0, progress=1)
    child = ObservedProcess(name="w/0", incarnation=1, pid=1, status=status)
    for value in (
        Endpoint("tcp://127.0.0.1:1", "i", 100),
        wanted,
        HostReport(host_daemon="a", launcher="l", processes=[child], notices=[(1, "n")]),
    ):
        yield Target(
            type(value).__name__, [msgspec.json.encode(value)], msgspec.json.Decoder(type(value)).decode, DECODE_ERRORS
        )
