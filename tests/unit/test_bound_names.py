"""What the checks before a start say about users' files without running them, compared with what the import finds."""

import sys

import pytest

from asyncrl.config.import_object import import_object
from asyncrl.config.schema import ConfigError, TaskConfig
from asyncrl.launch.checks.preflight import _check_defines
from asyncrl.rollout.rollouts import load_class

F = "lambda *given: 1.0"
BINDS_SCORE = {
    "def": "def score(): ...",
    "async def": "async def score(): ...",
    "class": "class score: ...",
    "decorated": "def wrap(f): return f\n@wrap\ndef score(): ...",
    "assignment": f"score = {F}",
    "chain": f"a = score = {F}",
    "annotated": f"score: object = {F}",
    "tuple": f"(a, [*b, score]) = 1, (2, {F})",
    "starred": "a, *score = 1, 2",
    "augmented": "score = 0\nscore += 1",
    "walrus": f"print(score := {F})",
    "walrus in a comprehension": "[score := n for n in (1, 2)]",
    "import": "import math as score",
    "dotted import": "import os.path",
    "from import": "from math import sqrt as score",
    "star import": "from math import *",
    "try": "try:\n    from no_such_package import score\nexcept ImportError:\n    def score(): ...",
    "try else finally": "try: pass\nexcept ValueError: pass\nelse: score = 1\nfinally: other = 2",
    "if": f"if True:\n    if True:\n        score = {F}",
    "else": "if False: pass\nelse:\n    def score(): ...",
    "with": "import contextlib\nwith contextlib.nullcontext(3) as score: pass",
    "in with": "import contextlib\nwith contextlib.suppress(ValueError):\n    def score(): ...",
    "for": "for score in (1, 2): pass",
    "in for": "for n in (1, 2):\n    score = n",
    "while": "while True:\n    score = 1\n    break",
    "match": "match 3:\n    case score: pass",
    "match mapping": "match {1: 2}:\n    case {1: a, **score}: pass",
    "match star": "match [1, 2]:\n    case [a, *score]: pass",
    "globals": f"globals()['score'] = {F}",
    "update": "vars().update(score=1)",
    "exec": "exec('score = 1')",
    "setattr": "import sys\nsetattr(sys.modules[__name__], 'score', 1)",
    "global": "def define():\n    global score\n    score = 1\ndefine()",
    "module getattr": "def __getattr__(name):\n    if name == 'score': return 1\n    raise AttributeError(name)",
}


@pytest.mark.parametrize("text", BINDS_SCORE.values(), ids=BINDS_SCORE)
def test_what_the_import_finds_is_never_refused(tmp_path, text):
    file = tmp_path / "rewards.py"
    file.write_text(text + "\n")
    name = {"import os.path": "os", "from math import *": "sqrt"}.get(text, "score")
    import_object(f"{file}:{name}", "reward")
    _check_defines("rollout.tasks.default.reward", f"{file}:{name}")


@pytest.mark.parametrize(
    "text",
    [
        "def other():\n    score = 1",
        "class Other:\n    score = 1",
        "other = [score for score in (1, 2)]",
        "other = {score for score in (1, 2)}",
        "other = {1: score for score in (1, 2)}",
        "other = lambda score: score",
        "other = {}\nother['score'] = 1",
        "import types\nother = types.SimpleNamespace()\nother.score = 1",
        "import logging\nlogger = logging.getLogger(__name__)\nif __name__ == '__main__': print('run')",
        "from math import sqrt as other",
    ],
)
def test_a_name_that_nothing_binds_is_refused_as_by_the_import(tmp_path, text):
    file = tmp_path / "rewards.py"
    file.write_text(text + "\n")
    with pytest.raises(ConfigError, match="has no 'score'"):
        import_object(f"{file}:score", "reward")
    with pytest.raises(ConfigError, match="does not define 'score'; it defines"):
        _check_defines("rollout.tasks.default.reward", f"{file}:score")


def test_the_attribute_of_a_class_is_found(tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text("class Rewards:\n    @staticmethod\n    def exact(prompt, completion, answer): return 1.0\n")
    assert import_object(f"{file}:Rewards.exact", "reward")("", "", "") == 1.0
    _check_defines("rollout.tasks.default.reward", f"{file}:Rewards.exact")
    with pytest.raises(ConfigError, match=r"has no 'Rewards\.exakt'"):
        import_object(f"{file}:Rewards.exakt", "reward")


def test_a_base_class_is_looked_for_where_the_import_looks(tmp_path, monkeypatch):
    """Installed modules first, then the folder of the file, then the current folder."""
    for folder, argument in (("installed", "far"), ("beside", "near"), ("current", "last")):
        (tmp_path / folder).mkdir()
        for module in {"installed": ["one"], "beside": ["one", "two"], "current": ["one", "two", "three"]}[folder]:
            (tmp_path / folder / f"{module}_base_env.py").write_text(
                "from asyncrl.rollout.agent import Env\n"
                f"class Base(Env):\n    def __init__(self, prompt, reward, {argument}): ...\n"
            )
    monkeypatch.chdir(tmp_path / "current")
    monkeypatch.setattr("sys.path", [*sys.path, str(tmp_path / "installed")])
    for module, argument in (("one", "far"), ("two", "near"), ("three", "last")):
        file = tmp_path / "beside" / f"own_{module}.py"
        file.write_text(f"from {module}_base_env import Base\nclass Own(Base): ...\n")
        load_class("rollout.tasks.t", TaskConfig(env=f"{file}:Own", env_args={argument: 2}), "env")
        with pytest.raises(ConfigError, match="does not take this argument"):
            load_class("rollout.tasks.t", TaskConfig(env=f"{file}:Own", env_args={argument: 2, "other": 1}), "env")
