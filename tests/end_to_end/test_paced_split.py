"""The advice about an idle side, against all splits tried: whole runs of four devices, whose two sides keep a set pace."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean

import pytest

from asyncrl.cli.advice import advise
from asyncrl.cli.run_files import RunFiles
from asyncrl.testing.runs import train_steps
from tests.support.paced_run import PROMPT_TOKENS, launch_paced, make_paced_run, response_lengths
from tests.support.paced_workers import Pace

DEVICES, ETA, BATCH, GROUP, SLOTS, SEED = 4, 2, 16, 4, 16, 1
FILL, STEPS = ETA + 2, 8  # steps before the measured ones, and these
NUM_PROMPTS = (FILL + STEPS + ETA + 2) * BATCH
LIMIT_S = 240.0

pytestmark = [pytest.mark.timeout(1800), pytest.mark.release]


class Tried:
    """Runs of a workload. generation, training: seconds of a batch on one device of a side, if that is always busy."""

    def __init__(self, folder: Path, generation: float, training: float) -> None:
        lengths = response_lengths(SEED, range((FILL + STEPS) * BATCH), GROUP)
        batch_tokens = BATCH * GROUP * fmean(length for group in lengths for length in group)
        self._folder, self._rate, self._training = folder, batch_tokens / (SLOTS * generation), training
        sizes = {"num_prompts": NUM_PROMPTS, "batch_size": BATCH, "group_size": GROUP, "slots": SLOTS}
        self._config = make_paced_run(folder, servers=1, **sizes)

    def run_dir(self, servers: int) -> Path:
        """Run with this number of servers."""
        trainers = DEVICES - servers
        pace = Pace(
            tokens_per_s=self._rate,
            step_s=self._training / trainers,
            load_s=0.0,
            seed=SEED,
            prompt_tokens=PROMPT_TOKENS,
        )
        overrides = [
            f"trial=servers{servers}",
            f"allocation=transformers.d{servers}p1m1+d{trainers}p1m1",
            f"manager.max_head_offpolicyness={ETA}",
            f"train.max_steps={FILL + STEPS}",
        ]
        with launch_paced(self._config, pace, *overrides) as run:
            assert run.wait(LIMIT_S) == 0, run.output()
            return run.run_dir


def step_s(run_dir: Path) -> float:
    """The mean time of a measured step."""
    times = [step["time"] for step in train_steps(run_dir)]
    return float(times[-1] - times[FILL - 1]) / (len(times) - FILL)


@pytest.mark.parametrize(
    ("generation", "training", "present", "title"),
    [(6.0, 2.0, 1, "the trainer is idle"), (2.0, 6.0, 3, "the servers are idle"), (4.0, 4.0, 1, "the trainer is idle")],
    ids=["generation is slow", "training is slow", "both are equal"],
)
def test_the_idle_side_is_named_and_the_split_is_within_a_tenth_of_the_best(
    generation: float, training: float, present: int, title: str, tmp_path: Path
) -> None:
    workload = Tried(tmp_path, generation, training)
    runs = {servers: workload.run_dir(servers) for servers in range(1, DEVICES)}
    tried = {servers: step_s(run_dir) for servers, run_dir in runs.items()}
    run = RunFiles(runs[present]).read().runs("paced", going_on=False)[-1]
    (found,) = [symptom for symptom in advise(run) if "idle" in symptom.title]
    assert found.title == title
    split = re.search(r"about (\d) should generate", found.remedy)
    assert split, found
    assert tried[int(split[1])] <= 1.1 * min(tried.values()), (tried, found)
    assert tried[present] > 1.2 * min(tried.values()), tried
