"""The scenario of a seed: the shape of the run, its speed, and its faults with their times."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl.config.schema import (
    CheckpointConfig,
    ConfigError,
    EvalConfig,
    ExperimentConfig,
    GenerationConfig,
    LoraConfig,
    ManagerConfig,
    NameResolveConfig,
    PPOConfig,
    PromptSourceConfig,
    RefConfig,
    RolloutConfig,
    RuntimeConfig,
    SamplingConfig,
    TaskConfig,
    TrainConfig,
    WeightsConfig,
)
from asyncrl.launch.experiment import validate
from asyncrl.launch.program import groups_that_restart_alone

NUM_STEPS = 50  # least number of train steps of a simulated run
_HERE = "tests.simulation.processes"


@dataclass(frozen=True)
class Fault:
    """A fault that strikes at a time, or some time after the nth event of a kind."""

    kind: str  # kill | power | torn | freeze | cut | messages | requests | outage | slow_disk | late_disk | damage
    target: str = ""  # a process; for a cut, one process to cut off from all others, or two names separated by a space
    at: float = 0.0  # seconds; after the event, if `event` is set
    event: str = ""  # kind of the event that the fault waits for; "" if it waits for none
    count: int = 0  # the fault waits for the nth event of this kind
    lasts_s: float = 0.0
    strength: float = 0.0

    def __str__(self) -> str:
        when = f"{self.at:.3f} s after {self.event} number {self.count}" if self.event else f"at {self.at:.3f} s"
        lasts = f" for {self.lasts_s:.3f} s" if self.lasts_s else ""
        strength = f" (strength {self.strength:.3f})" if self.strength else ""
        return f"{self.kind} {self.target}{lasts} {when}{strength}"


@dataclass(frozen=True)
class Scenario:
    """A run to be simulated."""

    seed: int
    batch_size: int
    eta: int
    num_prompts: int
    num_epochs: int
    num_servers: int
    num_heads: int
    num_rollout_workers: int
    slots: int
    tokens_per_s: float
    step_s: float
    write_s: float
    load_s: float
    latency_s: float
    heartbeat_s: float
    lease_s: float
    overdue: str
    overdue_wait_s: float
    max_issues: int
    max_groups_per_server: int
    routing: str
    update_fraction: float
    interrupt: str
    chunk: int
    one_mfc: bool
    reject_share: float = 0.0
    release_share: float = 0.0
    slow_share: float = 0.0
    slow_s: float = 0.0
    checkpoint_steps: int = 0
    streaming: str = ""  # train.streaming_order; "": train.streaming is off
    reference: str = ""  # train.ref.on_missing of a reference on workers of its own; "": no reference
    arriving: bool = False
    has_cpu_worker: bool = False
    shares_devices: bool = False
    full_every: int = 1
    has_step: bool = False  # the step is a user's function
    generates: bool = False  # which generates its batches
    faults: tuple[Fault, ...] = field(default=())

    @property
    def num_steps(self) -> int:
        """Train steps without rejections."""
        return -(-self.num_prompts * self.num_epochs // self.batch_size)

    @property
    def allocation(self) -> str:
        servers, heads = f"transformers.d{self.num_servers}p1m1", f"d{self.num_heads}p1m1"
        if self.shares_devices:
            servers, heads = f"{servers}@0-{self.num_servers - 1}", f"{heads}@0-{self.num_heads - 1}"
        sets = [servers, heads]
        if self.reference:
            sets.append("ref_inf:d1p1m1" + f"@{max(self.num_servers, self.num_heads)}" * self.shares_devices)
        if self.has_cpu_worker:
            sets.append("advantages:cpu1")
        return "+".join(sets)

    @property
    def detached(self) -> list[str]:
        """Model workers that restart alone."""
        if self.num_model_workers == self.num_heads:
            return []
        return [name for group in groups_that_restart_alone(self.config()) for name in group]

    @property
    def num_model_workers(self) -> int:
        return self.num_heads + bool(self.reference) + self.has_cpu_worker

    @property
    def limit_s(self) -> float:
        """Time after which the run counts as stuck. Each fault adds the longest delay that it can cause."""
        return 400.0 + 120.0 * len(self.faults)

    def config(self) -> ExperimentConfig:
        """The config, as a user would write it."""
        return ExperimentConfig(
            experiment="simulated",
            trial=f"s{self.seed}",
            fileroot="/simulated",
            seed=self.seed,
            allocation=self.allocation,
            model_path="/simulated/model",
            prompts=PromptSourceConfig(path="/simulated/prompts"),
            rollout=RolloutConfig(
                num_workers=self.num_rollout_workers,
                group_size=1,
                sampling=SamplingConfig(max_new_tokens=128),
                new_tokens_per_chunk=self.chunk,
                tasks={"default": TaskConfig(agent=f"{_HERE}:SimAgent", env=f"{_HERE}:SimEnv")},
                max_concurrent_per_worker=max(2, (1 + self.eta) * self.batch_size),
                request_timeout_s=60.0,
                rollout_timeout_s=120.0,
            ),
            generation=GenerationConfig(interrupt=self.interrupt, max_running_requests=self.slots, max_queue=256),
            manager=ManagerConfig(
                max_head_offpolicyness=self.eta,
                routing=self.routing,
                max_groups_per_server=self.max_groups_per_server,
                update_fraction=self.update_fraction,
                update_timeout_s=20.0,
                lease_s=self.lease_s,
                heartbeat_s=self.heartbeat_s,
                overdue=self.overdue,
                overdue_wait_s=self.overdue_wait_s,
                max_issues=self.max_issues,
            ),
            train=TrainConfig(
                batch_size=self.batch_size,
                num_epochs=self.num_epochs,
                ppo=PPOConfig(
                    use_decoupled_loss=False, minibatches=1, advantage_norm="none", kl_coef=0.1 * bool(self.reference)
                ),
                ref=RefConfig(on_missing=self.reference or "wait"),
                missing_after_s=5.0,
                streaming=bool(self.streaming),
                streaming_order=self.streaming or "groups",
                streaming_tokens=40,
                arriving_inference=self.arriving,
                lora=LoraConfig() if self.interrupt == "finish" else None,
                step=f"{_HERE}:in_orders" if self.generates else f"{_HERE}:in_halves" if self.has_step else "",
                call_timeout_s=60.0,
                data_timeout_s=300.0,
            ),
            eval=EvalConfig(),
            # simulated weights have no text to score
            weights=WeightsConfig(keep=3, verify_logprobs=False, full_every=self.full_every),
            checkpoint=CheckpointConfig(every_steps=self.checkpoint_steps, every_s=0.0, keep_last=2),
            name_resolve=NameResolveConfig(endpoints=["simulated:1"]),
            runtime=RuntimeConfig(resend_after_s=1.0, start_timeout_s=60.0, stop_timeout_s=5.0, max_restarts=100),
            tensorboard=False,
        )


def scenario_of(seed: int, *, faults: bool = True, **changes: Any) -> Scenario:
    """The scenario of a seed."""
    draw = random.Random(f"scenario {seed}")
    batch_size = draw.choice((1, 1, 1, 2, 2, 3))
    eta = draw.choice((0, 1, 1, 2, 2, 4))
    num_epochs = draw.choice((1, 1, 2))
    num_prompts = -(-batch_size * (NUM_STEPS + 2) // num_epochs) + draw.randrange(0, 2 * batch_size)
    heartbeat_s = draw.choice((1.0, 2.0, 2.0))
    scenario = Scenario(
        seed=seed,
        batch_size=batch_size,
        eta=eta,
        num_prompts=num_prompts,
        num_epochs=num_epochs,
        num_servers=draw.choice((1, 1, 1, 2, 2, 3)),
        num_heads=draw.choice((1, 1, 1, 2)),
        num_rollout_workers=draw.choice((1, 1, 2, 2, 3)),
        slots=draw.choice((1, 4, 32)),
        tokens_per_s=draw.choice((100.0, 300.0, 1000.0)),
        step_s=draw.choice((0.01, 0.05, 0.2)),
        write_s=draw.choice((0.005, 0.03, 0.2)),
        load_s=draw.choice((0.0, 0.02, 0.2)),
        latency_s=draw.choice((0.0002, 0.001, 0.004)),
        heartbeat_s=heartbeat_s,
        lease_s=heartbeat_s * draw.choice((2.5, 4.0, 7.0)),
        overdue=draw.choice(("wait", "wait", "wait", "drop", "train")),
        overdue_wait_s=draw.choice((5.0, 30.0, 600.0)),
        max_issues=draw.choice((3, 10, 10)),
        max_groups_per_server=draw.choice((0, 0, 2)),
        routing=draw.choice(("round_robin", "least_requests", "least_token_usage")),
        update_fraction=draw.choice((1.0, 0.5)),
        interrupt=draw.choice(("abort", "abort", "retract", "wait")),
        chunk=draw.choice((8, 1024, 1024, 1024)),
        one_mfc=draw.random() < 0.8,
        checkpoint_steps=draw.choice((1, 3, 10, 10, 25)),
    )
    scenario = _with_features(scenario)
    fits = not (scenario.eta or scenario.streaming or scenario.arriving or scenario.overdue == "train")
    if fits and random.Random(f"generates {seed}").random() < 0.8:
        scenario = replace(scenario, generates=True)
    if faults:
        scenario = _with_faults(scenario, draw)
    return replace(scenario, **changes)


def _with_features(scenario: Scenario) -> Scenario:
    """Switch on features in a random order, each unless the checks of a config refuse it beside those before it."""
    draw = random.Random(f"features {scenario.seed}")
    features: list[dict[str, Any]] = [
        {"streaming": draw.choice(("", "", "", "groups", "balanced", "tokens"))},
        {"reference": draw.choice(("", "", "", "", "wait", "continue"))},
        {"arriving": draw.random() < 0.7},
        {"has_cpu_worker": draw.random() < 0.2},
        {"shares_devices": draw.random() < 0.4},
        {"full_every": draw.choice((1, 1, 2, 4))},
        {"has_step": draw.random() < 0.3},
    ]
    draw.shuffle(features)
    for feature in [*features, *features]:  # twice, because one may need a later one
        changed = replace(scenario, **feature)
        if changed.reference or changed.has_cpu_worker:
            changed = replace(changed, one_mfc=False)
        if changed != scenario and not _problem(changed):
            scenario = changed
    return scenario


def _problem(scenario: Scenario) -> str:
    try:
        validate(scenario.config())
    except ConfigError as error:
        return str(error)
    return ""


_EVENTS = ("granted", "pushed", "stored", "acked", "trained", "committed", "published", "loaded", "echoed", "snapshot")


def _with_faults(scenario: Scenario, draw: random.Random) -> Scenario:
    """Add faults to a scenario. Some seeds get none; there the invariants are strictest."""
    scenario = replace(
        scenario,
        reject_share=draw.choice((0.0, 0.0, 0.02)),
        release_share=draw.choice((0.0, 0.0, 0.03)),
        slow_share=draw.choice((0.0, 0.0, 0.1)),
        slow_s=draw.choice((0.1, 1.0, 5.0)),
    )
    if scenario.reject_share:  # rejected prompts are not trained: add prompts to keep the number of steps
        scenario = replace(scenario, num_prompts=scenario.num_prompts + -(-scenario.num_prompts // 8))
    count = draw.choice((0, 1, 2, 3, 4, 6))
    return replace(scenario, faults=tuple(_draw_fault(scenario, draw) for _ in range(count)))


def _draw_fault(scenario: Scenario, draw: random.Random) -> Fault:
    kind = draw.choice(
        (
            "trainer_group",
            "trainer_group",
            "power",
            "torn",
            "kill",
            "kill",
            "kill",
            "freeze",
            "freeze",
            "cut",
            "messages",
            "requests",
            "outage",
            "slow_disk",
            "late_disk",
        )
    )
    alone = [
        "gserver_manager/0",
        *(f"rollout_worker/{i}" for i in range(scenario.num_rollout_workers)),
        *(f"generation_server/{i}" for i in range(scenario.num_servers)),
        *scenario.detached,
    ]
    workers = [f"model_worker/{i}" for i in range(scenario.num_model_workers)]
    training = ["master/0", *(name for name in workers if name not in scenario.detached)]
    target, lasts_s, strength = "", 0.0, 0.0
    if kind == "trainer_group":
        kind, target = "kill", draw.choice(training)
    elif kind == "power":
        lasts_s = draw.choice((0.5, 5.0))
    elif kind == "kill":
        target = draw.choice(alone)
    elif kind == "freeze":
        target, lasts_s = draw.choice(alone + training), draw.choice((0.05, 0.5, 3.0, 10.0, 20.0))
        if draw.random() < 0.1:
            lasts_s = 45.0
    elif kind == "cut":
        target = " ".join(sorted(draw.sample(alone + training, draw.choice((1, 2, 2)))))  # one: cut off from all others
        lasts_s, strength = draw.choice((0.2, 2.0, 10.0, 25.0)), draw.random()
    elif kind in ("messages", "requests"):
        lasts_s, strength = draw.choice((0.5, 5.0, 20.0)), draw.random()
    elif kind == "outage":
        lasts_s = draw.choice((0.5, 4.0, 30.0))
    elif kind == "slow_disk":
        target, lasts_s, strength = (
            draw.choice(alone + training),
            draw.choice((1.0, 10.0)),
            draw.choice((0.2, 1.0, 4.0)),
        )
    elif kind == "late_disk":
        lasts_s, strength = draw.choice((1.0, 10.0)), draw.choice((0.1, 1.0))
    if draw.random() < 0.8:
        return Fault(
            kind,
            target,
            draw.random() * draw.choice((0.001, 0.02, 0.3)),
            draw.choice(_EVENTS),
            draw.randrange(1, 60),
            lasts_s,
            strength,
        )
    return Fault(kind, target, draw.random() * 12.0, lasts_s=lasts_s, strength=strength)
