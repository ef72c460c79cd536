"""Preflight refuses a model folder that cannot be trained and names field, value and remedy."""

import json
import os
import re
import shutil

import pytest

from asyncrl.cli import doctor
from asyncrl.cli import main as cli
from asyncrl.config.schema import ConfigError
from asyncrl.data.model_folder import INDEX, check_shards, weight_map
from asyncrl.data.prompts import load_tokenizer
from asyncrl.launch.checks import model_files
from asyncrl.launch.checks.checklist import Case, make_checks
from asyncrl.launch.checks.disk import items_of, items_text
from asyncrl.launch.checks.preflight import CHECKS
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import run_directory
from asyncrl.testing.tiny import make_char_tokenizer
from tests.support.preflight import preflight

TENSORS = {"a.weight": [2, 3], "b.weight": [4]}


def safetensors(tensors):
    """Return the bytes of a file whose tensors are zeros."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in tensors.items():
        size = 4 * (shape[0] * shape[1] if len(shape) == 2 else shape[0])
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end)


@pytest.fixture
def model(tmp_path):
    """A folder that preflight accepts as a model: 10 parameters, a tokenizer of 64 tokens."""
    folder = tmp_path / "model"
    make_char_tokenizer(folder)
    edit(folder, "config.json", model_type="qwen2", vocab_size=64, max_position_embeddings=512)
    (folder / "model.safetensors").write_bytes(safetensors(TENSORS))
    return folder


@pytest.fixture
def check(tmp_path, model):
    """Return a function that runs preflight on a config whose files all exist, with overrides."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "1", "answer": "2"}\n' * 64)
    (tmp_path / "rewards.py").write_text("def reward(*_):\n    return 1.0\n")
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model_path: {model}\n"
        f"fileroot: {tmp_path}/runs\n"
        f"prompts: {{path: {tmp_path}/p.jsonl}}\n"
        f"rollout: {{tasks: {{default: {{reward: '{tmp_path}/rewards.py:reward'}}}}}}\n"
    )
    return lambda *overrides: preflight(load_experiment(file, list(overrides)))


def edit(folder, name, **entries):
    """Set entries of a JSON file; None removes an entry."""
    file = folder / name
    content = json.loads(file.read_text()) if file.exists() else {}
    content |= entries
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def shard(model):
    """Split the same weights into two files and an index."""
    (model / "model.safetensors").unlink()
    names = {name: f"model-0000{number}-of-00002.safetensors" for number, name in enumerate(TENSORS, start=1)}
    for name, file in names.items():
        (model / file).write_bytes(safetensors({name: TENSORS[name]}))
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def cut(file, to=None):
    data = file.read_bytes()
    file.write_bytes(data[:-4] if to is None else data[:to])


def test_a_complete_model_is_accepted(check, model):
    assert check() == 64
    assert model_files.count_parameters(str(model)) == 10
    shard(model)
    assert check() == 64
    assert model_files.count_parameters(str(model)) == 10


WEIGHTS = {
    "model.embed_tokens.weight": [64, 8],
    **{f"model.layers.{layer}.self_attn.q_proj.weight": [16, 8] for layer in range(2)},
    **{f"model.layers.{layer}.self_attn.k_proj.weight": [8, 8] for layer in range(2)},
    "model.norm.weight": [8],
}
SIZES = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def named(model):
    """The same folder with weights of the usual names, and their sizes in config.json."""
    (model / "model.safetensors").write_bytes(safetensors(WEIGHTS))
    edit(model, "config.json", **SIZES)
    return model


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"num_hidden_layers": 10**7}, "num_hidden_layers=10000000, but the weights have 2 layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0, which is no number above 0"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers='2', which is no number above 0"),
        ({"vocab_size": 2**40}, "vocab_size=1099511627776, but the embedding has 64 rows"),
        ({"hidden_size": 9}, "hidden_size=9, which is no dimension of the weights"),
        ({"num_attention_heads": 5}, "num_attention_heads=5, which does not divide the 16 rows of q_proj.weight"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3, which does not divide the 8 rows of k_proj.weight"),
        (
            {"text_config": {"num_hidden_layers": 3, "vocab_size": 64}, "num_hidden_layers": None},
            "num_hidden_layers=3, but the weights have 2 layers",
        ),
    ],
)
def test_a_config_that_contradicts_the_weights_is_refused(check, named, wrong, told):
    assert check() == 64
    edit(named, "config.json", num_hidden_layers=1)  # fewer layers than the files have
    assert check() == 64
    edit(named, "config.json", num_hidden_layers=2)
    edit(named, "config.json", **wrong)
    with pytest.raises(
        ConfigError, match=rf"model_path='{named}': config\.json has {re.escape(told)}.*copy the model again"
    ):
        check()


