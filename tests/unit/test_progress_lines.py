"""Output of `asyncrl-launch run`: lines of train steps and evaluations, starting processes, long waits, the summary."""

import io
import json
import re

import msgspec
import pytest
from rich.console import Console
from rich.text import Text

from asyncrl.cli.commands.run import JsonView
from asyncrl.cli.progress import (
    LongWaits,
    RunConsole,
    RunView,
    TrainingProgress,
    evaluation_line,
    print_summary,
    recording_rows,
    start_text,
    step_line,
)
from asyncrl.protocol.status import Wait, WorkerStatus
from asyncrl.runtime.metrics import JsonLinesReader, JsonLinesWriter

STEP = {
    "step": 3,
    "version": 3,
    "reward/mean": 0.25,
    "offpolicy/head_mean": 1.5,
    "offpolicy/head_max": 2.0,
    "offpolicy/tail_mean": 0.5,
    "throughput/tokens_per_s": 1234.5,
    "time/wait_data_s": 0.1,
    "time/step_s": 0.51,
    "time/train_s": 0.51,
    "time/wait_weights_s": 0.02,
}
EVALUATION = {"step": 30, "eval/sampled_reward": 0.8, "eval/greedy_reward": 0.934}


def plain(markup):
    return Text.from_markup(markup).plain


def status(worker, state="running", *waits):
    return WorkerStatus(worker=worker, pid=1, attempt=1, state=state, time=0.0, progress=0, waits=list(waits))


def wait(what, on="master/0", since_s=1.0):
    return Wait(what=what, on=on, since_s=since_s, limit_s=600.0)


def make_console(**options):
    return Console(file=io.StringIO(), width=200, **options)


FULL_LINE = (
    "step    3/60  version    3  reward 0.250  off-policy head 1.50 (max 2) tail 0.50    1234 tokens/s  "
    "waited data 0.10 s  train 0.51 s  weights 0.02 s"
)
LINES = {  # width of the terminal -> the line of a train step
    20: "step    3/60",
    80: "step    3/60  reward 0.250    1234 tokens/s  waited data 0.10 s  train 0.51 s",
    100: "step    3/60  reward 0.250    1234 tokens/s  waited data 0.10 s  train 0.51 s",
    120: "step    3/60  reward 0.250  off-policy head 1.50 (max 2) tail 0.50    1234 tokens/s  waited data 0.10 s  train 0.51 s",
    160: FULL_LINE,
}


def test_the_line_of_a_step():
    assert plain(step_line(STEP, 60)) == FULL_LINE


@pytest.mark.parametrize("width", LINES)
def test_on_a_terminal_the_line_of_a_step_never_wraps(tmp_path, width):
    console = Console(file=io.StringIO(), width=width, force_terminal=True)
    view = RunView(tmp_path, 60, console)
    with JsonLinesWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write(STEP)
    view.close()
    (line,) = Text.from_ansi(console.file.getvalue()).plain.splitlines()
    assert line == LINES[width]
    assert len(line) <= width


def test_the_line_of_an_evaluation():
    assert plain(evaluation_line(EVALUATION)) == "eval  step   30  reward sampled 0.800  greedy 0.934"
    assert plain(evaluation_line({"step": 0, "eval/greedy_reward": 1.0})) == "eval  step    0  reward greedy 1.000"


def test_the_reader_returns_only_new_and_complete_lines(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(msgspec.json.encode({**STEP, "step": 1}).decode() + "\n")
    tail = JsonLinesReader(file, newest_bytes=0)
    assert list(tail.new_records()) == []
    line = msgspec.json.encode(STEP)
    with file.open("ab", buffering=0) as writer:
        writer.write(line[:20])
        assert list(tail.new_records()) == []
        writer.write(line[20:] + b"\n" + msgspec.json.encode(EVALUATION) + b"\n")
    assert list(tail.new_records()) == [STEP, EVALUATION]
    assert list(tail.new_records()) == []


@pytest.mark.parametrize("end", [b'{"step": 2, "rew', b"\0" * 4096, b"\xff\xfe"])
def test_a_resumed_run_shows_its_steps_after_a_torn_end_of_the_file(tmp_path, end):
    """The view opens the file before the master truncates the torn end."""
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(msgspec.json.encode(STEP) + b"\n" + end)
    console = RunConsole(file=io.StringIO(), width=200)
    view = RunView(tmp_path, 10, console)
    with JsonLinesWriter(file) as master:
        master.write({**STEP, "step": 4})
    view.close()
    assert "step    4/10" in console.file.getvalue()
    assert "warning" not in console.file.getvalue()


def test_a_line_of_metrics_that_cannot_be_read_is_skipped_with_a_warning(tmp_path):
    console = RunConsole(file=io.StringIO(), width=200)
    view = RunView(tmp_path, 10, console)
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"\0\0\0\n" + msgspec.json.encode({**STEP, "step": 4}) + b"\n")
    view.close()
    told = " ".join(console.file.getvalue().split())
    assert f"warning: {file}:1: not a JSON object:" in told
    assert "the line is skipped" in told
    assert "step 4/10" in told


