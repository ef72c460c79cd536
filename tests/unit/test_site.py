"""The documentation site is built from docs/ without warnings, and the generated pages are up to date."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.config.reference import all_fields, json_schema, markdown, schema_text, select
from tests.pages import PAGES, ROOT, blocks

CONFIGS = sorted([*ROOT.glob("configs/*.yaml"), *ROOT.glob("examples/*/*.yaml")])


def build(folder: Path, out: Path, **env: str) -> str:
    """Build the site whose mkdocs.yml is in the folder, without a warning. Return mkdocs' log."""
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", **env}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mkdocs.yml is strict: a broken link, or a page that the navigation lacks, is an error. Built as without a network."""
    folder = tmp_path_factory.mktemp("site")
    cache = str(tmp_path_factory.mktemp("cache"))
    log = build(ROOT, folder, https_proxy="http://127.0.0.1:9", XDG_CACHE_HOME=cache)
    assert re.search(r"INFO .*cannot fetch \S+tiny-[\d.]+\.tgz \(.*\): browsers load Mermaid from unpkg\.com", log)
    return folder


def test_the_site_is_built_without_a_warning(site: Path) -> None:
    assert (site / "configuration" / "index.html").is_file()


@pytest.fixture
def small_site(tmp_path: Path) -> Path:
    """A site with the hook for Mermaid, and a package of ours in the registry's place."""
    script = tmp_path / "mermaid.tiny.js"
    script.write_text("globalThis.mermaid = 1")
    with tarfile.open(tmp_path / "tiny.tgz", "w:gz") as package:
        package.add(script, "package/dist/mermaid.tiny.js")
    digest = base64.b64encode(hashlib.sha512((tmp_path / "tiny.tgz").read_bytes()).digest()).decode()
    hook = (ROOT / "launcher" / "site_mermaid.py").read_text(encoding="utf-8")
    hook = re.sub(r'(?m)^URL = "https://registry\.npmjs\.org/.*"$', f'URL = "{(tmp_path / "tiny.tgz").as_uri()}"', hook)
    hook = re.sub(r'(?m)^SHA512 = "[\w+/=]{88}"', f'SHA512 = "{digest}"', hook)
    (tmp_path / "hook.py").write_text(hook, encoding="utf-8")
    (tmp_path / "mkdocs.yml").write_text("site_name: small\ntheme: {name: mkdocs}\nhooks: [hook.py]\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Small\n")
    return tmp_path


def test_the_site_serves_mermaid_itself(small_site: Path) -> None:
    for out in ("first", "from_the_cache"):
        build(small_site, small_site / out, XDG_CACHE_HOME=str(small_site / "cache"))
        assert (small_site / out / "javascripts" / "mermaid.js").read_text() == "globalThis.mermaid = 1"
        assert '<script src="javascripts/mermaid.js">' in (small_site / out / "index.html").read_text()
        (small_site / "tiny.tgz").unlink(missing_ok=True)
    (small_site / "cache" / "asyncrl" / "tiny.tgz").write_bytes(b"damaged")
    assert "cannot fetch" in build(small_site, small_site / "last", XDG_CACHE_HOME=str(small_site / "cache"))
    assert not (small_site / "last" / "javascripts").exists()


def test_another_mermaid_than_the_pinned_one_fails_the_build(small_site: Path) -> None:
    (small_site / "tiny.tgz").write_bytes(b"another")
    with pytest.raises(AssertionError, match=r"tiny\.tgz does not have the SHA-512 in launcher/site_mermaid\.py"):
        build(small_site, small_site / "out", XDG_CACHE_HOME=str(small_site / "cache"))
    assert not (small_site / "cache").exists()


def documented(site: Path) -> set[str]:
    """Modules, classes, functions and their members on the pages of the Python API."""
    pages = [file.read_text(encoding="utf-8") for file in site.glob("api/*/index.html")]
    return {name for page in pages for name in re.findall(r'<h\d id="(asyncrl[\w.]+)"', page)}


def test_the_python_api_has_public_names_with_types(site: Path) -> None:
    names = documented(site)
    assert "asyncrl.data.sequence.SequenceSample.from_groups" in names
    assert "asyncrl.generation.engine.GenerationEngine.load_weights" in names
    assert [name for name in names if "._" in name] == []
    shown = re.sub(r"<[^>]+>", "", (site / "api" / "data" / "index.html").read_text(encoding="utf-8"))
    assert "select_ids(ids: Sequence[str]) -&gt; SequenceSample" in shown