def test_check_shows_one_refusal_of_a_wrong_layer_count(check, named, capsys):
    """transformers refuses this config.json with an error of its own, which the check of the architecture would show."""
    edit(named, "config.json", num_hidden_layers=3, layer_types=["full_attention"] * 2)
    assert cli.main(["check", str(named.parent / "run.yaml")]) == 2
    out = capsys.readouterr().out.replace("\n", " ")
    assert "num_hidden_layers=3, but the weights have 2 layers" in out
    assert out.count("num_hidden_layers") == 1
    assert "architecture" not in out


@pytest.mark.parametrize("eos", [-5, [3, -1], "</s>", 64, [99, 100]])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_token_that_ends_responses_and_does_not_exist_is_refused(check, named, file, eos):
    edit(named, file, eos_token_id=[3, 99])  # one of them exists
    assert check() == 64
    edit(named, file, eos_token_id=eos)
    with pytest.raises(
        ConfigError, match=rf"{re.escape(file)} has eos_token_id=.*, which is no token of the vocabulary"
    ):
        check()


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json", INDEX])
def test_deep_and_large_json_is_refused_without_a_traceback(check, model, file):
    shard(model)
    edit(model, "generation_config.json")
    for content in (b"[" * 200_000, b'{"a":' * 200_000):
        (model / file).write_bytes(content)
        with pytest.raises(ConfigError, match=rf"_path='{model}': "):
            check()
    with (model / file).open("wb") as sparse:
        sparse.truncate(10**9)
    with pytest.raises(ConfigError, match=rf"_path='{model}': "):
        check()


def outside(model, name):
    files = {tensor: name for tensor in TENSORS}
    (model / INDEX).write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..", "", "sub/x.safetensors", "a\0b"])
@pytest.mark.parametrize("read", [lambda path: model_files.count_parameters(str(path)), check_shards, weight_map])
def test_an_index_that_names_files_outside_is_refused(model, name, read):
    shard(model)
    outside(model, name)
    with pytest.raises(ValueError, match="is not a name in this folder"):
        read(model)


@pytest.mark.parametrize("index", [False, True])
def test_links_out_of_the_folder_are_refused_except_into_a_hub_cache(tmp_path, model, index):
    if index:
        shard(model)
    hub, elsewhere = tmp_path / "models--a--b", tmp_path / "elsewhere"
    (hub / "blobs").mkdir(parents=True)
    elsewhere.mkdir()
    (hub / "snapshots").mkdir()
    snapshot = model.rename(hub / "snapshots" / "1")
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(hub / "blobs" / str(number))
        file.symlink_to(f"../../blobs/{number}")
    assert model_files.count_parameters(str(snapshot)) == 10
    check_shards(snapshot)
    shutil.copytree(snapshot, model, symlinks=False)
    first = next(iter(sorted(model.glob("*.safetensors"))))
    first.rename(elsewhere / "x")
    first.symlink_to(elsewhere / "x")
    with pytest.raises(ConfigError, match=r"is a link to .*/elsewhere/x, outside this folder and outside a Hub cache"):
        model_files.count_parameters(str(model))
    with pytest.raises(ValueError, match="outside this folder"):
        check_shards(model)


