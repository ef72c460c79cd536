"""`asyncrl-launch plot` with real matplotlib and plotext: pictures, text, JSON, and what it says where something is missing."""

import json
import re
import struct
import sys

import pytest
from test_curves import evaluation, step, write_run

from asyncrl.config import ConfigError
from asyncrl.launch import cli, plotting
from asyncrl.launch.curves import picture, read_runs
from asyncrl.launch.plotting import as_text, write_picture

pytest.importorskip("matplotlib", reason="it is an extra")
pytest.importorskip("plotext", reason="it is an extra")


def ramp(num_steps, **fields):
    return [evaluation(0), *(step(number, **fields) for number in range(1, num_steps + 1))]


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "sorter" / "t0", ramp(30), generating=[[101.5, 102.5]])


def plot(capsys, *arguments):
    """Exit code, stdout."""
    code = cli.main(["plot", *map(str, arguments)])
    return code, capsys.readouterr().out


def size_of_png(file):
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])


def test_one_run_as_picture_and_text(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    code, out = plot(capsys, run)
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "sorter/t0, 30 train steps"
    for heading in (
        "Reward [mean reward]",
        "Off-policyness of first tokens [versions behind]",
        "Response length [tokens]",
        "Time of a step [% of the step]",
        "Throughput [trained tokens/s]",
        "Train steps [steps/s]",
    ):
        assert heading in lines
    assert "• train batch, sampled   x evaluation, sampled   o evaluation, greedy" in lines
    assert "\x1b" not in out  # nobody asked for colours
    assert max(map(len, lines[:-1])) <= 90
    assert lines[-1] == f"picture: {run / 'plot.png'}"
    width, height = size_of_png(run / "plot.png")
    assert width >= 900
    assert height > 600


def test_two_panels_beside_each_other_where_there_is_room(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    out = plot(capsys, run, "--no-png")[1]
    assert re.search(r"^Reward \[mean reward\] +Off-policyness", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 140
    assert not (run / "plot.png").exists()


def test_in_the_drawing_a_higher_reward_is_higher(run):
    lines = as_text(picture(read_runs([run])), 80, colours=False).splitlines()
    first = next(i for i, line in enumerate(lines) if "•" in line and "┤" in line)
    rows = [line for line in lines[first - 1 : first + 12] if "•" in line]
    columns = [line.index("•") for line in rows]
    assert columns == sorted(columns, reverse=True)  # from bottom left to top right
    assert len(set(columns)) > 5


def test_with_colours_on_a_terminal(run):
    text = as_text(picture(read_runs([run])), 80, colours=True)
    assert "\x1b[38;5;" in text
    assert "⠉" in text or "⡠" in text  # lines are drawn finer than characters


def test_several_runs_have_a_legend(run, tmp_path, capsys):
    other = write_run(tmp_path / "other" / "t0", [*ramp(20), *ramp(10, attempt=2)])
    code, out = plot(capsys, run, other)
    assert code == 0
    assert "• sorter/t0   x other/t0, attempt 1   o other/t0, attempt 2" in out
    assert "Idle time, trainer waits [% of the step]" in out
    assert out.splitlines()[-1] == f"picture: {tmp_path / 'plot.png'}"
    assert size_of_png(tmp_path / "plot.png")[0] >= 900


def texts_of(shown, tmp_path, monkeypatch):
    """All texts in the picture, and the figure."""
    figures = []
    figure_class = plotting.require("matplotlib.figure").Figure

    class Kept(figure_class):
        def __init__(self, **options):
            super().__init__(**options)
            figures.append(self)

    monkeypatch.setattr("matplotlib.figure.Figure", Kept)
    write_picture(shown, tmp_path / "out.png")
    (figure,) = figures
    text_class = plotting.require("matplotlib.text").Text
    return [text.get_text() for text in figure.findobj(text_class)], figure


def test_the_picture_names_axes_units_and_curves(run, tmp_path, monkeypatch):
    texts, figure = texts_of(picture(read_runs([run])), tmp_path, monkeypatch)
    assert {"Reward", "mean reward", "train step", "tokens", "versions behind", "% of the step"} <= set(texts)
    assert {"train batch, sampled", "evaluation, greedy", "waits for data", "no generation"} <= set(texts)
    assert "sorter/t0, 30 train steps" in texts
    for axes in figure.axes:
        legend = axes.get_legend()
        if legend is not None:  # above the data, and inside of the picture
            box = legend.get_window_extent()
            assert box.y0 >= axes.get_window_extent().y1 - 1
            assert box.x1 <= figure.bbox.x1


def test_in_the_picture_runs_are_in_the_legend(run, tmp_path, monkeypatch):
    other = write_run(tmp_path / "other" / "t0", ramp(5))
    texts, _ = texts_of(picture(read_runs([run, other])), tmp_path, monkeypatch)
    assert {"sorter/t0", "other/t0", "Idle time", "trainer waits"} <= set(texts)


@pytest.mark.parametrize(
    "records",
    [
        [step(1)],
        [evaluation(0)],
        [step(1, **{"reward/mean": float("nan")}), step(2, **{"reward/mean": float("nan")}), step(3)],
        [step(1, **{"reward/mean": -2.0})],
        [
            step(number, **{"reward/mean": 0.0, "offpolicy/head_mean": 0.0, "offpolicy/head_max": 0.0})
            for number in (1, 2)
        ],
        [step(number) for number in range(1, 400)],
        [{"step": 1, "reward/mean": 1e300}, {"step": 2, "reward/mean": None}],
    ],
    ids=["one step", "an evaluation only", "nan", "negative", "all zero", "long", "large"],
)
def test_odd_runs_can_be_drawn(tmp_path, capsys, records):
    run = write_run(tmp_path / "t0", records)
    code, out = plot(capsys, run)
    assert code == 0
    assert "Reward [mean reward]" in out
    size_of_png(run / "plot.png")


def test_what_is_left_out_is_said(tmp_path, capsys):
    run = write_run(tmp_path / "t0", [{"step": 1, "reward/mean": 0.5}])
    empty = tmp_path / "t1"
    empty.mkdir()
    with (run / "metrics.jsonl").open("a") as file:
        file.write("broken\n")
    code, out = plot(capsys, run, empty, "--no-png")
    assert code == 0
    assert "left out: Response length: no step or evaluation has it" in out
    assert f"{empty}: nothing to draw (yet)" in out
    assert f"{run / 'metrics.jsonl'}: 1 broken lines skipped" in out


def test_a_run_without_a_step_is_an_error_that_says_so(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rew')
    code, out = plot(capsys, tmp_path)
    assert code == 1
    assert "nothing to draw: no metrics.jsonl with a train step" in out


def test_the_numbers_for_machines(run, capsys):
    code, out = plot(capsys, run, "--json")
    answer = json.loads(out)
    assert code == 0
    assert [entry["name"] for entry in answer["panels"]][:2] == ["reward", "off_policyness"]
    assert answer["panels"][0]["series"][0]["y"][:3] == [0.1, 0.2, 0.3]
    assert answer["runs"][0]["steps"] == 30
    assert answer["picture"] is None
    assert not (run / "plot.png").exists()
    out = plot(capsys, run, "--json", "--out", run / "x.svg")[1]
    assert json.loads(out)["picture"] == str(run / "x.svg")
    assert (run / "x.svg").read_text().lstrip().startswith("<?xml")


def test_a_run_is_found_by_its_config(tmp_path, capsys):
    write_run(tmp_path / "runs" / "asyncrl" / "b", ramp(3))
    config = tmp_path / "c.yaml"
    config.write_text(
        "model_path: m\nprompts: {path: p.jsonl}\nrollout: {tasks: {default: {reward: 'm:f'}}}\n"
        f"fileroot: {tmp_path / 'runs'}\n"
    )
    code, out = plot(capsys, config, "trial=b", "--no-png")
    assert code == 0
    assert out.startswith("asyncrl/b, 3 train steps")


@pytest.mark.parametrize("package", ["matplotlib", "plotext"])
def test_without_the_packages_the_command_that_installs_them_is_named(run, capsys, monkeypatch, package):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    code, out = plot(capsys, run)
    assert code == 1
    assert f"needs the package {package}" in out
    assert "pip install 'asyncrl[plot]'" in out
    assert "Reward" not in out  # before anything is drawn
    assert plot(capsys, run, "--json")[0] == 0


def test_a_picture_that_cannot_be_written(run, tmp_path, capsys):
    shown = picture(read_runs([run]))
    with pytest.raises(ConfigError, match=r"use \.png, \.svg or \.pdf"):
        write_picture(shown, tmp_path / "x.what")
    (tmp_path / "file").write_text("")
    code, out = plot(capsys, run, "--out", tmp_path / "file" / "x.png")
    assert code == 1
    assert "name another file with --out, or use --no-png" in out
