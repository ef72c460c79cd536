"""The page of `asyncrl-launch ui`: views of runs, for a browser. It only reads, in a process of its own: the folders of runs, and
the statuses in the name resolve of a run that is running, at most once a second however often it is asked.

The files in page_files/ are open to every client that reaches the port; they are the same for every run. All else is answered only
with the token that the command prints (runtime/http_server.py). The token is in the URL after `#`, which browsers do not send; the
page's script sends it in a header. So no other site that the browser shows can read a run, and no proxy logs the token.

Texts of a run are data: they travel as JSON, and the script puts them into text nodes only.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from asyncrl.cli.advice import advise
from asyncrl.cli.commands.common import goes_on, names_of, not_running
from asyncrl.cli.commands.inspect import Surroundings, make_view, surroundings_of, task_name
from asyncrl.cli.curves import Panel, panel_object, picture, thinned, timeline
from asyncrl.cli.live_state import read_seen
from asyncrl.cli.run_files import Run, RunEntry, RunFiles, read_entry
from asyncrl.data.trajectories import FOLDER as TRAJECTORIES
from asyncrl.data.trajectories import TrajectoryError, read_header
from asyncrl.launch.redact import redact_urls
from asyncrl.launch.rundir import RUN_FILE, SUMMARY_FILE, LaunchError, is_running, read_record
from asyncrl.launch.standstill import wait_texts
from asyncrl.protocol.run_folder import path_of
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.clock import Clock
from asyncrl.runtime.metrics import METRICS_FILE

_POINTS = 500  # most points of a curve
# An answer is given again for this long. With the page's turns a record is on the screen within a second
_FRESH_S = 0.3
_FRESH_RESOLVED_S = 1.0  # that of the processes, for which name resolve is asked
_TOKENS_TENTHS = 50  # curves of the servers' tokens are made anew for each five seconds of tokens
_MOST_ANSWERS = 32  # kept
_MOST_SEARCHED, _MOST_FOUND = 2000, 200  # recorded trajectories
_ENTRY_FILES = (METRICS_FILE, RUN_FILE, SUMMARY_FILE)
_BOUNDS = {"min_reward": "-inf", "max_reward": "inf", "min_tokens": "0", "max_tokens": "inf"}
_FILES = {
    "/": "index.html",
    **{f"/{name}": name for name in ("page.js", "page.css", "uPlot.iife.min.js", "uPlot.min.css")},
}
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
OPEN_PATHS = frozenset(_FILES)
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

View = Callable[[Mapping[str, str]], object]  # from the query of a request


class Page:
    """Makes the answers, one at a time.

    consumes: requests. produces: answers.
    waits for: the disk, and name resolve up to its limit, on a thread. unblocked by: both.
    """

    def __init__(self, run_dirs: Mapping[str, Path], clock: Clock) -> None:
        """run_dirs: by the name that requests use."""
        self._run_dirs, self._clock = run_dirs, clock
        self._files = {name: RunFiles(path) for name, path in run_dirs.items()}
        self._one_at_a_time = asyncio.Lock()
        self._groups: dict[str, dict[str, Any]] = {}  # the newest recorded files of one run
        self._listing: tuple[object, object] = (None, None)  # of these, and what it was made from
        self._surroundings: tuple[Path, Surroundings] | None = None
        self._entries: dict[Path, tuple[object, RunEntry]] = {}  # and what each was made from
        self._timeline: tuple[object, object] = (None, None)  # of one run, and what it was made from
        # request -> (monotonic seconds, JSON, tag); the oldest first
        self._answers: dict[str, tuple[float, bytes, str]] = {}
        self._encodings: dict[str, tuple[object, bytes]] = {}  # view -> its newest content, and that as JSON

        self.views: dict[str, View] = {
            "runs": self._runs,
            "learning": self._of_records(_learning),
            "time": self._time,
            "processes": self._processes,
            "trajectories": self._trajectories,
            "trajectory": self._trajectory,
            "advice": self._of_records(_advice),
        }

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", _send_file),
            web.get("/{file}", _send_file),
            web.get("/api/runs", self._answering("runs")),
            web.get("/api/learning", self._answering("learning")),
            web.get("/api/time", self._answering("time")),
            web.get("/api/processes", self._answering("processes")),
            web.get("/api/trajectories", self._answering("trajectories")),
            web.get("/api/trajectory", self._answering("trajectory")),
            web.get("/api/advice", self._answering("advice")),
        ]

    def _answering(self, view: str) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(request: web.Request) -> web.Response:
            try:
                body, tag = await self._body(request.path_qs, view, dict(request.query))
            except (LookupError, ValueError) as error:  # ValueError: of numbers, paths and files of trajectories
                return _response(_error(error), "application/json", 404)
            except (LaunchError, OSError) as error:
                return _response(_error(error), "application/json", 503)
            if request.headers.get("If-None-Match") == tag:
                return web.Response(status=304, headers=_HEADERS)
            return _response(body, "application/json", tag=tag)

        return answer

    async def _body(self, asked: str, view: str, query: Mapping[str, str]) -> tuple[bytes, str]:
        """JSON, and its tag: of the content alone, because a tab outlives this process."""
        async with self._one_at_a_time:
            made, body, tag = self._answers.pop(asked, (-math.inf, b"", ""))
            if self._clock.monotonic() - made >= (_FRESH_RESOLVED_S if view == "processes" else _FRESH_S):
                before, body = body, await asyncio.to_thread(self._encoded, view, query)
                made = self._clock.monotonic()
                if body != before:
                    tag = f'"{sha256(body).hexdigest()}"'
            self._answers[asked] = made, body, tag
            while len(self._answers) > _MOST_ANSWERS:
                del self._answers[next(iter(self._answers))]
            return body, tag

    def _encoded(self, view: str, query: Mapping[str, str]) -> bytes:
        """A view's content as JSON. It is encoded again only if the view was made anew."""
        content = self.views[view](query)
        if self._encodings.get(view, (None,))[0] is not content:
            self._encodings[view] = content, msgspec.json.encode(content)
        return self._encodings[view][1]

    def _of(self, query: Mapping[str, str]) -> RunFiles:
        """The run that a request names, read to its end. Raises LookupError."""
        if (files := self._files.get(query.get("run", ""))) is None:
            raise LookupError("there is no such run on this page")
        return files.read()

    # -------------------------------------------------------------------------------------------------------------- views

    def _runs(self, _: Mapping[str, str]) -> object:
        return [{**asdict(self._entry(path)), "name": name} for name, path in self._run_dirs.items()]

    def _entry(self, run_dir: Path) -> RunEntry:
        """It is read again only if its files or its launcher have changed."""
        times = [path.stat().st_mtime_ns for name in _ENTRY_FILES if (path := run_dir / name).exists()]
        with contextlib.suppress(LaunchError):  # of a damaged run, which the entry tells
            times.append(is_running(run_dir))
        if self._entries.get(run_dir, (None,))[0] != times:
            self._entries[run_dir] = times, read_entry(run_dir)
        return self._entries[run_dir][1]

    def _of_records(self, make: Callable[[list[Run]], object]) -> View:
        """A view of the lineages of the runs that a request names. It is made anew only if a run has a new record of a step or an
        evaluation, or has ended. The view raises LookupError or ValueError."""
        kept: tuple[object, object] = (None, None)

        def view(query: Mapping[str, str]) -> object:
            nonlocal kept
            names = msgspec.json.decode(query.get("runs", ""), type=list[str])
            files = [(name, one, is_running(one.run_dir)) for name in names for one in [self._of({"run": name})]]
            mark = [(name, one.num_records, going_on) for name, one, going_on in files]
            if kept[0] != mark:
                kept = mark, make([run for name, one, on in files for run in one.runs(name, going_on=on)])
            return kept[1]

        return view

    def _time(self, query: Mapping[str, str]) -> object:
        files = self._of(query)
        rejected = sum(sums.buckets.total() for sums in files.rejected.values())
        seen = files.num_records, len(files.events), len(files.published), rejected
        mark = query["run"], seen, files.generating.newest // _TOKENS_TENTHS, is_running(files.run_dir)
        if self._timeline[0] != mark:
            self._timeline = mark, self._make_time(files, query["run"])
        return self._timeline[1]

    def _make_time(self, files: RunFiles, name: str) -> object:
        runs = files.runs(name, going_on=is_running(files.run_dir))
        panels = timeline(files, runs[-1] if runs else None)
        return {"panels": [_shown(panel) for panel in panels], "events": files.events}

    def _processes(self, query: Mapping[str, str]) -> object:
        run_dir = self._of(query).run_dir
        try:
            record = read_record(run_dir)
        except LaunchError as error:  # it is damaged
            return {"title": str(error), "notes": [], "workers": []}
        if record is None or not goes_on(run_dir, record):
            notes = [redact_urls(f"it failed: {record.failure}")] if record is not None and record.failure else []
            return {"title": not_running(run_dir, record), "notes": notes, "workers": []}
        with names_of(record) as resolver:
            seen = read_seen(run_dir, record, resolver, self._clock.time())
        workers = [
            {
                **msgspec.structs.asdict(status),
                "error": redact_urls(status.error),
                "notes": [redact_urls(note) for note in status.notes],
                "age_s": max(0.0, seen.at - status.time),
                "waits": wait_texts(status.waits),
            }
            for status in seen.statuses
        ]
        title = f"{query['run']}: {seen.training.text()}, attempt {record.attempt}"
        if seen.desired is not None:
            title += f"; {seen.desired} generation servers desired"
        return {"title": title, "notes": [note for worker in workers for note in worker["notes"]], "workers": workers}

    # ------------------------------------------------------------------------------------------------------- trajectories

    def _trajectories(self, query: Mapping[str, str]) -> object:
        """Groups with a response that fits all of the request's bounds, the newest first."""
        try:
            recorded = self._of(query).recorded()
        except TrajectoryError:
            recorded = []
        if self._listing[0] != (mark := (query, recorded)):
            self._listing = mark, self._make_listing(recorded[::-1], _filter(query))
        return self._listing[1]

    def _make_listing(self, recorded: list[Path], fits: Callable[[Mapping[str, Any]], bool]) -> object:
        searched = recorded[:_MOST_SEARCHED]
        self._groups = {file: self._groups.get(file) or self._group(path) for path in searched for file in [str(path)]}
        found = [group for group in self._groups.values() if group and fits(group)]
        return {"total": len(recorded), "searched": len(searched), "found": found[:_MOST_FOUND]}

    def _group(self, path: Path) -> dict[str, Any]:
        """What the list shows of a recorded file; empty if the file is broken, or was pruned meanwhile."""
        try:
            header = read_header(path)
        except (TrajectoryError, OSError):
            return {}
        meta = header.meta
        versions = [str(WeightVersion.unpack(packed)) for packed in (min(meta.version_start), max(meta.version_end))]
        return {
            "file": f"{path.parent.name}/{path.name}",
            "ticket": meta.ticket_id,
            "step": header.step + header.trained,
            "task": task_name(meta.task_id, self._around(path).rollout),
            "rewards": meta.rewards,
            "response_lengths": meta.response_lengths,
            "versions": " to ".join(dict.fromkeys(versions)),
        }

    def _around(self, path: Path) -> Surroundings:
        """The configs and the tokenizer of the run that recorded a file. Those of one attempt are kept."""
        if self._surroundings is None or self._surroundings[0] != path.parent:
            self._surroundings = path.parent, surroundings_of(path.absolute())
        return self._surroundings[1]

    def _trajectory(self, query: Mapping[str, str]) -> object:
        name = query.get("file", "")
        if re.fullmatch(r"attempt_\d+/[\w-]+\.safetensors", name) is None:
            raise ValueError("file: attempt_N/NAME.safetensors, as /api/trajectories gives it")
        path = path_of(self._of(query).run_dir, f"{TRAJECTORIES}/{name}")
        return make_view(path, sequence=int(query.get("sequence", "0")), around=self._around(path), compute=False)


