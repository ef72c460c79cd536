"""Features of the training side, and steps with any two of them: the master's executor, interfaces and engines in one process.

How a version travels meets no step here: deltas (weights.full_every) and broadcast (weights.transport) read the weights that a step
has made. tests/processes/test_delta_versions.py and tests/processes/test_broadcast.py compare such versions with full ones on disk,
and tests/simulation draws deltas together with streaming, arriving inference and the others.

A feature has two halves. `what` defines the update. `how` must not change it: the same update in parts, on other workers, computed
again. A pair of features is run twice, with both halves and with `what` only, and the results are compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from test_detached_groups import WorldOfGroups
from test_detached_groups import running as running_groups
from transformers import AutoModelForSequenceClassification

from asyncrl.config import schema
from asyncrl.config.schema import (
    CriticConfig,
    EmaConfig,
    ExperimentConfig,
    LoraConfig,
    OptimizerConfig,
    PPOConfig,
    PromptSourceConfig,
    PtxConfig,
    ReplayConfig,
    RewardModelConfig,
    RoleConfig,
    RolloutConfig,
    TaskAlgorithmConfig,
    TaskConfig,
    TeacherConfig,
    TrainConfig,
)
from asyncrl.data.routes import ROUTES, RouteLayout, Routes
from asyncrl.data.sequence import SequenceSample
from asyncrl.dataflow.graph import build_dataflow, without_generation
from asyncrl.dataflow.mfc import MFCDef, mfc
from asyncrl.dataflow.placed_models import models_of, place
from asyncrl.dataflow.redistribution import transfers
from asyncrl.dataflow.topology import ModelPlacement, allocation_of
from asyncrl.dataflow.worker_groups import worker_groups_of
from asyncrl.master.detached import GroupMissingError
from asyncrl.master.parameter_hooks import ParameterHooks
from asyncrl.master.step_function import StepFunction
from asyncrl.model.calls import Calls
from asyncrl.model.cpu_ranks import CpuRanks
from asyncrl.model.engine import TrainEngine, base_engine
from asyncrl.model.interfaces import Minibatches, make_interface, split_minibatches
from asyncrl.model.kept_weights import KeptWeights
from asyncrl.protocol.calls import (
    CallResult,
    ClearData,
    ExecuteMFC,
    FetchData,
    FetchWeights,
    KeepWeights,
    ReadValues,
    Reallocate,
    Redistribute,
)
from asyncrl.protocol.trajectories import Locator, TrajectoryMeta
from asyncrl.testing.tiny import make_tiny_model
from tests.support.executors import executor_of

HERE = Path(__file__)
NUM_GROUPS, GROUP_SIZE = 6, 2
EXPERTS = RouteLayout((0,), 2, 8)  # of the mixture of experts
# Groups of each part of a step's batch. In every other step the last part has no groups
PARTS = [[[0, 3], [1, 2, 4], [5]], [[5], [0, 1, 2, 3, 4], []]]


@dataclass(frozen=True)
class Feature:
    """what: fields under train that define the update, by path. how: fields that must not change it. places: own workers of MFCs;
    also_plain: whether the plain step has them, too."""

    what: Mapping[str, Any] = field(default_factory=dict)
    how: Mapping[str, Any] = field(default_factory=dict)
    places: tuple[str, ...] = ()
    also_plain: bool = False
    lost: bool = False  # detached groups with on_missing=continue are missing in the second step
    restarts: bool = False  # CPU workers restart before each step, and between the parts of its batch
    broken: bool = False  # a reward of the second step is not finite
    experiment: Mapping[str, Any] = field(default_factory=dict)  # fields of the whole config, as `how`
    tolerance: float = 1e-5


KL = {"ppo.kl_coef": 0.1}
BASE = "lm"  # the actor's own weights, as a reference
JUDGE = {"reward_model": RewardModelConfig("reward", scale=0.5)}
OPTIMIZER = OptimizerConfig(lr=1e-3, warmup_steps=0, schedule="constant", eps=1e-4)
FEATURES: dict[str, Feature] = {
    "streaming": Feature(how={"streaming": True}),
    "ppo in parts": Feature(
        {
            "ppo.advantage_norm": "batch",
            "ppo.gae_lambda": 0.9,
            "critic": CriticConfig("", OPTIMIZER, minibatches=2, value_norm=True),
        },
        {"streaming": True},
    ),
    "reinforce_pp in parts": Feature({**KL, "ppo.advantage_norm": "batch"}, {"streaming": True}),
    "arriving_inference": Feature(KL, {"arriving_inference": True}, ("ref_inf:d1",)),
    "arriving reward model": Feature(JUDGE, {"arriving_inference": True}, ("rew_inf:d1",)),
    "reference on its own workers": Feature(KL, places=("ref_inf:d1",)),
    "reward model on its own workers": Feature(JUDGE, places=("rew_inf:d1",)),
    "teacher on its own workers": Feature({"teacher": TeacherConfig("lm", 0.5)}, places=("teacher_inf:d1",)),
    "actor_inf on its own workers": Feature(how={"ppo.proximal_pass": "always"}, places=("actor_inf:d1",)),
    "arriving actor_inf": Feature(
        how={"actor_inf_on_missing": "wait", "arriving_inference": True}, places=("actor_inf:d1",)
    ),
    "detached actor_inf": Feature(how={"actor_inf_on_missing": "wait"}, places=("actor_inf:d1",)),
    "critic on its own workers": Feature({"critic": CriticConfig("", OPTIMIZER, minibatches=1)}, places=("critic:d1",)),
    "advantages on a CPU worker": Feature(places=("advantages:cpu1",)),
    "CPU worker that restarts": Feature(
        {"ppo.kl_coef": 0.1, "ppo.kl_adaptive": True, "ppo.kl_horizon": 50.0},
        places=("advantages:cpu1",),
        restarts=True,
    ),
    "shared devices": Feature(experiment={"allocation": "transformers.d1@0+d1@0"}),
    "mode=train_only": Feature(experiment={"mode": "train_only", "replay": ReplayConfig(path="/run")}),
    "mode=sync": Feature(experiment={"mode": "sync"}),
    "proximal pass": Feature(how={"ppo.proximal_pass": "always"}),
    "small micro-batches": Feature(how={"max_tokens_per_mb": 16, "logprob_chunk_tokens": 3}),
    "gradient_checkpointing": Feature(how={"gradient_checkpointing": True}),
    "checkpointing that keeps attention": Feature(how={"gradient_checkpointing": "attention"}),
    "share_prefix": Feature(how={"share_prefix": "on"}),
    "accumulate_unsharded": Feature(how={"accumulate_unsharded": True}),
    "offload of the actor": Feature(how={"offload": ["actor"]}),
    "offload of the reference": Feature(KL, {"offload": ["ref"]}),
    "step function in chunks": Feature(how={"step": f"{HERE}:in_chunks"}),
    "reference missing": Feature(
        {**KL, "ref.on_missing": "continue"}, places=("ref_inf:d1",), also_plain=True, lost=True
    ),
    "reward model missing": Feature(
        {"reward_model": RewardModelConfig("reward", 0.5, "continue")},
        places=("rew_inf:d1",),
        also_plain=True,
        lost=True,
    ),
    "actor_inf missing": Feature(
        {"actor_inf_on_missing": "continue"}, places=("actor_inf:d1",), also_plain=True, lost=True
    ),
    "kl in the loss": Feature({"ppo.kl_coef": 0.1, "ppo.kl_in": "loss", "ppo.kl_estimator": "k3"}),
    "adaptive kl": Feature({**KL, "ppo.kl_adaptive": True, "ppo.kl_horizon": 50.0}),
    "refreshed reference": Feature({**KL, "ref.update_interval": 1, "ref.update_share": 0.5}),
    "reward_models": Feature(
        {"reward_models": {"a": RewardModelConfig("reward", 0.5), "b": RewardModelConfig("reward", 2.0)}}
    ),
    "teacher": Feature({"teacher": TeacherConfig("lm", 0.5)}),
    "ptx": Feature({"ptx": PtxConfig(PromptSourceConfig(path="texts"), batch_size=8)}),
    "epochs": Feature({"ppo.epochs": 2}),
    "minibatches": Feature({"ppo.minibatches": 2}),
    "minibatches that step early": Feature({"ppo.minibatches": 3, "ppo.use_decoupled_loss": False}),
    "minibatches and passes": Feature(
        {"ppo.minibatches": 4, "ppo.epochs": 2, "actor_inf_on_missing": "wait"},
        places=("actor_inf:d1",),
        also_plain=True,
    ),
    "minibatches of a critic": Feature({"critic": CriticConfig("", OPTIMIZER, minibatches=3)}),
    "critic": Feature({"critic": CriticConfig("", OPTIMIZER, minibatches=1), "ppo.gae_lambda": 0.9}),
    "value_norm": Feature({"critic": CriticConfig("", OPTIMIZER, minibatches=2, value_norm=True)}),
    "critic first": Feature({"critic": CriticConfig("", OPTIMIZER, minibatches=1), "num_critic_only_steps": 1}),
    "ema": Feature({"ema": EmaConfig(decay=0.5)}),
    "entropy": Feature({"ppo.entropy_coef": 0.1}),
    "entropy_target": Feature({"ppo.entropy_target": 9.0, "ppo.entropy_step": 0.1}),
    "dense_rewards": Feature({"dense_rewards": True}),
    "several sequences of a session": Feature({"branches": True, "ppo.baseline": "group_mean"}),
    "function of a user": Feature({"mfcs": [f"{HERE}:bonus"]}),
    "routes": Feature({"routes": "replay"}),  # of a mixture of experts, which all features have beside it
    "routes and minibatches in parts": Feature(
        {
            "routes": "replay",
            "ppo.minibatches": 2,
            "ppo.advantage_norm": "batch",
            "critic": CriticConfig("", OPTIMIZER, minibatches=2),
        },
        {"streaming": True, "max_tokens_per_mb": 16},
    ),
    "auxiliary loss of routers": Feature({"router_aux_loss_coef": 0.5}),  # of a mixture of experts, too
    "words that a function reads": Feature({"words": ["words_bonus"], "mfcs": [f"{HERE}:bonus_in_words"]}),
    "model of a user that is trained": Feature(
        {"roles": {"judge": RoleConfig("", "lm", OPTIMIZER)}, "mfcs": [f"{HERE}:Imitate"]}
    ),
    "lora": Feature({"lora": LoraConfig(rank=4, alpha=8.0)}),
    "lora with its base as reference": Feature({**KL, "lora": LoraConfig(rank=4, alpha=8.0), "ref.path": BASE}),
    "bfloat16": Feature({"dtype": "bfloat16"}, tolerance=2e-3),
    "group advantages": Feature({"ppo.advantage_norm": "group"}),
    "algorithms of tasks": Feature(
        {
            "tasks": {
                "even": TaskAlgorithmConfig(baseline="leave_one_out", reward_scaling=2.0),
                "odd": TaskAlgorithmConfig(mask_too_long=True, overlong_penalty=1.0, overlong_length=5),
            }
        }
    ),
    "batch advantages": Feature({"ppo.advantage_norm": "batch"}),
    "leave one out": Feature({"ppo.baseline": "leave_one_out"}),
    "naive loss": Feature({"ppo.use_decoupled_loss": False}),
    "recomputed logprobs": Feature({"ppo.use_decoupled_loss": False, "ppo.recompute_logprob": True}),
    "sequences": Feature({"ppo.loss_normalization": "sequence", "ppo.importance_level": "sequence"}),
    "constant normalization": Feature({"ppo.loss_normalization": "constant", "ppo.loss_length": 5}),
    "cispo": Feature({"ppo.policy_loss": "cispo"}),
    "masks": Feature({"ppo.mask_too_long": True, "ppo.mask_no_eos_with_zero": True}),
    "overlong penalty": Feature({"ppo.overlong_penalty": 1.0, "ppo.overlong_length": 5, "ppo.overlong_buffer": 0.5}),
    "early stop": Feature({"ppo.early_stop_imp_ratio": 1.0 + 1e-7, "ppo.use_decoupled_loss": False}),
    "reward that is not finite": Feature(broken=True),
}

# Fields that no feature sets, each with the reason
LEFT_OUT = {
    "train": {
        "algorithm": "a preset of other fields",
        "correction": "a preset of other fields",
        **dict.fromkeys(["batch_size", "num_epochs", "max_steps", "target_reward"], "which groups, how many steps"),
        **dict.fromkeys(["total_steps", "optimizer"], "of the optimizer, in each run here"),
        "mismatch": "a check that reads logprobs",
        "tf32": "arithmetic of a GPU",
        "compile": "the same operations, compared with those of the layers whenever a model is loaded (model/self_check.py)",
        **dict.fromkeys(
            ["streaming_order", "streaming_tokens", "streaming_parts"],
            "which groups are a part; the parts here are given",
        ),
        "extra_train_keys": "an order of calls",
        "max_words_bytes": "a limit",
        "wait_for_full_lag": "which groups",
        **dict.fromkeys(["keep_bad_batches", "max_skipped_steps"], "what follows a skipped step"),
        **dict.fromkeys(["call_timeout_s", "missing_after_s", "data_timeout_s"], "limits of waits"),
        **dict.fromkeys(["save_every_steps", "save_every_epochs", "save_every_s"], "reads weights only"),
        **dict.fromkeys(["torch_threads", "peak_flops"], "speed"),
    },
    "train.ppo": {
        **dict.fromkeys(["eps_clip", "eps_clip_higher", "c_clip"], "numbers of the loss of one token"),
        **dict.fromkeys(["behav_imp_weight_cap", "behav_imp_weight_floor", "behav_imp_weight_mode"], "the same"),
        "early_stop_kl": "decided where early_stop_imp_ratio is",
        **dict.fromkeys(["discount", "reward_scaling", "reward_bias", "max_reward_clip"], "numbers of one response"),
        "kl_target": "a number of kl_adaptive",
        "temperature": "set in each run here",
    },
    "train.critic": dict.fromkeys(["path", "eps_clip", "value_norm_beta"], "numbers of one value"),
    "train.ref": {},
    "train.lora": {
        **dict.fromkeys(["targets", "dropout", "start", "seed"], "which matrices, and where they begin"),
        "merge": "what is saved",
    },
    "train.ptx": dict.fromkeys(["coef", "max_length"], "numbers of one text"),
}


# ------------------------------------------------------------------------------------------------ functions of a user


async def in_chunks(models: Any, batch: Any) -> None:
    """The shipped step, with inference on halves of the batch."""
    for function in models.functions:
        halves = batch.chunk(2) if function.mfc.name.endswith("_inf") and len(batch) > 1 else [batch]
        made = [function(half) for half in halves]
        batch = batch.union(made[0] if len(made) == 1 else batch.concat(made))
    await batch


@mfc(input_keys=["packed_input_ids", "loss_mask"], output_keys=["dense_rewards"])
def bonus(engine: Any, sample: Any, train: Any) -> Any:
    bonus_T = 0.01 * sample.data["loss_mask"] * sample.data["packed_input_ids"]
    return sample.derive({"dense_rewards": bonus_T.astype(np.float32)})


@mfc(input_keys=["loss_mask", "words_bonus"], output_keys=["dense_rewards"])
def bonus_in_words(engine: Any, sample: Any, train: Any) -> Any:
    parts = zip(sample.slices("loss_mask"), sample.words("words_bonus"), strict=True)
    bonus = [mask * words["per token"] for masks, found in parts for mask, words in zip(masks, found, strict=True)]
    return sample.derive({"dense_rewards": np.concatenate([*bonus, []]).astype(np.float32)}, like="loss_mask")


def _imitate() -> Any:
    from asyncrl.model.interfaces import Interface, train_minibatches

    class Imitate(Interface):
        """Another model learns the responses."""

        def run(self, engine: Any, sample: Any, *, batch_ids: Any, step: Any) -> Any:
            sample = sample.select_keys(["packed_input_ids", "loss_mask"]) if sample is not None else None

            def loss_of(num: float, _: float) -> Any:
                return lambda outputs, data, _: (-(data["loss_mask"] * outputs["logprobs"]).sum() / num, {})

            steps = train_minibatches(engine, sample, [batch_ids], loss_of, temperature=1.0, lr_step=step.version)
            return None, steps.result("judge")

    return mfc(role="judge", kind="train_step", input_keys=["packed_input_ids", "loss_mask"])(Imitate)


Imitate = _imitate()

# ---------------------------------------------------------------------------------------------------------- configs


def set_fields(config: Any, values: Mapping[str, Any]) -> Any:
    for path, value in values.items():
        first, _, rest = path.partition(".")
        config = replace(config, **{first: set_fields(getattr(config, first), {rest: value}) if rest else value})
    return config


def base(models: Path) -> ExperimentConfig:
    ppo = PPOConfig(minibatches=1, advantage_norm="none", temperature=1.0)
    train = TrainConfig(batch_size=NUM_GROUPS, optimizer=OPTIMIZER, ppo=ppo, max_tokens_per_mb=64)
    return ExperimentConfig(
        experiment="pairs",
        trial="t",
        model_path=str(models / "lm"),
        prompts=PromptSourceConfig(path="prompts"),
        rollout=RolloutConfig(
            group_size=GROUP_SIZE, tasks=dict.fromkeys(("even", "odd"), TaskConfig(reward="m:reward"))
        ),
        allocation="transformers.d1+d1",
        train=train,
    )


class Contradiction(Exception):
    """Two features want different values of a field."""


def config_of(features: list[Feature], models: Path, *, plain: bool) -> ExperimentConfig:
    """Raises Contradiction."""
    if any(feature.what.keys() & {"routes", "router_aux_loss_coef"} for feature in features):
        models = models / "experts"
    wanted: dict[str, Any] = {}
    whole: dict[str, Any] = {}
    for feature in features:
        parts = (feature.what,) if plain else (feature.what, feature.how)
        for target, values in (
            (wanted, [entry for part in parts for entry in part.items()]),
            (whole, feature.experiment.items()),
        ):
            for path, value in () if plain and target is whole else values:
                if path in ("offload", "mfcs"):
                    value = [*target.get(path, []), *value]
                elif target.get(path, value) != value:
                    raise Contradiction(path)
                target[path] = value
    config = base(models)
    train = _with_models(set_fields(config.train, wanted), models)
    config = replace(config, **{"train": train, **whole})
    if config.mode != "async" and any(feature.lost for feature in features):
        raise Contradiction("mode")  # only mode=async has detached groups, so none can be missing
    if config.mode == "sync":
        config = replace(config, allocation="d1")
    if "@" in config.allocation:
        config = replace(config, manager=replace(config.manager, max_head_offpolicyness=0))
    places = [place for feature in features if feature.also_plain or not plain for place in feature.places]
    return replace(config, allocation="+".join([config.allocation, *dict.fromkeys(places)]))


def _with_models(train: TrainConfig, models: Path) -> TrainConfig:
    """Names of models become paths."""
    judge = {name: replace(model, path=str(models / model.path)) for name, model in train.reward_models.items()}
    train = replace(train, reward_models=judge)
    if train.reward_model is not None:
        train = replace(train, reward_model=replace(train.reward_model, path=str(models / train.reward_model.path)))
    if train.teacher is not None:
        train = replace(train, teacher=replace(train.teacher, path=str(models / "teacher")))
    if train.ptx is not None:
        texts = replace(train.ptx.texts, path=str(models / "texts.jsonl"))
        train = replace(train, ptx=replace(train.ptx, texts=texts))
    ref = str(models / "ref") if train.ref.path != BASE else ""
    return replace(train, ref=replace(train.ref, path=ref)) if train.ppo.kl_coef > 0 else train


def make_models(folder: Path) -> None:
    """Dense models, and in folder/experts the same of mixtures of experts."""
    _make_models(folder, "qwen2")
    _make_models(folder / "experts", "qwen3_moe")


def _make_models(folder: Path, architecture: str) -> None:
    for seed, name in enumerate(("lm", "ref", "teacher")):
        torch.manual_seed(seed)
        make_tiny_model(folder / name, architecture, hidden_size=16, intermediate_size=32, num_layers=1)
    torch.manual_seed(7)
    reward = AutoModelForSequenceClassification.from_pretrained(folder / "lm", num_labels=1)
    reward.score.weight.data.normal_(0.0, 0.2)
    reward.save_pretrained(folder / "reward")
    lines = [f'{{"prompt": "{number}=", "answer": "{number + 1}"}}' for number in range(9)]
    (folder / "texts.jsonl").write_text("\n".join(lines))


def make_batch(version: int, *, dense: bool, branches: bool, words: bool, broken: bool, routes: bool) -> SequenceSample:
    random = np.random.default_rng(version)
    groups = []
    for number in range(NUM_GROUPS):
        prompt = random.integers(1, 11, int(random.integers(1, 4))).tolist()
        lengths = [int(random.integers(1, 7)) for _ in range(GROUP_SIZE)]
        masks = [[False] * len(prompt) + [True] * n for n in lengths]
        rewards = random.normal(0, 1, GROUP_SIZE).tolist()
        if broken and version == 1 and number == 2:
            rewards[0] = math.inf
        group = {
            "packed_input_ids": [prompt + random.integers(11, 40, n).tolist() for n in lengths],
            "packed_logprobs": [[float(random.normal(-4.1, 0.3)) if on else 0.0 for on in mask] for mask in masks],
            "prompt_mask": [[not on for on in mask] for mask in masks],
            "loss_mask": masks,
            "seq_no_eos_mask": [number == 1 and k == 0 for k in range(GROUP_SIZE)],
            "rewards": rewards,
            "task_ids": number % 2,
            "versions": [[0 if on else -1 for on in mask] for mask in masks],
        }
        if dense:
            group["dense_rewards"] = [random.normal(0, 0.1, len(mask)).tolist() for mask in masks]
        if branches:  # the sequences of every second group are of one session, or of two seats
            group["seats"] = [0, number % 4 // 2]
            group["sessions"] = [0, number % 4 == 1]
        if words:
            group["words_bonus"] = [{"per token": float(random.normal(0, 0.1))} for _ in masks]
        if routes:
            group[ROUTES] = [drawn_routes(random, len(mask)) for mask in masks]
        groups.append(group)
    return SequenceSample.from_groups([f"s{version}g{number}" for number in range(NUM_GROUPS)], groups)


def drawn_routes(random: np.random.Generator, length: int) -> np.ndarray[Any, Any]:
    """Routes of all tokens of a sequence but the last."""
    rows = random.random((length - 1, EXPERTS.num_experts)).argsort(-1)[:, : EXPERTS.top_k]
    return Routes(EXPERTS, rows.astype(EXPERTS.dtype)).encode(length=length)


# ------------------------------------------------------------------------------------------------------------ workers


class EngineWorld(WorldOfGroups):
    """Workers with real engines and interfaces. Each model has one rank."""

    def set_up(self, config: ExperimentConfig, mfcs: list[MFCDef], models: list[Any], folder: Path) -> None:
        tokenizer = config.model_path
        self.folder = folder
        self.samples: list[dict[str, SequenceSample]] = [{} for _ in range(self.num_workers)]
        self.models = {model.name: model for model in models}
        self.kept_weights = KeptWeights(self.models)
        torch.manual_seed(3)
        own = [model for model in models if model.kind != "none" and not model.base_of]
        self.engines = {model.name: TrainEngine(model, config.train) for model in own}
        self.engines |= {model.name: base_engine(self.engines[model.base_of]) for model in models if model.base_of}
        for engine in self.engines.values():
            if engine.routes is not None:
                engine.routes._is_checked = True  # the experts are drawn
        self.interfaces = {
            mfc.name: make_interface(mfc, config.train, seed=5, tokenizer_path=tokenizer) for mfc in mfcs
        }
        cpu = {model.name: CpuRanks(model.name, None) for model in models if model.kind == "none"}
        first = {name: interface.state() for name, interface in self.interfaces.items()}
        self.calls_of = SimpleNamespace(
            engines=self.engines,
            _without_model=cpu,
            _interfaces=self.interfaces,
            _first_states=first,
            _totals={},
            _mfcs={mfc.name: mfc for mfc in mfcs},
            _config=SimpleNamespace(train=config.train),
        )
        self.calls_of._check_first_step = lambda *_: {}  # it changes no weights
        self.lost, self.errors = False, list[Exception]()

    def restart_cpu_workers(self) -> None:
        for model in self.models.values():
            if model.kind == "none":
                (worker,) = self.placed(model.name).workers
                for mfc in self.graph.mfcs.values():
                    if mfc.model == model.name:
                        self.calls_of._totals.pop(mfc.name, None)
                self.samples[worker].clear()
                self.begin_again(worker)

    def keep(self, worker: int, samples: Mapping[str, SequenceSample]) -> None:
        held = self.samples[worker]
        for group, sample in samples.items():
            held[group] = held[group].update(sample) if group in held else sample

    async def execute(self, body: Any, me: int) -> CallResult:
        if isinstance(body, ExecuteMFC):
            try:
                return self.compute(body, me)
            except Exception as error:
                self.errors.append(error)
                raise
        if isinstance(body, FetchData):
            for part in body.parts:
                theirs = self.samples[part.source]
                self.keep(me, {group: theirs[group].select_keys(part.keys) for group in part.ids})
            return CallResult(num_bytes=1)
        if isinstance(body, ReadValues):
            values = [self.samples[me][group].slices(body.key)[0] for group in body.ids]
            return CallResult(values=[[sequence.tolist() for sequence in group] for group in values])
        if isinstance(body, Redistribute):
            for step in body.steps:
                await self.move(step, me)
        elif isinstance(body, Reallocate):
            # Each worker reaches this copy in its own order of calls
            if me in self.placed(body.source).workers:
                self.wires[body.source, body.target].put_nowait(self.weights_of(body.source))
            if me in self.placed(body.target).workers:
                self.blend(body.target, await self.wires[body.source, body.target].get(), body.share)
        elif isinstance(body, KeepWeights):
            self.kept_weights.keep(body, self.engines[body.source], None)
        elif isinstance(body, FetchWeights):
            kept = self.kept_weights.kept[body.model]
            if kept.weight_version != body.weight_version:
                return CallResult(unfetched=f"weights {kept.weight_version} are kept")
            self.blend(body.model, kept.parts, 1.0)
        elif isinstance(body, ClearData):
            for group in body.ids:
                self.samples[me].pop(group, None)
        return CallResult()

    def placed(self, model: str) -> ModelPlacement:
        return ModelPlacement.of(self.models[model])

    def weights_of(self, model: str) -> dict[str, torch.Tensor]:
        engine = self.engines[model]
        engine.onload()
        return {name: parameter.detach().clone() for name, parameter in engine.own_parameters().items()}

    def blend(self, model: str, weights: Mapping[str, torch.Tensor], share: float) -> None:
        self.engines[model].onload()
        with torch.no_grad():
            for name, parameter in self.engines[model].own_parameters().items():
                parameter.lerp_(weights[name].to(parameter.dtype), share) if share < 1 else parameter.copy_(
                    weights[name]
                )

    async def move(self, step: Any, me: int) -> None:
        for transfer in transfers(step):
            for target in transfer.targets:
                if transfer.source == me:
                    mine = self.samples[me]
                    sent = {group: mine[group].select_keys(transfer.keys) for group in transfer.ids}
                    self.wires[me, target].put_nowait(sent)
                elif target == me:
                    self.keep(me, await self.wires[transfer.source, me].get())

    def compute(self, body: ExecuteMFC, me: int) -> CallResult:
        function, ids = self.graph.mfcs[body.mfc], body.parts[0]
        keys = [key for key in function.input_keys if key not in body.missing]
        groups = [self.samples[me][group].select_keys(keys) for group in ids]
        sample = SequenceSample.gather(groups) if groups else None
        calls: Any = self.calls_of
        made, stats = Calls._compute_on(calls, function.model, sample, body)
        if self.models[function.model].offload:
            self.engines[function.model].offload(folder=self.folder)
        if made is not None:
            self.keep(me, {part.ids[0]: part for part in made.select_keys(function.output_keys).unpack()})
        state = self.interfaces[body.mfc].state()
        return CallResult(ids=ids, keys=list(function.output_keys), stats=dict(stats), seconds=0.1, state=state)


class InOrderOfArrival(Minibatches):
    """The minibatches of a whole batch that train.streaming makes of its parts."""

    def passes(self, batch_ids: Sequence[str], version: int) -> list[list[str]]:
        arrived = [batch_ids[number] for part in PARTS[version % len(PARTS)] for number in part]
        first = [part.tolist() for part in np.array_split(arrived, self.num)]
        later = [
            split_minibatches(batch_ids, self.num, seed=self.seed, version=version, epoch=epoch)
            for epoch in range(1, self.epochs)
        ]
        return [*first, *(ids for drawn in later for ids in drawn)]


@dataclass
class Outcome:
    """The result of the steps."""

    weights: dict[str, dict[str, torch.Tensor]]
    states: dict[str, dict[str, float]]
    stats: list[dict[str, float]]


# Statistics of how a step was computed
HOW = ("arriving/", "missing/", "streaming/", "memory/", "redistribution/", "time/")


async def outcome_of(config: ExperimentConfig, features: list[Feature], folder: Path, num_steps: int = 3) -> Outcome:
    """folder: exists."""
    train = config.train
    graph = without_generation(list(build_dataflow(train, config.mode).mfcs.values()))
    allocation = allocation_of(config)
    placements, placed = place(allocation, graph)
    models = models_of(placements, placed, train, config.model_path)
    mfcs = [MFCDef.of(mfc) for mfc in placed]
    graph = without_generation(mfcs)
    groups = worker_groups_of(placements, placed, train, num_workers=allocation.num_model_workers, mode=config.mode)
    everything = [ModelPlacement.of(model) for model in models]
    detached = [list(group) for group in groups.detached]
    options: dict[str, Any] = {"train": train, "world_of": EngineWorld}
    async with running_groups(graph, everything, allocation.num_model_workers, detached, **options) as (world, master):
        world.set_up(config, mfcs, models, folder)
        if (
            not train.streaming
            and not schema.needs_whole_batch(train)
            and any("streaming" in feature.how for feature in features)
        ):
            for interface in world.interfaces.values():
                if hasattr(interface, "minibatches"):
                    interface.minibatches = InOrderOfArrival(**vars(interface.minibatches))
        master.executor = executor_of(
            graph,
            everything,
            master.buffer,
            master.tracker,
            master.caller,
            master.client,
            ParameterHooks(mfcs, train),
            detached=master.detached,
            refresher=master.refresher,
            function=StepFunction(train.step, 60.0),
        )
        repeated = master.detached.repeated

        async def sometimes(what: str, group: Any, work: Any, *, on_missing: str = "wait") -> Any:
            if on_missing == "continue" and world.lost and what.startswith("MFC"):
                raise GroupMissingError(f"{what}: its group is missing")
            return await repeated(what, group, work, on_missing=on_missing)

        master.detached.repeated = sometimes
        async with contextlib.AsyncExitStack() as stack:
            # An engine that stays offloaded leaves its file open
            stack.callback(lambda: [engine.onload() for engine in world.engines.values()])
            if train.arriving_inference:
                arriving = asyncio.create_task(master.executor.process_arriving(0))
                stack.callback(arriving.cancel)
                await asyncio.sleep(0)
            stats = []
            for version in range(num_steps):
                world.lost = version == 1 and any(feature.lost for feature in features)
                stats.append(await _step(world, master, config, features, version))
                if "@" in config.allocation:  # generation has the devices
                    for engine in world.engines.values():
                        engine.offload(folder=folder)
            if train.arriving_inference and arriving.done():
                arriving.result()
        for name in world.models:
            await master.refresher.refreshed(name)
        moving = ["ema", *(["ref"] if train.ref.update_interval else [])]
        kept = [name for name, model in world.models.items() if model.trainable or name in moving]
        return Outcome({name: world.weights_of(name) for name in kept}, master.executor.states, stats)


async def _step(
    world: EngineWorld, master: Any, config: ExperimentConfig, features: list[Feature], version: int
) -> Any:
    batch = make_batch(
        version,
        dense=config.train.dense_rewards,
        branches=config.train.branches,
        words=bool(config.train.words),
        broken=any(feature.broken for feature in features),
        routes=config.train.routes != "off",
    )
    for number, (ticket, sample) in enumerate(zip(batch.ids, batch.unpack(), strict=True)):
        lengths = sample.seqlens["packed_input_ids"][0]
        meta = TrajectoryMeta(
            ticket_id=ticket,
            locator=Locator(0, NUM_GROUPS * version + number),
            attempt=1,
            head=0,
            keys=list(sample.keys),
            seqlens=list(lengths),
            response_lengths=[1] * GROUP_SIZE,
            rewards=sample.data["rewards"].tolist(),
            version_start=[0] * GROUP_SIZE,
            version_end=[0] * GROUP_SIZE,
            birth_time=0.0,
        )
        assert master.buffer.put(meta).verdict == "stored"
        master.tracker.add(0, [ticket], meta.keys)
        world.samples[0][ticket] = sample
    parts = PARTS[version % len(PARTS)] if config.train.streaming else [list(range(NUM_GROUPS))]
    restarts = any(feature.restarts for feature in features)
    for part in parts[:-1]:
        if restarts:
            world.restart_cpu_workers()
        await master.executor.execute_part([batch.ids[number] for number in part], version)
    if restarts:
        world.restart_cpu_workers()
    result = await master.step(list(batch.ids), version, detached=False)
    return {name: value for name, value in result.stats.items() if not name.startswith(HOW)}


# --------------------------------------------------------------------------------------------------------- the table


def fields_of_features() -> dict[str, set[str]]:
    """By config class: the fields that some feature sets."""
    found: dict[str, set[str]] = {name: set() for name in LEFT_OUT}
    for feature in FEATURES.values():
        for path, value in [*feature.what.items(), *feature.how.items()]:
            first, _, rest = path.partition(".")
            found["train"].add(first)
            if rest:
                found[f"train.{first}"].add(rest)
            if is_dataclass(value) and f"train.{path}" in found:
                default = type(value)()
                changed = {f.name for f in fields(value) if getattr(value, f.name) != getattr(default, f.name)}
                found[f"train.{path}"] |= changed
    return found


def fields_of_schema() -> dict[str, set[str]]:
    classes = {
        "train": schema.TrainConfig,
        "train.ppo": schema.PPOConfig,
        "train.critic": schema.CriticConfig,
        "train.ref": schema.RefConfig,
        "train.ptx": schema.PtxConfig,
        "train.lora": schema.LoraConfig,
    }
    return {name: {entry.name for entry in fields(of)} for name, of in classes.items()}
