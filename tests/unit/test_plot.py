"""`asyncrl-launch plot` with real matplotlib: pictures, JSON, and messages about missing data."""

import base64
import hashlib
import json
import re
import struct
import sys

import pytest
from test_curves import AGES, evaluation, step, write_run

from asyncrl.cli import main as cli
from asyncrl.cli import plotting
from asyncrl.cli.curves import picture
from asyncrl.cli.plotting import write_picture
from asyncrl.cli.run_files import read_runs
from asyncrl.config.schema import ConfigError

pytest.importorskip("matplotlib", reason="matplotlib is an optional dependency")


def ramp(num_steps, **fields):
    return [evaluation(0), *(step(number, **fields) for number in range(1, num_steps + 1))]


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "sorter" / "t0", ramp(30), generating=[[101.5, 102.5]])


def plot(capsys, *arguments):
    """Run the command. Return the exit code and stdout."""
    code = cli.main(["plot", *map(str, arguments)])
    return code, capsys.readouterr().out


def size_of_png(file):
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])


def test_the_picture_of_one_run_is_written_to_its_folder(run, capsys):
    code, out = plot(capsys, run)
    assert code == 0
    assert out == f"picture: {run / 'plot.png'}\n"
    width, height = size_of_png(run / "plot.png")
    assert 900 <= width <= 1920  # it fits a screen
    assert 600 < height <= 1080
    assert plot(capsys, run, "--all", "--out", run / "all.png")[0] == 0
    assert size_of_png(run / "all.png")[1] > height


def test_several_runs_share_a_picture(run, tmp_path, capsys):
    other = write_run(tmp_path / "other" / "t0", [*ramp(20), *ramp(10, attempt=2)])
    code, out = plot(capsys, run, other)
    assert code == 0
    assert out.splitlines()[-1] == f"picture: {tmp_path / 'plot.png'}"
    assert size_of_png(tmp_path / "plot.png")[0] >= 900


def texts_of(shown, tmp_path, monkeypatch):
    """Return all texts in the picture, and the figure."""
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
    assert {"Entropy", "KL divergence (estimates)", "Gradient norm", "Clip share"} <= set(texts)
    assert {"train batch, sampled", "evaluation, greedy", "waits for data", "no generation"} <= set(texts)
    assert "sorter/t0, 30 train steps" in texts
    for axes in figure.axes:
        legend = axes.get_legend()
        if legend is not None:  # the legend is above the data and inside the picture
            box = legend.get_window_extent()
            assert box.y0 >= axes.get_window_extent().y1 - 1
            assert box.x1 <= figure.bbox.x1


def test_the_ages_of_trained_responses_have_axes_of_their_own(run, tmp_path, monkeypatch):
    (run / "summary.json").write_text(json.dumps({"attempt": 1, "offpolicyness": AGES}))
    texts, figure = texts_of(picture(read_runs([run])), tmp_path, monkeypatch)
    assert {"Age of trained responses", "% of responses", "Age of first tokens by length"} <= set(texts)
    by_title = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert by_title["Reward"].get_xlim()[1] > 30  # the range of train steps, which the ages do not affect
    assert by_title["Age of trained responses"].get_xlim()[1] < 3
    assert by_title["Age of first tokens by length"].get_xscale() == "log"


def test_the_legend_names_runs_and_attempts(run, tmp_path, monkeypatch):
    other = write_run(tmp_path / "other" / "t0", ramp(5))
    write_run(tmp_path / "again" / "t0", [*ramp(20), *ramp(10, attempt=2)])
    texts, _ = texts_of(picture(read_runs([run, other, tmp_path / "again" / "t0"])), tmp_path, monkeypatch)
    assert {"sorter/t0", "other/t0", "Idle time", "trainer waits"} <= set(texts)
    assert {"again/t0, attempt 1", "again/t0, attempt 2"} <= set(texts)


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
def test_unusual_runs_can_be_drawn(tmp_path, capsys, records):
    run = write_run(tmp_path / "t0", records)
    assert plot(capsys, run)[0] == 0
    size_of_png(run / "plot.png")


def test_a_run_without_loss_statistics_is_drawn(tmp_path, capsys):
    """Runs of older releases, and steps that train only the critic, have no such statistics."""
    records = [{name: value for name, value in step(n).items() if not name.startswith("actor/")} for n in (1, 2)]
    run = write_run(tmp_path / "t0", records)
    code, out = plot(capsys, run)
    assert code == 0
    for title in ("Entropy", "KL divergence (estimates)", "Gradient norm", "Clip share"):
        assert f"left out: {title}: no step or evaluation has it" in out
    size_of_png(run / "plot.png")


