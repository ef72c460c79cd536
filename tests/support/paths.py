"""Counts the files and functions that a sample and a weight version pass through, from the functions that a real run executes.

    python -m tests.support.paths            # runs the smallest possible run, prints both paths and their numbers of files
    python -m tests.support.paths --write    # and writes the lists of docs/design/path-of-a-sample.md and path-of-a-version.md

The recorder follows one prompt and one version from process to process. The path of the sample begins when the gserver manager
chooses the prompt, and ends with the optimizer step that consumes it. The path of the version begins with the optimizer step that
makes it, and ends when a generation server samples the first token from it. Between these points, a function of asyncrl is on
the path if

- it *holds* the sample or the version: when it is called or when it returns, one of its arguments or local variables is or
  contains the ticket's id, the prompt's locator or its text; or the version, as an object, as text or in a path. Strings, bytes,
  containers, messages and dataclasses are searched. Other objects, such as a worker or a ledger, are not, because they hold
  everything;
- or it *carries* the sample or the version: it takes tensors, arrays, bytes or token ids, and one of its callers, direct or
  indirect, holds the sample or the version;
- or it *computes* the sample in a batch whose parts have no names: it is called with tensors in a generation server, between
  the first and the last event in which a generation server holds the sample.

`BESIDE` lists files that are not counted although a function in them holds the sample or the version, each with the reason:
metrics, traces and journals, the base of all workers, and the drivers of ZeroMQ, HTTP and etcd below our interfaces. The output
includes their number.

A file counts once, no matter how many of its functions run. The run is `asyncrl.testing.runs.make_tiny_run`: one process of each
kind on this machine, Unix sockets, weights through files. The paths do not contain the additions of other layouts (SGLang,
fetching, broadcast, several ranks, agents of OpenAI's client).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import textwrap
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = {kind: ROOT / "docs" / "design" / f"path-of-a-{kind}.md" for kind in ("sample", "version")}
BEGIN, END = "<!-- tests/support/paths.py writes from here -->", "<!-- to here -->"
PROMPT, EPOCH, POSITION = "314159265358", 0, 3
ATTEMPT, VERSION = 1, 1
STEP = ("asyncrl/model/engine.py", "TrainEngine._step")  # its return is an optimizer step
LOAD = ("asyncrl/generation/transformers.py", "LiveTensors.load_version")  # returns when the engine has the tensors
SAMPLE_TOKENS = ("asyncrl/generation/transformers.py", "sample_tokens")
_FOLDER_ENV = "ASYNCRL_TEST_PATHS"
_MOST_ELEMENTS, _DEEPEST = 64, 5
_BUCKET_S = 0.01  # only the first of a function's events within this time is written

_BESIDE_BOTH = {
    "asyncrl/config/": "the configuration of a process",
    "asyncrl/launch/": "starts the processes",
    "asyncrl/runtime/metrics.py": "metrics",
    "asyncrl/runtime/trace.py": "the timeline",
    "asyncrl/runtime/journal.py": "books for people",
    "asyncrl/runtime/worker.py": "the base of all workers",
    "asyncrl/runtime/background.py": "the base of all workers: tasks",
    "asyncrl/runtime/board.py": "the base of all workers: named waits, the status board",
    "asyncrl/runtime/disk.py": "the message for a file that cannot be written",
    "asyncrl/runtime/transport.py": "the driver of ZeroMQ, below the channel",
    "asyncrl/runtime/http_client.py": "the driver of HTTP, below service_client.py",
    "asyncrl/runtime/names/etcd/": "the driver of etcd, below names/interface.py",
    "asyncrl/master/report.py": "metrics of a train step",
}
BESIDE: Mapping[str, Mapping[str, str]] = {  # path -> file or folder -> why it is not on that path
    "sample": _BESIDE_BOTH,
    "version": {
        **_BESIDE_BOTH,
        "asyncrl/manager/ledger.py": "grants tickets under the version that is served",
        "asyncrl/manager/load.py": "asks servers how busy they are",
        "asyncrl/manager/http.py": "reports to the master which servers serve the version",
        "asyncrl/runtime/service_client.py": "carries those reports",
        "asyncrl/master/rollouts.py": "takes those reports in, and forms a batch by them",
        "asyncrl/generation/worker.py": "shows which version the engine serves",
        "asyncrl/rollout/": "a token's version is part of the sample",
    },
}


# ------------------------------------------------------------------------------------------------------ in the processes


class Recorder:
    """Records the functions of asyncrl that hold or carry the sample or the version. One per process, for all its threads."""

    def __init__(self, file: Path, *, records_all_data: bool) -> None:
        """records_all_data: also record a call that takes tensors although neither the called function nor any of its callers
        holds the sample or the version."""
        self._output = file.open("a", buffering=1)
        self._records_all_data = records_all_data
        self._names: dict[CodeType, tuple[str, str] | None] = {}
        self._held: dict[int, set[str]] = {}  # by id of a running frame
        self._last: dict[tuple[str, str, str, str], float] = {}

    def start(self) -> None:
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "return"):
            try:
                self._see(frame, event, argument)
            except Exception as error:
                self._output.write(json.dumps([0.0, f"failed: {error!r}", event, frame.f_code.co_filename, ""]) + "\n")

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if code not in self._names:
            self._names[code] = _name_of(code)
        if (name := self._names[code]) is None:
            return
        kinds = set(_kinds_of(frame.f_locals))
        if event == "return":
            kinds |= set(_kinds_of({"": argument})) | self._held.pop(id(frame), set())
        else:
            self._held[id(frame)] = kinds
        for kind in kinds:
            self._write(kind, event, name)
        if event == "call" and len(kinds) < 2 and _is_data(frame.f_locals):
            below = self._held_above(frame) - kinds
            for kind in below:
                self._write(f"below {kind}", event, name)
            if not below and not kinds and self._records_all_data:
                self._write("data", event, name)
        if name == STEP:
            self._write("step of the sample" if "sample" in self._held_above(frame) else "step", event, name)

    def _held_above(self, frame: FrameType) -> set[str]:
        """Return the kinds ("sample", "version") that the callers of this frame hold. The variables of the nearest caller in
        asyncrl are searched again, because they may have changed since that caller was called."""
        found: set[str] = set()
        above, looked = frame.f_back, False
        while above is not None:
            if id(above) in self._held:
                if not looked:
                    self._held[id(above)] |= set(_kinds_of(above.f_locals))
                    looked = True
                found |= self._held[id(above)]
            above = above.f_back
        return found

    def _write(self, kind: str, event: str, name: tuple[str, str]) -> None:
        now = time.monotonic()
        key = (kind, event, *name)
        if now - self._last.get(key, -1.0) < _BUCKET_S and name != STEP:
            return
        self._last[key] = now
        self._output.write(json.dumps([now, kind, event, *name]) + "\n")


def install() -> None:
    """Start a recorder if this interpreter is a worker or runs judges. sitecustomize calls this in every interpreter of the run."""
    program = " ".join(sys.orig_argv)
    if "asyncrl.launch.worker_main" in program:
        process = Path(sys.orig_argv[-1]).stem
    elif "judge_main.py" in program:
        process = "judges"
    else:
        return
    file = Path(os.environ[_FOLDER_ENV]) / f"{process}.jsonl"
    Recorder(file, records_all_data=process.startswith("generation_server")).start()


def _name_of(code: CodeType) -> tuple[str, str] | None:
    """Return (file relative to the root of the repository, function), or None for code outside asyncrl."""
    file = code.co_filename
    if not file.startswith(f"{ROOT}/asyncrl/"):
        return None
    parts = [part for part in code.co_qualname.split(".") if not part.startswith("<")]
    return (str(Path(file).relative_to(ROOT)), ".".join(parts)) if parts else None


def _kinds_of(variables: Mapping[str, object]) -> Iterator[str]:
    if _contains(variables, _is_sample, _DEEPEST):
        yield "sample"
    if _contains(variables, _is_version, _DEEPEST):
        yield "version"


_TICKET = f"-e{EPOCH}-p{POSITION}-i"
_VERSION_TEXT = f"a{ATTEMPT:04d}-v{VERSION:08d}"


def _is_sample(value: object) -> bool:
    if type(value).__name__ == "Locator":
        return (getattr(value, "epoch", None), getattr(value, "position", None)) == (EPOCH, POSITION)
    return _has_text(value, _TICKET) or _has_text(value, PROMPT)


def _is_version(value: object) -> bool:
    if type(value).__name__ == "WeightVersion":
        return (getattr(value, "attempt", None), getattr(value, "version", None)) == (ATTEMPT, VERSION)
    return _has_text(value, _VERSION_TEXT)


def _has_text(value: object, text: str) -> bool:
    if isinstance(value, str):
        return text in value
    if isinstance(value, bytes | bytearray | memoryview):
        return text.encode() in bytes(value[:65536])
    return isinstance(value, PurePath) and text in str(value)


def _contains(value: object, wanted: Any, depth: int) -> bool:
    return bool(wanted(value)) or (depth > 0 and any(_contains(part, wanted, depth - 1) for part in _parts(value)))


def _parts(value: object) -> Iterable[object]:
    """The parts of a container, a message or a dataclass."""
    if isinstance(value, str | bytes | int | float | type | None):
        return ()
    if isinstance(value, dict):
        return [part for pair in _first(value.items()) for part in pair]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return _first(value)
    fields = getattr(type(value), "__struct_fields__", ()) or getattr(type(value), "__dataclass_fields__", ())
    return [getattr(value, name, None) for name in fields]


def _first(elements: Iterable[Any]) -> list[Any]:
    try:
        return [element for element, _ in zip(elements, range(_MOST_ELEMENTS), strict=False)]
    except RuntimeError:  # changed by another thread meanwhile
        return []


def _is_data(variables: Mapping[str, object]) -> bool:
    return any(_contains(value, _is_tensor, 3) for value in variables.values())


def _is_tensor(value: object) -> bool:
    if isinstance(value, list):
        return len(value) > 1 and all(type(element) is int for element in value)
    return isinstance(value, bytes | bytearray | memoryview) or type(value).__name__ in (
        "Tensor",
        "Parameter",
        "ndarray",
    )


# ---------------------------------------------------------------------------------------------------------- of the whole run


@dataclass(frozen=True)
class Visit:
    """A function on a path, with the time of its first run there."""

    time: float
    process: str
    file: str
    function: str


@dataclass(frozen=True)
class _Event:
    time: float
    kind: str
    event: str
    file: str
    function: str
    process: str


def record(folder: Path) -> Path:
    """Run the smallest run with recorders in its processes. Returns the folder with their files."""
    from asyncrl.testing.runs import launch, make_tiny_run

    config = make_tiny_run(folder / "tiny", num_prompts=32)
    lines = (folder / "tiny" / "prompts.jsonl").read_text().splitlines()
    lines[POSITION] = json.dumps({"prompt": PROMPT, "answer": ""})
    (folder / "tiny" / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    events, site = folder / "events", folder / "site"
    events.mkdir()
    site.mkdir()
    (site / "sitecustomize.py").write_text("from tests.support import paths\npaths.install()\n")
    python_path = os.pathsep.join([str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    overrides = (
        *("prompts.shuffle=false", "train.max_steps=3", "runtime.fork_server=false", "runtime.max_restarts=0"),
        "train.ppo.proximal_pass=always",  # the path of a step with several updates, which is the default
    )
    with launch(config, *overrides, env={"PYTHONPATH": python_path, _FOLDER_ENV: str(events)}) as run:
        if run.wait(300) != 0:
            raise RuntimeError(f"the run has failed; it printed:\n{run.output()}")
    return events


def paths(events: Path) -> dict[str, list[Visit]]:
    """Both paths, from the files of `record`: every function with the time of its first run on the path, in that order.

    Files in `BESIDE` are still included.
    """
    found = sorted(_read(events), key=lambda event: event.time)
    return {"sample": _path_of_sample(found), "version": _path_of_version(found)}


def is_beside(kind: str, file: str) -> bool:
    """Whether the path of this kind, sample or version, does not count the file."""
    return any(file == entry or (entry.endswith("/") and file.startswith(entry)) for entry in BESIDE[kind])


def summary(kind: str, visits: Sequence[Visit]) -> str:
    files = {visit.file for visit in visits}
    beside = {file for file in files if is_beside(kind, file)}
    functions = {(visit.file, visit.function) for visit in visits if visit.file not in beside}
    return f"{len(files - beside)} files, {len(functions)} functions; {len(beside)} further files stand beside it"


def as_list(kind: str, visits: Sequence[Visit]) -> str:
    """The path as a numbered list in Markdown. Each item has a process, a file, and its functions in order of their first calls."""
    functions: dict[tuple[str, str], list[str]] = {}
    for visit in visits:
        if not is_beside(kind, visit.file):
            functions.setdefault((visit.process, visit.file), []).append(f"`{visit.function}`")
    items = (
        textwrap.fill(
            f"{number}. {process.rstrip('_0').replace('_', ' ')}: `{file}` {', '.join(names)}",
            width=120,
            subsequent_indent="    ",
            break_long_words=False,
        )
        for number, ((process, file), names) in enumerate(functions.items(), start=1)
    )
    return "\n".join((f"{summary(kind, visits).capitalize()}.", "", *items))


def write_page(page: Path, text: str) -> None:
    """Write the text between the page's two markers."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def _path_of_sample(events: Sequence[_Event]) -> list[Visit]:
    holds = [event for event in events if event.kind == "sample"]
    begin = next(event.time for event in holds if event.process == "gserver_manager_0")
    end = next(event for event in events if event.kind == "step of the sample" and event.event == "return")
    served = [event.time for event in holds if event.process.startswith("generation_server")]
    computed = [event for event in events if event.kind == "data" and served[0] <= event.time <= served[-1]]
    mine = [event for event in events if event.kind in ("sample", "below sample", "step of the sample")]
    return _visits([*mine, *computed], begin, end.time)


