import json
import operator
import re
import resource
import shutil
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import asyncrl
from asyncrl.config.fields import ALIASES, find_field, leaf_values
from asyncrl.config.reference import select
from asyncrl.config.resolve import _PATIENT, Facts, resolve, total_steps
from asyncrl.config.schema import (
    AUTO,
    ConfigError,
    ExperimentConfig,
    GenerationConfig,
    NameResolveConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
    has_unix_sockets,
    rejects_equal_rewards,
    rollout_of_task,
)
from asyncrl.launch.checks.model_files import bytes_of_models
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import (
    config_text,
    load_process_config,
    parse_process_config,
    plan,
    save_config,
)
from asyncrl.runtime.devices import devices_of, visible_devices
from asyncrl.testing.tiny import make_char_tokenizer
from tests.support.mfcs import declare
from tests.support.preflight import preflight

STEP = f"{Path(asyncrl.__file__).parent}/examples/grpo/step.py:step"

MINIMAL = """
model_path: m
prompts: {path: p.jsonl}
rollout: {tasks: {default: {reward: "rewards.py:reward"}}}
"""


@pytest.fixture
def config_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(MINIMAL)
    return file


def test_overrides_replace_values_of_the_file(config_file):
    config = load_experiment(config_file, ["train.batch_size=7", "train.ppo.c_clip=3.0", "eval.prompts.path=e.jsonl"])
    assert (config.train.batch_size, config.train.ppo.c_clip, config.eval.prompts.path) == (7, 3.0, "e.jsonl")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.batchsize=3", "unknown field 'train.batchsize': did you mean 'train.batch_size'"),
        ("rolout.group_size=3", "did you mean 'rollout.group_size'"),
        ("rollout.tasks.default.rewrd=x", "did you mean 'rollout.tasks.default.reward'"),
        ("lr=1", "unknown field 'lr': did you mean 'train.optimizer.lr'?"),
        ("train.learning_rate=1", "unknown field 'train.learning_rate': did you mean 'train.optimizer.lr'?"),
        ("actor_rollout_ref.rollout.n=8", "unknown field 'actor_rollout_ref': did you mean 'rollout.group_size'?"),
        ("blorp=1", "unknown field 'blorp': valid names here: experiment"),
        (
            "name_resolve.backend=file",
            "removed field 'name_resolve.backend': names are always in etcd: leave this field out",
        ),
        ("rollout.tasks.default.gate={task: defalt}", "names no task; did you mean 'default'?"),
        ("rollout.tasks.default.gate={task: default}", "these tasks wait for each other: default"),
        (
            "rollout.tasks={a: {reward: 'm:f', reject_equal_rewards: true}, b: {reward: 'm:f', gate: {task: a}}}",
            "reject_equal_rewards of that task rejects groups that have passed",
        ),
        (
            "rollout.tasks={a: {reward: 'm:f', success_rate_ub: 0.5}, b: {reward: 'm:f', gate: {task: a}}}",
            "success_rate_ub of that task rejects groups that have passed",
        ),
        (
            "rollout.tasks={a: {reward: 'm:f', gate: {task: b}}, b: {reward: 'm:f', gate: {task: a}}}",
            "rollout.tasks.a.gate.task='b': these tasks wait for each other: a, b",
        ),
        ("train.tasks.defalt.reward_bias=1", "is not in rollout.tasks; did you mean 'default'"),
        ("train.tasks.default.advantage_norm=batch", "train.tasks.default.advantage_norm='batch'"),
        (
            "train={algorithm: reinforce_pp, tasks: {default: {reward_bias: 1}}}",
            "normalises over the groups of all tasks",
        ),
        (
            "train={critic: {}, ppo: {advantage_norm: none}, tasks: {default: {reward_bias: 1}}}",
            "predicts rewards that are shaped alike",
        ),
        ("train.tasks.default.overlong_penalty=1", "needs train.ppo.overlong_length, or one of this task"),
        ("train.tasks.default.teacher_coef=1", "there is no teacher"),
        ("prompts.task_weights.default=-1", "prompts.task_weights.default=-1.0: must be from 0 to 1000"),
        ("prompts={task_weights: {a: 2}, shuffle: false}", "draws lines anew in each epoch; set prompts.shuffle=true"),
        ("eval.prompts={path: x, task_weights: {a: 2}}", "only prompts.task_weights has an effect"),
        ("rollout.tasks.default.success_rate_lb=2e9", "is above success_rate_ub=1000000000.0 of the task"),
        ("rollout.tasks.default.success_rate_ub=-2e9", "is above success_rate_ub=-2000000000.0 of the task"),
        ("rollout.tasks.default.max_new_tokens=4096", "is above rollout.sampling.max_new_tokens="),
        ("rollout.tasks.default.reward_timeout_s=0", "rollout.tasks.default.reward_timeout_s=0.0: must be above 0"),
        ("train.batch_size=many", "train.batch_size='many': must be a whole number"),
        ("train.batch_size=0", "train.batch_size=0: must be at least 1"),
        ("runtime.push_credit_items=0", "runtime.push_credit_items=0: must be at least 1"),
        ("train.batch_size", "is not of the form key=value"),
        ("manager.routing=robin", "manager.routing='robin': did you mean 'round_robin'"),
        ("allocation=tgi.d1+d1", "unknown generation engine 'tgi'"),
        ("allocation=transformers.d1m2+d2m2", "the engine transformers runs data parallel only: use d1p1m1"),
        ("allocation=transformers.d2r2+d1", "d2p1m1r2 generates: r is for training; use d4p1m1"),
        ("allocation=sglang.d1c2+d1", "d1p1m1c2 generates: c is for training; use d1p1m1"),
        ("allocation=sglang.d1p2+d1", "the engine sglang has no pipeline stages: use d1p1m1"),
        ("allocation=sglang.d1+actor_tran:d2m2", "'actor_tran' is neither an MFC nor a role of this run: did you mean"),
        (
            "allocation=sglang.d1+d2+ref_inf:d1",
            "'ref_inf' is not part of this run: it comes with train.ppo.kl_coef above",
        ),
        ("allocation=sglang.d1+d2+critic:d1", "'critic' is not part of this run: it comes with train.critic"),
        ("allocation=sglang.d1+d2+d1", "has 2 grids without a name"),
        ("allocation=sglang.d1+d2+actor:d1", "no MFC runs on d2p1m1: other grids name each of its MFCs"),
        ("train.offload=[actor_train]", "train.offload=['actor_train']: 'actor_train' is an MFC; use its role: actor"),
        ("train.offload=[ref]", "'ref' is not part of this run: it comes with train.ppo.kl_coef above 0"),
        ("train.offload=[aktor]", "'aktor' is neither an MFC nor a role of this run: did you mean 'actor'?"),
        ("train.critic={}", "train.ppo.advantage_norm='group': does not use values; with train.critic use"),
        ("train.critic.minibatches=0", "train.critic.minibatches=0: must be at least 1"),
        ("train.critic.eps_clip=-1", "train.critic.eps_clip=-1.0: must not be negative"),
        ("train.critic.value_norm_beta=1", "train.critic.value_norm_beta=1.0: must be at least 0 and below 1"),
        ("train.critic.optimizer.lr=0", "train.critic.optimizer.lr=0.0: must be above 0"),
        ("train.critic.optimizer.schedule=linar", "train.critic.optimizer.schedule='linar': did you mean 'linear'?"),
        ("train.num_critic_only_steps=3", "train.num_critic_only_steps=3: there is no critic to train"),
        ("train.num_critic_only_steps=-1", "train.num_critic_only_steps=-1: must not be negative"),
        ("train.streaming_order=token", "train.streaming_order='token': did you mean 'tokens'"),
        ("train.ptx={}", "train.ptx.texts.path='': is required (or leave train.ptx out: no supervised texts)"),
        ("train.ptx={texts: {answer_key: ''}}", "train.ptx.texts.answer_key='': is required: the answers are what"),
        ("train.ptx={batch_size: 3}", "train.ptx.batch_size=3: must be at least train.ppo.minibatches=4"),
        ("train.ptx={coef: 0}", "train.ptx.coef=0.0: must be above 0"),
        ("train.ema={decay: 1}", "train.ema.decay=1.0: must be above 0 and below 1"),
        ("train.reward_models={a: {}}", "train.reward_models.a.path='': is required: a model with one label"),
        ("train.reward_models={A: {path: x}}", "train.reward_models='A': is the end of a role's name: use lower-case"),
        ("train.reward_model={}", "train.reward_model.path='': is required"),
        ("train.teacher={}", "train.teacher.path='': is required"),
        ("train.teacher={path: t, coef: 0}", "train.teacher.coef=0.0: must be above 0"),
        ("train.offload=[teacher]", "'teacher' is not part of this run: it comes with train.teacher"),
        ("train.ppo.epochs=0", "train.ppo.epochs=0: must be at least 1"),
        ("train.ppo.entropy_coef=-1", "train.ppo.entropy_coef=-1.0: must not be negative"),
        ("train.ppo.entropy_target=-1", "train.ppo.entropy_target=-1.0: must be above 0, or null for a fixed"),
        ("train.ref.update_share=0", "train.ref.update_share=0.0: must be above 0 and at most 1"),
        ("train.ref.update_share=1.5", "train.ref.update_share=1.5: must be above 0 and at most 1"),
        ("train.ref.update_interval=-1", "train.ref.update_interval=-1: must not be negative"),
        ("train.ref.update_interval=5", "no MFC uses the reference model; set train.ppo.kl_coef above 0"),
        ("train.ref.path=x", "train.ref.path='x': no MFC uses the reference model"),
        (
            f"train.mfcs=[{declare('of_critic', role='critic', input_keys=[])}]",
            "(critic with train.critic, reward with train.reward_model, teacher with train.teacher, others with train.roles)",
        ),
        (f"train.mfcs=[{declare('reads_y', input_keys=['y'])}]", "MFC 'reads_y' reads ['y'], which"),
        ("train.roles.ref={}", "train.roles='ref': is the name of a role: use"),
        ("train.roles.judge={kind: vale}", "train.roles.judge.kind='vale': did you mean 'value'"),
        ("train.roles.judge={optimizer: {lr: -1}}", "train.roles.judge.optimizer.lr=-1.0: must be above 0"),
        (
            "train.roles.judge={optimizer: {schedule: cosin}}",
            "train.roles.judge.optimizer.schedule='cosin': did you mean",
        ),
        ("train.mfcs=[math:floor]", "train.mfcs: math:floor is not declared; put @mfc(...) above it"),
        ("train.mfcs=[no_such_module:f]", "train.mfcs: no_such_module:f: there is no module 'no_such_module'"),
        ("train.mfcs=[f]", "expected `package.module:name` or `path/to/file.py:name`"),
        ("rollout.group_size=1", "a group of one has no advantage"),
        ("generation.num_blocks=1", "cannot hold one full sequence; use at least"),
        ("manager.lease_s=4", "must be more than twice"),
        ("train.max_steps=-3", "train.max_steps=-3: must not be negative"),
        ("rollout.sampling.top_p=1.5", "must be above 0 and at most 1"),
        ("rollout.sampling.top_k=0", "at least 1, or -1"),
        ("rollout.success_rate_lb=2.0e9", "all groups would be rejected"),
        ("manager.update_fraction=1.5", "must be at most 1"),
        ("manager.update_fraction=0", "must be above 0"),
        ("manager.update_timeout_s=0", "must be above 0"),
        ("manager.eval_share=1.5", "must be at most 1"),
        ("manager.max_issues=0", "must be at least 1"),
        ("manager.max_head_offpolicyness=-1", "must be from 0"),
        ("manager.max_concurrent_rollouts=-1", "manager.max_concurrent_rollouts=-1: must"),
        ("train.batch_size=0", "train.batch_size=0: must"),
        ("generation.attention=flash_atention_2", "did you mean 'flash_attention_2'"),
        ("generation.page_size=0", "generation.page_size=0: must be at least 1"),
        ("generation.page_size=2", "generation.page_size=2: the engine transformers needs at least 4"),
        ("generation.dtype=float8", "generation.dtype='float8': "),
        ("train.dtype=float16", "train.dtype='float16': did you mean 'bfloat16'"),
        ("generation.max_batch_tokens=8", "each running request takes one token of every"),
        ("rollout.tasks.other.agent_args={a: 1}", "needs a reward function or an env"),
        (
            "rollout.tasks.default.agent_args={trained: all}",
            "agent_args.trained='all': a session may have several sequences",
        ),
        ("rollout.tasks.default.reward=reward", "write package.module:name or path/to/file.py:name"),
        ("model_path=''", "model_path='': is required"),
        ("prompts.system_prompt=hello", "prompts.system_prompt='hello': needs prompts.chat_template=true"),
        ("eval.prompts={path: e, chat_template_args: {x: 1}}", "needs eval.prompts.chat_template=true"),
        (
            "prompts={chat_template: true, chat_template_args: {tools: []}}",
            "prompts.chat_template_args.tools=[]: asyncrl sets it",
        ),
        ("name_resolve.endpoints=['http://x:1']", "name_resolve.endpoints[0]='http://x:1': write host:port"),
        ("name_resolve.endpoints=[etcd:port]", "name_resolve.endpoints[0]='etcd:port': write host:port"),
        ("name_resolve.endpoints=['memory://']", "name_resolve.endpoints[0]='memory://': write host:port"),
        ("name_resolve.timeout_s=0", "name_resolve.timeout_s=0.0: must be above 0"),
        ("trial=a/b", "must be a non-empty name without '/'"),
        ("train.optimizer.lr=nan", "train.optimizer.lr=nan: must be a finite number, such as 0.0002 (the default)"),
        ("train.optimizer.lr=1e400", "train.optimizer.lr=inf: must be a finite number"),
        ("train.ppo.c_clip=.inf", "train.ppo.c_clip=inf: must be a finite number"),
        ("train.critic.optimizer.eps=nan", "train.critic.optimizer.eps=nan: must be a finite number"),
        ("rollout.group_size=99999999", "rollout.group_size=99999999: must be at most 65,536"),
        ("runtime.lease_ttl_s=1e12", "runtime.lease_ttl_s=1000000000000.0: must be at most 1,000,000,000"),
        ("train.max_steps=9223372036854775808", "must be at most 9,223,372,036,854,775,807"),
        (
            "allocation=transformers.d65537+d1",
            "must have at most 65,536 ranks of generation servers (servers times ranks per server) and at most 65,536 "
            "model workers",
        ),
    ],
)
def test_errors_name_field_value_and_remedy(config_file, override, message):
    with pytest.raises(ConfigError) as error:
        load_experiment(config_file, [override])
    assert message in str(error.value)


