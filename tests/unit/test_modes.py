"""The modes of a run: the configs that each accepts, and the processes that each starts."""

import pytest

from asyncrl.config.schema import ConfigError
from asyncrl.launch.checks.preflight import preflight
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import plan, total_steps
from asyncrl.launch.supervisor.external_process import debug_command
from asyncrl.testing.runs import make_tiny_run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_run(tmp_path_factory.mktemp("tiny"), num_prompts=20)


def names(config, num_prompts=20):
    return [spec.name for spec in plan(config, attempt=1, num_prompts=num_prompts)]


def configs(config, num_prompts=20):
    return {spec.name: spec.config for spec in plan(config, attempt=1, num_prompts=num_prompts)}


def test_rollout_only_starts_no_trainer(tiny):
    config = load_experiment(tiny, ["mode=rollout_only", "allocation=transformers.d2+d2", "train.save_every_steps=1"])
    assert names(config) == [
        "generation_server/0",
        "generation_server/1",
        "recorder/0",
        "master/0",
        "gserver_manager/0",
        "rollout_worker/0",
    ]
    processes = configs(config)
    master = processes["master/0"]
    assert (master.mode, master.num_model_workers, master.models) == ("rollout_only", 1, [])
    assert [(mfc.name, mfc.model) for mfc in master.mfcs] == [("record", "")]
    assert (master.train.save_every_steps, master.eval.at_end) == (0, False)
    assert processes["gserver_manager/0"].num_heads == processes["rollout_worker/0"].num_heads == 1
    assert not any(spec.computes for spec in plan(config, attempt=1, num_prompts=20) if "server" not in spec.name)


def test_train_only_starts_no_generation(tiny):
    overrides = ["mode=train_only", "allocation=transformers.d2+d2", "replay.path=somewhere", "train.max_steps=0"]
    config = load_experiment(tiny, [*overrides, "replay.first_step=3"])
    assert names(config) == ["model_worker/0", "model_worker/1", "master/0", "replayer/0"]
    processes = configs(config, num_prompts=5)
    assert (processes["master/0"].first_step, processes["master/0"].num_replayed) == (3, 5)
    assert processes["replayer/0"].num_heads == 2
    assert processes["master/0"].models == processes["model_worker/1"].models
    assert [(model.name, model.grid, model.workers) for model in processes["master/0"].models] == [
        ("actor", "d2p1m1", [0, 1])
    ]
    assert processes["replayer/0"].replay.path.endswith("/somewhere")
    assert total_steps(config, 5) == 3 + 3  # 5 groups in batches of 2


def test_the_size_limit_of_recordings_is_divided_among_heads(tiny):
    config = load_experiment(
        tiny, ["record.max_bytes=1000", "allocation=transformers.d1+d2p2", "record.trajectories=true"]
    )
    records = [configs(config)[f"model_worker/{index}"].record for index in range(4)]
    assert [record.trajectories for record in records] == [False, False, True, True]  # heads are on the last stage
    assert records[3].max_bytes == 500


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mode=rollouts_only"], r"mode='rollouts_only': did you mean 'rollout_only'"),
        (["mode=train_only"], r"replay\.path='': is required"),
        (["replay.path=x"], r"replay\.path='x': is used with mode=train_only only"),
        (["replay.first_step=1"], r"replay\.first_step=1: is used with mode=train_only only"),
        (["mode=train_only", "replay.path=x", "eval.prompts.path=y"], r"eval\.prompts='y': .*set eval\.prompts=null"),
        (["mode=rollout_only", "train.target_reward=1"], r"train\.target_reward=1\.0: nothing is trained"),
        (["record.every=0"], r"record\.every=0: must be at least 1"),
        (["record.max_bytes=0"], r"record\.max_bytes=0: must be at least 1"),
        (["debug.wait_s=0"], r"debug\.wait_s=0\.0: must be above 0"),
    ],
)
def test_invalid_combinations_are_refused(tiny, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_experiment(tiny, overrides)


def test_a_replay_needs_no_prompts(tmp_path):
    path = tmp_path / "replay.yaml"
    path.write_text("{mode: train_only, model_path: m, replay: {path: x}, name_resolve: {endpoints: ['localhost:1']}}")
    assert load_experiment(path).mode == "train_only"


def test_a_replay_without_recordings_is_refused_before_processes_start(tiny, tmp_path):
    with pytest.raises(ConfigError, match=r"replay\.path=.*holds no recorded trajectories\. Record them"):
        preflight(load_experiment(tiny, ["mode=train_only", f"replay.path={tmp_path}"]))


def test_the_run_waits_longer_for_a_process_that_the_user_starts(tiny):
    config = load_experiment(tiny, ["debug.leave_out=[rollout_worker/0]", "debug.wait_s=700"])
    processes = configs(config)
    assert processes["master/0"].worker.runtime.start_timeout_s == 700
    assert processes["master/0"].overdue_wait_s == 700
    assert processes["master/0"].train.data_timeout_s == 3600  # the default is longer
    assert processes["gserver_manager/0"].manager.lease_s == 700
    with pytest.raises(
        ConfigError,
        match=r"debug\.leave_out='rollout_worker/3': no process of this run has this name; .*rollout_worker/0",
    ):
        names(load_experiment(tiny, ["debug.leave_out=[rollout_worker/3]"]))


def test_the_debug_command_sets_the_environment_of_the_process(tiny, tmp_path):
    config = load_experiment(tiny, ["debug.leave_out=[model_worker/0]"])
    spec = next(s for s in plan(config, attempt=1, num_prompts=20, devices=["0", "1"]) if s.name == "model_worker/0")
    command = debug_command(spec, tmp_path / "a folder" / "model_worker_0.yaml")
    assert "CUDA_VISIBLE_DEVICES=1" in command
    assert f"debug '{tmp_path}/a folder/model_worker_0.yaml' --pdb" in command