def saved_page(run_dirs: Mapping[str, Path], clock: Clock) -> str:
    """The page as one file, without its server: the views `learning`, `time` and `advice` as they are now. It loads nothing, and
    its content security policy allows its own scripts only, by their hashes."""
    page = Page(run_dirs, clock)
    of_all = {"runs": msgspec.json.encode(list(run_dirs)).decode()}
    answers = {"/api/runs": page.views["runs"]({})}
    answers |= {f"/api/{view}": page.views[view](of_all) for view in ("learning", "advice")}
    answers |= {f"/api/time{name}": page.views["time"]({"run": name}) for name in run_dirs}
    data = msgspec.json.encode(answers).decode().replace("<", "\\u003c")  # no text ends the block
    scripts = [_file(name) for name in ("uPlot.iife.min.js", "page.js")]
    allowed = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts)
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"
    head, _, body = re.sub(r'<(link rel="stylesheet"|script src=).*\n', "", _file("index.html")).partition("</head>")
    parts = [
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        *(f"<style>{_file(name)}</style>" for name in ("uPlot.min.css", "page.css")),
    ]
    block = f'<script type="application/json" id="saved">{data}</script>'
    end = "".join(f"<script>{script}</script>\n" for script in scripts)
    return "".join((head, "\n".join(parts), "\n</head>", body.replace("</body>", f"{block}\n{end}</body>")))


