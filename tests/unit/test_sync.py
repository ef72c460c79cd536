"""mode=sync: generation is the first node of the graph, and the run needs no servers and no rollout workers."""

import pytest

from asyncrl.cli.commands.common import sizes, sizes_text
from asyncrl.cli.doctor import judge_num_gpus
from asyncrl.config.schema import ConfigError, PPOConfig, TrainConfig
from asyncrl.dataflow.graph import GENERATE_MFC, TRAJECTORY_KEYS, build_dataflow, without_generation
from asyncrl.dataflow.topology import allocation_of
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import can_scale, load_process_config, plan, save_config
from asyncrl.testing.runs import make_tiny_run
from tests.support.preflight import preflight


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_run(tmp_path_factory.mktemp("tiny"), num_prompts=20)


@pytest.fixture
def config_of(tiny):
    """Returns a function that loads the config with overrides: config_of("train.batch_size=8", ...)."""
    return lambda *overrides: load_experiment(tiny, ["mode=sync", *overrides])


def processes_of(config):
    return {spec.name: spec.config for spec in plan(config, attempt=1, num_prompts=20)}


def test_generation_is_the_first_node_and_the_rest_of_the_graph_is_unchanged():
    train = TrainConfig(ppo=PPOConfig(kl_coef=0.1))
    graph = build_dataflow(train, "sync")
    assert graph.order[0] == GENERATE_MFC
    generate = graph.mfcs[GENERATE_MFC]
    assert (generate.role, generate.kind, generate.input_keys, generate.output_keys) == (
        "actor",
        "generate",
        (),
        TRAJECTORY_KEYS,
    )
    assert graph.parents["actor_inf"] == graph.parents["ref_inf"] == {GENERATE_MFC}
    assert without_generation(list(graph.mfcs.values())).mfcs == build_dataflow(train).mfcs
    assert GENERATE_MFC not in build_dataflow(train).mfcs


@pytest.mark.parametrize("allocation", ["d2", "+d2p1m1", "transformers.d3+d2", "actor:d2"])
def test_a_run_has_only_model_workers_and_a_master(config_of, tmp_path, allocation):
    config = config_of(f"allocation={allocation}", "manager.max_head_offpolicyness=3", "train.batch_size=4")
    processes = processes_of(config)
    assert list(processes) == ["model_worker/0", "model_worker/1", "master/0"]
    master, worker = processes["master/0"], processes["model_worker/1"]
    assert (master.mode, master.max_head_offpolicyness, master.num_replayed) == ("sync", 0, 0)
    assert (master.mfcs[0].name, master.mfcs[0].model) == (GENERATE_MFC, "actor")
    assert [(model.name, model.grid) for model in master.models] == [("actor", "d2p1m1")]
    assert worker.store_capacity == 4
    assert worker.groups.prompts == master.prompts
    assert worker.groups.rollout.group_size == config.rollout.group_size
    save_config(worker, tmp_path / "worker.yaml")
    assert load_process_config(tmp_path / "worker.yaml") == worker
    assert not can_scale(config)
    assert preflight(config) == 20


def test_asynchronous_model_workers_get_no_config_for_generating_groups(tiny):
    assert processes_of(load_experiment(tiny))["model_worker/0"].groups is None


def test_generation_may_have_workers_of_its_own(config_of):
    config = config_of("allocation=d1p1m2+actor_gen:d2p1m1")
    master = processes_of(config)["master/0"]
    assert [(model.name, model.grid, model.workers, model.trainable) for model in master.models] == [
        ("actor", "d1p1m2", [0, 1], True),
        ("actor@1", "d2p1m1", [2, 3], False),
    ]
    assert {mfc.name: mfc.model for mfc in master.mfcs}[GENERATE_MFC] == "actor@1"


def test_sizes_and_doctor_describe_synchronous_generation(config_of):
    config = config_of("allocation=transformers.d1+d2")
    text = sizes_text(config, 20)
    assert "mode=sync: each step generates its batch on the model workers" in text
    assert "transformers.d1 of the allocation stays unused" in text
    assert "unused" not in sizes_text(config_of("allocation=d2"), 20)
    assert sizes(config, 20)["max_live_prompts"] == config.train.batch_size
    assert "0 for generation, 2 for training" in judge_num_gpus(2, config).value
    assert judge_num_gpus(2, config).state == "ok"
    assert str(allocation_of(config)) == "d2p1m1"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["allocation=d2p2m1"],
            r"allocation='d2p2m1': actor_gen needs the whole model .* d2p2m1\+actor_gen:d1p1m1, or all of them d4p1m1",
        ),
        (["allocation=d1p1m2"], r"d1p1m2 cuts it: .* or all of them d2p1m1"),
        (
            ["allocation=actor:d1p1m2"],
            r"cuts it: give actor_gen workers of its own, e.g. actor:d1p1m2\+actor_gen:d1p1m1$",
        ),
        (["allocation=d2r2"], r"actor_gen runs on one copy of the weights, not d2p1m1r2: leave r out"),
        (["allocation=d2x"], r"'d2x' is not a grid"),
        (
            ["rollout.tasks.default.agent=mine:Agent"],
            r"rollout.tasks.default.agent='mine:Agent': mode=sync supports only tasks of one",
        ),
        (["rollout.tasks.default.env=mine:Env"], r"set only rollout.tasks.default.reward, or use mode=async"),
        (
            ["train.dense_rewards=true"],
            r"train.dense_rewards=True: needs an agent or an environment, and mode=sync has",
        ),
        (["train.wait_for_full_lag=true"], r"train.wait_for_full_lag=True: with mode=sync no data is old"),
        (["weights.transport=broadcast"], r"weights.transport='broadcast'"),
        (["weights.verify_logprobs=true"], r"weights.verify_logprobs=True"),
        (["replay.path=somewhere"], r"replay.path='somewhere'"),
        (
            ["allocation=d1p1m2+actor_gen:d1", "record.trajectories=true"],
            r"record.trajectories=True: groups are recorded",
        ),
    ],
)
def test_settings_that_do_not_fit_sync_mode_are_refused(config_of, overrides, message):
    with pytest.raises(ConfigError, match=message):
        config_of(*overrides)


def test_only_synchronous_allocations_may_name_generation(tiny):
    with pytest.raises(ConfigError, match=r"'actor_gen' is not part of this run: it comes with mode=sync"):
        load_experiment(tiny, ["allocation=transformers.d1+d1+actor_gen:d1"])
    with pytest.raises(ConfigError, match="is not an allocation"):
        load_experiment(tiny, ["allocation=d2"])