def test_a_task_has_the_values_that_it_sets_and_otherwise_those_of_the_run():
    own = {"success_rate_lb": -1.0, "success_rate_ub": 2.0, "reject_equal_rewards": True}
    own |= {"reward_timeout_s": 3.0, "rollout_timeout_s": 4.0}
    assert {field.name for field in fields(TaskConfig)} & {field.name for field in fields(RolloutConfig)} == own.keys()
    run = RolloutConfig(tasks={"a": TaskConfig(**own, max_new_tokens=5), "b": TaskConfig()})
    assert rollout_of_task(run, "a") == replace(run, **own, sampling=replace(run.sampling, max_new_tokens=5))
    assert rollout_of_task(run, "b") == run
    assert rejects_equal_rewards(run)
    assert not rejects_equal_rewards(replace(run, tasks={"b": TaskConfig()}))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.tasks.default.baseline=group_mean", "train.tasks.default.baseline='group_mean': a group of one"),
        ("train.tasks.default.advantage_norm=group", "train.tasks.default.advantage_norm='group': a group of one"),
        ("rollout.reject_equal_rewards=true", "rollout.reject_equal_rewards=True: would reject every group of one"),
        (
            "rollout.tasks.default.reject_equal_rewards=true",
            "rollout.tasks.default.reject_equal_rewards=True: would reject every group of one",
        ),
    ],
)
def test_what_a_group_of_one_cannot_have(config_file, override, message):
    alone = ["rollout.group_size=1", "train.ppo.advantage_norm=none", "train.ppo.baseline=none"]
    load_experiment(config_file, [*alone, "rollout.tasks.default.reject_equal_rewards=false"])
    with pytest.raises(ConfigError) as error:
        load_experiment(config_file, [*alone, override])
    assert message in str(error.value)


