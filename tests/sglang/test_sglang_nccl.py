"""The settings of NCCL that SGLang really makes at its start are those that the trainers of a broadcast get."""

import itertools
import json
import os
import subprocess

from asyncrl.generation.sglang_environment import nccl_settings

LIMIT_S = 180.0
FLAGS = ("enable-symm-mem", "enable-nccl-nvls")
NAMES = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")
CASES = [
    (dict.fromkeys(flags, ""), users)
    for flags, users in itertools.product([(), FLAGS[:1], FLAGS[1:]], [{}, dict.fromkeys(NAMES, "1"), {NAMES[1]: "0"}])
]
# The function that SGLang calls at its start, with a config that has only these flags
_PROGRAM = """
import json, os, sys
from sglang.srt.entrypoints import engine

class Config:
    def __init__(self, flags):
        self.on = {flag.replace("-", "_") for flag in flags}
    def __getattr__(self, name):
        return {"nnodes": 1, "dcp_size": 1}.get(name, name in self.on)

engine.resolving_view = lambda config: config
found = []
for flags, users in json.loads(sys.argv[1]):
    for name in json.loads(sys.argv[2]):
        os.environ.pop(name, None)
    os.environ.update(users)
    try:
        engine._set_envs_and_config(Config(flags))
    except Exception:  # later steps of the function look at the machine
        pass
    found.append({name: os.environ.get(name) for name in json.loads(sys.argv[2])})
print(json.dumps(found))
"""


def test_the_trainers_settings_of_nccl_are_those_of_sglang(sglang_python):
    done = subprocess.run(
        [sglang_python, "-c", _PROGRAM, json.dumps(CASES), json.dumps(NAMES)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"},
    )
    made = json.loads(done.stdout.splitlines()[-1])
    assert made == [{**users, **nccl_settings(flags, users)} for flags, users in CASES]
