"""Tables show what matters on terminals of any width."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from asyncrl.cli.commands.common import process_table
from asyncrl.cli.commands.inspect import SequenceRow, _sequence_table
from asyncrl.config.processes import RolloutWorkerConfig


def printed(table, width):
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_only_the_response_is_cropped(width):
    rows = [
        SequenceRow(
            index=index,
            reward=-0.125,
            finish="length",
            prompt_tokens=512,
            response_tokens=1024,
            version_start="a0001-v00000017",
            version_end="a0001-v00000019",
            offpolicyness=2,
            text="a long response " * 50,
        )
        for index in range(2)
    ]
    text = printed(_sequence_table(SimpleNamespace(sequences=rows, sequence=0), width), width)
    lines = [line for line in text.splitlines() if "-0.125" in line]
    assert len(lines) == 2
    for line in lines:
        assert len(line) <= width
        assert [word for word in ("length", "512 + 1024") if word in line] == ["length", "512 + 1024"]
        assert ("a0001-v00000017 to v19" in line) == (width >= 80)
    assert ("a long respo" in text) == (width >= 80)


def test_processes_that_differ_only_in_their_number_share_a_row():
    env = {"NAME": "a rather long value of an environment variable"}
    specs = [
        SimpleNamespace(name=f"{kind}/{index}", kind=kind, computes=False, env=env, config=RolloutWorkerConfig)
        for kind in ("rollout_worker", "gserver_manager")
        for index in range(5 if kind == "rollout_worker" else 1)
    ]
    text = printed(process_table("run", specs), 200)
    assert "rollout_worker/0 ... rollout_worker/4 (5)" in text
    assert text.count("a rather long value") == 1
    assert "the same" in text