@pytest.mark.parametrize("error", ["ValueError", "KeyError"])
def test_a_file_of_train_mfcs_that_raises_is_named(config_file: Path, tmp_path: Path, error: str) -> None:
    (tmp_path / "raises.py").write_text(f"raise {error}('no weights here')\n")
    told = rf"train.mfcs: {tmp_path}/raises.py:f: importing it failed: {error}: '?no weights here"
    with pytest.raises(ConfigError, match=told):
        load_experiment(config_file, [f"train.mfcs=[{tmp_path}/raises.py:f]"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.ppo.advantage_norm=batch", f"train.step={STEP}"],
            f"train.step='{STEP}': would run on parts without the advantages",
        ),
        (
            [f"train.mfcs=[{declare('trains', kind='train_step', input_keys=[])}]"],
            "trains would step after each part of a batch; set train.streaming=false",
        ),
        (["train.offload=[actor]"], "train.offload=['actor']: actor must stay on the device"),
        (["train.wait_for_full_lag=true"], "train.wait_for_full_lag=True: waits until the whole batch is stored"),
        (["train.streaming_parts=9999"], "train.streaming_parts=9999: must be at most train.batch_size"),
        (
            ["train.streaming_parts=2", "train.streaming_order=balanced"],
            "train.streaming_parts=2: decides when a part begins",
        ),
        (["train.streaming_order=tokens"], "train.streaming_tokens=0: must be at least 1"),
        (["mode=sync"], "train.streaming=True: mode=sync has no groups that arrive one after another"),
    ],
)
def test_what_cannot_stream_is_refused_with_the_reason(config_file, overrides, message):
    streaming = ["train.streaming=true", "train.ppo.minibatches=1"]
    load_experiment(config_file, streaming)
    load_experiment(config_file, [*streaming, "train.ppo.advantage_norm=none", "train.critic={minibatches: 1}"])
    load_experiment(config_file, [*streaming, f"train.step={STEP}"])
    for algorithm in ("reinforce_pp", "ppo"):
        load_experiment(config_file, [*streaming, f"train.algorithm={algorithm}", "train.offload=[actor]"])
    with pytest.raises(ConfigError) as error:
        load_experiment(config_file, [*streaming, *overrides])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "mode=train_only",
            "mode='train_only': allocation=transformers.d1p1m1.d1p1m1.advantages:cpu1 has CPU workers, which",
        ),
    ],
)
def test_what_excludes_cpu_workers_is_refused(config_file, override, message):
    with pytest.raises(ConfigError, match=message):
        load_experiment(config_file, ["allocation=transformers.d1p1m1+d1p1m1+advantages:cpu1", override])


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("rollout.group_size=65536", 65536),
        ("train.optimizer.lr=1", 1.0),
        ("runtime.lease_ttl_s=1e9", 1e9),
        ("rollout.success_rate_ub=1e30", 1e30),
        ("train.max_steps=9223372036854775807", 2**63 - 1),
    ],
)
def test_the_largest_values_are_accepted(config_file, override, value):
    config = load_experiment(config_file, [override])
    assert operator.attrgetter(override.partition("=")[0])(config) == value


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("learning_rate", "train.optimizer.lr"),
        ("optimizer.lr", "train.optimizer.lr"),
        ("train.critic.lr", "train.critic.optimizer.lr"),
        ("eta", "manager.max_head_offpolicyness"),
        ("max_staleness", "manager.max_head_offpolicyness"),
        ("manager.staleness", "manager.max_head_offpolicyness"),
        ("batch_size", "train.batch_size"),
        ("train.batch-size", "train.batch_size"),
        ("epochs", "train.num_epochs"),
        ("steps", "train.max_steps"),
        ("max_steps", "train.max_steps"),
        ("seed", "seed"),
        ("model", "model_path"),
        ("model_name", "model_path"),
        ("temperature", "rollout.sampling.temperature"),
        ("ppo.temperature", "train.ppo.temperature"),
        ("max_tokens", "rollout.sampling.max_new_tokens"),
        ("max_new_tokens", "rollout.sampling.max_new_tokens"),
        ("n_gpus", "allocation"),
        ("kl", "train.ppo.kl_coef"),
        ("clip", "train.ppo.eps_clip"),
        ("tasks.maths.reward", "rollout.tasks.maths.reward"),
        ("rolout.group_sise", "rollout.group_size"),
        ("path", None),  # ambiguous: prompts, models, ... have a path
        ("prompts.path", "prompts.path"),
        ("lora_rank", None),
        ("gpu_memory_utilization", None),
        ("rollout.tasks.default.timeout", None),
        ("x", None),
    ],
)
def test_a_name_resolves_to_its_field(asked, meant):
    assert find_field(asked) == meant


