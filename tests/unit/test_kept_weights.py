"""Weights that the trainer keeps for a model of another worker group: torn, wrong, late or stolen ones are never computed with."""

from __future__ import annotations

import contextlib
import logging
import uuid

import aiohttp
import msgspec
import pytest
import torch
from aiohttp import web

from asyncrl.config.processes import ModelConfig, WorkerInfo
from asyncrl.config.schema import NameResolveConfig, RuntimeConfig, TrainConfig
from asyncrl.model import kept_weights
from asyncrl.model.compute import Compute
from asyncrl.model.engine import TrainEngine
from asyncrl.model.fetching import FetchError
from asyncrl.model.kept_weights import PATH, KeptWeights, KeptWeightsFetcher
from asyncrl.model.shards import ShardError
from asyncrl.protocol.calls import FetchWeights, KeepWeights, KeptWeightsRequest
from asyncrl.runtime import security
from asyncrl.runtime.board import StatusBoard
from asyncrl.runtime.http_client import open_session
from asyncrl.runtime.http_server import listen_routes
from asyncrl.testing.tiny import make_tiny_model
from tests.support.process_wide import secured_by

SOURCE = 3
BODY = FetchWeights(model="ref", weight_version="v1", sources=[SOURCE])
KEEP = KeepWeights(source="actor", target="ref", weight_version="v1")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, hidden_size=16, intermediate_size=32, num_layers=1)
    return str(folder)


def engine_of(path, *, trainable, dtype="bfloat16"):
    engine = TrainEngine(ModelConfig("m", path, "d1", [0], trainable=trainable), TrainConfig(dtype=dtype))
    with torch.no_grad():
        for parameter in engine.named_parameters().values():
            parameter.add_(0.1 if trainable else 0.2)
    return engine


class Both:
    """A trainer that keeps weights, and a model elsewhere that fetches them. `urls` is where the model asks next."""

    def __init__(self, path, monkeypatch):
        monkeypatch.setattr(kept_weights, "BUCKET_BYTES", 1000)  # several answers
        self.kept = KeptWeights({"ref": ModelConfig("ref", path, "d1", [0])})
        self.source, self.model = engine_of(path, trainable=True), engine_of(path, trainable=False)
        self.urls = []

    async def url_of(self, worker, incarnation):
        assert (worker, incarnation) == (SOURCE, 0)
        return self.urls.pop(0) if len(self.urls) > 1 else self.urls[0]

    def same(self):
        ours, theirs = self.source.named_parameters(), self.model.named_parameters()
        return [name for name in ours if torch.equal(ours[name].to(torch.bfloat16), theirs[name])]


@contextlib.asynccontextmanager
async def both(path, monkeypatch):
    pair = Both(path, monkeypatch)
    info = WorkerInfo("model_worker", 0, 1, "e", "t", 1, "/nowhere", 1, NameResolveConfig(), RuntimeConfig())
    board = StatusBoard(info, logging.getLogger(uuid.uuid4().hex))
    compute = Compute("me", board, limit_s=60.0)
    async with listen_routes(pair.kept.route(), host="127.0.0.1") as url, open_session(max_connections=8) as session:
        pair.urls, pair.url = [url], url
        pair.fetcher = KeptWeightsFetcher(session, pair.url_of, compute, board)
        yield pair
    compute.close()