def _path_of_version(events: Sequence[_Event]) -> list[Visit]:
    holds = [event for event in events if event.kind == "version"]
    written = next(event.time for event in holds if event.process.startswith("model_worker"))
    begin = max(event.time for event in events if _is(event, STEP) and event.event == "return" and event.time < written)
    loaded = next(event.time for event in holds if _is(event, LOAD) and event.event == "return" and event.time > begin)
    end = next(event for event in events if event.time > loaded and _is(event, SAMPLE_TOKENS))
    mine = [event for event in events if event.kind in ("version", "below version") or _is(event, STEP)]
    return _visits([*mine, end], begin, end.time)


def _is(event: _Event, name: tuple[str, str]) -> bool:
    return (event.file, event.function) == name


def _visits(events: Iterable[_Event], begin: float, end: float) -> list[Visit]:
    first: dict[tuple[str, str, str], Visit] = {}
    for event in sorted(events, key=lambda event: event.time):
        if begin <= event.time <= end:
            key = (event.process, event.file, event.function)
            first.setdefault(key, Visit(event.time - begin, *key))
    return list(first.values())


def _read(folder: Path) -> Iterator[_Event]:
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            moment, kind, event, source, function = json.loads(line)
            yield _Event(moment, kind, event, source, function, file.stem)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.paths", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the lists of the pages in docs/design")
    parser.add_argument("--events", type=Path, help="read an earlier recording from this folder")
    parser.add_argument("--keep", type=Path, help="record to this new folder, and keep it")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found = paths(arguments.events or record(arguments.keep or Path(temporary)))
    for kind, visits in found.items():
        print(f"path of a {kind}: {summary(kind, visits)}")
        for visit in visits:
            beside = " (beside it)" if is_beside(kind, visit.file) else ""
            print(f"  {visit.time:8.3f} s  {visit.process:20} {visit.file}:{visit.function}{beside}")
        if arguments.write:
            write_page(PAGES[kind], as_list(kind, visits))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
