"""A whole generation server with a tiny model: SGLang's protocol over real sockets, updates, refusals, journal, metrics."""

import asyncio
import itertools
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import torch

from asyncrl.config.processes import GenerationServerConfig, WorkerInfo
from asyncrl.config.schema import GenerationConfig, NameResolveConfig, RuntimeConfig
from asyncrl.generation.journal import TokenJournal, journal_path
from asyncrl.generation.transformers import LiveTensors
from asyncrl.generation.worker import GenerationServer
from asyncrl.protocol.generation import GenerateReply, GenerateRequest, SamplingParams
from asyncrl.protocol.names import Names
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import FetchWeightsRequest, UpdateWeightsReply
from asyncrl.runtime.metrics import read_json_lines
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights import versions as weights
from asyncrl.weights.versions import version_dir, write_version
from tests.support.memory_names import memory_system, open_names

V0, V1 = WeightVersion(1, 0), WeightVersion(1, 1)
GENERATION = GenerationConfig(
    max_running_requests=16, max_batch_tokens=256, num_blocks=128, page_size=16, load_timeout_s=20.0, max_queue=4
)
_spaces = itertools.count()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with the versions v0 and v1 beside it."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("server")
    make_tiny_model(root / "model")
    for version in (V0, V1):
        tensors = make_tiny_model(None, seed=version.version).named_parameters()
        path = version_dir(root, "actor", version)
        write_version(
            path, ((n, p.detach()) for n, p in tensors), source_dir=root / "model", version=version, fsync=False
        )
    return root / "model"


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str, model_path: Path, run_dir: Path) -> None:
        self.session, self.url, self.model_path, self.run_dir = session, url, model_path, run_dir

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        data = msgspec.json.encode(body)
        async with self.session.post(self.url + path, data=data) as response:
            return response.status, msgspec.json.decode(await response.read())

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            return response.status, msgspec.json.decode(await response.read())

    async def generate(self, ids: list[int], rid: str, **params: Any) -> GenerateReply:
        request = GenerateRequest(input_ids=ids, rid=rid, sampling_params=SamplingParams(**params))
        status, reply = await self.post("/generate", request)
        assert status == 200, reply
        return msgspec.convert(reply, GenerateReply)

    async def update(self, version: WeightVersion, path: Path | None = None) -> tuple[int, UpdateWeightsReply]:
        where = path or version_dir(self.run_dir, "actor", version)
        body = {"model_path": str(where), "weight_version": str(version)}
        status, reply = await self.post("/update_weights_from_disk", body)
        return status, msgspec.convert(reply, UpdateWeightsReply)

    async def metric(self, name: str) -> float:
        async with self.session.get(self.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@asynccontextmanager
async def served(model_path: Path, run_dir: Path, version: WeightVersion | None = V0) -> AsyncIterator[Client]:
    shutil.copytree(model_path.parent / "weights", run_dir / "weights")
    resolve = NameResolveConfig(endpoints=[f"memory://generation-{next(_spaces)}"])
    info = WorkerInfo(
        kind="generation_server", index=1, count=2, experiment="e", trial="t", attempt=1, run_dir=str(run_dir), seed=1,
        name_resolve=resolve, runtime=RuntimeConfig(),
    )  # fmt: skip
    server = GenerationServer(
        GenerationServerConfig(
            worker=info, engine="transformers", model_path=str(model_path), tokenizer_path=str(model_path),
            generation=GENERATION, torch_threads=1,
        ),
        memory_system(),
    )  # fmt: skip
    main = asyncio.create_task(server.main())
    resolver = open_names(resolve)
    try:
        url = await asyncio.to_thread(resolver.wait, Names("e", "t").generation_server(1), 30.0)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
            client = Client(session, url, model_path, run_dir)
            if version is not None:
                status, reply = await client.update(version)
                assert (status, reply.success) == (200, True)
            yield client
    finally:
        server.stopping.set()
        await asyncio.wait_for(main, 30)
        resolver.close()


async def test_a_server_from_start_to_stop(model_path: Path, tmp_path: Path) -> None:
    """The server answers 503 until it has a version. Then the test loads v0, sends a request, pauses the server and loads v1."""
    async with served(model_path, tmp_path, None) as client:
        told = {"model_path": str(model_path), "weight_version": "", "paused": False}
        assert (await client.get("/get_model_info"))[1] == told
        assert (await client.get("/health"))[0] == 200
        request = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}, "rid": "a"}
        async with client.session.post(client.url + "/generate", json=request) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
        assert (await client.get("/health_generate"))[0] == 503

        assert (await client.update(V0))[0] == 200
        assert (await client.get("/model_info"))[1]["weight_version"] == str(V0)
        assert (await client.get("/health_generate"))[0] == 200
        reply = await client.generate([5, 6, 7], "a", max_new_tokens=4, ignore_eos=True)
        meta = reply.meta_info
        assert len(reply.output_ids) == len(reply.text) == meta.completion_tokens == 4
        assert (meta.id, meta.prompt_tokens, meta.weight_version) == ("a", 3, str(V0))
        assert (meta.finish_reason.type, meta.finish_reason.length) == ("length", 4)
        assert [(span.version, span.start, span.end) for span in meta.weight_versions] == [(str(V0), 0, 4)]
        assert [token for _, token, _ in meta.output_token_logprobs] == reply.output_ids
        assert all(logprob < 0 for logprob, _, _ in meta.output_token_logprobs)

        running = asyncio.create_task(client.generate([9] * 20, "long", max_new_tokens=450, ignore_eos=True))
        while await client.metric("asyncrl_generation_running") == 0:
            pass
        assert (await client.post("/flush_cache", {}))[0] == 400
        assert (await client.post("/pause_generation", {"mode": "abort"}))[0] == 200
        first = await running
        assert first.meta_info.finish_reason.type == "abort"
        waiting = asyncio.create_task(client.generate([9] * 20 + first.output_ids, "long", max_new_tokens=3))
        while await client.metric("asyncrl_generation_waiting") == 0:
            pass
        assert (await client.update(V1))[0] == 200
        assert not waiting.done()
        assert (await client.post("/continue_generation", {}))[0] == 200
        assert (await waiting).meta_info.weight_version == str(V1)
        assert (await client.post("/flush_cache", {}))[0] == 200
        info = (await client.get("/get_server_info"))[1]
        assert (info["engine"], info["state"]["version"], info["state"]["num_updates"]) == ("transformers", str(V1), 2)
        num_tokens = info["state"]["num_tokens"]
        assert await client.metric("asyncrl_generation_tokens_total") == num_tokens
    lines = read_json_lines(journal_path(tmp_path, 1))
    assert sum(int(str(line["tokens"])) for line in lines) == num_tokens
    assert [line["version"] for line in lines if line["version"] == str(V1)]
    assert len({(line["time"], line["version"]) for line in lines}) == len(lines)