def test_starting_processes_are_shown_with_their_waits():
    statuses = [
        status("master/0", "starting", wait("model workers to connect")),
        status("model_worker/0", "starting", wait("its imports")),
        status("rollout_worker/0", "starting"),
        status("gserver_manager/0"),
    ]
    assert start_text(statuses) == (
        "1 of 4 processes run; starting: master/0 (model workers to connect), model_worker/0 (its imports), "
        "rollout_worker/0 (setting up)"
    )
    many = [status(f"generation_server/{index}", "starting") for index in range(20)]
    assert start_text(many).endswith("generation_server/7 (setting up) and 12 more")


def test_once_all_processes_run_the_masters_wait_is_shown():
    assert start_text([status("gserver_manager/0")]) == "all 1 processes run"
    assert (
        start_text([status("master/0", "running", wait("a batch", "rollout_worker/0")), status("rollout_worker/0")])
        == "all 2 processes run; master/0 waits: a batch from rollout_worker/0"
    )


def test_a_long_wait_is_reported_each_time_it_has_doubled():
    waits = LongWaits()
    told = [
        since_s
        for since_s in range(200)
        if waits.new([status("master/0", "running", wait(f"step {since_s} to end", "model workers", float(since_s)))])
    ]
    assert told == [21, 42, 84, 168]


def test_equal_long_waits_of_several_processes_are_one_line():
    waiting = wait("the next piece", "generation_server/1", 25.0)
    statuses = [status(f"rollout_worker/{index}", "running", waiting, waiting) for index in range(3)]
    assert LongWaits().new(statuses) == [
        "rollout_worker/0 and 2 more like it waited 25 s so far for the next piece from generation_server/1 (limit 600 s)"
    ]


def test_a_note_of_a_worker_is_one_warning(tmp_path, capsys):
    def note(version):
        text = f"out of service: generation_server/1: loading a0001-v{version:08d} failed: refused"
        return [msgspec.structs.replace(status("gserver_manager/0"), notes=[text])]

    console = make_console()
    for view in (RunView(tmp_path, 60, console), JsonView(tmp_path)):
        view.turn(note(3))
        view.turn(note(4))
        view.turn([status("gserver_manager/0")])
    told = "out of service: generation_server/1: loading a0001-v00000003 failed: refused"
    assert console.file.getvalue().count("out of service") == console.file.getvalue().count(f"warning: {told}") == 1
    notices = [event for event in map(json.loads, capsys.readouterr().out.splitlines()) if event["event"] == "notice"]
    assert [event["text"] for event in notices] == [told]


def test_without_a_terminal_each_change_is_one_line(tmp_path):
    console = make_console()
    view = RunView(tmp_path, 60, console, clock=iter([0.0, 1.0, 1.1, 2.0, *[5.0] * 9]).__next__)
    starting = [status("master/0", "starting"), status("rollout_worker/0", "starting", wait("its [imports]"))]
    view.turn(starting)
    view.turn(starting)
    view.turn([status("master/0"), starting[1]])
    view.notice("the disk [is] full")
    with JsonLinesWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write({**STEP, "step": 1})
    view.turn([status("master/0"), status("rollout_worker/0")])
    view.turn([status("master/0"), status("rollout_worker/0", "starting")])  # the start is no longer reported
    view.close()
    assert [re.sub(r"^ *\d+\.\d s ", "", line) for line in console.file.getvalue().splitlines()] == [
        " 0 of 2 processes run; starting: master/0 (setting up), rollout_worker/0 (its [imports])",
        " 1 of 2 processes run; starting: rollout_worker/0 (its [imports])",
        "warning: the disk [is] full",
        plain(step_line({**STEP, "step": 1}, 60)) + "  0:30 left",
    ]


