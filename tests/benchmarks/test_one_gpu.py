"""launcher/one_gpu.py without a GPU: every stage runs to its end, and no figure of a CPU stands for one of a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LAUNCHER = Path(__file__).parents[2] / "launcher"
LIMIT_S = 560  # all stages take a minute of CPU time; the machine may be busy
STAGES = ("facts", "kernels", "step", "nccl", "generate")

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def one_gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(LAUNCHER / "one_gpu.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False)


@pytest.fixture
def write_stage(tmp_path: Path) -> Any:
    def write(stage: str, *rows: dict[str, Any], seconds: float | None = 1.0) -> None:
        head = {"stage": stage, "commit": "0" * 40, "card": "GPU", "torch": "2.11", "transformers": "5.23"}
        content = head | {"seconds": seconds, "rows": [{"name": "a", "unit": "s", **row} for row in rows]}
        (tmp_path / f"{stage}.json").write_text(json.dumps(content))

    return write


def test_all_stages_run_to_their_end_without_a_gpu(tmp_path: Path) -> None:
    done = one_gpu("all", "--tiny", "--out", str(tmp_path), "--limit", str(LIMIT_S))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads((tmp_path / "plans.json").read_text())["plans"]) > 8
    for stage in STAGES:
        content = json.loads((tmp_path / f"{stage}.json").read_text())
        assert content["seconds"] > 0, stage
        assert content["rows"], stage
        for row in content["rows"]:
            assert not row["note"].startswith("failed"), row
            if row["unit"] in ("ms", "GB/s", "GiB", "tokens/s", "%"):
                assert (row["value"], row["note"]) == (None, "not measured: needs a GPU"), row
    table = (tmp_path / "table.txt").read_text()
    assert table in done.stdout
    assert max(map(len, table.splitlines())) <= 100


@pytest.mark.parametrize("stage", STAGES)
def test_a_failed_row_and_a_stage_that_was_ended_fail(write_stage: Any, tmp_path: Path, stage: str) -> None:
    for name in STAGES:
        write_stage(name, {"value": 1.0, "planned": 0.5})
    assert one_gpu("table", "--out", str(tmp_path)).returncode == 0
    write_stage(stage, {"note": f"failed: {'a long reason ' * 12}\nin two lines"})
    done = one_gpu("table", "--out", str(tmp_path))
    assert done.returncode == 1
    assert "in two lines" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    write_stage(stage, seconds=None)
    done = one_gpu("table", "--out", str(tmp_path))
    assert done.returncode == 1
    assert f"{stage}: was ended before its end" in done.stdout


def test_a_measurement_that_fails_is_a_row_and_the_stage_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(LAUNCHER))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    import one_gpu as program
    from gpu_stages import facts
    from gpu_stages.sheet import Row

    def breaks(bench: Any) -> Any:
        yield Row("before", 1.0, "ms", anywhere=True)
        raise RuntimeError("CUDA error: misaligned address")

    rows = (("broken", breaks), ("versions", facts.versions))
    monkeypatch.setattr(facts, "MEASUREMENTS", rows)
    monkeypatch.setattr(sys, "argv", ["one_gpu.py", "facts", "--out", str(tmp_path), "--limit", str(LIMIT_S)])
    try:
        assert program.main() == 1
    finally:
        program.faulthandler.cancel_dump_traceback_later()
    names = [(row["name"], row["note"]) for row in json.loads((tmp_path / "facts.json").read_text())["rows"]]
    assert names[0] == ("before", "")
    assert names[1] == ("broken", "failed: RuntimeError: CUDA error: misaligned address")
    assert [name for name, _ in names[2:]] == ["nvidia-smi", "versions"]