def test_aliases_refer_to_fields():
    assert all(find_field(path) == path for path in ALIASES)


def test_all_problems_are_reported_at_once(config_file):
    with pytest.raises(ConfigError) as error:
        load_experiment(config_file, ["train.batch_size=0", "manager.routing=x"])
    assert len(str(error.value).splitlines()) == 2


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a file"):
        load_experiment(tmp_path / "none.yaml")


@pytest.mark.parametrize("content", [b"a: [", b"\x80\xff", b"\0\0\0"])
def test_invalid_yaml_is_refused(tmp_path, content):
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="is not YAML"):
        load_experiment(file)


def test_a_list_is_refused_as_a_config(tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_text("[1, 2]")
    with pytest.raises(ConfigError, match=r"bad.yaml has no fields at its top level; write them as `field: value`"):
        load_experiment(file)


def test_plan_has_every_process_of_the_allocation(config_file):
    config = load_experiment(config_file, ["allocation=transformers.d3+d2", "rollout.num_workers=4"])
    specs = plan(config, attempt=5, num_prompts=640)
    kinds = [spec.kind for spec in specs]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "generation_server": 3,
        "model_worker": 2,
        "master": 1,
        "gserver_manager": 1,
        "rollout_worker": 4,
    }
    assert {spec.config.worker.attempt for spec in specs} == {5}
    model_worker = next(spec.config for spec in specs if spec.name == "model_worker/1")
    assert (model_worker.worker.index, model_worker.worker.count) == (1, 2)
    assert (model_worker.store_capacity, model_worker.train.total_steps) == (192, 10)
    assert model_worker.train.ppo.temperature == 1.0
    manager = next(spec.config for spec in specs if spec.kind == "gserver_manager")
    assert manager.manager.max_concurrent_rollouts == 192


def test_process_configs_are_read_back_unchanged(config_file, tmp_path):
    extra = declare("read_back", input_keys=[], dispatch="rank_zero")
    config = load_experiment(config_file, ["eval.prompts.path=e.jsonl", f"train.mfcs=[{extra}]"])
    for spec in plan(config, attempt=1, num_prompts=64):
        file = tmp_path / f"{spec.file_stem}.yaml"
        save_config(spec.config, file)
        assert load_process_config(file) == spec.config


def test_a_process_looks_up_nothing_in_its_resolved_config(config_file):
    """And it refuses fields that its release does not have, at any depth."""
    (spec,) = (spec for spec in plan(load_experiment(config_file), attempt=1, num_prompts=64) if spec.kind == "master")
    prompts = replace(spec.config.prompts, system_prompt="${oc.env:HOME}", chat_template_args={"any": [{"depth": 1}]})
    text = config_text(replace(spec.config, prompts=prompts))
    assert parse_process_config(text).prompts == prompts
    for field, names in (
        ("train.ppo.eps_clap", ("eps_clip:", "eps_clap:")),
        ("models.0.trained", ("trainable:", "trained:")),
    ):
        with pytest.raises(ValueError, match=f"master/0 has no field {field}"):
            parse_process_config(text.replace(*names, 1))


@pytest.mark.parametrize("text", ["", "[1]", "worker: 1", "worker: {}", "worker: {kind: [1]}", "model_path: m"])
def test_a_config_of_no_process_is_refused_with_the_reason(text):
    with pytest.raises(ValueError, match=r"not a config of a process: it has no worker\.kind"):
        parse_process_config(text)


def test_total_steps(config_file):
    config = load_experiment(config_file)
    assert total_steps(config, 65) == 2
    assert total_steps(replace(config, train=replace(config.train, max_steps=1)), 65) == 1