async def test_lists(model_path: Path, tmp_path: Path) -> None:
    async with served(model_path, tmp_path) as client:
        body: dict[str, Any] = {
            "input_ids": [[1, 2], [3], [4, 5, 6]],
            "sampling_params": {"max_new_tokens": 2, "ignore_eos": True},
            "rid": ["a", "b", "c"],
        }
        status, replies = await client.post("/generate", body)
        assert status == 200
        assert [reply["meta_info"]["id"] for reply in replies] == ["a", "b", "c"]
        assert [reply["meta_info"]["prompt_tokens"] for reply in replies] == [2, 1, 3]
        params = [{"max_new_tokens": i + 1, "ignore_eos": True} for i in range(3)]
        status, replies = await client.post("/generate", {"input_ids": [[1], [1], [1]], "sampling_params": params})
        assert [len(reply["output_ids"]) for reply in replies] == [1, 2, 3]
        assert len({reply["meta_info"]["id"] for reply in replies}) == 3
        status, reply = await client.post("/generate", body | {"input_ids": [[1], [99], [1]]})
        assert (status, "99" in reply["error"]["message"]) == (400, True)
        assert (await client.post("/generate", body))[0] == 200  # the refused list has left none of its rids in use
        status, reply = await client.post("/generate", body | {"rid": ["a"]})
        assert (status, "equal lengths" in reply["error"]["message"]) == (400, True)


