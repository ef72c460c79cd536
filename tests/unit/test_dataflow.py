from dataclasses import replace

import pytest

from asyncrl.config.schema import (
    CriticConfig,
    OptimizerConfig,
    PPOConfig,
    RewardModelConfig,
    RoleConfig,
    TeacherConfig,
    TrainConfig,
)
from asyncrl.dataflow.graph import (
    TRAJECTORY_KEYS,
    DataflowGraph,
    build_dataflow,
    training_mfcs,
    without_generation,
)
from asyncrl.dataflow.mfc import MFCDef
from asyncrl.dataflow.placed_models import models_of, place
from asyncrl.dataflow.topology import Allocation
from tests.support.mfcs import declare


def mfc(name, reads=(), writes=()):
    return MFCDef(name, "actor", "inference", "x:y", tuple(reads), tuple(writes))


def test_the_decoupled_loss_adds_actor_inf():
    graph = build_dataflow(TrainConfig())
    assert graph.order == ("actor_inf", "advantages", "actor_train")
    assert graph.parents["actor_train"] == {"actor_inf", "advantages"}
    assert graph.parents["advantages"] == set()  # advantages follow from the rewards alone


ONE_UPDATE = TrainConfig(ppo=PPOConfig(minibatches=1))


@pytest.mark.parametrize("loss", [{}, {"use_decoupled_loss": False, "recompute_logprob": True}])
def test_one_update_per_step_has_the_proximal_logprobs_itself(loss):
    train = replace(ONE_UPDATE, ppo=replace(ONE_UPDATE.ppo, **loss))
    graph = build_dataflow(train)
    assert graph.order == ("advantages", "actor_train")
    assert "proximal_logprobs" not in graph.mfcs["actor_train"].input_keys
    assert build_dataflow(replace(train, streaming=True)).order == graph.order  # its parts are one update


@pytest.mark.parametrize(
    ("fields", "ppo"),
    [
        ({}, {"minibatches": 2}),
        ({}, {"epochs": 2}),
        ({}, {"proximal_pass": "always"}),
        ({}, {"kl_coef": 0.1}),  # the KL of the metrics, and that of rewards, compare with it before the update
        ({}, {"kl_coef": 0.1, "kl_in": "loss"}),
        ({"teacher": TeacherConfig("t")}, {}),
        ({"step": "mine.py:step"}, {}),  # it may train twice
        ({"actor_inf_on_missing": "wait"}, {}),
        ({"extra_train_keys": ["proximal_logprobs"]}, {}),
        ({"mfcs": ["reads"]}, {}),
        ({"mfcs": ["trains"]}, {}),
    ],
)
def test_the_proximal_pass_stays_where_something_else_needs_it(fields, ppo):
    declared = {
        "reads": {"input_keys": ["proximal_logprobs"], "output_keys": ["surprise"]},
        "trains": {"kind": "train_step", "input_keys": ["packed_input_ids"]},
    }
    fields |= {"mfcs": [declare(f"{name}_it", **declared[name]) for name in fields.get("mfcs", [])]}
    graph = build_dataflow(replace(ONE_UPDATE, **fields, ppo=replace(ONE_UPDATE.ppo, **ppo)))
    assert "actor_inf" in graph.mfcs
    assert "proximal_logprobs" in graph.mfcs["actor_train"].input_keys


def test_the_naive_loss_recomputes_no_logprobs():
    graph = build_dataflow(TrainConfig(ppo=PPOConfig(use_decoupled_loss=False)))
    assert graph.order == ("advantages", "actor_train")


def test_kl_adds_a_reference():
    graph = build_dataflow(TrainConfig(ppo=PPOConfig(kl_coef=0.1)))
    assert set(graph.roles) == {"actor", "ref"}
    assert graph.trained_roles == ("actor",)
    assert graph.parents["advantages"] == {"actor_inf", "ref_inf"}
    assert "packed_ref_logprobs" not in graph.mfcs["actor_train"].input_keys
    graph = build_dataflow(TrainConfig(ppo=PPOConfig(kl_coef=0.1, kl_in="loss")))
    assert "ref_inf" in graph.parents["actor_train"]
    naive = build_dataflow(TrainConfig(ppo=PPOConfig(kl_coef=0.1, use_decoupled_loss=False)))
    assert {"packed_logprobs", "packed_ref_logprobs"} <= set(naive.mfcs["advantages"].input_keys)


