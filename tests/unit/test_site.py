"""The documentation site is built from docs/ without warnings, and the generated pages are up to date."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from asyncrl.config.reference import all_fields, json_schema, markdown, select
from tests.pages import ROOT

CONFIGS = sorted([*ROOT.glob("configs/*.yaml"), *ROOT.glob("examples/*/*.yaml")])


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """mkdocs.yml is strict: a broken link, or a page that the navigation lacks, is an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert (tmp_path / "site" / "configuration" / "index.html").is_file()


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


def unknown_keys(value: object, schema: dict[str, object], path: str = "") -> list[str]:
    """Return the keys of a config that the schema refuses."""
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
def test_the_json_schema_knows_all_fields_of_the_shipped_configs(config: Path) -> None:
    assert unknown_keys(yaml.safe_load(config.read_text(encoding="utf-8")), json_schema()) == []


def test_the_json_schema_refuses_an_unknown_field() -> None:
    assert unknown_keys({"train": {"optimizer": {"learning_rate": 1}}}, json_schema()) == [
        "train.optimizer.learning_rate"
    ]