def test_a_step_line_omits_the_fields_that_its_record_lacks():
    assert plain(step_line({"step": 2, "reward/mean": None, "throughput/tokens_per_s": 10.0}, 4)) == (
        "step    2/4  reward nan      10 tokens/s"
    )


def test_the_bottom_line_shows_step_time_left_reward_and_waits():
    training = TrainingProgress(60)
    assert training.bottom_text([], 103.0) == "step 0/60, 0 %"
    training.add({**EVALUATION, "step": 0}, 103.5)
    assert training.text() == "step 0/60, 0 %"
    for step, reward in ((1, 0.1), (2, 0.3), (3, 0.2)):
        training.add({**STEP, "step": step, "reward/mean": reward, "time/step_s": 2.0}, 110.0 + 2 * step)
    assert training.text() == "step 3/60, 5 %, 1:54 left, reward 0.200"
    master = status("master/0", "running", wait("/report"), wait("a batch", "rollout_worker/0"))
    assert training.bottom_text([master], 116.5) == "step 3/60, 5 %, 1:54 left, reward 0.200"
    busy = msgspec.structs.replace(master, queues={"evaluations": 1})
    assert training.bottom_text([busy, status("rollout_worker/0")], 119.0) == (
        "step 3/60, 5 %, 1:54 left, reward 0.200  1 evaluation running  master/0 waits: a batch from rollout_worker/0"
    )
    training.add({**STEP, "step": 4, "reward/mean": None}, 120.0)
    assert training.text() == "step 4/60, 7 %, 1:31 left"


def test_progress_goes_back_when_training_resumes_from_a_checkpoint():
    training = TrainingProgress(10)
    for number in (1, 2, 3, 4, 5, 3):
        training.add({"step": number, "time/step_s": 2.0, "reward/mean": number / 10}, 2.0 * number)
    assert training.text() == "step 3/10, 30 %, 0:14 left, reward 0.300"
    training.add({"step": 4, "time/step_s": 2.0, "reward/mean": 0.4}, 12.0)
    assert training.text() == "step 4/10, 40 %, 0:12 left, reward 0.400"


def test_after_the_last_step_the_bottom_line_shows_the_remaining_work():
    training = TrainingProgress(2)
    training.add({**STEP, "step": 1}, 1.0)
    assert not training.lingers(5.0)
    training.add({**STEP, "step": 2}, 6.0)
    assert not training.lingers(7.0)
    assert training.lingers(8.5)
    busy = msgspec.structs.replace(status("master/0", "running", wait("closing", "w")), queues={"evaluations": 2})
    assert training.bottom_text([busy], 8.5) == (
        "all 2 steps done, reward 0.250  2 evaluations running  master/0 waits: closing from w"
    )


def test_an_evaluation_names_its_step_once_later_steps_are_done():
    training = TrainingProgress(60)
    first = {**EVALUATION, "step": 0}
    assert training.note(first) == ""
    training.add({**STEP, "step": 1}, 1.0)
    assert training.note(first) == "  (of step 0, 1 step ago)"
    training.add(STEP, 2.0)
    assert training.note(first) == "  (of step 0, 3 steps ago)"
    assert training.note({**EVALUATION, "step": 3}) == ""


def test_without_a_terminal_the_remaining_work_is_shown_once(tmp_path):
    console = make_console()
    times = iter([0.0, 1.0, 2.0, 4.0, 5.0, *[9.0] * 9])
    view = RunView(tmp_path, 1, console, clock=times.__next__)
    with JsonLinesWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write({**STEP, "step": 1})
        running = [status("master/0", "running", wait("version 1 to be served", "gserver manager"))]
        for _ in range(4):
            view.turn(running)
        writer.write({**EVALUATION, "step": 0})
        view.close()
    lines = console.file.getvalue().splitlines()
    assert lines[1:] == [
        "all 1 steps done, reward 0.250  master/0 waits: version 1 to be served from gserver manager",
        "eval  step    0  reward sampled 0.800  greedy 0.934  (of step 0, 1 step ago)",
    ]


def test_on_a_terminal_step_lines_appear_above_the_bottom_line(tmp_path):
    console = make_console(force_terminal=True)
    view = RunView(tmp_path, 60, console)
    with JsonLinesWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write(STEP)
    view.turn([status("master/0")])
    view.close()
    text = Text.from_ansi(console.file.getvalue()).plain
    assert re.search(r"weights 0\.02 s\n", text)  # without the time left, which the bottom line shows
    assert "step 3/60, 5 %" in text
    assert text.index("step    3/60") < text.index("step 3/60, 5 %")