async def test_bad_input_gets_400_and_the_server_lives(model_path: Path, tmp_path: Path) -> None:
    good: dict[str, Any] = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}, "rid": "a"}
    async with served(model_path, tmp_path) as client:
        for body, word in [
            (good | {"input_ids": [64]}, "64"),
            (good | {"input_ids": []}, "empty"),
            (good | {"input_ids": "text"}, "array"),
            (good | {"input_ids": [1.5]}, "int"),
            (good | {"input_ids": [1] * 600}, "do not fit"),
            (good | {"sampling_params": {"best_of": 2}}, "best_of"),
            (good | {"sampling_params": {"temperature": -1}}, "temperature"),
            (good | {"stream": True}, "stream"),
            ({"sampling_params": {}}, "input_ids"),
            ([], "object"),
        ]:
            status, reply = await client.post("/generate", body)
            assert status == 400, body
            assert word in reply["error"]["message"], reply
        async with client.session.post(client.url + "/generate", data=b"{not json") as response:
            assert response.status == 400
        status, reply = await client.post("/pause_generation", {"mode": "gently"})
        assert (status, "retract" in reply["error"]["message"]) == (400, True)
        assert (await client.post("/abort_request", {}))[0] == 400
        assert (await client.post("/generate", good | {"unknown": 1}))[0] == 200


async def test_an_unknown_path_gets_404_and_a_wrong_method_405(model_path: Path, tmp_path: Path) -> None:
    async with served(model_path, tmp_path) as client:
        async with client.session.get(f"{client.url}/none_such") as response:
            assert (response.status, await response.text()) == (404, "there is no /none_such\n")
        async with client.session.get(f"{client.url}/generate") as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")


async def test_a_bad_update_gets_400_and_the_old_version_serves(model_path: Path, tmp_path: Path) -> None:
    async with served(model_path, tmp_path) as client:
        before = await client.generate([1, 2, 3], "a", max_new_tokens=5, temperature=0.0)
        v1, v7 = version_dir(tmp_path, "actor", V1), version_dir(tmp_path, "actor", WeightVersion(1, 7))
        for version, path, word in [
            (WeightVersion(1, 7), v7, f"the newest one beside it: {V1}"),
            (WeightVersion(1, 7), v1, f"model_path is '{v1}', but this run stores {WeightVersion(1, 7)} only in {v7}"),
            (V1, version_dir(model_path.parent, "actor", V1), "is not in the run's folder"),
            (V1, version_dir(tmp_path, "critic", V1), "only"),
            (V1, tmp_path / "x" / ".." / "weights" / "actor" / str(V1), "is no folder of the run"),
        ]:
            status, reply = await client.update(version, path)
            assert (status, reply.success, word in reply.message) == (400, False, True), reply
        v1.rename(tmp_path / "elsewhere")
        v1.symlink_to(tmp_path / "elsewhere")
        status, reply = await client.update(V1)
        assert (status, "is a symbolic link, or" in reply.message) == (400, True)
        status, body = await client.post("/update_weights_from_disk", {"model_path": str(v1), "weight_version": "v1"})
        assert (status, body["success"]) == (400, False)
        assert await client.generate([1, 2, 3], "a", max_new_tokens=5, temperature=0.0) == before


async def test_no_version_of_a_lower_attempt_and_none_that_is_older_is_loaded(model_path: Path, tmp_path: Path) -> None:
    """Such a request may come from any sender, for example from a manager or trainer that was frozen and sends after its
    successor."""
    async with served(model_path, tmp_path, V1) as client:
        status, reply = await client.update(V0)
        assert (status, reply.success, reply.error_class) == (400, False, "permanent")
        assert reply.message == f"version {V0} is older than {V1}, which was loaded here"
        assert (await client.update(V1))[0] == 200  # the same version again
        new = WeightVersion(2, 0)
        tensors = make_tiny_model(None, seed=5).named_parameters()
        path = version_dir(tmp_path, "actor", new)
        write_version(path, ((n, p.detach()) for n, p in tensors), source_dir=model_path, version=new, fsync=False)
        assert (await client.update(new, path))[0] == 200  # a later attempt may begin at a lower version number
        status, reply = await client.update(V1)
        assert (status, reply.success, reply.error_class) == (400, False, "permanent")
        assert reply.message == f"version {V1} is older than {new}, which was loaded here; attempt 1 is over"
        status, begun = await client.post("/begin_weight_update", {"weight_version": str(V1)})
        assert (status, begun["success"], begun["error_class"]) == (400, False, "permanent")
        assert "attempt 1 is over" in begun["message"]
        _, info = await client.get("/get_model_info")
        assert (info["weight_version"], info["paused"]) == (str(new), False)
        await client.post("/pause_generation", {"mode": "abort"})
        assert (await client.get("/get_model_info"))[1]["paused"]