OF_THE_REPOSITORY = {"bad_batch", "staleness"}  # examples that look into a run: they import what no task needs


def test_the_python_api_has_what_tasks_import(site: Path) -> None:
    """Tasks: the shipped ones, and those of the pages."""
    files = [file for file in ROOT.glob("examples/*/*.py") if file.parent.name not in OF_THE_REPOSITORY]
    sources = [file.read_text(encoding="utf-8") for file in files]
    sources += [block for page in PAGES for block in blocks(page, "python")]
    imported = {
        f"{node.module}.{alias.name}"
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "asyncrl"
        for alias in node.names
    }
    assert len(imported) > 20
    assert imported - documented(site) == set()


def test_the_configuration_page_is_up_to_date() -> None:
    """To regenerate it: `asyncrl-launch config --markdown > docs/configuration.md`."""
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == markdown()


def test_a_field_has_type_default_limits_and_meaning() -> None:
    (field,) = select("manager.max_head_offpolicyness")
    assert (field.type, field.default, field.limits) == ("int", "2", "at least 0, at most 10,000")
    assert "synchronous" in field.meaning
    # the meaning of a field is its comment in schema.py
    assert [field.path for field in all_fields() if not field.meaning] == []
    (routing,) = select("manager.routing")
    assert routing.allowed == ("round_robin", "least_requests", "least_token_usage")


def test_a_section_and_a_user_defined_key_are_found() -> None:
    names = {field.path for field in select("rollout.tasks.maths")}
    assert "rollout.tasks.<name>.reward" in names
    assert {field.path for field in select("train.critic")} > {"train.critic.eps_clip", "train.critic.optimizer.lr"}
    assert select("train.none_such") == []
    assert len({field.path for field in all_fields()}) == len(all_fields())


def test_the_gallery_shows_each_example_and_each_config_for_a_cpu() -> None:
    """A section without a picture says why; pictures are small, because each clone has them."""
    gallery = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    sections = {part.split("\n")[0]: part for part in gallery.split("\n## ")[1:]}
    examples = {file.parent.name for file in ROOT.glob("examples/*/README.md")}
    configs = {file.name for file in ROOT.glob("configs/*_cpu.yaml")}
    assert examples <= sections.keys()
    assert all(any(f"configs/{config}" in part for part in sections.values()) for config in configs)
    for name in examples:
        assert "](images/" in sections[name] or "No curve: " in sections[name], name
    shown = set(re.findall(r"\]\(images/([\w.]+)\)", gallery))
    pictures = {file.name: file.stat().st_size for file in (ROOT / "docs" / "images").iterdir()}
    assert shown == pictures.keys()
    assert max(pictures.values()) <= 60_000


def unknown_keys(
    value: object, schema: dict[str, Any], path: str = "", whole: dict[str, Any] | None = None
) -> list[str]:
    """Return the keys of a config that the schema refuses. whole: the schema that this one is part of."""
    whole = whole or schema
    for option in schema.get("anyOf", [schema]):
        option = whole["$defs"][option["$ref"].rpartition("/")[2]] if "$ref" in option else option
        if isinstance(value, dict) and option.get("type") == "object":
            properties, others = option.get("properties", {}), option.get("additionalProperties", {})
            found: list[str] = []
            for key, inner in value.items():
                below = properties.get(key, others)
                found += [f"{path}{key}"] if below is False else unknown_keys(inner, below, f"{path}{key}.", whole)
            return found
    return []


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_first_line_of_a_shipped_config_names_a_schema_that_knows_its_fields(config: Path) -> None:
    text = config.read_text(encoding="utf-8")
    named = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
    assert named
    schema = json.loads((config.parent / named[1]).read_text(encoding="utf-8"))
    assert unknown_keys(yaml.safe_load(text), schema) == []


def test_the_json_schema_is_up_to_date() -> None:
    """Write it again: `asyncrl-launch config --schema > configs/schema.json`."""
    assert (ROOT / "configs" / "schema.json").read_text(encoding="utf-8") == schema_text()


def test_the_json_schema_refuses_an_unknown_field() -> None:
    assert unknown_keys({"train": {"optimizer": {"learning_rate": 1}}}, json_schema()) == [
        "train.optimizer.learning_rate"
    ]
