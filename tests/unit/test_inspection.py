"""The output of `asyncrl-launch inspect`, for single files and for files in a run's folder."""

import io
import json

import numpy as np
import pytest
from msgspec.structs import replace
from recordings import make_group, make_store, record_batches
from rich.console import Console
from tokenizers import Tokenizer, decoders, models

from asyncrl.cli.commands.inspect import Texts, make_view, print_view, visible
from asyncrl.cli.main import main
from asyncrl.data.trajectories import Entry, list_recording, recording_dir
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import plan, save_config
from asyncrl.launch.rundir import configs_dir
from asyncrl.testing.runs import make_tiny_run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_run(tmp_path_factory.mktemp("tiny"), num_prompts=20)


def write_configs(tiny, run_dir, *overrides):
    """Write the configs that the launcher leaves in the folder of an attempt."""
    for spec in plan(load_experiment(tiny, overrides), attempt=1, num_prompts=20):
        save_config(spec.config, configs_dir(run_dir, 1) / f"{spec.file_stem}.yaml")


def first_file(run_dir):
    return list_recording(recording_dir(run_dir, 1))[0]


def test_tokens_are_shown_as_text_and_parts_of_a_character_as_in_the_vocabulary(tmp_path):
    vocabulary = {"Ġa": 0, "b": 1, "Ã": 2, "©": 3}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.decoder = decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    texts = Texts(tmp_path)
    assert [texts.piece(token) for token in range(5)] == [" a", "b", "Ã", "©", "<4>"]
    assert texts.text([0, 2, 3]) == " aé"
    made = Tokenizer(models.WordLevel({"▁a": 0, "b": 1}, "b"))
    made.decoder = decoders.Metaspace()
    made.save(str(tmp_path / "tokenizer.json"))
    assert [Texts(tmp_path).piece(token) for token in range(2)] == [" a", "b"]


def test_a_file_outside_a_run_shows_token_ids_only(tmp_path):
    record_batches(tmp_path, batches=1, size=1, trained=True)
    file = tmp_path / "moved.safetensors"
    first_file(tmp_path).rename(file)
    view = make_view(file, sequence=1)
    assert view.notes == [
        "the file is not in a run's folder: no text, no advantages",
        "no advantages: the config of the run's master was not found",
    ]
    assert [row.id for row in view.tokens] == [1, 2, 5, 6, 7]
    assert [row.prompt for row in view.tokens] == [True, True, False, False, False]
    assert [row.behaviour_logprob for row in view.tokens] == [None, None, -0.5, -1.5, -2.5]
    assert [row.version for row in view.tokens] == [None, None, *["a0001-v00000000"] * 3]
    assert [row.reward for row in view.tokens] == [None, None, None, None, 0.0]
    assert {row.text for row in view.tokens} == {row.advantage for row in view.tokens} == {None}
    assert [(row.finish, row.response_tokens, row.offpolicyness) for row in view.sequences] == [
        ("stop", 2, 0),
        ("length", 3, 0),
    ]


def test_text_and_advantages_come_from_the_run(tiny, tmp_path):
    write_configs(tiny, tmp_path)
    record_batches(tmp_path, batches=3, size=1, trained=True, lag=2)
    view = make_view(list_recording(recording_dir(tmp_path, 1))[2])
    assert view.notes == []
    assert view.prompt_text == "01"
    assert [row.text for row in view.tokens] == ["0", "1", "4", "5"]
    assert [row.text for row in view.sequences] == ["45", "456"]
    assert [row.offpolicyness for row in view.sequences] == [2, 2]
    # rewards 1 and 0: (1 - 0.5) / 0.5
    assert [row.advantage for row in view.tokens] == [
        None,
        None,
        pytest.approx(1, abs=1e-4),
        pytest.approx(1, abs=1e-4),
    ]
    assert view.task == "default"


def test_advantages_are_normalised_over_the_batch_if_the_trainer_does_so(tiny, tmp_path):
    write_configs(tiny, tmp_path, "train.ppo.advantage_norm=batch")
    store = make_store(tmp_path, trained=True)
    groups = [make_group(0, rewards=(1.0, 1.0), lengths=(2, 2)), make_group(1, rewards=(0.0, 0.0), lengths=(2, 2))]
    store.write(0, 2, [Entry(sample, meta, place) for place, (meta, sample) in enumerate(groups)])
    files = list_recording(recording_dir(tmp_path, 1))
    for file, expected in zip(files, (1.0, -1.0), strict=True):
        view = make_view(file)
        assert view.notes == []
        assert [row.advantage for row in view.tokens[2:]] == [pytest.approx(expected, abs=1e-3)] * 2
    files[1].unlink()
    assert make_view(files[0]).notes == ["advantages are normalised over 1 of the batch's 2 groups"]


def test_missing_keys_that_only_training_adds_are_named(tiny, tmp_path):
    write_configs(tiny, tmp_path, "train.ppo.kl_coef=0.1")
    record_batches(tmp_path, batches=1, size=1)
    view = make_view(first_file(tmp_path))
    (note,) = view.notes
    assert "packed_ref_logprobs" in note
    assert "proximal_logprobs" in note
    assert {row.advantage for row in view.tokens} == {None}


