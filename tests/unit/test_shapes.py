"""Every entry that does not fit the schema is reported, with the field that was probably meant."""

import pytest

from asyncrl.cli import main as cli
from asyncrl.config.nearest import nearest
from asyncrl.config.schema import ConfigError, CriticConfig, ExperimentConfig
from asyncrl.launch.experiment import draft_experiment, load_experiment

FITTING = "model_path: m\nprompts: {path: p}\nrollout: {tasks: {default: {reward: 'a:b'}}}\n"


@pytest.fixture
def config_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(FITTING)
    return file


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("train=8", "train=8: must be a section of fields, not one value; did you mean train.batch_size=8? its fields"),
        ("train=grpo", "did you mean train.algorithm=grpo?"),
        ("train.optimizer=1e-4", "did you mean train.optimizer.lr=0.0001?"),
        ("train=[1]", "train=[1]: must be a section of fields, not a list; its fields: algorithm, "),
        ("prompts=file.jsonl", "did you mean prompts.path=file.jsonl?"),
        ("eval=file.jsonl", "did you mean eval.prompts.path=file.jsonl?"),
        ("eval.prompts=file.jsonl", "did you mean eval.prompts.path=file.jsonl?"),
        (
            "rollout.tasks=f.py:r",
            "must be a section of names and values; did you mean rollout.tasks.default.reward=f.py:r",
        ),
        ("rollout.tasks.default=f.py:r", "did you mean rollout.tasks.default.reward=f.py:r?"),
        ("train.ref=/model", "did you mean train.ref.path=/model?"),
        ("train.critic=true", "did you mean train.critic={}?"),
        ("wandb=online", "did you mean wandb.mode=online?"),
        ("network=off", "did you mean network.authenticate=off?"),
        ("checkpoint=false", "did you mean checkpoint.every_s=0?"),
        ("record=true", "did you mean record.trajectories=true?"),
        ("model_path={path: x}", "must be one value, not a section; did you mean model_path=x?"),
        ("model_path=[x]", "must be one value, not a list; did you mean model_path=x?"),
        ("train.batch_size={n: 8}", "must be a whole number, not a section; did you mean train.batch_size=8?"),
        ("hosts=node1", "hosts='node1': must be a list: write hosts=[node1]"),
        ("hosts=[{a: 1}]", "hosts[0]={'a': 1}: must be one value, not a section"),
        ("train.max_steps=${trial}", "train.max_steps='t0': must be a whole number"),
        ("train.correction=${train.ppo}", "train.correction={'use_decoupled_loss': True"),
        ("train=null", "train=null: is a section without fields; give it some, or leave it out"),
        ("train.batch_size=null", "must have a value; leave it out for the default (64)"),
        (f"train.optimizer.lr=1{'0' * 400}", "must be a number"),
        ("train.batch_size=8.5", "train.batch_size=8.5: must be a whole number"),
        ("train.optimizer.lr=fast", "train.optimizer.lr='fast': must be a number"),
        ("train.ppo.c_clip=big", "train.ppo.c_clip='big': must be a number or null"),
        ("tensorboard=maybe", "tensorboard='maybe': must be true or false"),
        ("Train.Batch_Size=3", "unknown field 'Train': did you mean 'train.batch_size'?"),
        ("train=${nowhere}", "Interpolation key 'nowhere' not found; ${...} takes the path of another field"),
        ("train.algorithm=GRPO", "did you mean 'grpo'? one of ppo, grpo"),
        ("train.algorithm=gpro", "did you mean 'grpo'?"),
        ("train.correction=x", "train.correction='x': one of mask, tis, icepop"),
        ("mode=Async", "did you mean 'async'?"),
        (
            "allocation=Transformer.d1+d1",
            "did you mean 'transformers'? use one of transformers, sglang, vllm, external",
        ),
    ],
)
def test_what_does_not_fit_is_told_with_what_was_meant(config_file, written, told):
    with pytest.raises(ConfigError) as error:
        load_experiment(config_file, [written])
    assert told in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_everything_that_does_not_fit_is_reported_at_once(config_file):
    config_file.write_text(
        f"{FITTING}train: {{batch_sise: 3, optimizer: 2}}\ntrial: {{name: x}}\nseed: one\nblorp: 1\nhosts: a\n"
    )
    overrides = ["train.max_steps=many", "train.max_steps=-1", "train.optimizer.lr=nan", "manager.routing=robin"]
    draft = draft_experiment(config_file, overrides)
    assert [field for field, _ in draft.wrong] == [
        "train.batch_sise",
        "train.optimizer",
        "trial",
        "seed",
        "blorp",
        "hosts",
        "train.max_steps",
        "manager.routing",
    ]
    assert draft.wrong[0].text.startswith(f"in {config_file}: unknown field 'train.batch_sise': did you mean")
    assert (draft.config.seed, draft.config.trial) == (ExperimentConfig.seed, ExperimentConfig.trial)


@pytest.mark.parametrize(
    ("overrides", "lr"),
    [
        (["train.critic={}"], CriticConfig().optimizer.lr),
        (["train.algorithm=ppo"], CriticConfig().optimizer.lr),
        (["train.critic={optimizer: {lr: 0.5}}", "train.critic.minibatches=1"], 0.5),
        (["train.critic.optimizer.lr='0.5'"], 0.5),
    ],
)
def test_a_value_is_looked_up_in_a_section_that_is_absent_by_default(config_file, overrides, lr):
    config = draft_experiment(config_file, ["train.optimizer.lr=${train.critic.optimizer.lr}", *overrides]).config
    assert config.train.optimizer.lr == config.train.critic.optimizer.lr == lr


def test_a_whole_section_is_looked_up_elsewhere(config_file):
    config = load_experiment(
        config_file, ["prompts.chat_template=true", "eval.prompts=${prompts}", "eval.prompts.path=e"]
    )
    assert (config.eval.prompts.path, config.eval.prompts.chat_template, config.prompts.path) == ("e", True, "p")


def test_values_become_those_of_their_fields(config_file):
    """YAML reads on and off as true and false, and a name of digits as a number."""
    config_file.write_text(f"{FITTING}trial: 7\nrecover: off\nhosts: [1, 2]\ntensorboard: 'no'\n")
    config = draft_experiment(config_file, ["weights.fetch=on", "train.ppo.eps_clip=1", "train.batch_size='8'"]).config
    assert (config.trial, config.recover, config.hosts, config.tensorboard) == ("7", "off", ["1", "2"], False)
    assert (config.weights.fetch, repr(config.train.ppo.eps_clip), config.train.batch_size) == ("on", "1.0", 8)


@pytest.mark.parametrize(("written", "value"), [("0", "0.0"), ("90", "90.0"), ("0.5", "0.5"), ("auto", "'auto'")])
def test_a_number_of_seconds_or_a_word(config_file, written, value):
    config_file.write_text(FITTING)
    assert repr(draft_experiment(config_file, [f"checkpoint.every_s={written}"]).config.checkpoint.every_s) == value


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.tasks.default.reward=reward"],
        ["train.ppo.advantage_norm=auto", "train.critic={}"],
        ["slurm.options=[constraint]"],
        ["train.reward_models={a: {}}"],
        ["cluster=host", "hosts=[a,b]"],
        ["mode=train_onyl", "replay.path=x"],
    ],
)
def test_nothing_is_said_about_the_default_of_a_wrong_field(config_file, overrides):
    with pytest.raises(ConfigError) as error:
        load_experiment(config_file, overrides)
    assert str(error.value).count("\n") == 0


def test_a_number_that_is_not_finite_hides_no_other_problem(config_file):
    with pytest.raises(ConfigError) as error:
        load_experiment(config_file, ["train.optimizer.lr=nan", "mode=asinc", "allocation=tgi.d1+d1"])
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("asked", "known", "found"),
    [
        ("GRPO", ["grpo", "gspo"], "grpo"),
        ("gpro", ["gspo", "grpo"], "grpo"),
        ("dr-grpo", ["grpo", "dr_grpo"], "dr_grpo"),
        ("", ["a"], None),
        ("x", ["", "grpo"], None),
        ("chek", ["check", "chaos"], "check"),
    ],
)
def test_the_nearest_name(asked, known, found):
    assert nearest(asked, known) == found


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["chek"], "unknown command 'chek': did you mean 'check'? commands: init, run"),
        (["Status"], "did you mean 'status'?"),
        (["train"], "did you mean 'run'?"),
        (["run.yaml"], "did you mean `asyncrl-launch run run.yaml`?"),
    ],
)
def test_an_unknown_command_suggests_one(words, told, capsys):
    assert cli.main(words) == 2
    assert told in capsys.readouterr().err
