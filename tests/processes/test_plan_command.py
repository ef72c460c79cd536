"""`asyncrl-launch plan` on the config of the quickstart, with the real plan of its model workers."""

import json

import msgspec
import pytest

from asyncrl.cli.commands.plan import PlanReport
from asyncrl.cli.main import main
from asyncrl.plan.devices import library_bytes
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


def test_the_quickstart_is_planned_without_weights(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    config = ROOT / "configs" / "quickstart_cpu.yaml"
    code = main(["plan", str(config), f"model_path={tmp_path}", "--gpu", "rtx4090-24g", "--json"])
    report = msgspec.json.decode(capsys.readouterr().out, type=PlanReport)
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
    assert train.collectives["all_gather"].bytes > 0
    assert plan.time.step_s >= plan.time.training_s >= train.flops / 165.2e12
    assert plan.server.requests == 512  # 512 blocks of 32 tokens, and requests of 26 tokens