async def test_one_rid_at_a_time_a_full_queue_and_clients_that_leave(model_path: Path, tmp_path: Path) -> None:
    async with served(model_path, tmp_path) as client:
        await client.post("/pause_generation", {})
        tasks = [
            asyncio.create_task(client.generate([1], f"r{i}", max_new_tokens=450, ignore_eos=True)) for i in range(4)
        ]
        while await client.metric("asyncrl_generation_waiting") < 4:
            pass
        request = {"input_ids": [1], "rid": "r0"}
        assert (await client.post("/generate", request))[0] == 400  # r0 is in flight
        async with client.session.post(client.url + "/generate", json=request | {"rid": "r9"}) as response:
            assert (response.status, "Retry-After" in response.headers) == (503, True)
        tasks.pop().cancel()
        while await client.metric("asyncrl_generation_waiting") == 4:
            pass
        await client.post("/continue_generation", {})
        tasks.pop().cancel()
        while await client.metric("asyncrl_generation_running") > 2:
            pass
        assert (await client.post("/abort_request", {"rid": "r0"}))[1]["num_aborted"] == 1
        assert (await tasks[0]).meta_info.finish_reason.type == "abort"
        assert (await client.post("/abort_request", {"abort_all": True}))[1]["num_aborted"] == 1
        assert (await tasks[1]).meta_info.finish_reason.type == "abort"


def test_the_config_is_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    info = WorkerInfo(
        kind="generation_server", index=0, count=1, experiment="e", trial="t", attempt=1, run_dir=str(tmp_path), seed=1,
        name_resolve=NameResolveConfig(endpoints=["memory://"]), runtime=RuntimeConfig(),
    )  # fmt: skip
    for engine, path, word in [("tgi", tmp_path, "tgi"), ("transformers", tmp_path, "config.json")]:
        with pytest.raises(ValueError, match=word):
            GenerationServer(GenerationServerConfig(info, engine, str(path), str(path), GENERATION, 1))


def test_journal(tmp_path: Path) -> None:
    now = 100.01
    journal = TokenJournal(tmp_path / "j.jsonl", now=lambda: now)
    journal.add(5, "a")
    journal.add(2, "a")
    journal.add(0, "a")
    journal.add(3, "b")
    journal.flush()
    assert read_json_lines(tmp_path / "j.jsonl") == []  # the bucket is not complete
    now = 100.15
    journal.add(1, "b")
    journal.flush()
    expected: list[dict[str, object]] = [
        {"time": 100.0, "tokens": 7, "version": "a"},
        {"time": 100.0, "tokens": 3, "version": "b"},
    ]
    assert read_json_lines(tmp_path / "j.jsonl") == expected
    journal.close()
    assert read_json_lines(tmp_path / "j.jsonl") == [*expected, {"time": 100.1, "tokens": 1, "version": "b"}]


async def test_a_version_is_verified_before_the_pause_and_a_retry_waits_for_the_load_in_progress(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = asyncio.Event()
    loop, real, may_load = asyncio.get_running_loop(), weights.check_files, threading.Event()

    def check(*args: Any) -> None:
        real(*args)
        loop.call_soon_threadsafe(checked.set)

    monkeypatch.setattr(weights, "check_files", check)
    load, loading = LiveTensors.load_version, asyncio.Event()

    def slow_load(*args: Any) -> None:
        loop.call_soon_threadsafe(loading.set)
        assert may_load.wait(20)
        load(*args)

    async with served(model_path, tmp_path) as client:
        before = await client.metric("asyncrl_generation_weight_updates")
        checked.clear()
        where = str(version_dir(tmp_path, "actor", V1))
        request = FetchWeightsRequest(model_path=where, weight_version=str(V1), source="", limit_s=20.0)
        assert (await client.post("/fetch_weights", request))[0] == 200
        assert checked.is_set()
        assert not (await client.get("/get_model_info"))[1]["paused"]
        checked.clear()
        monkeypatch.setattr(LiveTensors, "load_version", slow_load)
        first = asyncio.create_task(client.update(V1))
        await asyncio.wait_for(loading.wait(), 20)
        retry = asyncio.create_task(client.update(V1))
        assert (await client.get("/get_model_info"))[1]["weight_version"] == str(
            V0
        )  # until this answer comes, the server has time to receive the retry
        may_load.set()
        assert [status for status, _ in await asyncio.gather(first, retry)] == [200, 200]
        assert not checked.is_set()  # the files were not hashed again
        assert await client.metric("asyncrl_generation_weight_updates") == before + 1

        status, reply = await client.post("/fetch_weights", msgspec.structs.replace(request, model_path="/no/where"))
        assert (status, reply["success"]) == (400, False)
