"""`asyncrl-launch plan` on the config of the quickstart, with the real plan of its model workers."""

import json
from dataclasses import replace

import msgspec
import pytest

from asyncrl.cli.commands.plan import PlanReport
from asyncrl.cli.main import main
from asyncrl.plan.devices import DEVICES, library_bytes
from asyncrl.plan.shapes import ModelShape
from tests.pages import ROOT

pytestmark = pytest.mark.timeout(240)

# The model of examples/sloppy_sorter
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 192,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


@pytest.fixture
def planned(tmp_path, capsys, monkeypatch):
    """Returns a function that plans the quickstart with these arguments, and returns the exit code and the report.

    The GPU `toy` has 16 MiB more than the libraries of several workers need, `tiny` 16 MiB more than those of one."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    for name, communicates in (("toy", True), ("tiny", False)):
        memory = library_bytes(communicates=communicates) + 16 * 2**20
        monkeypatch.setitem(DEVICES, name, replace(DEVICES["rtx4090-24g"], name=name, memory=memory))

    def run(*arguments):
        code = main(["plan", str(ROOT / "configs/quickstart_cpu.yaml"), f"model_path={tmp_path}", "--json", *arguments])
        return code, msgspec.json.decode(capsys.readouterr().out, type=PlanReport)

    return run


def test_the_quickstart_is_planned_without_weights(planned):
    code, report = planned("--gpu", "rtx4090-24g")
    plan = report.plan
    assert (code, report.fits, plan.allocation) == (0, True, "transformers.d2p1m1+d2p1m1")
    (rank,) = plan.ranks
    assert rank.stands_for == [0, 1]
    half = ModelShape.from_config(MODEL).parameters * 4 / 2  # bytes of a rank's float32 parameters
    assert half <= rank.at_peak["parameters"] <= 1.2 * half
    assert 2 * half <= rank.at_peak["optimizer"] <= 2.4 * half
    assert plan.peak == max(rank.peak, rank.load_peak, rank.export_peak) + library_bytes(communicates=True)
    train = next(step for step in rank.steps if step.mfc == "actor_train")
    assert train.flops > train.model_flops > 0
    assert train.collectives["data all_gather"].bytes > 0
    assert plan.time.step_s >= plan.time.training_s >= train.flops / 165.2e12
    assert plan.server.requests == 512  # 512 blocks of 32 tokens, and requests of 26 tokens


def test_the_layouts_of_two_gpus_are_planned_and_those_that_fit_come_first(planned):
    code, report = planned(
        *("--gpu", "toy", "--gpus", "2", "mode=train_only", "replay.path=recordings", "eval.prompts=null"),
        "train.share_prefix=off",
    )
    found = [(layout.allocation.partition("+")[2], layout.planned, layout.fits) for layout in report.layouts]
    assert (code, found) == (
        0,
        [("d2p1m1", True, True), ("d1p1m1c2", True, True), ("d1p1m2", True, True), ("d1p2m1", True, False)],
    )
    assert [layout.fits for layout in report.layouts] == [
        layout.peak <= DEVICES["toy"].memory for layout in report.layouts
    ]
    assert (
        report.layouts[0].time.training_s < report.layouts[1].time.training_s
    )  # of those that fit, the fastest comes first


@pytest.mark.release
def test_a_remedy_fits_when_it_is_planned(planned):
    run = ("allocation=transformers.d1+d1", "train.gradient_checkpointing=true", "train.share_prefix=off")
    small = ("--gpu", "tiny", *run)
    code, report = planned(*small, "train.max_tokens_per_mb=4096")
    assert (code, report.fits) == (1, False)
    remedy = report.remedies[0]
    assert remedy.overrides == ["train.max_tokens_per_mb=2048"]
    code, report = planned(*small, *remedy.overrides)
    assert (code, report.fits, report.plan.peak) == (0, True, remedy.peak)