@contextlib.asynccontextmanager
async def relaying(url, change):
    """A server between both. change: gets the number and the bytes of each answer, and returns other bytes; None: the trainer is
    killed in the middle of this answer."""
    numbers = iter(range(1000))

    async def relay(request):
        async with aiohttp.ClientSession() as session, session.post(url + PATH, data=await request.read()) as answer:
            body = await answer.read()
            new = change(next(numbers), body)
            if new is None:
                response = web.StreamResponse(headers={"Content-Length": str(len(body))})
                await response.prepare(request)
                await response.write(body[: len(body) // 2])
                request.transport.abort()
                return response
            return web.Response(status=answer.status, body=new)

    async with listen_routes(web.post(PATH, relay), host="127.0.0.1") as there:
        yield there


async def test_the_model_has_the_cast_of_the_kept_weights_though_training_goes_on(path, monkeypatch):
    async with both(path, monkeypatch) as pair:
        num_bytes = pair.kept.keep(KEEP, pair.source, None)
        num_values = sum(tensor.numel() for tensor in pair.source.named_parameters().values())
        assert num_bytes == 2 * num_values, "the dtype of the computation"
        with torch.no_grad():
            for parameter in pair.source.named_parameters().values():
                parameter.add_(1.0)
        received = await pair.fetcher.fetch(BODY, pair.model)
        assert num_bytes <= received < 1.2 * num_bytes
        with torch.no_grad():
            for parameter in pair.source.named_parameters().values():
                parameter.sub_(1.0)
        assert pair.kept.keep(KEEP, pair.source, None) == num_bytes
        await pair.fetcher.fetch(BODY, pair.model)
        assert len(pair.same()) == len(pair.source.named_parameters())
        pair.fetcher.check_finished("ref")


async def test_a_trainer_keeps_one_copy_for_each_target(path, monkeypatch):
    async with both(path, monkeypatch) as pair:
        for version in range(3):
            pair.kept.keep(msgspec.structs.replace(KEEP, weight_version=f"v{version}", share=0.5), pair.source, None)
        assert list(pair.kept.kept) == ["ref"]
        with pytest.raises(FetchError, match=r"answered 409: weights v1 of ref are asked for; this worker keeps v2"):
            await pair.fetcher.fetch(BODY, pair.model)
        pair.fetcher.check_finished("ref")  # nothing has changed
        with pytest.raises(FetchError, match=r"weights v1 of other are asked for; this worker keeps none"):
            await pair.fetcher.fetch(msgspec.structs.replace(BODY, model="other"), pair.model)


def broken(number, body):
    return body if number < 3 else bytes([body[0] ^ 1]) + body[1:]


def short(number, body):
    return body if number < 3 else body[:-1]


def of_another_request(number, body, seen=[]):  # noqa: B006
    seen.append(body)
    return body if number < 3 else seen[1]


def killed(number, body):
    return body if number < 3 else None


@pytest.mark.parametrize("change", [broken, short, of_another_request, killed])
async def test_a_part_of_the_weights_is_not_computed_with(path, monkeypatch, change):
    """Some answers have come. The model computes nothing until it has all weights of a version: from the same trainer, or from the
    trainer of the next attempt."""
    async with both(path, monkeypatch) as pair, relaying(pair.url, change) as url:
        pair.kept.keep(KEEP, pair.source, None)
        before = {name: tensor.clone() for name, tensor in pair.model.named_parameters().items()}
        pair.urls = [url]
        with pytest.raises(FetchError, match=r"model_worker/3 does not deliver weights v1 of ref"):
            await pair.fetcher.fetch(BODY, pair.model)
        changed = [
            name for name, tensor in pair.model.named_parameters().items() if not torch.equal(before[name], tensor)
        ]
        assert 0 < len(changed) < len(before)
        with pytest.raises(RuntimeError, match="ref has fetched only a part of the weights v1"):
            pair.fetcher.check_finished("ref")
        pair.urls = [pair.url]
        await pair.fetcher.fetch(BODY, pair.model)
        pair.fetcher.check_finished("ref")
        assert len(pair.same()) == len(before)


async def test_weights_that_are_replaced_during_a_fetch_are_not_mixed(path, monkeypatch):
    async with both(path, monkeypatch) as pair:
        pair.kept.keep(KEEP, pair.source, None)

        def replace(number, body):
            if number == 2:
                with torch.no_grad():
                    for parameter in pair.source.named_parameters().values():
                        parameter.add_(1.0)
                pair.kept.keep(msgspec.structs.replace(KEEP, weight_version="v2"), pair.source, None)
            return body

        async with relaying(pair.url, replace) as url:
            pair.urls = [url]
            with pytest.raises(FetchError, match="answered 409"):
                await pair.fetcher.fetch(BODY, pair.model)
            with pytest.raises(RuntimeError, match="only a part"):
                pair.fetcher.check_finished("ref")
            await pair.fetcher.fetch(msgspec.structs.replace(BODY, weight_version="v2"), pair.model)
        assert len(pair.same()) == len(pair.source.named_parameters())


async def test_a_lost_answer_is_asked_for_again(path, monkeypatch):
    async with both(path, monkeypatch) as pair, relaying(pair.url, lambda n, body: None if n == 2 else body) as url:
        pair.kept.keep(KEEP, pair.source, None)
        pair.urls = [url]
        await pair.fetcher.fetch(BODY, pair.model)
        assert len(pair.same()) == len(pair.source.named_parameters())


async def test_another_model_is_refused(path, monkeypatch, tmp_path):
    make_tiny_model(tmp_path, hidden_size=32, intermediate_size=32, num_layers=1)
    async with both(path, monkeypatch) as pair:
        pair.kept.keep(KEEP, pair.source, None)
        with pytest.raises(ShardError, match=r"the models do not fit: tensor .* has the shape"):
            await pair.fetcher.fetch(BODY, engine_of(str(tmp_path), trainable=False))
        pair.fetcher.check_finished("ref")
        pair.kept = KeptWeights({"ref": ModelConfig("ref", str(tmp_path), "d1", [0])})
        with pytest.raises(ShardError, match=r"the models do not fit"):
            pair.kept.keep(msgspec.structs.replace(KEEP, share=0.5), pair.source, None)


async def test_strangers_get_no_weights_and_bad_requests_none(path, monkeypatch):
    asked = msgspec.msgpack.encode(KeptWeightsRequest(model="ref", weight_version="v1"))
    too_many = KeptWeightsRequest(model="ref", weight_version="v1", parts=[("lm_head.weight", [0, 0], [99999, 16])])
    with secured_by(security.Security(security.Secrets.make())):
        async with both(path, monkeypatch) as pair, aiohttp.ClientSession() as session:
            pair.kept.keep(KEEP, pair.source, None)
            async with session.post(pair.url + PATH, data=asked) as response:
                assert response.status == 401
            await pair.fetcher.fetch(BODY, pair.model)
    async with both(path, monkeypatch) as pair, aiohttp.ClientSession() as session:
        pair.kept.keep(KEEP, pair.source, None)
        for bad in (b"\xc1", msgspec.msgpack.encode(too_many)):
            async with session.post(pair.url + PATH, data=bad) as response:
                assert response.status == 400