def test_a_hub_name_is_refused(check):
    with pytest.raises(ConfigError, match=r"model_path='Qwen/Qwen3-0.6B': there is no config\.json; give a folder"):
        check("model_path=Qwen/Qwen3-0.6B")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda m: (m / "config.json").write_text("{"), r"config\.json cannot be read: .*; copy the model again"),
        (lambda m: (m / "config.json").write_text("[1]"), r"config\.json is not a JSON object; copy the model again"),
        (
            lambda m: edit(m, "config.json", model_type="nosuch"),
            r"model_type='nosuch', which is no language model .*; upgrade",
        ),
        (lambda m: edit(m, "config.json", model_type=None), r"model_type=None, which is no language model"),
        (lambda m: (m / "model.safetensors").unlink(), r"there are no weights, neither model\.safetensors nor"),
        (
            lambda m: cut(m / "model.safetensors"),
            r"model\.safetensors has \d+ bytes, its header says \d+: .* copy it again",
        ),
        (
            lambda m: cut(m / "model.safetensors", 20),
            r"model\.safetensors \(20 bytes\) is not a safetensors file, or was cut",
        ),
        (
            lambda m: cut(m / "model.safetensors", 0),
            r"model\.safetensors \(0 bytes\) is not a safetensors file, or was cut",
        ),
        (lambda m: (m / "model.safetensors").write_bytes(bytes(100)), r"\(100 bytes\) is not a safetensors file"),
        (lambda m: (m / "model.safetensors").write_bytes(b"\xff" * 100), r"\(100 bytes\) is not a safetensors file"),
        (
            lambda m: edit(m, "config.json", vocab_size=32),
            r"largest token id is 63, but the model's vocabulary has 32 .* own tokenizer",
        ),
        (
            lambda m: edit(m, "config.json", vocab_size=None, text_config={"vocab_size": 32}),
            r"largest token id is 63, but the model's vocabulary has 32",
        ),
        (lambda m: edit(m, "tokenizer_config.json", eos_token=None), r"has no EOS token, .*; set eos_token"),
        (
            lambda m: edit(m, "tokenizer_config.json", eos_token="<end>"),
            r"EOS token '<end>' is not in its vocabulary, .*; set eos",
        ),
        (lambda m: (m / "tokenizer.json").write_text("{"), r"no tokenizer can be loaded from it"),
        (lambda m: (m / "tokenizer.json").unlink(), r"has no tokenizer\.json; save the tokenizer with save_pretrained"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(check, model, damage, told):
    damage(model)
    with pytest.raises(ConfigError, match=rf"_path='{model}': .*{told}"):
        check()


def test_a_missing_or_truncated_shard_is_named(check, model):
    shard(model)
    cut(model / "model-00002-of-00002.safetensors")
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors has \d+ bytes, its header says \d+"):
        check()
    (model / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"names 2 files, and model-00002-of-00002\.safetensors is missing; copy the missing files"
    ):
        check()
    (model / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"index\.json cannot be read: it has no weight_map; copy it again"):
        check()


def test_an_added_token_beyond_the_vocabulary_is_accepted_unless_it_is_eos(check, model):
    """Gemma has such a token for images."""
    tokenizer = load_tokenizer(model)
    tokenizer.add_tokens(["<image>"])
    tokenizer.save_pretrained(model)
    assert check() == 64
    edit(model, "tokenizer_config.json", eos_token={"content": "<image>", "__type": "AddedToken"})
    with pytest.raises(ConfigError, match=r"EOS token '<image>' has id 64, but the model's vocabulary has 64"):
        check()


def test_the_table_of_architectures_comes_from_transformers():
    known = model_files.auto_classes()
    assert {"qwen2", "qwen3", "llama", "mistral", "gemma3_text", "qwen3_vl"} <= known.keys()
    assert "vit" not in known


def test_without_the_table_every_architecture_is_accepted(check, model, monkeypatch):
    monkeypatch.setattr(model_files, "auto_classes", dict)
    edit(model, "config.json", model_type="newer than this")
    assert check() == 64


def test_a_disk_without_room_for_the_weights(check, model, monkeypatch):
    total, used, _ = usage = shutil.disk_usage(model)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type(usage)(total, used, 100_000_000))
    with pytest.raises(
        ConfigError, match=r"fileroot='.*runs': 100\.0 MB are free there, but the run needs 130\.0 MB .*weights\.keep=1"
    ):
        check()
    with_users_etcd = "name_resolve.endpoints=[localhost:2379]"
    assert check(with_users_etcd) == 64
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type(usage)(total, used, 199))
    with pytest.raises(
        ConfigError, match=r"needs 200 B \(weight versions \(weights\.keep \+ 1\): 4 x 40 B; final models: 1 x 40 B\)"
    ):
        check(with_users_etcd, "checkpoint.every_s=0")  # no checkpoints
    told = r"needs 560 B \(weight versions .*: 4 x 40 B; .*; checkpoints .*: 3 x 120 B\).* and checkpoint\.keep_last=1"
    with pytest.raises(ConfigError, match=told):
        check(with_users_etcd, "checkpoint.keep_last=2")
    # auto: a second checkpoint does not fit, so it is neither counted nor a remedy
    told = (
        r"needs 440 B \(.*; checkpoints \(checkpoint\.keep_last=auto: 1, \+ 1\): 2 x 120 B\).* or set weights\.keep=1$"
    )
    with pytest.raises(ConfigError, match=told):
        check(with_users_etcd)