def test_gpus_go_to_servers_first_and_then_to_model_workers(config_file):
    config = load_experiment(config_file, ["allocation=transformers.d1+d2"])
    specs = plan(config, attempt=1, num_prompts=64, devices=["0", "1"])
    given = {spec.name: spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs}
    assert (given["generation_server/0"], given["model_worker/0"], given["model_worker/1"]) == ("0", "1", "0")
    assert given["rollout_worker/0"] == given["master/0"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in plan(config, attempt=1, num_prompts=64)[0].env
    config = load_experiment(config_file, ["allocation=transformers.d1@0+d1@1+advantages:cpu1"])
    specs = plan(config, attempt=1, num_prompts=64, devices=["0", "1"])
    given = {spec.name: spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs}
    assert (given["model_worker/0"], given["model_worker/1"]) == ("1", "")


def test_auto_dtypes_follow_the_device(config_file):
    config = load_experiment(config_file, ["generation.dtype=auto", "train.dtype=auto"])
    for devices, dtype in ((["0"], "bfloat16"), ([], "float32")):
        specs = plan(config, attempt=1, num_prompts=64, devices=devices)
        assert {spec.config.generation.dtype for spec in specs if spec.kind == "generation_server"} == {dtype}
        assert {spec.config.train.dtype for spec in specs if spec.kind in {"model_worker", "master"}} == {dtype}
    explicit = plan(
        load_experiment(config_file, ["generation.dtype=float16"]), attempt=1, num_prompts=64, devices=["0"]
    )
    assert next(spec.config for spec in explicit if spec.kind == "generation_server").generation.dtype == "float16"


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_resolved_config_stays_as_it_is(config_file, on_gpu):
    """So the launcher may resolve it as its facts become known, and the values of a planned run are those of config.yaml."""
    asked = load_experiment(config_file, ["debug.leave_out=[master/0]", "fileroot=runs"])
    facts = Facts(
        on_gpu=on_gpu,
        num_prompts=64,
        model_bytes=16_000_000_000,
        host="10.0.0.1",
        socket_dir="/s",
        name_resolve=NameResolveConfig(["e:1"]),
    )
    whole = resolve(asked, facts)
    assert resolve(whole, facts) == resolve(whole, Facts()) == resolve(resolve(asked, Facts()), facts) == whole
    assert "auto" not in (
        whole.train.dtype,
        whole.generation.dtype,
        whole.train.tf32,
        whole.rollout.new_tokens_per_chunk,
    )
    assert (whole.runtime.host, whole.network.socket_dir, whole.name_resolve.where) == ("10.0.0.1", "/s", "e:1")
    assert (whole.train.total_steps, whole.train.ppo.temperature) == (total_steps(asked, 64), 1.0)
    assert whole.weights.verify_tolerance == (0.3 if on_gpu else 0.001)
    unknown = resolve(asked, Facts())
    assert (unknown.train.dtype, unknown.train.total_steps, unknown.weights.verify_tolerance) == (AUTO, 0, 0.0)


@pytest.mark.parametrize(
    ("overrides", "num_bytes", "load_s", "start_s"),
    [
        ([], 500_000, 120.0, 120.0),
        (["allocation=sglang.d1+d1"], 500_000, 600.0, 600.0),
        ([], 65_000_000_000, 770.0, 770.0),  # 32 billion parameters in bfloat16
        (["allocation=sglang.d1+d1"], 140_000_000_000, 2000.0, 2000.0),
        (["generation.load_timeout_s=900"], 0, 900.0, 900.0),  # a server starts within a run's start
        (["generation.load_timeout_s=60", "runtime.start_timeout_s=30"], 65_000_000_000, 60.0, 30.0),  # the user's
    ],
)
def test_limits_of_starts_follow_the_engine_and_the_bytes_of_the_models(
    config_file, overrides, num_bytes, load_s, start_s
):
    asked = load_experiment(config_file, overrides)
    config = resolve(asked, Facts(model_bytes=num_bytes))
    assert (config.generation.load_limit_s, config.runtime.start_limit_s) == (load_s, start_s)
    planned = plan(config, attempt=1, num_prompts=64)
    assert {spec.config.worker.runtime.start_limit_s for spec in planned} == {start_s}
    assert next(spec.config for spec in planned if spec.kind == "generation_server").generation.load_limit_s == load_s


def test_the_bytes_of_all_models_that_a_config_names_count(config_file, tmp_path):
    for name, sizes in (("actor", (300, 200)), ("critic", (70,))):
        (tmp_path / name).mkdir()
        for number, size in enumerate(sizes):
            (tmp_path / name / f"model-{number}.safetensors").write_bytes(bytes(size))
    overrides = [f"model_path={tmp_path}/actor", f"train.critic.path={tmp_path}/critic"]
    overrides += ["train.ppo.baseline=none", "train.ppo.advantage_norm=batch"]
    assert bytes_of_models(load_experiment(config_file, overrides)) == 570
    assert bytes_of_models(load_experiment(config_file, [f"model_path={tmp_path}/none"])) == 0


def test_every_wait_for_a_process_that_the_user_starts_is_long_enough(config_file):
    own = "rollout.tasks.default.reward_timeout_s"
    asked = load_experiment(config_file, ["debug.leave_out=[rollout_worker/0]", "debug.wait_s=7000", f"{own}=5"])
    values = {path: value for path, value, _ in leaf_values(resolve(asked, Facts(model_bytes=0)))}
    assert {values.get(path) for path in [*_PATIENT, own]} == {7000.0}
    assert values["rollout.tasks.default.rollout_timeout_s"] is None


def resolved(file, *overrides, on_gpu):
    asked = load_experiment(file, ["generation.num_blocks=100000", *overrides])  # room for long responses
    config = resolve(asked, Facts(on_gpu=on_gpu))
    train = config.train
    return (
        config.generation.dtype,
        train.dtype,
        train.tf32,
        train.gradient_checkpointing,
        config.rollout.new_tokens_per_chunk,
        train.logprob_chunk_tokens,
    )


@pytest.mark.parametrize("max_new_tokens", [128, 32768, 1_000_000])
def test_without_a_gpu_auto_equals_the_defaults(config_file, max_new_tokens):
    """Float32, no TF32, no checkpointing, 1024 tokens per chunk: results on a CPU do not depend on `auto`."""
    found = resolved(config_file, f"rollout.sampling.max_new_tokens={max_new_tokens}", on_gpu=False)
    assert found == ("float32", "float32", False, False, 1024, 1024)
    train = TrainConfig()
    assert found[:2] == (GenerationConfig().dtype, train.dtype)
    assert found[2:4] == (train.tf32, train.gradient_checkpointing)
    assert found[4:] == (RolloutConfig().new_tokens_per_chunk, train.logprob_chunk_tokens)


@pytest.mark.parametrize(
    ("max_new_tokens", "request_timeout_s", "chunk"),
    [
        (128, 600, 1024),
        (4096, 600, 1024),
        (4097, 600, 1025),
        (32768, 600, 8192),
        (131072, 600, 9600),
        (32768, 10, 1024),
    ],
)
def test_with_a_gpu_auto_selects_values_for_gpus(config_file, max_new_tokens, request_timeout_s, chunk):
    """Chunks are so large that a response takes at most four requests, unless one would take longer than request_timeout_s."""
    length = f"rollout.sampling.max_new_tokens={max_new_tokens}", f"rollout.request_timeout_s={request_timeout_s}"
    assert resolved(config_file, *length, on_gpu=True) == ("bfloat16", "bfloat16", True, True, chunk, 8192)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_explicit_values_override_auto(config_file, on_gpu):
    """This includes values that `auto` would select on the other device."""
    found = resolved(
        config_file,
        "generation.dtype=float16",
        "train.dtype=bfloat16",
        "train.tf32=false",
        "train.gradient_checkpointing=true",
        "rollout.new_tokens_per_chunk=77",
        "train.logprob_chunk_tokens=9",
        "rollout.sampling.max_new_tokens=32768",
        on_gpu=on_gpu,
    )
    assert found == ("float16", "bfloat16", False, True, 77, 9)
    assert resolved(config_file, "train.gradient_checkpointing=attention", on_gpu=on_gpu)[3] == "attention"
    cpu = "generation.dtype=float32", "train.dtype=float32", "train.gradient_checkpointing=false"
    assert resolved(config_file, *cpu, on_gpu=True)[:4] == ("float32", "float32", True, False)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.tf32=always", "train.tf32='always': one of true, false, auto"),
        ("train.gradient_checkpointing=some", "train.gradient_checkpointing='some': one of true, false, auto"),
        (
            "rollout.new_tokens_per_chunk=many",
            "rollout.new_tokens_per_chunk='many': must be a number of tokens, or auto",
        ),
        ("train.logprob_chunk_tokens=0", "train.logprob_chunk_tokens=0: must be at least 1"),
        ("rollout.new_tokens_per_chunk=0", "rollout.new_tokens_per_chunk=0: must be at least 1"),
    ],
)
def test_values_that_are_neither_valid_nor_auto_are_refused(config_file, override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_experiment(config_file, [override])


def test_processes_get_the_values_of_their_device(config_file, tmp_path):
    config = load_experiment(config_file, ["rollout.sampling.max_new_tokens=32768", "generation.num_blocks=2048"])
    for devices, expected in ((["0"], (True, True, 8192)), ([], (False, False, 1024))):
        specs = {spec.kind: spec for spec in plan(config, attempt=1, num_prompts=64, devices=devices)}
        for spec in specs.values():
            save_config(spec.config, tmp_path / f"{spec.kind}.yaml")
        train = load_process_config(tmp_path / "model_worker.yaml").train
        rollout = load_process_config(tmp_path / "rollout_worker.yaml").rollout
        assert (train.tf32, train.gradient_checkpointing, rollout.new_tokens_per_chunk) == expected


def test_a_task_name_must_differ_from_the_metric_of_all_tasks(config_file):
    both = ["rollout.tasks.mean.reward=a:b", "rollout.tasks.other.reward=a:b"]
    with pytest.raises(ConfigError, match=r"rollout\.tasks\.mean=.*reward/mean is a metric of all tasks"):
        load_experiment(config_file, both)


def test_visible_devices_come_from_the_environment(monkeypatch):
    monkeypatch.setattr("asyncrl.runtime.devices.count_gpus", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-abc")
    assert visible_devices() == ["2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_devices() == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_devices() == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("chosen", "devices"),
    [
        (None, "0 1 2 3"),
        ("", ""),
        ("-1", ""),
        ("NoDevFiles", ""),
        ("none", ""),
        ("all", ""),
        ("0", "0"),
        ("2,0", "2 0"),
        (" 1 , 3 ", "1 3"),
        ("0,-1,1", "0"),
        ("0,,1", "0"),
        (",0", ""),
        ("0,1,", "0 1"),
        ("0,4,1", "0"),
        ("7", ""),
        ("0,1,0", ""),
        ("01,1", ""),
        ("+1,1gpu2", ""),
        ("2gpu,1ampere", "2 1"),
        ("0,GPU-a1", "0"),
        ("GPU-a1,0", "GPU-a1"),
        ("GPU-b, GPU-a1", "GPU-b2 GPU-a1"),
        ("GPU-a", ""),  # two begin with this
        ("GPU-zz,GPU-b2", ""),
        ("GPU-b2,GPU-b", ""),
        ("MIG-1,MIG-2,GPU-a1", "MIG-1 MIG-2"),
        ("MIG-GPU-a1/1/0", "MIG-GPU-a1/1/0"),
        ("gpu-a1", ""),
    ],
)
def test_devices_are_those_that_cuda_uses(chosen, devices):
    assert devices_of(chosen, 4, ["GPU-a1", "GPU-a2", "GPU-b2"]) == devices.split()


def test_gpus_granted_by_slurm_count_whatever_their_nodes_are_called(monkeypatch):
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pathlib.Path.glob", lambda *_: iter(()))
    monkeypatch.setattr("os.path.exists", lambda _: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert visible_devices() == []
    monkeypatch.setenv("SLURM_JOB_GPUS", "2,3")
    assert visible_devices() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "NoDevFiles")
    assert visible_devices() == []


def test_no_value_adds_gpus_to_a_machine_without_one():
    for chosen in (None, "0", "0,1", "GPU-a", "MIG-b"):
        assert devices_of(chosen, 0) == []
    assert devices_of("0,11", None) == ["0", "11"]  # the machine does not tell their number
    assert devices_of("GPU-a,GPU-b", None) == ["GPU-a", "GPU-b"]


@pytest.fixture
def runnable(tmp_path):
    """A config whose files all exist."""
    make_char_tokenizer(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(
        '{"model_type": "qwen2", "max_position_embeddings": 512, "num_hidden_layers": 2, "num_attention_heads": 4, '
        '"num_key_value_heads": 2}'
    )
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (tmp_path / "m" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    (tmp_path / "p.jsonl").write_text('{"prompt": "1", "answer": "2", "task": "other"}\n' * 64)
    (tmp_path / "rewards.py").write_text("import needs_nothing_installed\n\ndef reward(*_):\n    return 1.0\n")
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model_path: {tmp_path}/m\n"
        f"prompts: {{path: {tmp_path}/p.jsonl}}\n"
        f"rollout: {{tasks: {{default: {{reward: '{tmp_path}/rewards.py:reward'}}}}}}\n"
    )
    return file


def test_evaluation_renders_chats_like_training_unless_it_says_otherwise(config_file):
    def rendering(*overrides):
        own = ["prompts.chat_template=true", "prompts.chat_template_args={a: 1, b: [2]}", "prompts.system_prompt=S"]
        prompts = load_experiment(config_file, [*own, "eval.prompts.path=e.jsonl", *overrides]).eval.prompts
        return prompts.chat_template, prompts.chat_template_args, prompts.system_prompt

    assert rendering() == (True, {"a": 1, "b": [2]}, "S")
    assert rendering("eval.prompts.chat_template=true", "eval.prompts.system_prompt=''") == (
        True,
        {"a": 1, "b": [2]},
        "",
    )
    assert rendering("eval.prompts.chat_template_args={c: 3}") == (True, {"c": 3}, "S")
    assert rendering("eval.prompts.chat_template_args={}") == (True, {}, "S")
    assert rendering("eval.prompts.chat_template=false") == (False, {}, "")
    assert load_experiment(config_file, ["eval.prompts=null"]).eval.prompts is None


def test_an_agent_may_repeat_the_template_arguments_of_the_prompts(config_file):
    own = ["prompts.chat_template=true", "prompts.chat_template_args={a: 1}", "eval.prompts.path=e.jsonl"]
    agent = "rollout.tasks.default.agent_args={chat_template_args: {a: 1}}"
    assert load_experiment(config_file, [*own, agent]).rollout.tasks["default"].agent_args
    other = "rollout.tasks.default.agent_args={chat_template_args: {a: 2}}"
    with pytest.raises(ConfigError) as error:
        load_experiment(config_file, [*own, other, "eval.prompts=null"])
    assert str(error.value).endswith(
        "rollout.tasks.default.agent_args.chat_template_args={'a': 2}: differs from prompts.chat_template_args={'a': 1}, which "
        "all turns have; leave it out, and set prompts.chat_template_args"
    )
    with pytest.raises(ConfigError, match=r"differs from eval.prompts.chat_template_args=\{'a': 2\}"):
        load_experiment(config_file, [*own, agent, "eval.prompts.chat_template_args={a: 2}"])
    without_template = "rollout.tasks.default.agent_args={chat_template_args: {a: 3}}"  # for a ChatAgent's own messages
    assert load_experiment(config_file, [without_template]).rollout.tasks["default"].agent_args


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (MINIMAL.encode() + b"trial: \xff\n", r"run.yaml:5 is not YAML: .* save the file as UTF-8"),
        (MINIMAL.encode() + b"trial: 't\x00'\n", r"run.yaml:5 is not YAML: the character #x0000 is not allowed"),
        (MINIMAL.encode("utf-16"), r"run.yaml:1 is not YAML"),
    ],
)
def test_a_file_that_is_no_text_is_refused_with_the_line(config_file, content, message):
    config_file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_experiment(config_file)


def test_byte_order_marks_are_skipped(runnable):
    for file in (runnable, runnable.parent / "rewards.py", runnable.parent / "p.jsonl"):
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert preflight(load_experiment(runnable)) == 64


def test_preflight_names_the_line_that_cannot_be_rendered(runnable):
    model = runnable.parent / "m"
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    image = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "answer": 1}
    chat = {"messages": [{"role": "user", "content": "hi"}], "answer": 1}
    (runnable.parent / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [chat, chat, image]))
    for field in ("prompts", "eval.prompts", "train.ptx.texts"):
        source = f"{{path: {runnable.parent}/chats.jsonl, prompt_key: messages, chat_template: true}}"
        with pytest.raises(
            ConfigError, match=rf"^{field}.path=.*chats.jsonl:3: .* content has a part of type 'image_url'"
        ):
            preflight(load_experiment(runnable, [f"{field}={source}", "train.batch_size=1", "eval.num_prompts=1"]))


