"""The first day on GPUs, in its quick form, without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from whole_runs import ROOT

pytestmark = [pytest.mark.release, pytest.mark.timeout(400)]


def test_the_first_day_runs_to_its_end_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASYNCRL_SGLANG_PYTHON", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = [sys.executable, str(ROOT / "launcher" / "first_day.py"), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "table.md").read_text()
    assert table in done.stdout
    _, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert [row[0] for row in rows] == ["disjoint", "shared devices", "sglang", "tensor ranks", "broadcast"]
    for name, *cells in rows:
        assert cells[::2] == ["not planned"] * 4, name
        if name == "sglang":
            assert all(cell.startswith("not measured") for cell in cells[1::2])
        else:
            step_s, tokens_per_s, mfu, memory = cells[1::2]
            assert 0 < float(step_s.removesuffix(" s")) < 60
            assert float(tokens_per_s.replace(",", "")) > 0
            assert (mfu, memory) == ("not measured", "not measured")
