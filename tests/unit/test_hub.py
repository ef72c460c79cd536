"""Models by name: the Hub's cache on disk, a small server that stands in for the Hub, and each failure to get a model."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import HfApi, constants
from safetensors.numpy import save

from asyncrl.cli.hub import is_hub_name, with_local_models
from asyncrl.config.schema import ConfigError, ExperimentConfig
from asyncrl.launch.experiment import Draft

NAME, COMMIT, OLDER = "Somebody/Tiny-1.5B", "0123456789abcdef0123456789abcdef01234567", "76543210" * 5
FILES = {
    "config.json": json.dumps({"model_type": "qwen2", "vocab_size": 4}).encode(),
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "merges.txt": b"",
    "model.safetensors": save({"weight": np.zeros((2, 3), np.float32)}),
}
NOT_WANTED = {"pytorch_model.bin": b"old", "original/consolidated.safetensors": b"other", "README.md": b"# Tiny"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hub. Any request to the network fails the test."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "repo_info", lambda *args, **kwargs: pytest.fail("there was a request to the network"))
    return tmp_path / "hub"


def put_into(cache: Path, files: dict[str, bytes], *, commit: str = COMMIT, refs: tuple[str, ...] = ("main",)) -> Path:
    """Write a model as huggingface_hub caches it: blobs, links to them, and the commit of each branch."""
    folder = cache / f"models--{NAME.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir(exist_ok=True)
    (folder / "refs").mkdir(exist_ok=True)
    for ref in refs:
        (folder / "refs" / ref).write_text(commit)
    for i, (name, content) in enumerate(files.items()):
        blob = folder / "blobs" / f"{commit[:8]}{i}"
        blob.write_bytes(content)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def config_of(model: str, tokenizer: str = "") -> ExperimentConfig:
    return ExperimentConfig(model_path=model, tokenizer_path=tokenizer)


def local_models(config: ExperimentConfig, *, download: bool) -> ExperimentConfig:
    return with_local_models(Draft(config, []), download=download).checked()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("Qwen/Qwen2.5-1.5B-Instruct", True),
        ("Qwen/Qwen2.5-1.5B-Instruct@main", True),
        ("Qwen/Qwen2.5-1.5B-Instruct@refs/pr/3", True),
        ("/models/qwen", False),
        ("./models/qwen", False),
        ("~/qwen", False),
        ("../qwen", False),
        ("examples/sloppy_sorter/model", False),
        ("gpt2", False),
        ("", False),
    ],
)
def test_hub_names_are_distinguished_from_paths(path: str, expected: bool) -> None:
    assert is_hub_name(path) is expected


def test_a_folder_takes_precedence_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path(NAME).mkdir(parents=True)
    config = config_of(NAME)
    assert local_models(config, download=True) == config


@pytest.mark.parametrize("download", [False, True])
def test_a_cached_model_is_used_without_a_request_to_the_hub(cache: Path, download: bool) -> None:
    snapshot, older = put_into(cache, FILES), put_into(cache, FILES, commit=OLDER, refs=("v1",))
    config = local_models(config_of(NAME), download=download)
    assert (config.model_path, config.tokenizer_path) == (str(snapshot), "")
    for name in (f"{NAME}@v1", f"{NAME}@{OLDER}"):
        assert local_models(config_of("/models/other", name), download=download).tokenizer_path == str(older)


def test_a_missing_model_is_named_with_its_remedy(cache: Path) -> None:
    """`asyncrl-launch check` only reads: it creates no cache folder."""
    with pytest.raises(ConfigError) as error:
        local_models(config_of(NAME), download=False)
    text = str(error.value)
    for part in (
        f"model_path='{NAME}'",
        "no folder of that name",
        str(cache),
        "asyncrl-launch prepare",
        "model_path=/path",
    ):
        assert part in text
    assert not cache.exists()
    put_into(cache, FILES)
    with pytest.raises(ConfigError, match=r"tokenizer_path='Some/Other'.* has no model of that name"):
        local_models(config_of(NAME, "Some/Other"), download=False)
    with pytest.raises(ConfigError, match=r"Tiny-1\.5B@v2'.* has no model of that name"):
        local_models(config_of(f"{NAME}@v2"), download=False)


@pytest.mark.parametrize(
    ("lost", "complaint"), [("config.json", "has no config.json"), ("model.safetensors", "there are no weights")]
)
def test_an_incomplete_model_is_refused(cache: Path, lost: str, complaint: str) -> None:
    put_into(cache, {name: content for name, content in FILES.items() if name != lost})
    with pytest.raises(ConfigError, match=rf"has only part of it: .*{complaint}.*asyncrl-launch prepare"):
        local_models(config_of(NAME), download=False)


def test_a_truncated_file_is_refused(cache: Path) -> None:
    put_into(cache, FILES | {"model.safetensors": FILES["model.safetensors"][:-1]})
    with pytest.raises(ConfigError, match=r"has only part of it: .*cut short"):
        local_models(config_of(NAME), download=False)


def test_offline_mode_uses_the_cache_and_downloads_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids to download it"):
        local_models(config_of(NAME), download=True)
    snapshot = put_into(cache, FILES)
    assert local_models(config_of(NAME), download=True).model_path == str(snapshot)


# ------------------------------------------------------------------------------------------------- a server instead of the Hub


class StandIn(http.server.BaseHTTPRequestHandler):
    """The requests of huggingface_hub for a snapshot: the commit of a revision, its list of files, and the files."""

    served: list[str]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        refusals = {"/api/models/No/Such": "RepoNotFound", "/api/models/Meta/Gated": "GatedRepo"}
        for start, code in refusals.items():
            if path.startswith(start):
                return self._answer(404 if code == "RepoNotFound" else 403, b"", {"X-Error-Code": code})
        if path == f"/api/models/{NAME}/revision/main":
            siblings = [{"rfilename": name} for name in [*FILES, *NOT_WANTED]]
            return self._json({"id": NAME, "sha": COMMIT, "siblings": siblings})
        if path.startswith(f"/api/models/{NAME}/revision/"):
            return self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if path == f"/api/models/{NAME}/tree/{COMMIT}":
            files = enumerate({**FILES, **NOT_WANTED}.items())
            listed = [
                {"type": "file", "path": name, "size": len(data), "oid": f"{i:040x}"} for i, (name, data) in files
            ]
            return self._json(listed)
        name = path.removeprefix(f"/{NAME}/resolve/{COMMIT}/")
        if name not in FILES:
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        if self.command == "GET":
            self.served.append(name)
        return self._answer(200, FILES[name], {"X-Repo-Commit": COMMIT, "ETag": f'"{list(FILES).index(name):040x}"'})

    do_HEAD = do_GET

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    """The server's address, and a list that receives the names of the files that were fetched."""
    served: list[str] = []
    handler = type("Handler", (StandIn,), {"served": served})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", served
        server.shutdown()
        thread.join(10)


