"""The table of endpoints is complete: it lists exactly the endpoints that the code opens."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import asyncrl
from asyncrl.protocol.calls import CallBody
from asyncrl.protocol.names import Names
from asyncrl.rollout.openai_api import DIALECTS
from tests.support.endpoints import HTTP, NAMES, STREAMS

SOURCE = {path: path.read_text() for path in Path(asyncrl.__file__).parent.rglob("*.py") if "testing" not in path.parts}
_ADDED = re.compile(r"""(?:web\.|add_)(get|post)\((?:prefix \+ )?(["'][^"']+["']|\w+),""")
_DISPATCHED = re.compile(r'^\s+"(/\w+)": \("(GET|POST)",', re.MULTILINE)
_CONSTANT = re.compile(r'^(PATH) = "([^"]+)"', re.MULTILINE)


def test_every_http_route_is_in_the_table() -> None:
    found = set()
    for text in SOURCE.values():
        constants = dict(_CONSTANT.findall(text))
        found |= {f"{method.upper()} {constants.get(path) or path[1:-1]}" for method, path in _ADDED.findall(text)}
        found |= {f"{method} {path}" for path, method in _DISPATCHED.findall(text)}
    found |= {f"POST {dialect.path}" for dialect in DIALECTS}
    assert found == {route for routes in HTTP.values() for route in routes}


def test_every_http_server_refuses_unauthenticated_clients() -> None:
    """`serve` refuses them before a handler runs, and no other function binds a server. The OpenAI API has sessions of its own."""
    for path, text in SOURCE.items():
        if path.name != "http_server.py":
            assert not re.search(r"web\.\w*(Site|run_app)\b", text), path
        if path.name not in ("http_server.py", "openai_api.py"):
            assert "for_others" not in text, path


def test_every_call_of_a_model_worker_and_every_key_is_in_the_table() -> None:
    calls = STREAMS["model_worker: request_reply/<index>"]
    assert {kind.__name__ for kind in CallBody.__args__} <= set(calls)  # type: ignore[attr-defined]
    assert {name for name, _ in inspect.getmembers(Names, inspect.isfunction) if name[0] != "_"} == set(NAMES)
