"""`asyncrl-launch completion`: bash completes with the script; those of other shells name every command."""

import shutil
import subprocess

import pytest

from asyncrl.cli.main import _parser, main

_COMPLETE = """
{script}
COMP_WORDS=({words}); COMP_CWORD={at}
_shtab_asyncrl_launch
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def script_of(shell, capsys):
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def completed(script, *words):
    asked = _COMPLETE.format(script=script, words=" ".join(f"'{word}'" for word in words), at=len(words) - 1)
    return subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True).stdout.split()


def test_bash_completes_commands_and_options(capsys):
    script = script_of("bash", capsys)
    assert completed(script, "asyncrl-launch", "re") == ["resume", "rejudge"]
    assert set(completed(script, "asyncrl-launch", "run", "--d")) == {"--dry-run", "--detach"}
    assert completed(script, "asyncrl-launch", "completion", "f") == ["fish"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_script_names_every_command(shell, capsys):
    script = script_of(shell, capsys)
    commands = next(action.choices for action in _parser()._actions if isinstance(action.choices, dict))
    assert len(commands) > 20
    assert [name for name in commands if name not in script] == []
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)
