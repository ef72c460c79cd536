"""The progress of loading a model: counted inside transformers, and shown in a worker's status."""

import asyncio
import logging

import pytest

from asyncrl.config.processes import WorkerInfo
from asyncrl.config.schema import NameResolveConfig, RuntimeConfig
from asyncrl.runtime import loading
from asyncrl.runtime.board import StatusBoard, WaitTimeoutError
from asyncrl.runtime.loading import LoadProgress
from asyncrl.testing.tiny import make_char_tokenizer, make_tiny_model
from tests.support.clock import ManualClock

INFO = WorkerInfo("model_worker", 0, 1, "e", "t", 1, "/r", 1, NameResolveConfig(), RuntimeConfig())


@pytest.fixture
def model_path(tmp_path):
    tokenizer = make_char_tokenizer(tmp_path)
    make_tiny_model(tmp_path, tokenizer=tokenizer, seed=1)
    return tmp_path


def test_a_real_model_is_counted_to_its_last_tensor(model_path, monkeypatch):
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    monkeypatch.setattr(loading, "_SHOWN_FROM_BYTES", 0)
    progress = LoadProgress(model_path)
    progress._num_bytes = 3_000_000_000
    board = StatusBoard(INFO, logging.getLogger("test"))
    shown = []
    counted = progress._counted

    def seen(tensors, total):
        for tensor in counted(tensors, total):
            shown.append(board.snapshot().waits[0].what)
            yield tensor

    monkeypatch.setattr(progress, "_counted", seen)
    with board.showing("loading actor", on="model_worker/0", limit_s=9.0, detail=progress.text):
        assert board.snapshot().waits[0].what == "loading actor"  # no progress is known yet
        with progress.watched():
            AutoModelForCausalLM.from_pretrained(model_path)
        shown.append(board.snapshot().waits[0].what)
    assert shown[0] == "loading actor, 0.0 of 3.0 GB"
    assert shown[-1] == "loading actor, 3.0 of 3.0 GB"
    assert len(shown) > 10
    assert transformers_logging.set_tqdm_hook(None) is None  # our hook is removed


def test_a_small_model_is_there_at_once(model_path):
    progress = LoadProgress(model_path)
    assert list(progress._counted("abc", 3)) == ["a", "b", "c"]
    assert progress.text() == ""


def test_the_error_of_a_load_that_takes_too_long_has_the_seconds_of_each_phase(model_path):
    clock = ManualClock()
    progress = LoadProgress(model_path, clock)
    assert progress.phases() == ""
    progress.enter("imports and weights")
    clock.now += 85.0
    progress.enter("self-check")
    clock.now += 35.4
    assert progress.phases() == "imports and weights 85 s, self-check 35 s"


async def test_the_error_of_a_wait_has_its_progress():
    board = StatusBoard(INFO, logging.getLogger("test"))
    with pytest.raises(WaitTimeoutError, match=r"loading actor, 1.2 of 3.0 GB from model_worker/0; giving up"):
        await board.bounded(
            asyncio.Event().wait(),
            what="loading actor",
            on="model_worker/0",
            limit_s=0.01,
            detail=lambda: ", 1.2 of 3.0 GB",
        )


def test_other_bars_are_left_alone(model_path):
    progress = LoadProgress(model_path)
    items = [1, 2]
    assert progress._bar(lambda *args, **kwargs: (args, kwargs), (items,), {"desc": "Fetching"}) == (
        (items,),
        {"desc": "Fetching"},
    )