def test_preflight_names_the_line_of_a_zero_byte_in_a_reward(runnable):
    rewards = runnable.parent / "rewards.py"
    rewards.write_bytes(rewards.read_bytes() + b"\0")
    with pytest.raises(ConfigError, match=r"rewards.py:5 has a zero byte; save the file as UTF-8"):
        preflight(load_experiment(runnable))


def test_preflight_names_a_feedback_role_without_a_template(runnable):
    agent = "{agent: 'asyncrl.rollout.agent:MultiStepAgent', agent_args: {feedback_role: user}}"
    with pytest.raises(ConfigError, match=r"agent_args.feedback_role='user': the tokenizer in .* has no chat template"):
        preflight(load_experiment(runnable, [f"rollout.tasks.default={agent}"]))


def test_preflight_names_the_supervised_text_without_an_answer(runnable):
    (runnable.parent / "texts.jsonl").write_text('{"prompt": "1", "answer": 1}\n{"prompt": "1", "answer": null}\n')
    with pytest.raises(ConfigError, match=r"train.ptx.texts.answer_key='answer': .*texts.jsonl:2: the answer is None"):
        preflight(load_experiment(runnable, [f"train.ptx.texts.path={runnable.parent}/texts.jsonl"]))


def test_preflight_counts_the_prompts(runnable):
    assert preflight(load_experiment(runnable)) == 64


def test_a_low_limit_of_open_files_is_refused(runnable, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(ConfigError, match=r"`ulimit -Hn` is 64, .* at least 256 open files; raise the hard limit"):
        preflight(load_experiment(runnable))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.batch_size=65", "has only 64 prompts"),
        ("rollout.sampling.max_new_tokens=512", "the model has 512 positions"),
        ("prompts.task_key=task", "has prompts of the tasks other, which are not in rollout.tasks"),
        ("prompts.task_weights.defalt=2", "has no prompt of this task; did you mean 'default'"),
        (
            "rollout.tasks={default: {reward: 'reward.py:f', gate: {task: rare}}, rare: {reward: 'reward.py:f'}}",
            "has no prompt of this task in an epoch: 'default' would never open",
        ),
        (f"train.mfcs=[{declare('lost', input_keys=['nowhere'])}]", "reads ['nowhere'], which no MFC writes"),
        ("model_path=nowhere", "there is no config.json"),
        (
            "train.ref.path=nowhere train.ppo.kl_coef=1",
            "train.ref.path='nowhere': there is no config.json; give a folder",
        ),
        ("allocation=transformers.d1+p3", "the actor has the grid d1p3m1, and 2 layers: use at most p2"),
        (
            "allocation=transformers.d1+m4",
            "and 2 heads of keys and values, which do not divide evenly among its tensor parallel ranks: use m1, m2",
        ),
        (
            "allocation=transformers.d1+c3",
            "d1p1m1c3, and 4 attention heads do not divide evenly among 3 context ranks: use c1, c2, c4",
        ),
        (
            "allocation=transformers.d1+m2c4",
            "d1p1m2c4, and 2 attention heads do not divide evenly among 4 context ranks: use c1, c2",
        ),
        ("prompts.chat_template=true", "has no chat template; set prompts.chat_template=false"),
    ],
)
def test_preflight_refuses_configs_that_would_fail_later(runnable, override, message):
    with pytest.raises(ConfigError) as error:
        preflight(
            load_experiment(
                runnable, [*re.split(r" (?=train\.)", override), "tokenizer_path=" + str(runnable.parent / "m")]
            )
        )
    assert message in str(error.value)


def with_reference(runnable, **changes):
    """Return a config with its own reference model: the actor's model with changed fields of config.json."""
    own, ref = runnable.parent / "m", runnable.parent / "ref"
    shutil.copytree(own, ref)
    (ref / "config.json").write_text(json.dumps(json.loads((own / "config.json").read_text()) | changes))
    return load_experiment(runnable, [f"train.ref.path={ref}", "train.ppo.kl_coef=0.1", "train.ref.update_interval=10"])


def test_preflight_accepts_a_reference_of_the_same_shape(runnable):
    assert preflight(with_reference(runnable)) == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_hidden_layers": 1},
            "weights do not fit the model of train.ref.path: its config.json has a different num_hidden_layers",
        ),
        ({"vocab_size": 3}, "it reads the actor's tokens, but tokenizer_path=.* its largest token id"),
    ],
)
def test_preflight_refuses_a_reference_that_does_not_fit(runnable, changes, message):
    with pytest.raises(ConfigError, match=message):
        preflight(with_reference(runnable, **changes))


