import pytest

from asyncrl.config import MFCConfig, PPOConfig, TrainConfig
from asyncrl.dataflow import DataflowGraph, MFCDef, build_dataflow


def mfc(name, reads=(), writes=()):
    return MFCDef(name, "actor", "inference", "x:y", tuple(reads), tuple(writes))


def test_decoupled_loss_switches_actor_inf_on():
    graph = build_dataflow(TrainConfig())
    assert graph.order == ("actor_inf", "actor_train")
    assert graph.parents["actor_train"] == {"actor_inf"}


def test_naive_loss_needs_only_the_train_step():
    assert build_dataflow(TrainConfig(ppo=PPOConfig(use_decoupled_loss=False))).order == ("actor_train",)


def test_kl_adds_a_reference():
    graph = build_dataflow(TrainConfig(ppo=PPOConfig(kl_coef=0.1)))
    assert set(graph.roles) == {"actor", "ref"}
    assert graph.trained_roles == ("actor",)
    assert "ref_inf" in graph.parents["actor_train"]


def test_an_mfc_is_added_by_config():
    extra = MFCConfig(interface="mine:f", input_keys=["proximal_logprobs"], output_keys=["surprise"])
    graph = build_dataflow(TrainConfig(extra_mfcs={"surprise_inf": extra}, extra_train_keys=["surprise"]))
    assert graph.order == ("actor_inf", "surprise_inf", "actor_train")


@pytest.mark.parametrize(
    ("mfcs", "message"),
    [
        ([mfc("a"), mfc("a")], "same name"),
        ([mfc("a", writes=["rewards"])], "comes with every trajectory"),
        ([mfc("a", writes=["k"]), mfc("b", writes=["k"])], "both write 'k'"),
        ([mfc("a", reads=["nowhere"])], r"reads \['nowhere'\], which nothing writes"),
        ([mfc("a", reads=["y"], writes=["x"]), mfc("b", reads=["x"], writes=["y"])], "in a circle"),
    ],
)
def test_what_does_not_fit_is_refused(mfcs, message):
    with pytest.raises(ValueError, match=message):
        DataflowGraph(mfcs)
