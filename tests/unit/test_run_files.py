"""The model of a run for readers: incremental reading gives what one reading gives, and sums over time stay small."""

import json
import random
import shutil

import numpy as np
import pytest

from asyncrl.cli.run_files import _MOST_BUCKETS, Columns, RunFiles, Sums, Tenths, number

VERSION = "a0001-v{:08d}"


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def write(run_dir, name, *records):
    path = run_dir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(lines(*records))


def write_parts(run_dir, part):
    """Write one of two parts of a run: the second one is another attempt, which continues from step 1."""
    attempt, at = part + 1, 100.0 + 10 * part
    begun = {"event": "begun", "attempt": attempt, "from": [1, 1] if part else None, "time": at}
    events = [begun, {"event": "published", "attempt": attempt, "version": part, "time": at + 1}]
    events += [
        {"event": "stored", "ticket": "t", "time": at},
        {"event": "rejected", "reason": "too_easy", "time": at + 2},
    ]
    write(run_dir, "journal/master.jsonl", *events)
    steps = [{"step": step + part, "attempt": attempt, "reward/mean": 0.1 * step} for step in (1, 2)]
    write(run_dir, "metrics.jsonl", *steps, {"no": "step"})
    server = [{"time": at + tenth / 10, "tokens": 5, "version": VERSION.format(part)} for tenth in range(20)]
    write(run_dir, "journal/generation_server_0.jsonl", *server, {"time": None, "tokens": 1, "version": "?"})
    write(run_dir, "journal/faults.jsonl", {"event": "kill", "name": "master/0", "time": at + 3})


def told(files):
    runs = [(run.name, run.attempt, run.steps, run.evaluations) for run in files.runs("r", going_on=False)]
    servers = {name: (server.tokens.points(), server.versions) for name, server in files.servers.items()}
    rejected = {reason: sums.points() for reason, sums in files.rejected.items()}
    return runs, servers, rejected, files.published, files.events, files.num_broken_lines, files.generating.newest


def test_reading_in_parts_gives_what_one_reading_gives(tmp_path):
    files = RunFiles(tmp_path)
    assert told(files.read()) == told(RunFiles(tmp_path / "none").read())
    write_parts(tmp_path, 0)
    assert [len(run.steps) for run in files.read().runs("r", going_on=False)] == [2]
    assert told(files.read()) == told(RunFiles(tmp_path).read())
    write_parts(tmp_path, 1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9')  # a line that is being written
    assert told(files.read()) == told(RunFiles(tmp_path).read())
    ((_, attempt, steps, _),), servers, rejected, published, events, broken, newest = told(files)
    # Step 2 of attempt 1 is void
    assert (attempt, [step["step"] for step in steps], broken, newest) == (2, [1, 2, 3], 2, 1119)
    assert servers == {"generation_server/0": ([(100, 50), (101, 50), (110, 50), (111, 50)], [(100.0, 0), (110.0, 1)])}
    assert (rejected, published) == ({"too_easy": [(102, 1), (112, 1)]}, [(101.0, 0), (111.0, 1)])
    assert [text for _, text in events[1::2]] == ["fault: kill master/0"] * 2


def test_a_run_that_was_begun_again_in_a_new_folder_is_read_from_its_beginning(tmp_path):
    for _ in range(2):
        write_parts(tmp_path / "run", 0)
    files = RunFiles(tmp_path / "run").read()
    (tmp_path / "run").rename(tmp_path / "old")
    write_parts(tmp_path / "run", 0)
    assert told(files.read()) == told(RunFiles(tmp_path / "run").read())
    shutil.rmtree(tmp_path / "run")
    assert told(files.read())[1] == {}


def test_columns_have_the_number_of_each_record():
    records = [{"a": 1, "b": "text"}, {"c": 2.5}, {"a": None, "c": float("inf")}, {"a": 4}]
    columns = Columns(records)
    for chosen, rows in ((columns, range(4)), (columns.at(np.array([3, 1])), (3, 1))):
        for key in "abcd":
            expected = [number(records[row], key) for row in rows]
            assert chosen[key].tolist() == pytest.approx(expected, nan_ok=True)
    assert (list(columns), list(columns.at(np.array([0])))) == (["a", "b", "c"], ["a"])
    assert columns.at(np.arange(4)) is columns


def test_tenths_are_counted_as_in_a_set():
    chance = random.Random(1)
    some = {chance.randrange(17_000_000_000, 17_000_010_000) for _ in range(3000)} | {5, 10**15}
    tenths = Tenths()
    for tenth in chance.sample(sorted(some), len(some)):
        tenths.add(tenth)
    assert tenths.newest == 10**15
    for _ in range(200):
        first = chance.randrange(17_000_000_000 - 700, 17_000_010_000)
        end = first + chance.choice([1, 2, 599, 600, 601, 5000, 10**12])
        assert tenths.count(first, end) == sum(first <= tenth < end for tenth in some)


@pytest.mark.parametrize("span_s", [100, 10_000, 1_000_000])
def test_sums_over_time_keep_their_total_in_few_buckets(span_s):
    chance, sums, total = random.Random(1), Sums(), 0
    for _ in range(10_000):
        value = chance.randrange(9)
        sums.add(1.7e9 + chance.random() * span_s, value)
        total += value
    assert len(sums.points()) <= _MOST_BUCKETS
    assert sum(value for _, value in sums.points()) == total
    assert sums.width_s >= span_s / _MOST_BUCKETS / 2
