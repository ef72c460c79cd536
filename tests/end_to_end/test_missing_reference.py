"""The worker of a detached reference and of a detached actor_inf is killed at every start. With on_missing=continue the run trains
without the KL term and with the servers' logprobs as proximal ones, restarts the worker without limit, and uses both models with
the current weights once they are back.

With train.ref.update_interval=1 the reference has the weights with which each step begins, like actor_inf. So the KL of a step
between actor_inf and reference is 0 if both have the same weights. With one minibatch the KL between the policy and actor_inf is 0
if actor_inf has the current weights, and not 0 if it has those of its path.
"""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path

import psutil
from whole_runs import LEARNABLE, Gate

from asyncrl.testing.runs import RunHandle, assert_nothing_left, launch, make_tiny_run, train_steps
from asyncrl.weights.lineage import audit

STEPS, BATCH, LIMIT_S = 14, 4, 300.0
WORKER = "model_worker/1"
SETTINGS = [
    Gate.OVERRIDE,
    "allocation=transformers.d1+d1+ref_inf:d1,actor_inf:d1",
    "rollout.group_size=1",
    f"train.batch_size={BATCH}",
    f"train.max_steps={STEPS}",
    "train.optimizer.lr=1e-3",
    "train.ppo.minibatches=1",
    "train.ppo.advantage_norm=batch",
    "train.ppo.kl_coef=0.5",
    "train.ref.update_interval=1",
    "train.ref.on_missing=continue",
    "train.actor_inf_on_missing=continue",
    "train.missing_after_s=2",
    "runtime.max_restarts=1",
    "runtime.start_timeout_s=300",
    "checkpoint.every_s=0",
]


@contextlib.contextmanager
def killed_at_every_start(run: RunHandle):
    """Kill the worker and each of its successors, until the block ends."""
    ended = threading.Event()

    def kill() -> None:
        while not ended.wait(0.05):
            with contextlib.suppress(AssertionError, psutil.NoSuchProcess):
                run.worker(WORKER).kill()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def num_starts(run: RunHandle) -> int:
    log = run.run_dir / "logs" / "attempt_1" / "model_worker_1.log"
    return log.read_text().count(", detached, in incarnation")


def test_the_run_continues_without_reference_and_actor_inf_and_with_them_once_they_are_back(tmp_path: Path) -> None:
    config = make_tiny_run(tmp_path, num_prompts=STEPS * BATCH)
    gate = Gate(config, BATCH, LEARNABLE)
    gate.let(2)
    with launch(config, *SETTINGS) as run:
        run.wait_for_step(2, LIMIT_S)
        with killed_at_every_start(run):
            run.wait_for_output(f"{WORKER} was killed by signal SIGKILL", LIMIT_S)
            gate.let(5)
            run.wait_for_step(5, LIMIT_S)
            run.wait_for_output("the run continues without it meanwhile", LIMIT_S)
            count = num_starts(run)
        run.wait_until(lambda: num_starts(run) > count, "the worker was back", LIMIT_S)
        gate.open()
        assert run.wait(LIMIT_S) == 0, run.output()
        steps = train_steps(run.run_dir)
        missing = [int(step["missing/ref_inf"]) for step in steps]
        assert missing[:5] == [0, 0, 1, 1, 1]
        assert missing[-1] == 0, missing
        for step in steps:
            assert step["missing/actor_inf"] == step["missing/ref_inf"]
            assert ("kl/sequence_mean" in step) == (not step["missing/ref_inf"])
            if not step["missing/actor_inf"]:
                assert abs(step["kl/sequence_mean"]) < 1e-5, "reference and actor_inf have different weights"
                assert abs(step["actor/approx_kl"]) < 1e-5, "actor_inf has older weights"
        assert all(step["actor/grad_norm"] > 0 for step in steps), "the actor has not been trained"
        found = audit(run.run_dir)
        assert (found.problems, found.complete, found.steps) == ([], True, STEPS)
        assert [stretch.attempt for stretch in found.lineage] == [1], "the trainer group was restarted"
        summary = json.loads((run.run_dir / "summary.json").read_text())
        assert summary["steps_without"] == {"actor_inf": sum(missing), "ref_inf": sum(missing)}
        assert f"ref_inf in {sum(missing)} steps" in " ".join(run.output().split())
        assert_nothing_left(run.run_dir)
