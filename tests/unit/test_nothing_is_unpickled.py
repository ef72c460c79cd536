"""Data from other processes is never unpickled, evaluated or constructed. Checked in the sources, and with a pickle that has an
effect."""

import ast
import asyncio
import os
import pickle
import uuid
from pathlib import Path

import msgspec
import pytest

import asyncrl
from asyncrl.config.schema import ConfigError, RuntimeConfig
from asyncrl.data.sequence import decode_sample
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import load_process_config, parse_process_config
from asyncrl.protocol.errors import DECODE_ERRORS, CodecError
from asyncrl.protocol.manager import MasterReport
from asyncrl.protocol.names import Names
from asyncrl.protocol.trajectories import TrajectoryMeta
from asyncrl.runtime.channel import ChannelSender
from asyncrl.runtime.channel_protocol import ChannelRefused
from asyncrl.streams.push_pull import NameResolvingZmqPuller, puller_stream
from tests.support.memory_names import MemoryNameResolver

SOURCES = sorted(Path(asyncrl.__file__).parent.rglob("*.py"))
# Judges: judge_main.py receives calls only from the worker that forked it, through a socket pair that no other process has.
# Sandboxes: the first process of a sandbox reads marshal from its creator and runs a model's program, which is its purpose. The
# creator only writes marshal, and receives only bytes from the sandbox.
OWN_CHILDREN = {"rewards/judges.py", "rewards/judge_main.py", "rewards/sandbox/pool.py", "rewards/sandbox/main.py"}
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
CALLS = {
    *("torch.load", "torch.save", "torch.jit.load", "np.load", "numpy.load", "eval", "exec", "compile", "__import__"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "pandas.read_pickle"),
}
# These functions pickle the objects that they move between ranks
OBJECT_COLLECTIVES = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"} | {
    *("send_object_list", "recv_object_list", "recv_pyobj", "send_pyobj")
}


def offences(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in UNPICKLERS]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module or ""] if (node.module or "").partition(".")[0] in UNPICKLERS else []
            found += [alias.name for alias in node.names if alias.name in OBJECT_COLLECTIVES]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in CALLS or called.rpartition(".")[2] in OBJECT_COLLECTIVES:
                found.append(called)
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code"):
            is_off = isinstance(node.value, ast.Constant) and node.value.value is False
            found += [] if is_off else [node.arg]
    return found


def test_no_source_unpickles_or_evaluates():
    assert len(SOURCES) > 200
    found = {str(path.relative_to(Path(asyncrl.__file__).parent)): offences(path) for path in SOURCES}
    assert {name for name, what in found.items() if what} == OWN_CHILDREN, found


def test_the_creator_of_a_sandbox_reads_no_objects_from_it():
    """The sandbox's first process does read objects. Its source is a string constant in this file, so the check does not see it."""
    tree = ast.parse((Path(asyncrl.__file__).parent / "rewards" / "sandbox" / "pool.py").read_text(encoding="utf-8"))
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert "marshal.dumps" in called
    assert not {"marshal.load", "marshal.loads", "eval", "exec"} & called


def test_each_offence_would_be_found(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import pickle\nfrom dill import loads\nimport torch, yaml\ntorch.load('x')\nyaml.load('y')\neval('1')\n"
        "dist.broadcast_object_list([])\nsocket.recv_pyobj()\nnp.load('x', allow_pickle=True)\n"
    )
    assert len(offences(bad)) == 9


class Bomb:
    """Creates a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def bomb(tmp_path):
    """The pickle, and the folder that it creates when unpickled. The end of the fixture checks that unpickling would create it."""
    crater = tmp_path / "crater"
    made = pickle.dumps(Bomb(crater))
    yield made, crater
    assert not crater.exists()
    pickle.loads(made)
    assert crater.exists()


async def test_a_pickle_in_a_stream_is_refused(bomb):
    made, crater = bomb
    runtime = RuntimeConfig()
    with MemoryNameResolver(uuid.uuid4().hex) as resolver:
        names = Names("e", "t")
        puller = NameResolvingZmqPuller(resolver, names, puller_index=0, runtime=RuntimeConfig())
        await puller.start()
        pulling = asyncio.create_task(puller.pull())
        sender = ChannelSender("s", "puller0", "i", runtime=runtime)
        await sender.start(resolver, names.stream(puller_stream(0)))
        for header, frames in ((made, [made]), (msgspec.msgpack.encode(made), [])):
            with pytest.raises(ChannelRefused, match="cannot read"):
                await sender.send(header, frames, timeout_s=20, what="a bomb")
        pulling.cancel()
        await sender.close()
        await puller.close()
    assert not crater.exists()


def test_a_pickle_is_not_a_valid_message_or_sample(bomb):
    made, _ = bomb
    for decode in (msgspec.json.Decoder(MasterReport).decode, msgspec.msgpack.Decoder(TrajectoryMeta).decode):
        with pytest.raises(DECODE_ERRORS):
            decode(made)
    with pytest.raises(CodecError):
        decode_sample(made, [made])


@pytest.mark.parametrize(
    "tag",
    ["!!python/object/apply:os.mkdir", "!!python/object/new:os.mkdir", "!!python/name:os.mkdir", "!!python/module:os"],
)
def test_yaml_tags_construct_nothing(tmp_path, tag):
    crater = tmp_path / "crater"
    file = tmp_path / "config.yaml"
    for text in (f"model_path: {tag} [{crater}]\n", f"worker: {tag} [{crater}]\n", f"{tag} [{crater}]\n"):
        file.write_text(text)
        with pytest.raises(ConfigError):
            load_experiment(file)
        with pytest.raises(Exception, match=r"constructor|tag|YAML"):
            load_process_config(file)
        with pytest.raises(ValueError):  # noqa: PT011 - any message
            parse_process_config(text)
        with pytest.raises(ConfigError):
            load_experiment("configs/quickstart_cpu.yaml", [f"model_path={tag} [{crater}]"])
    assert not crater.exists()