def test_on_a_terminal_a_long_bottom_line_is_cut_to_one_line(tmp_path):
    console = make_console(force_terminal=True)
    view = RunView(tmp_path, 60, console)
    view.turn([status("master/0", "starting", wait("something " * 40))])
    view.close()
    lines = Text.from_ansi(console.file.getvalue()).plain.splitlines()
    assert [len(line) for line in lines if "something" in line] == [199]
    assert not any("limit" in line for line in lines)


def test_on_a_terminal_the_line_of_the_start_is_erased_at_the_end(tmp_path):
    console = make_console(force_terminal=True)
    view = RunView(tmp_path, 60, console)
    view.turn([status("master/0", "starting")])
    view.close()
    assert "starting: master/0" in console.file.getvalue()
    assert console.file.getvalue().rstrip().endswith("\x1b[?25h\r\x1b[1A\x1b[2K")  # cursor shown, line erased


def test_the_summary(tmp_path):
    summary = {
        "steps": 60,
        "version": 60,
        "sequences": 30720,
        "generated_tokens": 200000,
        "wall_s": 61.2,
        "training_s": 50.0,
        "first_reward": 0.16,
        "last_reward": 0.9,
        "evaluations": [
            {"step": 60, "eval/sampled_reward": 0.88, "eval/greedy_reward": 0.95},
            {"step": 0, "eval/sampled_reward": 0.16},
        ],
        "trainer_idle_share": 0.2,
        "trainer_waits_data_share": 0.15,
        "trainer_waits_weights_share": 0.05,
        "generation_idle_share": None,
        "head_offpolicyness_mean": 1.2,
        "head_offpolicyness_max": 2.0,
        "sequences_of_two_versions": 12,
        "sequences_of_two_versions_share": 0.015,
        "offpolicyness": {
            "head": {"0": 200, **{str(age): 80 for age in range(1, 9)}, "9": 160},
            "tail": {"0": 1000},
            "by_length": [
                {"tokens_min": 1, "tokens_max": 1, "responses": 1, "head_mean": 0.5, "head_max": 1},
                {"tokens_min": 4, "tokens_max": 7, "responses": 1, "head_mean": 1.25, "head_max": 9},
            ],
        },
        "rejected": {"too_long": 3},
    }
    (tmp_path / "summary.json").write_bytes(msgspec.json.encode(summary))
    console = make_console()
    print_summary(tmp_path, console)
    text = re.sub(r"\s+", " ", re.sub(r"[│┌┐└┘─]", " ", console.file.getvalue()))
    for expected in (
        "train steps 60 (version 60)",
        "reward of a batch 0.160 in the first step, 0.900 in the last",
        "evaluation at step 0 sampled 0.160 evaluation at step 60 sampled 0.880, greedy 0.950",
        "trainer idle 20% of the time (waiting for data 15%, for weights 5%)",
        "generation idle unknown",
        "mean 1.20, max 2; 12 responses sampled by more than one version (1.5%)",
        "first tokens, versions behind 0: 20.0%, 1: 8.0%, 2: 8.0%, 3: 8.0%, 4: 8.0%, 5: 8.0%, 6: 8.0%, 7: 8.0%, 8 or more: 24.0%",
        "last tokens, versions behind 0: 100.0%",
        "first tokens, mean (max) by length up to 1 tokens: 0.50 (1), up to 7 tokens: 1.25 (9)",
        "rejected prompts too_long: 3",
        f"AutoModelForCausalLM.from_pretrained('{tmp_path / 'checkpoints' / 'final'}')",
    ):
        assert expected in text


def test_the_summary_of_a_recording_names_no_version():
    """All its weights are of version 0; the last evaluation is of the step of the last batch."""
    evaluation = {"step": 5, "eval/greedy_reward": 0.5, "eval/greedy_version_min": 0.0, "eval/greedy_version_max": 0.0}
    summary = {
        "steps": 5,
        "groups": 20,
        "sequences": 80,
        "generated_tokens": 400,
        "training_s": 2.0,
        "wall_s": 3.0,
        "mean_reward": 0.4,
        "first_reward": 0.3,
        "last_reward": 0.5,
        "evaluations": [evaluation],
        "rejected": {},
    }
    assert ("evaluation of the weights", "greedy 0.500") in recording_rows(summary)


def test_a_summary_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"summary\.json"):
        print_summary(tmp_path, make_console())
