"""Redaction: printed texts and config.yaml contain no secrets. The configs that processes load keep them."""

import os

import pytest

from asyncrl.config.schema import ExperimentConfig, NameResolveConfig, RolloutConfig, TaskConfig
from asyncrl.launch.program import load_process_config, plan, save_config
from asyncrl.launch.redact import is_secret, redact, redact_text, redact_urls


@pytest.mark.parametrize(
    "name",
    [
        "password",
        "db_password",
        "etcdPassword",
        "HF_TOKEN",
        "token",
        "auth_token",
        "WANDB_API_KEY",
        "wandb_api_key",
        "apiKey",
        "api-key",
        "AWS_SECRET_ACCESS_KEY",
        "client_secret",
        "accessKey",
        "private_key",
        "wandb_key",
        "credentials",
    ],
)
def test_names_of_secrets_are_recognised(name):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "max_new_tokens",
        "tokenizer_path",
        "prompt_key",
        "answer_key",
        "input_keys",
        "eos_token",
        "stop_token",
        "TOKENIZERS_PARALLELISM",
        "logprob_chunk_tokens",
        "max_tokens_per_mb",
        "tokens",
        "key",
        "extra_train_keys",
        "secretary",
        "compass",
        "num_keys",
    ],
)
def test_other_names_are_not_secret(name):
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://root:pa:ss@h:2379/x", "http://root:***@h:2379/x"),
        ("['root:pw@h:1', 'b:c@h:2']", "['root:***@h:1', 'b:***@h:2']"),
        ("127.0.0.1:2379", "127.0.0.1:2379"),
        ("https://h/path?token=abc&x=1", "https://h/path?token=***&x=1"),
        ("HF_TOKEN=abc python make.py --api-key xyz --out d", "HF_TOKEN=*** python make.py --api-key *** --out d"),
        ("max_tokens 5 hf_token=abc", "max_tokens 5 hf_token=***"),
        ('{"password": "a b", "user": "me"}', '{"password": ***, "user": "me"}'),
        ("the token expired; me@host.com: git@github.com:x/y", "the token expired; me@host.com: git@github.com:x/y"),
        ("path/to/file.py:reward", "path/to/file.py:reward"),
    ],
)
def test_secrets_in_texts_are_masked(text, shown):
    assert redact_text(text) == shown


def test_redact_urls_leaves_code_in_a_traceback_unchanged():
    assert redact_urls("    token = ids[0]  # http://u:p@h") == "    token = ids[0]  # http://u:***@h"


def test_secrets_in_nested_values_are_masked():
    value = {
        "api_key": "k",
        "args": {"url": "http://u:p@h", "token": "", "tokens": 3, "passwords": [1]},
        "n": [1, "b:c@h"],
    }
    assert redact(value) == {
        "api_key": "***",
        "args": {"url": "http://u:***@h", "token": "", "tokens": 3, "passwords": [1]},
        "n": [1, "b:***@h"],
    }
    assert redact(value, "secret") != value
    assert value["api_key"] == "k"


def test_saved_configs_are_redacted_or_private(tmp_path):
    """config.yaml is redacted. A process's config is complete; if it contains a secret, only its owner can read it."""
    config = ExperimentConfig(
        experiment="e",
        rollout=RolloutConfig(tasks={"default": TaskConfig(env="m:E", env_args={"api_key": "hidden", "size": 3})}),
        name_resolve=NameResolveConfig(endpoints=["u:hidden@h:1"]),
    )
    file = tmp_path / "config.yaml"
    file.write_text("of an attempt before")
    save_config(config, file, redacted=True)
    text = file.read_text()
    assert "hidden" not in text
    assert "size: 3" in text
    assert "u:***@h:1" in text

    spec = next(spec for spec in plan(config, attempt=1, num_prompts=1) if spec.kind == "rollout_worker")
    save_config(spec.config, file)
    assert load_process_config(file) == spec.config
    assert os.stat(file).st_mode & 0o077 == 0
    save_config(ExperimentConfig(), file)
    assert os.stat(file).st_mode & 0o777 == 0o666 & ~_umask()


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask
