"""The process plan: the models, MFCs, workers and GPUs that an allocation gives to each process."""

import os
from pathlib import Path

import pytest
import torch

from asyncrl.cli.commands.common import process_objects
from asyncrl.config import schema as configs
from asyncrl.config.schema import ConfigError
from asyncrl.dataflow.axes import ParallelGrid
from asyncrl.dataflow.topology import ProcessTopology
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import load_process_config, plan, save_config, server_spec
from tests.support.mfcs import declare

CONFIG = """
model_path: m
prompts: {path: p.jsonl}
rollout: {tasks: {default: {reward: "rewards.py:reward"}}}
"""


@pytest.fixture
def config_of(tmp_path):
    """Returns a function that loads the config with overrides: config_of("train.batch_size=8", ...)."""
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG)
    return lambda *overrides: load_experiment(file, overrides)


def by_name(specs):
    return {spec.name: spec.config for spec in specs}


def test_plan_of_a_pipelined_actor_and_a_reference_on_its_own_worker(config_of, tmp_path):
    config = config_of(
        "allocation=transformers.d2p1m1+d2p2m1+ref_inf:d1p1m1",
        "train.ppo.kl_coef=0.1",
        "train.offload=[ref]",
        "train.batch_size=8",
        "record.trajectories=true",
        "record.max_bytes=1000",
    )
    specs = plan(config, attempt=1, num_prompts=80)
    processes = by_name(specs)
    workers = [processes[f"model_worker/{index}"] for index in range(5)]
    assert "model_worker/5" not in processes
    assert {worker.worker.count for worker in workers} == {5}
    master = processes["master/0"]
    assert master.num_model_workers == 5

    actor, ref = master.models
    model_path = os.path.abspath("m")
    assert (actor.name, actor.grid, actor.workers) == ("actor", "d2p2m1", [0, 1, 2, 3])
    assert (actor.path, actor.kind, actor.trainable, actor.offload) == (model_path, "lm", True, False)
    assert (ref.name, ref.grid, ref.workers) == ("ref", "d1p1m1", [4])
    assert (ref.path, ref.kind, ref.trainable, ref.offload) == (model_path, "lm", False, True)
    assert {mfc.name: mfc.model for mfc in master.mfcs} == {
        "actor_inf": "actor",
        "ref_inf": "ref",
        "advantages": "actor",
        "actor_train": "actor",
    }
    for worker in workers:
        assert (worker.models, worker.mfcs) == (master.models, master.mfcs)
        assert worker.store_capacity == (1 + 2) * 8
    # the heads are on the last stage; they receive the trajectories, so they record them and share record.max_bytes
    assert [worker.record.trajectories for worker in workers] == [False, False, True, True, False]
    assert {worker.record.max_bytes for worker in workers} == {500}
    assert processes["gserver_manager/0"].num_heads == processes["rollout_worker/0"].num_heads == 2

    for spec in specs:
        file = tmp_path / f"{spec.file_stem}.yaml"
        save_config(spec.config, file)
        assert load_process_config(file) == spec.config


def test_a_teacher_on_workers_of_its_own_is_detached(config_of):
    config = config_of("allocation=transformers.d1+d2+teacher:d2", "train.teacher={path: t, coef: 0.5}")
    master = by_name(plan(config, attempt=1, num_prompts=64))["master/0"]
    actor, teacher = master.models
    assert (actor.name, actor.workers, teacher.name, teacher.workers) == ("actor", [0, 1], "teacher", [2, 3])
    assert (teacher.path, teacher.kind, teacher.trainable) == (os.path.abspath("t"), "lm", False)
    assert {mfc.name: mfc.model for mfc in master.mfcs}["teacher_inf"] == "teacher"
    assert master.worker_groups[1:] == [[2, 3]]
    together = by_name(plan(config_of("train.teacher={path: t}"), attempt=1, num_prompts=64))["master/0"]
    assert together.worker_groups[1:] == []


def test_model_workers_get_the_gpus_after_those_of_the_servers(config_of):
    config = config_of("allocation=sglang.d1m2+d1p2+ref_inf:d1", "train.ppo.kl_coef=0.1")
    specs = plan(config, attempt=1, num_prompts=64, devices=[str(index) for index in range(8)])
    given = {spec.name: spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs}
    assert given["generation_server/0"] == "0,1"
    assert [given[f"model_worker/{index}"] for index in range(3)] == ["2", "3", "4"]
    more = server_spec(1, config, attempt=1, num_prompts=64, devices=[str(index) for index in range(8)])
    assert more.env["CUDA_VISIBLE_DEVICES"] == "5,6"
    for spec in (*specs, more):  # a process knows what it was given, and fails without it
        assert ",".join(spec.config.worker.gpus) == spec.env["CUDA_VISIBLE_DEVICES"]


def test_the_allocator_of_processes_with_gpus_has_expandable_segments_unless_the_user_chose_other_settings(
    config_of, monkeypatch
):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)

    def with_it(allocation: str, devices: str) -> list[str]:
        specs = plan(config_of(f"allocation={allocation}"), attempt=1, num_prompts=64, devices=list(devices))
        return [spec.name for spec in specs if spec.env.get("PYTORCH_ALLOC_CONF") == "expandable_segments:True"]

    assert with_it("transformers.d1+d2+advantages:cpu1", "0123") == [
        "generation_server/0",
        "model_worker/0",
        "model_worker/1",
    ]
    assert with_it("sglang.d1+d2", "0123") == ["model_worker/0", "model_worker/1"]  # its memory saver refuses them
    assert with_it("transformers.d1+d2", "") == []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "max_split_size_mb:512")
            assert with_it("transformers.d1+d2", "0123") == []


def test_torch_reads_the_setting_under_this_name():
    header = Path(torch.__file__).parent / "include/c10/cuda/CUDAAllocatorConfig.h"
    assert 'get_env("PYTORCH_ALLOC_CONF")' in header.read_text()


def test_a_further_server_beside_named_gpus_gets_those_after_them(config_of):
    config = config_of("allocation=sglang.d1m2@4-5+d2@0-1")
    more = server_spec(1, config, attempt=1, num_prompts=64, devices=[str(index) for index in range(8)])
    assert (more.name, more.env["CUDA_VISIBLE_DEVICES"]) == ("generation_server/1", "6,7")


def test_shared_gpus_are_those_that_the_allocation_names(config_of):
    config = config_of(
        "allocation=sglang.d2m2@1-4+d4@1-4+ref_inf:d1@0", "train.ppo.kl_coef=0.1", "manager.max_head_offpolicyness=0"
    )
    given = {
        spec.name: spec.env["CUDA_VISIBLE_DEVICES"]
        for spec in plan(config, attempt=1, num_prompts=64, devices=list("abcde"))
    }
    assert (given["generation_server/0"], given["generation_server/1"]) == ("b,c", "d,e")
    assert [given[f"model_worker/{index}"] for index in range(5)] == ["b", "c", "d", "e", "a"]
    assert given["master/0"] == given["rollout_worker/0"] == ""
    named = {
        spec.name: ",".join(spec.config.worker.gpus)
        for spec in plan(config, attempt=1, num_prompts=64, devices=list("abcde"))
    }
    assert named == given
    processes = {spec.name: spec.config for spec in plan(config, attempt=1, num_prompts=64)}
    assert [processes[f"model_worker/{index}"].shares_devices for index in range(5)] == [True] * 4 + [False]
    assert processes["master/0"].shared_workers == [0, 1, 2, 3]
    assert processes["generation_server/0"].shares_devices
    assert processes["gserver_manager/0"].shares_devices


