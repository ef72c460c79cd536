"""Replay plans: recorded batches keep their order, versions get the new attempt, and unsuitable recordings are refused."""

import numpy as np
import pytest
from recordings import make_group, make_store, record_batches

from asyncrl.config.schema import ConfigError, ReplayConfig
from asyncrl.data.replay import check_replay, plan_replay, translate
from asyncrl.data.trajectories import Entry, list_recording, read_trajectory, recording_dir
from asyncrl.protocol.trajectories import Locator
from asyncrl.protocol.versions import WeightVersion


def plan(run_dir, *, batch_size=2, max_steps=0, eta=9, first_step=0):
    replay = ReplayConfig(path=str(run_dir), first_step=first_step)
    return plan_replay(replay, batch_size=batch_size, max_steps=max_steps, max_head_offpolicyness=eta)


def prompts(replay_plan):
    return [[entry.header.meta.locator.position for entry in batch] for batch in replay_plan.batches]


def test_batches_keep_their_recorded_order_and_size(tmp_path):
    record_batches(tmp_path, batches=3, size=2, trained=True, lag=1)
    assert prompts(plan(tmp_path)) == [[0, 1], [2, 3], [4, 5]]
    assert prompts(plan(tmp_path, max_steps=2)) == [[0, 1], [2, 3]]
    assert plan(tmp_path).num_groups == 6


def test_rollouts_that_were_not_trained_may_form_other_batches(tmp_path):
    record_batches(tmp_path, batches=3, size=2)
    assert prompts(plan(tmp_path, batch_size=4)) == [[0, 1, 2, 3], [4, 5]]


def test_a_translated_group_has_the_attempt_versions_and_locator_of_this_run(tmp_path):
    record_batches(tmp_path, batches=3, size=1, trained=True)
    trajectory = read_trajectory(list_recording(recording_dir(tmp_path, 1))[2])
    meta, sample = translate(trajectory, attempt=7, head=3, place=11)
    packed = WeightVersion(7, 2).pack()
    assert (meta.attempt, meta.head, meta.locator) == (7, 3, Locator(0, 11))
    assert meta.version_start == meta.version_end == [packed, packed]
    sampled = sample.data["loss_mask"]
    assert set(sample.data["versions"][sampled].tolist()) == {packed}
    assert set(sample.data["versions"][~sampled].tolist()) == {-1}
    assert meta.ticket_id == trajectory.header.meta.ticket_id
    unchanged = [key for key in sample.keys if "version" not in key]
    assert sample.select_keys(unchanged) == trajectory.sample.select_keys(unchanged)


def test_keys_that_mfcs_added_are_dropped(tmp_path):
    meta, sample = make_group(0)
    added = sample.update(sample.derive({"proximal_logprobs": np.zeros(sample.total_tokens(), np.float32)}))
    make_store(tmp_path, trained=True).write(0, 1, [Entry(added, meta, 0)])
    (file,) = list_recording(recording_dir(tmp_path, 1))
    assert "proximal_logprobs" in read_trajectory(file).sample.keys
    assert translate(read_trajectory(file), attempt=2, head=0, place=0)[1].keys == sample.keys


def test_a_pruned_recording_is_replayed_from_its_first_step(tmp_path):
    record_batches(tmp_path, batches=3, size=2, first_step=5, trained=True, lag=2)
    with pytest.raises(
        ConfigError, match=r"replay\.first_step=0: .* begins with step 5.*replay\.first_step=5 and model_path"
    ):
        plan(tmp_path)
    assert prompts(plan(tmp_path, first_step=6, eta=2)) == [[12, 13], [14, 15]]
    assert prompts(plan(tmp_path, first_step=5, eta=2, max_steps=6)) == [[10, 11]]
    with pytest.raises(ConfigError, match="ends before that step"):
        plan(tmp_path, first_step=8)


@pytest.mark.parametrize(
    ("damage", "options", "message"),
    [
        ("none", {"batch_size": 7}, r"train\.batch_size=7: .*holds 6 trajectories.*too few"),
        (
            "none",
            {"eta": 1},
            r"manager\.max_head_offpolicyness=1: step 2 .*2 versions old.*=2, or .*train\.max_steps=2",
        ),
        ("none", {"batch_size": 1, "eta": 4}, r"step 5 .* 5 versions old .*train\.max_steps=5"),
        ("hole", {}, r"has a gap, step 1 has 1 of 2 groups.*train\.max_steps=1"),
        ("gap", {}, r"has a gap, step 1 is missing: record with record\.every=1"),
        ("header", {}, r"replay\.path='.*step_00000001-group_0000.*cut short"),
        ("all", {}, r"replay\.path='.*holds no recorded trajectories"),
    ],
)
def test_a_recording_that_cannot_be_replayed_is_refused(tmp_path, damage, options, message):
    record_batches(tmp_path, batches=3, size=2)
    files = list_recording(recording_dir(tmp_path, 1))
    remove = {"none": [], "hole": files[3:4], "gap": files[2:4], "header": [], "all": files}[damage]
    for file in remove:
        file.unlink()
    if damage == "header":
        files[2].write_bytes(files[2].read_bytes()[:100])
    with pytest.raises(ConfigError, match=message):
        plan(tmp_path, **options)


def test_no_group_is_trained_before_the_version_that_sampled_it(tmp_path):
    record_batches(tmp_path, batches=4, size=2, trained=True)
    with pytest.raises(ConfigError, match=r"train\.batch_size: step 0 would train on .*version 1 sampled; use .*\(2\)"):
        plan(tmp_path, batch_size=4)


def test_every_file_is_checked_before_the_run_starts(tmp_path):
    record_batches(tmp_path, batches=2, size=2, tokenizer="ours")
    good = plan(tmp_path)
    check_replay(good, vocab_size=64, tokenizer="ours")
    check_replay(good, vocab_size=64, tokenizer="")
    with pytest.raises(ConfigError, match="another tokenizer"):
        check_replay(good, vocab_size=64, tokenizer="theirs")
    with pytest.raises(ConfigError, match="has the token id 7, but the model at model_path has only 6 tokens"):
        check_replay(good, vocab_size=6, tokenizer="ours")
    file = good.batches[1][1].path
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ConfigError, match=f"{file.name} is broken"):
        check_replay(good, vocab_size=64, tokenizer="ours")


def test_missing_keys_are_named(tmp_path):
    meta, sample = make_group(0)
    kept = [key for key in sample.keys if key not in ("versions", "rewards")]
    make_store(tmp_path).write(0, 1, [Entry(sample.select_keys(kept), meta, 0)])
    with pytest.raises(ConfigError, match=r"lacks the keys \['rewards', 'versions'\]"):
        check_replay(plan(tmp_path, batch_size=1), vocab_size=64, tokenizer="")