def test_a_teacher_adds_an_inference_whose_key_the_advantages_read():
    graph = build_dataflow(TrainConfig(teacher=TeacherConfig("t")))
    assert set(graph.roles) == {"actor", "teacher"}
    assert graph.trained_roles == ("actor",)
    assert graph.parents["advantages"] == {"actor_inf", "teacher_inf"}
    assert "packed_teacher_logprobs" not in graph.mfcs["actor_train"].input_keys
    naive = build_dataflow(TrainConfig(teacher=TeacherConfig("t"), ppo=PPOConfig(use_decoupled_loss=False)))
    assert {"packed_logprobs", "packed_teacher_logprobs"} <= set(naive.mfcs["advantages"].input_keys)


def test_a_critic_and_a_reward_model():
    graph = build_dataflow(TrainConfig(critic=CriticConfig(), reward_model=RewardModelConfig()))
    assert set(graph.roles) == {"actor", "critic", "reward"}
    assert set(graph.trained_roles) == {"actor", "critic"}
    assert graph.parents == {
        "actor_inf": set(),
        "critic_inf": set(),
        "rew_inf": set(),
        "advantages": {"critic_inf", "rew_inf"},
        "actor_train": {"actor_inf", "advantages"},
        "critic_train": {"critic_inf", "advantages"},
    }


def test_actor_and_critic_read_only_the_keys_that_they_need():
    """Keys travel to other meshes. The inputs of the advantages stay where the advantages are computed."""
    graph = build_dataflow(TrainConfig(critic=CriticConfig(), ppo=PPOConfig(kl_coef=0.1)))
    assert set(graph.mfcs["critic_train"].input_keys) == {"packed_input_ids", "values", "returns", "value_mask"}
    assert set(graph.mfcs["actor_train"].input_keys) == {
        "packed_input_ids",
        "packed_logprobs",
        "proximal_logprobs",
        "advantages",
        "trained_mask",
    }


def test_several_reward_models():
    train = TrainConfig(
        reward_model=RewardModelConfig(), reward_models={"safe": RewardModelConfig(), "good": RewardModelConfig()}
    )
    graph = build_dataflow(train)
    assert {name: graph.mfcs[name].role for name in graph.order if name.startswith("rew_inf")} == {
        "rew_inf": "reward",
        "rew_inf_safe": "reward_safe",
        "rew_inf_good": "reward_good",
    }
    keys = ["model_rewards", "model_rewards_safe", "model_rewards_good"]
    assert [key for key in graph.mfcs["advantages"].input_keys if key.startswith("model_rewards")] == keys
    extra = declare("judge", role="reward_safe", input_keys=["rewards"], output_keys=["x"])
    assert "judge" in build_dataflow(replace(train, mfcs=[extra])).mfcs
    extra = declare("judge", role="reward_safe", kind="train_step", input_keys=["rewards"])
    with pytest.raises(ValueError, match="trains the role 'reward_safe', whose model is frozen"):
        build_dataflow(replace(train, mfcs=[extra]))


def test_an_mfc_of_a_user_is_added():
    extra = declare("surprise_inf", input_keys=["proximal_logprobs"], output_keys=["surprise"])
    graph = build_dataflow(TrainConfig(mfcs=[extra], extra_train_keys=["surprise"]))
    assert graph.order.index("actor_inf") < graph.order.index("surprise_inf") < graph.order.index("actor_train")


def test_dense_rewards_of_an_mfc_reach_the_advantages():
    extra = declare("judge", input_keys=["packed_input_ids"], output_keys=["dense_rewards"])
    graph = build_dataflow(TrainConfig(mfcs=[extra]))
    assert graph.parents["advantages"] == {"judge"}


def test_dense_rewards_come_with_the_trajectories_or_from_an_mfc():
    train = TrainConfig(dense_rewards=True)
    graph = build_dataflow(train)
    assert "dense_rewards" in graph.mfcs["advantages"].input_keys
    assert graph.parents["advantages"] == frozenset()
    assert without_generation(list(graph.mfcs.values())).mfcs == graph.mfcs  # the master's graph
    extra = declare("judge", input_keys=["packed_input_ids"], output_keys=["dense_rewards"])
    with pytest.raises(ValueError, match="'judge' writes 'dense_rewards', a key that every trajectory already has"):
        build_dataflow(TrainConfig(dense_rewards=True, mfcs=[extra]))


