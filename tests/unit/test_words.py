"""Words of trajectories: the rollout worker adds them, a head refuses forged ones, and MFCs read them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncrl.config.schema import TrainConfig
from asyncrl.data.model_limits import ModelLimits
from asyncrl.data.prompts import Prompt
from asyncrl.data.replay import translate
from asyncrl.data.sequence import SequenceSample
from asyncrl.data.trajectories import TrajectoryHeader, read_trajectory, write_trajectory
from asyncrl.data.words import add_words, words_error
from asyncrl.dataflow.graph import build_dataflow, trajectory_keys
from asyncrl.dataflow.mfc import MFCDef
from asyncrl.model.interfaces import FunctionInterface, StepTotals
from asyncrl.model.trajectory_receiver import trajectory_error
from asyncrl.protocol.trajectories import Locator, TrajectoryMeta
from asyncrl.rewards.trajectory import Episode, Response, build_sample, complete_sample, summary_of

WORDS = ("words_completion", "prompt_words_answer", "prompt_words_row", "words_tools")
PROMPT = Prompt("p", "2+2", [5, 6], {"number": 4}, "default", {"question": "2+2", "n": [4]}, False)
TOKENIZER: Any = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))


def agents_sample(tools: tuple[Any, Any] = ({"found": [1]}, None)) -> SequenceSample:
    episodes = []
    for output in ([7, 8], [9]):
        episode = Episode([5, 6])
        episode.add_response(Response([5, 6], output, [-1.0] * len(output), [(0, len(output))], True))
        episodes.append(episode)
    sample = build_sample("a", episodes)
    return sample.update(SequenceSample.from_groups(sample.ids, [{"words_tools": list(tools)}]))


def trajectory() -> tuple[TrajectoryMeta, SequenceSample]:
    sample = complete_sample(agents_sample(), ticket_id="t", task_id=0, birth_time=1.0, words=WORDS)
    sample = add_words(sample, WORDS, PROMPT, TOKENIZER)
    return meta_of(sample), sample


def meta_of(sample: SequenceSample) -> TrajectoryMeta:
    summary = msgspec.structs.asdict(summary_of(sample))
    return TrajectoryMeta(
        ticket_id="t",
        locator=Locator(0, 0),
        attempt=1,
        head=0,
        keys=list(sample.keys),
        birth_time=1.0,
        task_id=0,
        **summary,
    )


def objection(sample: SequenceSample, max_bytes: int = 1000) -> str:
    limits = ModelLimits(vocab_size=100, max_length=100)
    keys = trajectory_keys(TrainConfig(words=list(WORDS)))
    return trajectory_error(meta_of(sample), sample, limits=limits, keys=keys, max_words_bytes=max_bytes)


def test_the_worker_adds_completion_answer_and_row_to_the_words_of_the_agent() -> None:
    _, sample = trajectory()
    assert sample.words("words_completion") == [["7 8", "9"]]
    assert sample.words("prompt_words_answer") == [[{"number": 4}]]
    assert sample.words("prompt_words_row") == [[{"question": "2+2", "n": [4]}]]
    assert sample.words("words_tools") == [[{"found": [1]}, None]]
    assert objection(sample) == ""


def test_words_that_the_config_does_not_name_and_missing_ones_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\['words_tools'\], which an agent must not set.*list words in train.words"):
        complete_sample(agents_sample(), ticket_id="t", task_id=0, birth_time=1.0)
    plain = agents_sample().select_keys([key for key in agents_sample().keys if key != "words_tools"])
    with pytest.raises(
        ValueError, match=r"lacks the keys \['words_tools'\] of train.words.*adds only words_completion"
    ):
        add_words(plain, WORDS, PROMPT, TOKENIZER)


def test_a_head_refuses_oversized_forged_and_missing_words() -> None:
    _, sample = trajectory()
    num_bytes = sum(sample.data[key].nbytes for key in WORDS)
    assert objection(sample, num_bytes) == ""
    assert objection(sample, num_bytes - 1).startswith(f"bad_words: group t has {num_bytes} bytes of words")
    forged = sample.data["words_tools"].copy()
    forged[0] = 0
    broken = SequenceSample(sample.ids, sample.seqlens, {**sample.data, "words_tools": forged})
    assert objection(broken).startswith("bad_words: key 'words_tools', id 't': its bytes are no JSON")
    assert (
        objection(sample.select_keys([k for k in sample.keys if k != "words_tools"])) == "missing_keys: ['words_tools']"
    )


def test_recorded_words_are_replayed_identically(tmp_path: Any) -> None:
    meta, sample = trajectory()
    seqlens = {key: lengths[0] for key, lengths in sample.seqlens.items()}
    header = TrajectoryHeader(
        meta=meta, seqlens=seqlens, step=0, position=0, batch=1, trained=False, recorded_by="recorder/0", time=1.0
    )
    _, replayed = translate(read_trajectory(write_trajectory(tmp_path, header, sample)), attempt=2, head=0, place=0)
    for key in WORDS:
        assert replayed.words(key) == sample.words(key)
        assert replayed.data[key].tobytes() == sample.data[key].tobytes()


def interface(function: Any, output: str, **train: Any) -> FunctionInterface:
    mfc = MFCDef("judge", "actor", "inference", "mine.py:judge", ("packed_input_ids", *WORDS), (output,))
    return FunctionInterface(function, mfc, TrainConfig(**train))


def test_a_function_reads_and_makes_words_and_its_words_are_bounded() -> None:
    def judge(engine: Any, sample: SequenceSample, train: TrainConfig) -> SequenceSample:
        texts = sample.words("words_completion")
        groups = [{"words_verdict": [f"{text}!" for text in group]} for group in texts]
        return SequenceSample.from_groups(sample.ids, groups) if groups else sample

    engine: Any = SimpleNamespace(is_head=True)
    _, sample = trajectory()
    made, _ = interface(judge, "words_verdict").run(engine, sample, batch_ids=["t"], step=StepTotals(0, {}))
    assert made is not None
    assert made.words("words_verdict") == [["7 8!", "9!"]]
    assert interface(judge, "words_verdict").run(engine, None, batch_ids=["t"], step=StepTotals(0, {})) == (None, {})
    with pytest.raises(ValueError, match=r"MFC 'judge': group t has 10 bytes of words .*train.max_words_bytes=9"):
        interface(judge, "words_verdict", max_words_bytes=9).run(
            engine, sample, batch_ids=["t"], step=StepTotals(0, {})
        )
    assert words_error(SequenceSample((), {}, {}), 1) == ""


def test_the_graph_has_the_words_of_the_config(tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text(
        "from asyncrl.dataflow.mfc import mfc\n"
        "@mfc(input_keys=['words_completion'], output_keys=['dense_rewards'])\n"
        "def judge(engine, sample, train): ...\n"
    )
    mfcs = [f"{tmp_path}/mine.py:judge"]
    assert "judge" in build_dataflow(TrainConfig(mfcs=mfcs, words=["words_completion"])).mfcs
    with pytest.raises(ValueError, match=r"reads \['words_completion'\], which no MFC writes"):
        build_dataflow(TrainConfig(mfcs=mfcs))


def test_batches_tell_their_facts() -> None:
    from asyncrl.master.handles import Batch

    async def read(ids: Any, key: str) -> Any:
        return []

    meta, _ = trajectory()
    found = Batch([meta], read, version=3).meta_info
    assert found == {"version": 3, "step": 4, "num_groups": 1, "num_sequences": 2, "num_tokens": 7}
    assert np.sum(meta.seqlens) == 7
