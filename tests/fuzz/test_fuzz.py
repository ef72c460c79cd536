"""A minute of fuzzing. `python tests/fuzz/fuzz.py` runs a million inputs."""

import json
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from fuzz import failure_of, input_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from targets import OpenTransport, Target, all_targets

from asyncrl.config.schema import RuntimeConfig
from asyncrl.runtime.channel import ChannelReceiver
from asyncrl.runtime.channel_protocol import decode_forward

EXAMPLES = 150


@pytest.fixture(scope="module")
def targets():
    with all_targets() as made:
        yield made


def test_a_hundred_thousand_inputs():
    """Run the fuzzer's command, which limits memory and time."""
    command = [sys.executable, "fuzz.py", "--inputs", "100000", "--seed", "1"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    told = json.loads(done.stdout)
    assert told["inputs"] >= 100_000
    assert (told["failures"], told["processes_that_hung_or_died"]) == (0, 0)


def test_what_honest_peers_say_is_taken(targets):
    """The targets accept the corpus. Otherwise the fuzzer would only reach the first check."""
    for target in targets:
        for data in target.corpus:
            target.run(data)


@given(data=st.data())
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_bytes_of_hypothesis(targets, data):
    """Hypothesis shrinks failing inputs, and chooses inputs that our own mutations do not produce."""
    target = data.draw(st.sampled_from(targets))
    honest = st.sampled_from(list(target.corpus))
    cut = st.builds(lambda one, other, at: one[:at] + other[at:], honest, honest, st.integers(0, 400))
    told = failure_of(
        target,
        data.draw(
            st.one_of(st.binary(max_size=4096), honest, cut, st.builds(bytes.__add__, cut, st.binary(max_size=64)))
        ),
    )
    assert not told, f"{target.name}: {told}"


def test_the_fuzzer_sees_what_is_wrong():
    def bad(data):
        if data.count(b"\xff") > 2:
            raise KeyError("not allowed")

    target = Target("bad", [b"\x00" * 20], bad, (ValueError,))
    assert any("KeyError" in failure_of(target, input_of(target, 0, number)) for number in range(3000))


NESTED = b"\x9f\xa4data\xa0\xa0\xa0\xa0\x00\x00\x90\xc4\x00\x00" + b"\x91" * 200_000


async def test_what_is_nested_too_deeply_ends_no_stream():
    """Found by this fuzzer: 200 kB of nested lists after a message's fields ended the reading of heads."""
    transport = OpenTransport()
    receiver = ChannelReceiver("r", runtime=RuntimeConfig(push_credit_items=4), transport=transport)
    await receiver.start()
    frame = zlib.crc32(NESTED).to_bytes(4, "little") + NESTED
    with pytest.raises(RecursionError):
        decode_forward(frame)
    transport.sockets[0].deliver([frame])
    assert receiver.num_malformed == 1
    await receiver.close()