ASK = """
import json, sys
from asyncrl.config.schema import ConfigError, ExperimentConfig
from asyncrl.cli.hub import with_local_models
from asyncrl.launch.experiment import Draft
answers, said = {}, []
for name in sys.argv[1:]:
    try:
        answers[name] = with_local_models(
            Draft(ExperimentConfig(model_path=name), []), download=True, say=said.append
        ).checked().model_path
    except ConfigError as error:
        answers[name] = str(error)
print(json.dumps([answers, said]))
"""


def ask(endpoint: str, home: Path, *names: str) -> tuple[dict[str, str], list[str], str]:
    """Run with_local_models in a new process, because huggingface_hub reads its environment when it is imported.

    Returns (folder or error by name, messages given to `say`, stderr).
    """
    hidden = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN")
    env = {
        name: value for name, value in os.environ.items() if name not in hidden and not name.lower().endswith("_proxy")
    }
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    # The timeouts are long, so that a slow answer causes no second request
    env |= {"HF_HUB_ETAG_TIMEOUT": "60", "HF_HUB_DOWNLOAD_TIMEOUT": "60"}
    done = subprocess.run(
        [sys.executable, "-c", ASK, *names], env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    answers, said = json.loads(done.stdout)
    return answers, said, done.stderr


def test_a_model_is_downloaded_once(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, served = hub
    answers, said, progress = ask(endpoint, tmp_path, NAME, NAME, "No/Such", "Meta/Gated", f"{NAME}@v9")
    folder = Path(answers[NAME])
    assert folder == tmp_path / "hub" / "models--Somebody--Tiny-1.5B" / "snapshots" / COMMIT
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == FILES
    assert sorted(served) == sorted(
        name for name, data in FILES.items() if data
    )  # each file once, and no file that is not needed
    assert "6/6" in progress  # the progress bar
    assert len(said) == 4
    assert said[0].endswith(f"downloading it from {endpoint} to {tmp_path / 'hub'}")
    assert "the Hub has no model of that name" in answers["No/Such"]
    assert f"its licence must be accepted on the Hub first: {endpoint}/Meta/Gated" in answers["Meta/Gated"]
    assert "the Hub has no such revision of it" in answers[f"{NAME}@v9"]
    assert all("model_path=/path/to/model" in answers[name] for name in answers if name != NAME)


def test_an_unreachable_hub_is_reported_for_models_that_are_not_cached(tmp_path: Path) -> None:
    put_into(tmp_path / "hub", FILES)
    answers, _, _ = ask("http://127.0.0.1:9", tmp_path, NAME, "Some/Other")
    assert answers[NAME].endswith(COMMIT)
    assert "the Hub cannot be reached" in answers["Some/Other"]
    assert "https_proxy" in answers["Some/Other"]