def test_the_kl_coefficient_that_a_run_changes_is_named(tiny, tmp_path):
    write_configs(tiny, tmp_path, "train.ppo.kl_coef=0.1", "train.ppo.kl_adaptive=true")
    (meta, sample) = make_group(0)
    logprobs = {
        name: np.zeros(sample.total_tokens(), np.float32) for name in ("packed_ref_logprobs", "proximal_logprobs")
    }
    sample = sample.update(sample.derive(logprobs, like="packed_input_ids"))
    make_store(tmp_path, trained=True).write(0, 1, [Entry(sample, meta, 0)])
    assert make_view(first_file(tmp_path)).notes == [
        "advantages use the run's initial KL coefficient (train.ppo.kl_adaptive changes it during a run)"
    ]


def test_recorded_proximal_logprobs_are_shown(tiny, tmp_path):
    meta, sample = make_group(0)
    logprobs = np.arange(sample.total_tokens(), dtype=np.float32)
    made = sample.update(sample.derive({"proximal_logprobs": logprobs}))
    make_store(tmp_path, trained=True).write(0, 1, [Entry(made, meta, 0)])
    view = make_view(first_file(tmp_path), sequence=1)
    assert [row.proximal_logprob for row in view.tokens] == [None, None, 6.0, 7.0, 8.0]


def test_recorded_advantages_are_shown_unchanged(tmp_path):
    meta, sample = make_group(0)
    trained_on = np.arange(sample.total_tokens(), dtype=np.float32)
    made = sample.update(sample.derive({"advantages": trained_on}))
    make_store(tmp_path, trained=True).write(0, 1, [Entry(made, meta, 0)])
    view = make_view(first_file(tmp_path), sequence=1)
    assert [row.advantage for row in view.tokens] == [None, None, 6.0, 7.0, 8.0]


def test_control_characters_of_a_text_are_escaped():
    hostile = "a\x1b[2Jb\r\n\tc\u202ed\x00[bold]e\N{ZERO WIDTH SPACE}\\n"
    assert visible(hostile) == "a\\x1b[2Jb\\r\\n\\tc\\u202ed\\x00[bold]e\\u200b\\n"
    assert visible("two\nlines\x07", lines=True) == "two\nlines\\x07"
    assert visible("größer 你好 🙂") == "größer 你好 🙂"


def test_markup_in_a_text_is_shown_literally(tiny, tmp_path):
    write_configs(tiny, tmp_path)
    record_batches(tmp_path, batches=1, size=1)
    view = make_view(first_file(tmp_path))
    hostile = "[red]x[/]\x1b[31m\n"
    tokens = [replace(row, text=hostile) for row in view.tokens]
    sequences = [replace(row, text=hostile) for row in view.sequences]
    output = io.StringIO()
    print_view(
        replace(view, tokens=tokens, sequences=sequences, prompt_text=hostile, ticket=hostile),
        Console(file=output, width=200, force_terminal=True, color_system=None),
        limit=100,
        with_prompt=True,
    )
    assert "\x1b[31m" not in output.getvalue()
    assert output.getvalue().count("[red]x[/]\\x1b[31m") == 1 + 1 + 2 + 1 + 4  # ticket, prompt, group, response, tokens


def test_the_command_lists_and_selects_trajectories(tiny, tmp_path, capsys):
    write_configs(tiny, tmp_path)
    record_batches(tmp_path, batches=3, size=2, trained=True, lag=1)

    def inspect(*arguments):
        code = main(["inspect", str(tmp_path), *arguments])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    def inspect_json(*arguments):
        code, printed = inspect("--json", *arguments)
        assert code == 0
        return json.loads(printed)

    answer = inspect_json()
    assert answer["total"] == 6
    assert [entry["step"] for entry in answer["trajectories"]] == [2, 2, 1, 1, 0, 0]
    assert answer["trajectories"][0]["file"] == answer["trajectory"]["file"]
    assert len(inspect_json("--limit", "1")["trajectories"]) == 1
    assert inspect_json("--index", "3")["trajectory"]["step"] == 1
    assert inspect_json("--ticket", "e0-p4-")["trajectory"]["prompt"] == "e0-p4"
    assert inspect_json("--sequence", "1")["trajectory"]["sequence"] == 1
    code, printed = inspect("--limit", "2")
    assert code == 0
    assert "6 trajectories, the newest 2" in printed
    for wrong, message in (
        (["--index", "6"], "--index 6: use 0 to 5"),
        (["--ticket", "nobody"], "none of the 6 recorded trajectories has it"),
        (["--sequence", "2"], "the sequences 0 to 1"),
        (["--limit", "0"], "--limit 0: must be at least 1"),
    ):
        code, printed = inspect(*wrong)
        assert (code, message in printed) == (2, True), printed


def test_a_run_without_recordings_names_the_option_that_records(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 1
    assert "record.trajectories=true" in capsys.readouterr().out
    (tmp_path / "torn.safetensors").write_bytes(b"1234")
    assert main(["inspect", str(tmp_path / "torn.safetensors")]) == 1
    assert "cut short" in capsys.readouterr().out


def test_a_run_that_resumed_from_a_checkpoint_lists_only_the_batches_behind_its_weights(tmp_path, capsys):
    """Attempt 2 resumed from step 2, so the third batch of attempt 1 is void."""
    record_batches(tmp_path, batches=3, size=1, trained=True)
    record_batches(tmp_path, batches=2, size=1, first_step=2, trained=True, attempt=2)
    lines = [{"event": "begun", "attempt": 1, "from": None}, {"event": "begun", "attempt": 2, "from": [1, 2]}]
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "master.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["trajectories"]
    folders = [(entry["file"].split("/")[-2], entry["step"]) for entry in listed]
    assert folders == [("attempt_2", 3), ("attempt_2", 2), ("attempt_1", 1), ("attempt_1", 0)]
