"""Runs in which generation and training are paced. Everything between them is real, and benchmarks/overlap.py measures it."""

import importlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from whole_runs import ROOT, assert_each_prompt_trained_once, busy_buckets, trained_events

from asyncrl.testing.runs import assert_nothing_left, processes_of, train_steps
from tests.support.paced_run import response_lengths

BATCH, GROUP, STEPS, SEED = 4, 2, 3, 1
FILL, SPARE = 2, 1  # steps before and after the measured ones

pytestmark = [pytest.mark.timeout(900), pytest.mark.release]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("paced") / "overlap"


@pytest.fixture(scope="module")
def result(folder: Path) -> Mapping[str, Any]:
    """The benchmark at eta 0 and 4, with the smallest sizes."""
    options = f"--json-only --rounds 1 --etas 0 4 --scenarios balanced --steps {STEPS} --step-s 0.4"
    size = f"--batch {BATCH} --group {GROUP} --servers 1 --slots 4 --folder {folder}"
    command = [sys.executable, str(ROOT / "benchmarks" / "overlap.py"), *options.split(), *size.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    found: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_of(folder: Path, eta: int) -> Path:
    (found,) = (folder / "runs" / "paced").glob(f"eta{eta}-1")
    return found


def test_the_result_has_its_shape(result: Mapping[str, Any]) -> None:
    assert (result["name"], result["areal_headline"], result["peers_missing"]) == ("overlap", 2.77, [])
    assert result["ratio"]["ideal"].keys() == {"eta0", "eta4"}
    assert result["ratio"]["eta0"].keys() == {"eta4"}
    assert all(share > 0 for share in result["ratio"]["ideal"].values())
    assert result["value"] == pytest.approx(100 * result["ratio"]["ideal"]["eta4"], rel=1e-3)
    assert all(case["cpu_share"] > 0 for case in result["cases"].values())


@pytest.mark.parametrize("eta", [0, 4])
def test_every_prompt_is_trained_once_and_none_is_dropped(result: Mapping[str, Any], folder: Path, eta: int) -> None:
    run_dir = run_of(folder, eta)
    assert_each_prompt_trained_once(run_dir, FILL + eta + STEPS + SPARE, BATCH)
    case = result["cases"][f"eta{eta}"]
    assert (case["dropped"], case["rejected"]) == (0, 0)
    assert case["offpolicy_max"] <= eta
    assert_nothing_left(run_dir)
    assert not processes_of(folder)


@pytest.mark.parametrize("eta", [0, 4])
def test_a_response_has_its_length_however_often_it_was_interrupted(
    result: Mapping[str, Any], folder: Path, eta: int
) -> None:
    run_dir = run_of(folder, eta)
    lengths = response_lengths(SEED, range(1000), GROUP)
    steps = train_steps(run_dir)
    trained = [[lengths[group["prompt"][1]] for group in event["groups"]] for event in trained_events(run_dir)]
    assert [step["batch/num_generated_tokens"] for step in steps] == [
        sum(length for group in batch for length in group) for batch in trained
    ]
    mixed = sum(step["batch/num_sequences_of_two_versions"] for step in steps)
    assert (mixed > 0) == (eta > 0)  # such sequences were interrupted by an update and resumed


def test_only_the_asynchronous_run_samples_while_it_trains(result: Mapping[str, Any], folder: Path) -> None:
    """The journals resolve a tenth of a second. The tenths at either end of a train step are not counted."""
    sampled = Counter[int]()
    for eta in (0, 4):
        run_dir = run_of(folder, eta)
        busy = busy_buckets(run_dir)
        for event in trained_events(run_dir):
            sampled[eta] += len(busy & set(range(int(event["start"] * 10) + 2, int(event["end"] * 10) - 1)))
    assert sampled[0] == 0
    assert sampled[4] > 0


def test_what_is_measured_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fabricated run: a step ends every 2 s, the trainer works for 1.5 s of each, and slots are busy half of the time."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    overlap = importlib.import_module("overlap")
    numbers = {
        "reward/mean": 0.0,
        "time/wait_data_s": 0.4,
        "time/wait_weights_s": 0.1,
        "time/servers_updating_s": 0.2,
        "batch/num_generated_tokens": 50.0,
    }
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": n, "time": 100.0 + 2 * n, "offpolicy/head_mean": n, "offpolicy/head_max": n, **numbers})
            + "\n"
            for n in range(1, 6)
        )
    )
    (tmp_path / "journal").mkdir()
    for server in range(2):
        records = [{"time": 100 + second, "tokens": 10, "version": "v"} for second in range(20)]
        text = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / "journal" / f"generation_server_{server}.jsonl").write_text(text)
    summary = {"dropped_groups": 1, "rejected": {"a": 2, "b": 1}}
    lengths = {"trained_response_length_mean": 20.0, "finished_response_length_mean": 25.0}
    (tmp_path / "summary.json").write_text(json.dumps({**summary, **lengths}))
    pace = overlap.Pace(tokens_per_s=10.0, step_s=1.5, prompt_tokens=7)
    found = overlap.measure(tmp_path, 2, 4, pace, slots=4)  # from 104 to 108 s
    assert found == pytest.approx(
        {
            "share": 0.75,
            "steps_per_s": 0.5,
            "trainer_busy": 0.75,
            "slots_busy": 0.5,
            "waits_data": 0.2,
            "waits_weights": 0.05,
            "servers_updating": 0.1,
            "offpolicy_mean": 3.5,
            "offpolicy_max": 4,
            "dropped": 1,
            "rejected": 3,
            "length_bias": 0.8,
            "measured_s": 4.0,
        }
    )
    assert overlap.speedups(
        {"eta0": {"steps_per_s": 2}, "eta4": {"steps_per_s": 5}, "training_eta4": {"steps_per_s": 1}}
    ) == {"eta4": 2.5}