@pytest.mark.parametrize(
    ("role", "fields", "message"),
    [
        ("critic", {}, r":judge has the role 'critic'; the roles of this run are \['actor', 'ref'\]"),
        ("reward", {"critic": CriticConfig()}, r"the roles of this run are \['actor', 'critic', 'ref'\]"),
        ("ref", {"kind": "train_step"}, r":judge trains the role 'ref', whose model is frozen"),
        (
            "teacher",
            {"kind": "train_step", "teacher": TeacherConfig("t")},
            r":judge trains the role 'teacher', whose model is frozen",
        ),
        (
            "teacher",
            {},
            r"the roles of this run are \['actor', 'ref'\] .*teacher with train.teacher, others with train.roles",
        ),
    ],
)
def test_an_mfc_needs_a_model(role, fields, message):
    kind = fields.pop("kind", "inference")
    extra = declare("judge", role=role, kind=kind, input_keys=["rewards"], output_keys=["x"])
    with pytest.raises(ValueError, match=message):
        build_dataflow(TrainConfig(mfcs=[extra], **fields))


def test_an_mfc_may_run_on_the_critic_and_the_reward_model():
    extra = [
        declare(name, role=name, kind=kind, input_keys=["rewards"], output_keys=[f"by_{name}"])
        for name, kind in (("critic", "train_step"), ("reward", "inference"))
    ]
    train = TrainConfig(mfcs=extra, critic=CriticConfig(), reward_model=RewardModelConfig())
    assert build_dataflow(train).mfcs["critic"].role == "critic"


def test_further_roles_are_trained_by_functions_of_a_user():
    judge, score = (
        declare(name, role="judge", kind=kind, input_keys=["rewards"], output_keys=keys)
        for name, kind, keys in (("judge_train", "train_step", []), ("judge_score", "inference", ["scores"]))
    )
    roles = {"judge": RoleConfig(path="j", kind="value", optimizer=OptimizerConfig(lr=0.5))}
    train = TrainConfig(mfcs=[judge, score], roles=roles)
    graph = build_dataflow(train)
    assert set(graph.trained_roles) == {"actor", "judge"}
    assert (graph.mfcs["judge_train"].function, graph.mfcs["judge_score"].function) == ("train", "score")
    placements, mfcs = place(Allocation.parse("transformers.d1+d2+judge:d1"), graph)
    actor, own = models_of(placements, mfcs, train, "a")
    assert (own.name, own.path, own.kind, own.trainable, own.workers) == ("judge", "j", "value", True, [2])
    assert (own.optimizer.lr, actor.optimizer) == (0.5, train.optimizer)
    with pytest.raises(ValueError, match=r"train.roles.judge: no function of train.mfcs has the role 'judge'"):
        build_dataflow(replace(train, mfcs=[]))


def test_an_mfc_may_produce_the_trajectories():
    """With mode=sync the MFC actor_gen produces the trajectories. The MFCs after actor_gen are the same as in the other modes."""
    made = [key for key in TRAJECTORY_KEYS if key != "packed_prompts"]
    train = TrainConfig(ppo=PPOConfig(kl_coef=0.1))
    graph = DataflowGraph(
        [mfc("actor_gen", ["packed_prompts"], made), *training_mfcs(train)], dataset_keys=["packed_prompts"]
    )
    assert graph.order[0] == "actor_gen"
    assert graph.parents["advantages"] == {"actor_gen", "actor_inf", "ref_inf"}


@pytest.mark.parametrize(
    ("mfcs", "message"),
    [
        ([mfc("a"), mfc("a")], "same name"),
        ([mfc("a", writes=["rewards"])], "a key that every trajectory already has"),
        ([mfc("a", writes=["k"]), mfc("b", writes=["k"])], "both write 'k'"),
        ([mfc("a", reads=["nowhere"])], r"reads \['nowhere'\], which no MFC writes"),
        ([mfc("a", reads=["y"], writes=["x"]), mfc("b", reads=["x"], writes=["y"])], "depend on each other in a cycle"),
    ],
)
def test_inconsistent_graphs_are_refused(mfcs, message):
    with pytest.raises(ValueError, match=message):
        DataflowGraph(mfcs)
