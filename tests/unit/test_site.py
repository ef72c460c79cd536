"""The documentation site is built from docs/ without a warning, and the pages that are generated are up to date."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from asyncrl.config.reference import all_fields, json_schema, markdown, schema_text, select
from tests.pages import PAGES, ROOT, blocks

CONFIGS = sorted([*ROOT.glob("configs/*.yaml"), *ROOT.glob("examples/*/*.yaml")])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mkdocs.yml is strict: a broken link, or a page that the navigation lacks, is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_the_site_is_built_without_a_warning(site: Path) -> None:
    assert (site / "configuration" / "index.html").is_file()


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


def test_the_page_of_the_configuration_is_up_to_date() -> None:
    """Write it again: `asyncrl-launch config --markdown > docs/configuration.md`."""
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == markdown()


def test_a_field_has_type_default_limits_and_meaning() -> None:
    (field,) = select("manager.max_head_offpolicyness")
    assert (field.type, field.default, field.limits) == ("int", "2", "at least 0, at most 10,000")
    assert "synchronous" in field.meaning
    assert [field.path for field in all_fields() if not field.meaning] == []  # a comment in schema.py
    (routing,) = select("manager.routing")
    assert routing.allowed == ("round_robin", "least_requests", "least_token_usage")


def test_a_section_and_a_key_of_the_users_are_found() -> None:
    names = {field.path for field in select("rollout.tasks.maths")}
    assert "rollout.tasks.<name>.reward" in names
    assert {field.path for field in select("train.critic")} > {"train.critic.eps_clip", "train.critic.optimizer.lr"}
    assert select("train.none_such") == []
    assert len({field.path for field in all_fields()}) == len(all_fields())


def unknown_keys(value: object, schema: dict[str, object], path: str = "") -> list[str]:
    """Keys of a config that the schema refuses."""
    for option in schema.get("anyOf", [schema]):  # type: ignore[attr-defined]
        if isinstance(value, dict) and option.get("type") == "object":
            properties, others = option.get("properties", {}), option["additionalProperties"]
            found: list[str] = []
            for key, inner in value.items():
                below = properties.get(key, others)
                found += [f"{path}{key}"] if below is False else unknown_keys(inner, below, f"{path}{key}.")
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