@pytest.mark.parametrize("field", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_preflight_refuses_layouts_that_a_mixture_of_experts_cannot_have(runnable, field):
    file = runnable.parent / "m" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: 8}))
    allocation = "allocation=transformers.d1p1m1+"
    with pytest.raises(ConfigError, match=f"actor has the grid d1p1m2, and config.json has {field}=8: .* use m1"):
        preflight(load_experiment(runnable, [f"{allocation}d1p1m2"]))
    for grid in ("d2p1m1", "d1p2m1", "d4e2"):
        assert preflight(load_experiment(runnable, [f"{allocation}{grid}"])) == 64
    with pytest.raises(ConfigError, match=r"the grid d6p1m1e3, and e3 does not divide 8 experts: use e2"):
        preflight(load_experiment(runnable, [f"{allocation}d6e3"]))


def test_preflight_refuses_a_model_that_asks_for_a_loss_of_its_routers(runnable):
    file = runnable.parent / "m" / "config.json"
    plain = json.loads(file.read_text()) | {"num_experts": 8, "router_aux_loss_coef": 0.02}
    file.write_text(json.dumps(plain))
    preflight(load_experiment(runnable, []))
    file.write_text(json.dumps(plain | {"output_router_logits": True}))
    with pytest.raises(
        ConfigError, match=r"router_aux_loss_coef=0.02, .*to false there, and train.router_aux_loss_coef=0.02"
    ):
        preflight(load_experiment(runnable, []))


def test_preflight_refuses_to_split_the_experts_of_a_dense_model(runnable):
    with pytest.raises(ConfigError, match=r"the grid d2p1m1e2, and config.json has no experts .*: leave e out"):
        preflight(load_experiment(runnable, ["allocation=transformers.d1p1m1+d2e2"]))


def test_preflight_reads_reward_files_without_running_them(runnable):
    spec = f"{runnable.parent}/rewards.py:rewrd"
    with pytest.raises(
        ConfigError,
        match="does not define 'rewrd'; did you mean 'reward'\\? it defines needs_nothing_installed, reward",
    ):
        preflight(load_experiment(runnable, [f"rollout.tasks.default.reward={spec}"]))


@pytest.mark.parametrize(("written", "read"), [("off", "off"), ("false", "off")])
def test_switches_stay_off_although_yaml_reads_off_as_false(config_file, written, read):
    names = "recover", "network.authenticate", "plan.enforce", "weights.fetch", "train.mismatch"
    config = load_experiment(config_file, [f"{name}={written}" for name in names])
    assert (config.recover, config.network.authenticate) == (read, read)
    assert (config.plan.enforce, config.weights.fetch, config.train.mismatch) == (read, read, read)


@pytest.mark.parametrize(
    ("overrides", "unix"),
    [
        ([], True),
        (["runtime.host=127.0.0.5"], True),
        (["network.sockets=tcp"], False),
        (["network.sockets=unix"], True),
        (["runtime.host=10.0.0.1"], False),
        (["runtime.host=10.0.0.1", "network.authenticate=off"], False),
    ],
)
def test_only_a_run_on_one_machine_has_unix_sockets(config_file, overrides, unix):
    assert has_unix_sockets(load_experiment(config_file, overrides)) is unix


def test_unix_sockets_that_other_machines_cannot_reach_are_refused(config_file):
    with pytest.raises(ConfigError, match=r"network\.sockets='unix': other machines take part in this run"):
        load_experiment(config_file, ["network.sockets=unix", "runtime.host=10.0.0.1"])


def test_certificates_need_authentication(config_file):
    with pytest.raises(ConfigError, match=r"network\.tls_cert='c.pem': needs network\.authenticate=on"):
        load_experiment(config_file, ["network.authenticate=off", "network.tls_cert=c.pem"])
    with pytest.raises(ConfigError, match=r"network\.tls_key='k.pem': needs network\.tls_cert"):
        load_experiment(config_file, ["network.authenticate=on", "network.tls_key=k.pem"])


def names_of_fields(owner, kinds):
    """Yield the field names of a config and of all configs in it, as `Owner.name`."""
    kinds.add(owner)
    hints = get_type_hints(owner)
    for entry in fields(owner):
        yield f"{owner.__name__}.{entry.name}"
        inside = [hints[entry.name], *get_args(hints[entry.name])]
        for kind in inside:
            if is_dataclass(kind) and kind not in kinds:
                yield from names_of_fields(kind, kinds)


def test_every_field_is_read():
    """Code outside the config modules reads an attribute with each field's name.

    The attribute may belong to another class, so the test finds an unread field only if the field's name is unique.
    """
    package = Path(asyncrl.__file__).parent
    read = set()
    for file in package.rglob("*.py"):
        if file.parent != package / "config":
            code = re.sub(r'""".*?"""|#[^\n]*', "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
            read |= set(re.findall(r"(?<=[\w\])])\.([a-z]\w*)", code))
    within = {
        "TrainConfig.algorithm",  # loading.py replaces it with the fields that it stands for
        "TrainConfig.correction",  # the same
        "TrainConfig.reward_models",  # read through schema.reward_models and schema.model_settings
        "WeightsConfig.broadcast_network",  # a statement of the user, which validation.py reads
    }
    unread = [name for name in names_of_fields(ExperimentConfig, set()) if name.partition(".")[2] not in read]
    assert set(unread) == within


def test_messages_and_reference_list_the_words_of_a_field_in_any_section(config_file: Path) -> None:
    """Also in sections that are absent by default, and in those whose name the user chooses."""
    for path in ("train.ppo.kl_in", "train.critic.optimizer.schedule", "train.roles.judge.kind", "eval.modes"):
        (field,) = select(path)
        written = "[loud]" if field.type.startswith("list") else "loud"
        with pytest.raises(ConfigError, match=f"one of {', '.join(field.allowed)}"):
            load_experiment(config_file, [f"{path}={written}"])


def test_routes_are_not_combined_with_adapters(config_file):
    load_experiment(config_file, ["train.routes=replay"])
    with pytest.raises(ConfigError, match=r"train.routes='?replay.*train.lora"):
        load_experiment(config_file, ["train.routes=replay", "train.lora={rank: 4}"])


def test_routes_are_not_combined_with_pipeline_stages(config_file):
    grids = ("d2e2", "d2c2e2", "d2r2", "d2+actor_inf:d2")
    for grid in grids:
        load_experiment(config_file, ["train.routes=replay", f"allocation=transformers.d1+{grid}"])
    for grid in ("p2", "d1+actor_inf:p2"):
        with pytest.raises(ConfigError, match=r"train.routes='?replay.*use p1, or set it to off"):
            load_experiment(config_file, ["train.routes=replay", f"allocation=transformers.d1+{grid}"])