def test_check_states_the_disk_item_by_item(check, tmp_path):
    """A model of a billion parameters in bfloat16, with recordings."""
    overrides = ["train.dtype=bfloat16", "record.trajectories=true", "weights.keep=2", "checkpoint.keep_last=2"]
    config = load_experiment(tmp_path / "run.yaml", overrides)
    items = list(items_of(config, 10**9))
    assert [(item.count, item.num_bytes, item.is_certain) for item in items] == [
        (3, 2 * 10**9, True),  # weight versions
        (1, 2 * 10**9, True),  # the final model
        (3, 12 * 10**9, True),  # checkpoints: weights and two moments in float32
        (2, 65 * 10**6, True),  # etcd
        (1, 4 * 10**9, False),  # recordings
    ]
    assert "checkpoints (checkpoint.keep_last + 1): 3 x 12.0 GB" in items_text(items)
    case = make_checks(CHECKS, Case(config)).case
    (_, disk) = doctor.judge_disk(tmp_path, case.disk_needed, case.disk_items)
    auto = load_experiment(tmp_path / "run.yaml", [*overrides[:-1], "checkpoint.keep_last=auto"])
    others = (3 + 1) * 2 * 10**9 + 130 * 10**6
    for room, kept in ((others + 72 * 10**9, 2), (others + 72 * 10**9 - 1, 1)):  # three of 12 GB in half of the rest
        stated = f"checkpoints (checkpoint.keep_last=auto: {kept}, + 1): {kept + 1} x 12.0 GB"
        assert stated in items_text(list(items_of(auto, 10**9, room)))
    assert "recorded trajectories (record.max_bytes): at most 4.0 GB" in disk.value


def test_what_the_run_holds_already_counts_as_room(check, tmp_path, model, monkeypatch):
    """A run that trained on this disk can be resumed on it, with the command that its error recommends."""
    run_dir = run_directory(load_experiment(tmp_path / "run.yaml", []))
    wal = run_dir / "etcd" / "attempt_1" / "member" / "wal" / "0.wal"
    wal.parent.mkdir(parents=True)
    total, used, _ = usage = shutil.disk_usage(model)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type(usage)(total, used, 100_000_000))
    with wal.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 20_000_000)
        with pytest.raises(ConfigError, match="but the run needs"):
            check()
        os.posix_fallocate(file.fileno(), 0, 64_000_000)
    assert check() == 64
    case = make_checks(CHECKS, Case(load_experiment(tmp_path / "run.yaml", []))).case
    _, disk = doctor.judge_disk(run_dir, case.disk_needed)
    assert disk.state == "warn"  # nearly full, but there is room for the rest


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def reward(:\n", r"rewards\.py:reward': the file is not valid Python: .*\(rewards\.py, line 1\)"),
        ("def other(): pass\n", r"rewards\.py does not define 'reward'; it defines other"),
    ],
)
def test_a_reward_file_that_cannot_be_used_is_refused(check, tmp_path, text, told):
    (tmp_path / "rewards.py").write_text(text)
    with pytest.raises(ConfigError, match=rf"rollout\.tasks\.default\.reward=.*{told}"):
        check()


def test_a_missing_reward_module_is_refused(check, tmp_path, monkeypatch):
    wanted = "rollout.tasks.default.reward=bad_rewards_of_mine.sums:reward"
    with pytest.raises(ConfigError, match=r"there is no module 'bad_rewards_of_mine'; write path/to/file\.py:name"):
        check(wanted)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad_rewards_of_mine").mkdir()
    assert check(wanted) == 64  # found: the run's processes import from the current folder