def test_gpus_of_generation_servers_are_in_inference_order(config_of):
    """Inference order of the seed documents: data, pipe, tensor. Each server gets the GPUs of one data rank."""
    specs = plan(config_of("allocation=sglang.d3m2+d1"), attempt=1, num_prompts=64, devices=[str(i) for i in range(8)])
    topology = ProcessTopology(("data", "pipe", "tensor"), ParallelGrid.parse("d3m2").sizes)
    for data in range(3):
        (server,) = (spec for spec in specs if spec.name == f"generation_server/{data}")
        ranks = [topology.get_rank(data=data, pipe=0, tensor=tensor) for tensor in range(2)]
        assert server.env["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, ranks))


def test_each_role_gets_its_models_with_grid_workers_path_and_optimizer(config_of):
    config = config_of(
        "allocation=sglang.d1+actor_train:d2p2,actor_inf:d4,critic:d2m2+ref:d1,reward:d2",
        "train.ppo={kl_coef: 0.1, advantage_norm: batch}",
        "train.optimizer.lr=0.5",
        "train.critic={path: c, optimizer: {lr: 0.25}}",
        "train.ref.path=r",
        "train.reward_model.path=/models/judge",
        "train.offload=[ref, reward, actor]",
    )
    models = {model.name: model for model in by_name(plan(config, attempt=1, num_prompts=64))["master/0"].models}
    assert next(iter(models)) == "actor"
    assert {name: (model.grid, model.workers) for name, model in models.items()} == {
        "actor": ("d2p2m1", [0, 1, 2, 3]),
        "actor@1": ("d4p1m1", [0, 1, 2, 3]),
        "critic": ("d2p1m2", [0, 1, 2, 3]),
        "ref": ("d1p1m1", [4]),
        "reward": ("d2p1m1", [4, 5]),
    }
    assert {name: model.kind for name, model in models.items()} == {
        "actor": "lm",
        "actor@1": "lm",
        "critic": "value",
        "ref": "lm",
        "reward": "reward",
    }
    assert [name for name, model in models.items() if model.trainable] == ["actor", "critic"]
    assert [name for name, model in models.items() if model.offload] == ["actor", "actor@1", "ref", "reward"]
    assert {name: model.path for name, model in models.items()} == {
        "actor": os.path.abspath("m"),
        "actor@1": os.path.abspath("m"),
        "critic": os.path.abspath("c"),
        "ref": os.path.abspath("r"),
        "reward": "/models/judge",
    }
    assert (models["actor"].optimizer.lr, models["critic"].optimizer.lr) == (0.5, 0.25)


def test_a_critic_without_a_path_starts_from_the_actors_checkpoint(config_of):
    config = config_of("train.critic={}", "train.ppo.advantage_norm=batch", "train.reward_model.path=j")
    models = {model.name: model for model in by_name(plan(config, attempt=1, num_prompts=64))["master/0"].models}
    assert models["critic"].path == models["actor"].path
    assert models["critic"].optimizer == configs.OptimizerConfig()


def test_the_list_of_processes_shows_the_models_that_each_holds(config_of):
    config = config_of("allocation=transformers.d1+d1p2+ref_inf:d1", "train.ppo.kl_coef=0.1")
    holds = {entry["name"]: entry["holds"] for entry in process_objects(plan(config, attempt=1, num_prompts=64))}
    assert holds["model_worker/1"] == ["actor d1p2m1"]
    assert holds["model_worker/2"] == ["ref d1p1m1"]
    assert holds["master/0"] == holds["generation_server/0"] == []


def test_an_allocation_can_place_an_mfc_of_a_user(config_of):
    extra = declare("judge", input_keys=["packed_input_ids"], output_keys=["dense_rewards"])
    config = config_of("allocation=transformers.d1+d2+judge:d1", f"train.mfcs=[{extra}]")
    master = by_name(plan(config, attempt=1, num_prompts=64))["master/0"]
    assert {mfc.name: mfc.model for mfc in master.mfcs} == {
        "actor_inf": "actor",
        "judge": "actor@1",
        "advantages": "actor",
        "actor_train": "actor",
    }
    assert [model.workers for model in master.models] == [[0, 1], [2]]


def test_all_errors_of_an_allocation_are_reported_together(config_of):
    with pytest.raises(ConfigError) as error:
        config_of("allocation=transformers.d1m2+d1+ref:d1+actor_trian:d1")
    assert [line.partition(": ")[2][:20] for line in str(error.value).splitlines()] == [
        "the engine transform",
        "'ref' is not part of",
        "'actor_trian' is nei",
    ]
