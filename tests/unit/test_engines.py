"""The table of engines: the contract that each engine keeps, and that no other code compares an engine's name."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_engine import TRAITS, FakeEngines

from asyncrl.config.engines import ENGINES
from asyncrl.config.processes import GenerationServerConfig, WorkerInfo
from asyncrl.config.schema import ExperimentConfig, GenerationConfig, NameResolveConfig, RuntimeConfig
from asyncrl.dataflow.layout_checks import problems_of_layout
from asyncrl.dataflow.topology import Allocation
from asyncrl.generation.engine import EngineRequest, EngineUnavailable, GenerationEngine, RequestRefused, WeightsRefused
from asyncrl.generation.engines import KINDS, engines_of
from asyncrl.protocol.generation import SamplingParams
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.clock import SYSTEM_CLOCK
from asyncrl.runtime.trace import OFF
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights.versions import version_dir, write_version
from tests.support.decisions import PACKAGE, comparisons, decisions

V0, V1 = WeightVersion(1, 0), WeightVersion(1, 1)
PROMPT = [5, 6, 7]
LIMIT_S = 60.0  # for one wait, on a busy machine


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "fake", TRAITS)
    monkeypatch.setitem(KINDS, "fake", FakeEngines)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    make_tiny_model(folder / "model")
    for version in (V0, V1):
        model = make_tiny_model(None, seed=1 + version.version)
        tensors = ((name, parameter.detach()) for name, parameter in model.named_parameters())
        path = version_dir(folder, "actor", version)
        write_version(path, tensors, source_dir=folder / "model", version=version, fsync=False)
    return folder


def server_config(engine: str, run_dir: Path) -> GenerationServerConfig:
    names = NameResolveConfig(endpoints=["memory://engines"])
    info = WorkerInfo("generation_server", 0, 1, "e", "t", 1, str(run_dir), 1, names, RuntimeConfig())
    limits = GenerationConfig(max_running_requests=2, max_queue=2, max_batch_tokens=64, num_blocks=64, page_size=16)
    model = str(run_dir / "model")
    return GenerationServerConfig(info, engine, model, model, limits, torch_threads=1)


@asynccontextmanager
async def starting(engine: str, run_dir: Path) -> AsyncIterator[GenerationEngine[Any]]:
    kind = engines_of(server_config(engine, run_dir), OFF, SYSTEM_CLOCK)
    journal = kind.journal()
    made = await asyncio.to_thread(kind.make, journal, None)
    try:
        assert all(isinstance(text, str) for text in (*kind.start_wait(), made.progress()))
        await asyncio.wait_for(made.start(), LIMIT_S)
        yield made
    finally:
        await made.close()
        journal.close()


def request(rid: str, most: int = 8) -> EngineRequest:
    return EngineRequest(rid, PROMPT, SamplingParams(max_new_tokens=most))


CONTRACT = pytest.mark.parametrize("engine", ["transformers", "fake"])


@CONTRACT
async def test_an_engine_keeps_its_contract(fake: None, engine: str, run_dir: Path) -> None:
    async with starting(engine, run_dir) as made:
        # Without a version it refuses to generate
        with pytest.raises(EngineUnavailable):
            await asyncio.wait_for(made.submit(request("early")), LIMIT_S)
        assert made.stats().version == ""

        # Every token has a logprob and the version that sampled it
        await made.load_weights(version_dir(run_dir, "actor", V0), V0)
        first = await asyncio.wait_for(made.submit(request("a")), LIMIT_S)
        assert 0 < len(first.token_ids) == len(first.logprobs) <= 8
        assert [(span.version, span.start, span.end) for span in first.spans] == [(str(V0), 0, len(first.token_ids))]

        # Bad requests are refused at once
        with pytest.raises(RequestRefused):
            made.submit(request("b", most=0))

        # In a pause requests wait, and versions load
        assert await made.pause("abort") == 0
        with pytest.raises(RequestRefused):
            await made.pause("unknown")
        waiting = made.submit(request("c"))
        await made.load_weights(version_dir(run_dir, "actor", V1), V1)
        assert (waiting.done(), made.stats().paused, made.stats().waiting) == (False, True, 1)
        await made.resume()
        second = await asyncio.wait_for(waiting, LIMIT_S)
        assert {span.version for span in second.spans} == {str(V1)}
        assert made.stats().version == str(V1)

        # Versions only increase, and a refused version changes nothing
        with pytest.raises(WeightsRefused):
            await made.load_weights(version_dir(run_dir, "actor", V0), V0)
        with pytest.raises(WeightsRefused):
            await made.load_weights(run_dir / "no such version", WeightVersion(1, 2))
        assert made.stats().version == str(V1)

        # The queue is bounded, and `abort_all` answers every request
        await made.pause("abort")
        queued = [made.submit(request(f"q{n}")) for n in range(2)]
        with pytest.raises(EngineUnavailable):
            made.submit(request("more"))
        assert await made.abort_all() == 2
        assert {(await asyncio.wait_for(answer, LIMIT_S)).finish.type for answer in queued} == {"abort"}

        # Scores work in the pause
        scores = await asyncio.wait_for(made.score(PROMPT), LIMIT_S)
        assert len(scores) == len(PROMPT)
        assert scores[0] == 0

        # A forgotten version is not served until the next load
        made.forget_version()
        assert made.stats().version == ""
        await made.resume()
        with pytest.raises(EngineUnavailable):
            await asyncio.wait_for(made.submit(request("late")), LIMIT_S)
        assert made.failure is None


def test_each_engine_has_a_row_in_both_tables() -> None:
    assert list(ENGINES) == list(KINDS)


def test_a_new_engine_is_a_row(fake: None) -> None:
    """Its allocations parse, and the layout checks follow its traits."""

    def problems(allocation: str, **generation: Any) -> dict[str, str]:
        config = ExperimentConfig(allocation=allocation, generation=GenerationConfig(**generation))
        return {name: remedy for name, _, remedy in problems_of_layout(config)}

    assert Allocation.parse("fake.d2p1m2+d1p1m1").num_devices == 5
    assert problems("fake.d2p1m2+d1p1m1", server_args={"speed": "1"}) == {}
    assert "the engine fake has no stages: use d1p1m1" in problems("fake.d1p2m1+d1p1m1")["allocation"]
    told = problems("transformers.d1p1m1+d1p1m1", server_args={"speed": "1"})["generation.server_args"]
    assert told.startswith("is for the engine sglang or vllm or fake;")


@pytest.mark.parametrize(
    "code",
    [
        "engine == 'sglang'",
        "engine in ('sglang', 'other')",
        "allocation.startswith(('sglang.', 'external.'))",
        "{'sglang': 1}.get(engine)",
        "match engine:\n    case 'sglang':\n        pass",
    ],
)
def test_the_scan_finds_a_comparison(code: str) -> None:
    assert list(comparisons(ast.parse(code), {*ENGINES}))


def test_no_other_code_compares_the_name_of_an_engine() -> None:
    """A decision that depends on the engine reads a trait, so that a new engine needs no change there."""
    tables = {PACKAGE / "config" / "engines.py", PACKAGE / "generation" / "engines.py"}
    assert decisions({*ENGINES}, tables) == set()