def test_omitted_panels_runs_and_lines_are_reported(tmp_path, capsys):
    run = write_run(tmp_path / "t0", [{"step": 1, "reward/mean": 0.5}])
    empty = tmp_path / "t1"
    empty.mkdir()
    with (run / "metrics.jsonl").open("a") as file:
        file.write("broken\n")
    code, out = plot(capsys, run, empty)
    assert code == 0
    assert "left out: Response length: no step or evaluation has it" in out
    assert f"{empty}: nothing to draw (yet)" in out
    assert f"{run / 'metrics.jsonl'}: 1 broken lines skipped" in out


def test_a_run_without_a_step_is_an_error(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rew')
    code, out = plot(capsys, tmp_path)
    assert code == 1
    assert "nothing to draw: no metrics.jsonl with a train step" in out


def test_an_unknown_metric_alone_names_the_nearest(run, capsys):
    assert plot(capsys, run, "--metric", "rewrd/mean") == (
        1,
        "failed: nothing to draw: rewrd/mean: no step or evaluation has it; did you mean 'reward/mean'?\n",
    )


def test_the_data_of_the_panels_are_printed_as_json(run, capsys):
    code, out = plot(capsys, run, "--json")
    answer = json.loads(out)
    assert code == 0
    assert [entry["name"] for entry in answer["panels"]][:2] == ["reward", "response_length"]
    assert answer["panels"][0]["series"][0]["y"][:3] == [0.1, 0.2, 0.3]
    assert answer["runs"][0]["steps"] == 30
    assert answer["picture"] is None
    assert not (run / "plot.png").exists()
    out = plot(capsys, run, "--json", "--out", run / "x.svg")[1]
    assert json.loads(out)["picture"] == str(run / "x.svg")
    assert (run / "x.svg").read_text().lstrip().startswith("<?xml")


def test_a_run_is_found_from_its_config(tmp_path, capsys):
    write_run(tmp_path / "runs" / "asyncrl" / "b", ramp(3))
    config = tmp_path / "c.yaml"
    config.write_text(
        "model_path: m\nprompts: {path: p.jsonl}\nrollout: {tasks: {default: {reward: 'm:f'}}}\n"
        f"fileroot: {tmp_path / 'runs'}\n"
    )
    code, out = plot(capsys, config, "trial=b")
    assert code == 0
    assert out.splitlines()[-1] == f"picture: {tmp_path / 'runs' / 'asyncrl' / 'b' / 'plot.png'}"


def test_without_matplotlib_the_install_command_is_shown(run, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out = plot(capsys, run)
    assert code == 1
    assert "needs the package matplotlib" in out
    assert "pip install 'asyncrl[plot]'" in out
    assert plot(capsys, run, "--json")[0] == 0


def test_a_picture_that_cannot_be_written_is_an_error(run, tmp_path, capsys):
    shown = picture(read_runs([run]))
    with pytest.raises(ConfigError, match=r"use \.png, \.svg or \.pdf"):
        write_picture(shown, tmp_path / "x.what")
    (tmp_path / "file").write_text("")
    code, out = plot(capsys, run, "--out", tmp_path / "file" / "x.png")
    assert code == 1
    assert "choose another file with --out" in out


def test_one_file_opens_anywhere(run, tmp_path, capsys):
    """It loads nothing, its scripts are those that its policy allows, and texts of the run stay data."""
    planted = "</script><script>alert(1)</script>"
    records = [step(number, **{f"count/{planted}": 2.0, f"reward/{planted}": 0.5}) for number in (1, 2)]
    other = write_run(tmp_path / "<b>", records)
    code, out = plot(capsys, run, other, "--html", tmp_path / "new" / "page.html")
    assert (code, out.splitlines()[-1]) == (0, f"page: {tmp_path / 'new' / 'page.html'}")
    page = (tmp_path / "new" / "page.html").read_text()
    assert re.findall(r'(?:src|href)="(?!data:)[^"]*"', page) == []
    blocks = re.findall(r"<script([^>]*)>(.*?)</script>", page, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for kind, text in blocks if not kind]
    assert len(hashes) == 2
    assert all(f"'sha256-{one}'" in page for one in hashes)
    (answers,) = [json.loads(text) for kind, text in blocks if "application/json" in kind]
    assert planted not in page
    panels = {panel["name"]: panel for panel in answers["/api/learning"]["panels"]}
    assert [series["run"] for series in panels["reward_by_task"]["series"]] == ["<b>"]
    assert planted in panels["reward_by_task"]["series"][0]["name"]
    assert answers["/api/timet0"]["panels"]
    assert plot(capsys, run, "--html", "x.html", "--metric", "reward/mean")[0] == 2
