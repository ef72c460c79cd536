"""A run whose weights travel over the network: every version reaches every server, and computes there as in the trainer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl.messages import WeightVersion
from asyncrl.testing.runs import assert_nothing_left, launch, make_tiny_run, train_steps
from asyncrl.weights import verify_version, version_dir

pytestmark = pytest.mark.timeout(300)

STEPS = 4


def test_a_run_with_broadcasts(tmp_path: Path) -> None:
    """Two servers, two trainers of which one sends; verify_logprobs compares each server with the trainer after each update."""
    config = make_tiny_run(tmp_path)
    overrides = (
        "allocation=transformers.d2+d2",
        f"train.max_steps={STEPS}",
        "weights.transport=broadcast",
        "weights.bucket_bytes=20_000",
        "weights.verify_logprobs=true",
        f"weights.keep={STEPS + 1}",
        "eval.at_end=false",
    )
    with launch(config, *overrides) as run:
        assert run.wait(240) == 0, run.output()
    assert len(train_steps(run.run_dir)) == STEPS
    logs = run.run_dir / "logs" / "latest"
    sent = re.findall(r"weights (\S+) sent to (.*) \(", (logs / "model_worker_0.log").read_text())
    versions = [str(WeightVersion(1, number)) for number in range(STEPS + 1)]
    # A wave may part, so that servers get a version one after the other. The last one comes when everybody is leaving already.
    reached = {(version, server) for version, servers in sent for server in servers.split(", ")}
    for index in range(2):
        assert {(version, f"generation_server/{index}") for version in versions[1:STEPS]} <= reached
        verified = re.findall(r"weights (\S+) verified", (logs / f"generation_server_{index}.log").read_text())
        assert verified[:STEPS] == versions[:STEPS]
    for number in range(STEPS + 1):  # on disk they are, too
        version = WeightVersion(1, number)
        verify_version(version_dir(run.run_dir, "actor", version), version)
    assert_nothing_left(run.run_dir)
