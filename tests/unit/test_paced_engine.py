"""The paced engine, which imitates generation at a given speed: the guarantees that tests rely on, at any speed of the machine."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import fmean, median

import aiohttp
import msgspec
import pytest

from asyncrl.config.schema import GenerationConfig
from asyncrl.generation.engine import EngineRequest, EngineUnavailable, Generated, RequestRefused, WeightsRefused
from asyncrl.generation.http import GenerationHTTP
from asyncrl.protocol.generation import GenerateRequest, SamplingParams
from asyncrl.protocol.versions import WeightVersion
from asyncrl.weights.versions import publish_folder, version_dir
from tests.support.paced_engine import EOS, LongTail, PacedEngine
from tests.support.paced_run import make_paced_run, response_lengths

V0, V1 = WeightVersion(1, 0), WeightVersion(1, 1)
TAIL = LongTail(seed=1, prompt_tokens=3)
NEVER, SLOW, FAST = 1e-6, 5.0, 1e5  # tokens per second; SLOW: requests stay running for some time


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Callable[[WeightVersion], Path]:
    folder = tmp_path_factory.mktemp("paced")
    make_paced_run(folder, num_prompts=1, batch_size=1, group_size=1, servers=1, slots=1, weight_bytes=64)
    for version in (V0, V1):
        path = version_dir(folder, "actor", version)
        publish_folder(path, source_dir=folder / "model", version=version, fsync=False)
    return lambda version: version_dir(folder, "actor", version)


@asynccontextmanager
async def serving(
    versions: Callable[[WeightVersion], Path], *, slots: int = 2, tokens_per_s: float = FAST, max_queue: int = 4
) -> AsyncIterator[PacedEngine]:
    engine = PacedEngine(
        TAIL, GenerationConfig(max_running_requests=slots, max_queue=max_queue), tokens_per_s=tokens_per_s
    )
    await engine.start()
    await engine.load_weights(versions(V0), V0)
    yield engine
    await engine.close()


def ask(engine: PacedEngine, rid: str, input_ids: list[int], most: int = 1000) -> asyncio.Future[Generated]:
    return engine.submit(EngineRequest(rid, input_ids, SamplingParams(max_new_tokens=most)))


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the condition did not become true in time")


async def until_tokens(engine: PacedEngine, count: int) -> None:
    """Wait until all requests together hold this many tokens, prompts included."""
    await until(lambda: engine.stats().used_tokens >= count)


def prompt(length_at_least: int = 1, start: int = 0) -> list[int]:
    """Return a prompt with a response of at least this many tokens."""
    return next(ids for n in range(start, 10_000) if TAIL.length(ids := [5, n, 2]) >= length_at_least)


def test_lengths_have_a_long_tail() -> None:
    lengths = [length for group in response_lengths(1, range(4000), 4) for length in group]
    assert fmean(lengths) == pytest.approx(24, abs=2)
    assert median(lengths) == pytest.approx(11, abs=2)
    assert 100 < max(lengths) <= 165
    assert response_lengths(2, range(10), 4) != response_lengths(1, range(10), 4)


def test_tokens_already_generated_do_not_change_the_length() -> None:
    assert TAIL.length([5, 6, 2, 1, 1, 1]) == TAIL.length([5, 6, 2])
    assert len({TAIL.length([5, 6, member]) for member in range(2, 12)}) > 1


async def test_a_response_has_its_prompts_length_and_ends_in_eos(versions: Callable[[WeightVersion], Path]) -> None:
    async with serving(versions) as engine:
        ids = prompt(20)
        whole = await ask(engine, "a", ids)
        assert len(whole.token_ids) == len(whole.logprobs) == TAIL.length(ids)
        assert whole.token_ids.index(EOS) == len(whole.token_ids) - 1
        assert whole.finish.type == "stop"
        assert [(span.version, span.start, span.end) for span in whole.spans] == [(str(V0), 0, len(whole.token_ids))]
        cut = await ask(engine, "b", ids, most=7)
        assert (len(cut.token_ids), cut.finish.type, EOS in cut.token_ids) == (7, "length", False)
        rest = await ask(engine, "c", ids + cut.token_ids)
        assert len(rest.token_ids) == TAIL.length(ids) - 7
        assert engine.stats().num_tokens == 2 * TAIL.length(ids)


async def test_slots_and_queue_are_bounded(versions: Callable[[WeightVersion], Path]) -> None:
    async with serving(versions, tokens_per_s=NEVER) as engine:
        answers = [ask(engine, str(n), prompt()) for n in range(6)]
        assert (engine.stats().running, engine.stats().waiting) == (2, 4)
        with pytest.raises(EngineUnavailable, match="queue is full"):
            ask(engine, "more", prompt())
        answers[0].cancel()  # its client has disconnected
        await asyncio.sleep(0)
        assert (engine.stats().running, engine.stats().waiting) == (2, 3)
        with pytest.raises(RequestRefused, match="in flight"):
            ask(engine, "1", prompt())
        assert await engine.abort_all() == 5
        assert [(await answer).token_ids for answer in answers[1:]] == [[]] * 5
        assert {(await answer).finish.type for answer in answers[1:]} == {"abort"}


async def test_resumed_requests_run_before_new_ones(versions: Callable[[WeightVersion], Path]) -> None:
    async with serving(versions, slots=1) as engine:
        order, futures = [], []
        for rid, first in (("runs", False), ("new", False), ("resumed", True)):
            request = EngineRequest(rid, prompt(), SamplingParams(), first)
            futures.append(engine.submit(request))
            futures[-1].add_done_callback(lambda _, rid=rid: order.append(rid))
        await asyncio.wait_for(asyncio.gather(*futures), 20)
    assert order == ["runs", "resumed", "new"]


async def test_the_priority_of_a_resumed_request_is_passed_over_http(versions: Callable[[WeightVersion], Path]) -> None:
    async with (
        serving(versions, slots=1) as engine,
        aiohttp.ClientSession() as session,
        GenerationHTTP(engine, engine_name="paced", settings={}).listening("127.0.0.1") as url,
    ):
        await engine.pause()
        order: list[str] = []

        async def generate(rid: str, priority: int) -> None:
            params = SamplingParams(max_new_tokens=5)
            body = GenerateRequest(input_ids=prompt(), sampling_params=params, rid=rid, priority=priority)
            async with session.post(f"{url}/generate", data=msgspec.json.encode(body)) as response:
                assert response.status == 200, await response.text()
                order.append(rid)

        asking = []
        for rid, priority in (("new", 0), ("resumed", 1)):
            asking.append(asyncio.create_task(generate(rid, priority)))
            await until(lambda: engine.stats().waiting == len(asking))
        await engine.resume()
        await asyncio.wait_for(asyncio.gather(*asking), 20)
    assert order == ["resumed", "new"]


async def test_an_abort_returns_partial_tokens_and_the_rest_has_the_new_version(
    versions: Callable[[WeightVersion], Path],
) -> None:
    async with serving(versions, tokens_per_s=SLOW) as engine:
        ids = prompt(100)
        first = ask(engine, "a", ids)
        await until_tokens(engine, 5)
        assert await engine.pause("abort") == 1
        had = await first
        assert had.finish.type == "abort"
        assert 2 <= len(had.token_ids) < TAIL.length(ids)
        late = ask(engine, "b", ids + had.token_ids)
        await engine.load_weights(versions(V1), V1)
        assert engine.stats().running == 0  # paused: the request waits
        engine.tokens_per_s = FAST
        await engine.resume()
        rest = await late
        assert len(had.token_ids) + len(rest.token_ids) == TAIL.length(ids)
        assert ([span.version for span in had.spans], [span.version for span in rest.spans]) == ([str(V0)], [str(V1)])


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_request_that_is_not_aborted_has_tokens_of_both_versions(
    versions: Callable[[WeightVersion], Path], mode: str
) -> None:
    async with serving(versions, tokens_per_s=SLOW) as engine:
        ids = prompt(100)
        answer = ask(engine, "a", ids)
        await until_tokens(engine, 5)
        await engine.pause(mode)
        used = engine.stats().used_tokens
        await engine.load_weights(versions(V1), V1)
        assert engine.stats().used_tokens == used
        engine.tokens_per_s = FAST
        await engine.resume()
        whole = await answer
        assert len(whole.token_ids) == TAIL.length(ids)
        assert [span.version for span in whole.spans] == [str(V0), str(V1)]
        assert (whole.spans[0].start, whole.spans[0].end, whole.spans[1].end) == (0, used - 3, len(whole.token_ids))


async def test_a_pause_with_mode_wait_lets_requests_finish(versions: Callable[[WeightVersion], Path]) -> None:
    async with serving(versions) as engine:
        answer = ask(engine, "a", prompt(50))
        assert await engine.pause("wait") == 1
        assert answer.done()
        assert answer.result().finish.type == "stop"


async def test_weights_that_fail_their_checksums_are_not_served(
    versions: Callable[[WeightVersion], Path], tmp_path: Path
) -> None:
    async with serving(versions) as engine:
        torn = version_dir(tmp_path, "actor", V1)
        publish_folder(torn, source_dir=versions(V0), version=V1, fsync=False)
        (torn / "config.json").write_text("{}")
        with pytest.raises(WeightsRefused, match=r"config\.json"):
            await engine.load_weights(torn, V1)
        assert engine.stats().version == str(V0)
        await engine.load_weights(versions(V1), V1)
        with pytest.raises(WeightsRefused, match="older"):
            await engine.load_weights(versions(V0), V0)