def _file(name: str) -> str:
    return resources.files("asyncrl.cli").joinpath("page_files", name).read_text(encoding="utf-8")


def _learning(runs: list[Run]) -> object:
    return {"panels": [_shown(panel) for panel in picture(runs).panels]}


def _advice(runs: list[Run]) -> object:
    return [
        {"run": run.name, "title": found.title, "figure": found.figure, "remedy": found.remedy}
        for run in runs
        for found in advise(run)
    ]


def _filter(query: Mapping[str, str]) -> Callable[[Mapping[str, Any]], bool]:
    """Raises ValueError for a bound that is no number."""
    low, high, shortest, longest = (float(query.get(name, end)) for name, end in _BOUNDS.items())
    task = query.get("task", "")

    def fits(group: Mapping[str, Any]) -> bool:
        responses = zip(group["rewards"], group["response_lengths"], strict=True)
        return task in group["task"] and any(
            low <= reward <= high and shortest <= length <= longest for reward, length in responses
        )

    return fits


def _shown(panel: Panel) -> dict[str, object]:
    return {**panel_object(thinned(panel, _POINTS)), "points": [curve.points for curve in panel.curves]}


def _error(error: Exception) -> bytes:
    return msgspec.json.encode({"error": redact_urls(str(error))})


async def _send_file(request: web.Request) -> web.Response:
    if (name := _FILES.get(request.path)) is None:
        raise web.HTTPNotFound(headers=_HEADERS)
    return _response(_file(name).encode(), _KINDS[Path(name).suffix])


def _response(body: bytes, kind: str, status: int = 200, tag: str = "") -> web.Response:
    headers = {**_HEADERS, "ETag": tag} if tag else _HEADERS
    return web.Response(body=body, status=status, content_type=kind, charset="utf-8", headers=headers)
