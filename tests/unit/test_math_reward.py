r"""The rewards of examples/math: answers of GSM8K, fifty right answers in different notations, fifty near misses, and
formulas whose computation would never end.

Set ASYNCRL_GSM8K=/folder/with/train.jsonl/and/test.jsonl to check all of GSM8K besides the excerpt in the repository.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import psutil
import pytest

from asyncrl.data.prompts import Prompt
from asyncrl.rewards.reward import Completion, Reward
from tests.support.services import make_services

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "math"
EXCERPT = ROOT / "examples" / "word_problems" / "gsm8k_excerpt.jsonl"
MODULES = ("final_answer", "verifier", "reward")

# (response, answer in the data)
RIGHT = [
    (r"6 \cdot 7 = 42, so \boxed{42}.", "42"),
    ("She has 42 apples.\n#### 42", "42"),
    ("The answer is 42.", "42"),
    ("So the final answer is: **42**", "42"),
    ("**Answer:** 42 apples", "42"),
    ("The answer is therefore $42$.", "42"),
    ("The answer is 42 because 6 * 7 = 42.", "42"),
    ("The answer is $42 for the hat, not $5.", "42"),
    ("42", "42"),
    (r"First \boxed{41}, but then \boxed{42}", "42"),
    ("#### 41\nNo, wait.\n#### 42", "42"),
    (r"\[ \boxed{42} \]", "42"),
    (r"\(\boxed{42\text{ apples}}\)", "42"),
    (r"$\boxed{x = 42}$", "42"),
    (r"\boxed{6 \times 7 = 42}", "42"),
    (r"\boxed{\text{42}}", "42"),
    (r"\boxed{\mathbf{42}}", "42"),
    (r"\fbox{42}", "42"),
    (r"\boxed{(42)}", "42"),
    (r"\boxed{42.0}", "42"),
    (r"\boxed{42.}", "42"),
    (r"\boxed{+42}", "42"),
    (r"\boxed{\$42}", "42"),
    ("#### $42.00", "42"),
    ("The answer is 42 dollars per day.", "42"),
    ("#### 42 km/h", "42"),
    (r"\boxed{42\,\mathrm{cm}^2}", "42"),
    (r"\boxed{42^\circ}", "42"),
    (r"\boxed{42\%}", "42"),
    ("The answer is 42 percent.", "42"),
    (r"\boxed{42\%}", "0.42"),
    (r"\boxed{4.2 \times 10^{1}}", "42"),
    ("#### 4.2e1", "42"),
    ("#### 4.2×10¹", "42"),
    (r"\boxed{\sqrt{1764}}", "42"),
    (r"\boxed{10^3}", "1000"),
    ("#### 1,080", "1080"),
    (r"\boxed{1{,}080}", "1080"),
    (r"\boxed{1\,080}", "1,080"),
    ("The answer is $1,234,567.50.", "1234567.5"),
    ("#### -3", "-3"),
    ("The answer is \u22123 degrees.", "-3"),
    ("The answer is minus 3.", "-3"),
    ("#### -$3", "-3"),
    (r"\boxed{\frac{1}{2}}", "0.5"),
    (r"\boxed{\dfrac12}", "1/2"),
    ("The answer is 1/2 of a pie.", "0.5"),
    ("#### ½", "0.5"),
    (r"\boxed{1\frac{1}{2}}", "1.5"),
    ("The answer is 1 1/2 cups.", "1.5"),
    (r"\boxed{.5}", r"\frac{1}{2}"),
    ("#### 0.3333", r"\frac{1}{3}"),
    (r"\boxed{-\frac{3}{4}}", "-0.75"),
    (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}"),
    (r"\boxed{(x-1)(x+1)}", "x^2-1"),
    (r"\boxed{2\pi}", r"\pi \cdot 2"),
    (r"\boxed{\{3, 1, 2\}}", r"\{1,2,3\}"),
    (r"\boxed{\text{Tuesday}}", "Tuesday"),
    ("#### 42", 42),
    ("#### 0.25", 0.25),
    ("#### 72", "Natalia sold 48+24 = <<48+24=72>>72 clips.\n#### 72"),
]
WRONG = [
    (r"\boxed{43}", "42"),
    (r"\boxed{4.2}", "42"),
    (r"\boxed{420}", "42"),
    (r"\boxed{-42}", "42"),
    (r"\boxed{42.1}", "42"),
    (r"\boxed{24}", "42"),
    (r"\boxed{042.42}", "42"),
    ("42 is what I had first.\n#### 43", "42"),
    (r"\boxed{42}, or rather \boxed{43}", "42"),
    ("#### 42\nNo, wait.\n#### 43", "42"),
    ("The answer is not 42.", "42"),
    ("The answer isn't 42.", "42"),
    ("The answer is 42 or 43.", "42"),
    ("The answer is 42 or 43.", "43"),
    ("The answer is 42, 43.", "42"),
    ("The answer is between 42 and 43.", "43"),
    ("The answer is about 42.", "42"),
    ("She had 42 apples in the end, and that was all there was to it.", "42"),
    ("40\n41\n42", "42"),
    ("", "42"),
    ("####", "42"),
    (r"\boxed{}", "42"),
    (r"\boxed{42", "42"),
    (r"\boxed{40 + 2}", "42"),
    (r"\boxed{6 \times 7}", "42"),
    (r"\boxed{6(7)}", "42"),
    (r"\boxed{84 - 42}", "42"),
    (r"\boxed{x}", "42"),
    (r"\boxed{42x}", "42"),
    (r"\boxed{42 x}", "42"),
    (r"\boxed{x > 42}", "42"),
    (r"\boxed{x \neq 42}", "42"),
    (r"\boxed{x \approx 42}", "42"),
    (r"\boxed{42 \pm 1}", "42"),
    (r"\boxed{42!}", "42"),
    (r"\boxed{42^2}", "42"),
    ("#### 42k", "42"),
    ("#### 42 thousand", "42"),
    ("The answer is 42 hundred dollars.", "42"),
    ("The answer is 42 and a half.", "42"),
    ("The answer is 42 thirds.", "42"),
    ("#### 42:30", "42"),
    ("#### 1,08", "108"),
    ("#### 1.080", "1080"),
    ("#### 1,080", "1.08"),
    (r"\boxed{50\%}", "5000"),
    (r"\boxed{0.5\%}", "0.5000001"),
    (r"\boxed{0.42}", "42"),
    ("#### 0.33", r"\frac{1}{3}"),
    ("#### 0.3334", r"\frac{1}{3}"),
    (r"\boxed{\frac{2}{1}}", "0.5"),
    (r"\boxed{\frac{1}{0}}", "0"),
    (r"\boxed{1\frac{1}{2}}", "0.5"),
    ("#### 4.2e2", "42"),
    ("#### 1e999999999", "42"),
    (r"\boxed{x^2+1}", "x^2-1"),
    (r"\boxed{\{1, 2\}}", r"\{1,2,3\}"),
    (r"\boxed{\text{Thursday}}", "Tuesday"),
    (r"\boxed{\text{act}}", "cat"),
    (r"\boxed{\text{forty-three}}", "42"),
]
HANGS = r"\boxed{9^{9^{9^{9}}}}"


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, Any]]:
    """Import the example's modules as a rollout worker does, with its folder on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        for name in MODULES:
            patch.delitem(sys.modules, name, raising=False)
        modules: dict[str, ModuleType] = {name: importlib.import_module(name) for name in MODULES}
        pool = modules["verifier"].VerifierPool(1, cpu_limit_s=1.0)  # one process: each takes a second to start
        with pytest.MonkeyPatch.context() as first:  # the first call creates this process's pool
            first.setattr(modules["verifier"], "VerifierPool", lambda: pool)
            assert modules["verifier"].verify("1", "1")
        patch.setattr(modules["verifier"], "WALL_LIMIT_S", 90.0)  # long, for a busy machine
        yield modules
        pool.close()
        for name in MODULES:
            del sys.modules[name]


def gsm8k(path: Path) -> list[dict[str, str]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().split(b"\n") if line]


def test_there_are_fifty_right_answers_and_fifty_near_misses() -> None:
    assert len(set(RIGHT)) == len(RIGHT) >= 50
    assert len(set(WRONG)) == len(WRONG) >= 50


@pytest.mark.parametrize(("response", "answer"), RIGHT)
def test_a_right_answer_of_a_finished_response_is_rewarded(
    example: dict[str, Any], response: str, answer: object
) -> None:
    assert example["reward"].correct("", response, answer) == 1.0
    assert example["reward"].correct("", response, answer, finished=False) == 0.0


@pytest.mark.parametrize(("response", "answer"), WRONG)
def test_a_near_miss_is_not_rewarded(example: dict[str, Any], response: str, answer: object) -> None:
    assert example["reward"].correct("", response, answer) == 0.0


@pytest.mark.timeout(600)  # with all of GSM8K
def test_answers_of_gsm8k(example: dict[str, Any]) -> None:
    """GSM8K's solutions are right. So is the number alone, boxed, with commas or as dollars. The next problem's number is wrong."""
    folder = os.environ.get("ASYNCRL_GSM8K")
    files = [EXCERPT, *(Path(folder) / f"{split}.jsonl" for split in (("train", "test") if folder else ()))]
    correct, number = example["reward"].correct, example["final_answer"].number
    for file in files:
        answers = [row["answer"] for row in gsm8k(file)]
        assert len(answers) >= 64
        for i, answer in enumerate(answers):
            written = answer.rpartition("####")[2].strip()
            value = number(written).value
            assert value.denominator == 1, written
            ways = (answer, f"The answer is {written}.", rf"\boxed{{{value}}}", f"#### ${int(value):,}.00")
            assert [correct("", way, answer) for way in ways] == [1.0] * 4, answer
            other = answers[i - 1].rpartition("####")[2].strip()
            assert correct("", other, answer) == float(number(other).value == value)
            for near in (f"#### {value + 1}", f"#### {value}1", f"#### {-value or 1}", f"#### {value} or {value + 1}"):
                assert correct("", near, answer) == 0.0, near


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"\boxed{\frac{19}{12}}", "19/12", 1.0),
        ("The answer is 19/12 of a mile.", "19/12", 1.0),
        (r"\boxed{-\dfrac{1}{2}}", "-1/2", 1.0),
        (r"\boxed{x = 3}", "3", 1.0),
        ("#### 0", "0", 1.0),
        (r"\boxed{\frac{38}{24}}", "19/12", 0.0),
        (r"\boxed{1\frac{7}{12}}", "19/12", 0.0),
        (r"\boxed{\frac{3}{1}}", "3", 0.0),
        (r"\boxed{\frac{0}{5}}", "0", 0.0),
        (r"\boxed{\frac{1}{0}}", "0", 0.0),
        (r"\boxed{0.5}", "1/2", 0.0),
        (r"\boxed{3/4 + 5/6}", "19/12", 0.0),
        (r"\boxed{\frac{19}{13}}", "19/12", 0.0),
        ("19 out of 12", "19/12", 0.0),
    ],
)
def test_only_lowest_terms_are_rewarded(example: dict[str, Any], response: str, answer: str, reward: float) -> None:
    assert example["reward"].lowest_terms("", response, answer) == reward
    assert example["reward"].lowest_terms("", response, answer, finished=False) == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "\\boxed{" * 20_000,
        "{" * 100_000 + "\\boxed{42}" + "}" * 100_000,
        "answer " * 50_000,
        "the answer is " * 50_000,
        "$" * 100_000,
        "1," * 100_000,
        "#" * 300_000,
        "\\(" * 50_000,
        "\\boxed{" + "1" * 290 + "}",
        "\\boxed{" + "(" * 290 + "}",
        "\\boxed{" + "1,234" * 50 + "}",
        "".join(map(chr, range(32, 3000))),
        "\x00\ud800 \\boxed{\ud800^2}",
        "#### " + "9" * 250 + "e300",
    ],
    ids=lambda response: response[:12].encode("ascii", "replace").decode().replace("\x00", "0"),
)
def test_garbage_is_judged_quickly(example: dict[str, Any], response: str) -> None:
    started = time.thread_time()
    assert example["reward"].correct("", response, "42") == 0.0
    assert time.thread_time() - started < 1  # usually milliseconds; verifier processes have limits of their own


def verifiers() -> set[psutil.Process]:
    """Return the processes of all pools."""
    return {child for child in psutil.Process().children() if f"{FOLDER}/verifier.py" in child.cmdline()}


def test_a_formula_that_exceeds_the_time_limit_is_wrong(example: dict[str, Any]) -> None:
    """This works from any thread. Other calls proceed meanwhile, and a verifier that was killed is replaced."""
    pool = example["verifier"].VerifierPool(2, cpu_limit_s=0.5)
    try:
        assert pool.verify(r"\sqrt{4}", "2")
        verdicts: dict[str, bool] = {}
        hung = threading.Thread(target=lambda: verdicts.update(hung=pool.verify("1", r"9^{9^{9^{9}}}")))
        hung.start()
        verdicts["meanwhile"] = pool.verify(r"\frac{4}{2}", "2")
        hung.join(example["verifier"].START_LIMIT_S + example["verifier"].WALL_LIMIT_S)
        assert verdicts == {"hung": False, "meanwhile": True}
        assert pool.verify(r"\sqrt{9}", "3")  # by whichever process was returned to the pool last
    finally:
        pool.close()


def test_a_verifier_that_was_killed_is_replaced(example: dict[str, Any]) -> None:
    others = verifiers()
    pool = example["verifier"].VerifierPool(1)
    try:
        assert pool.verify(r"\sqrt{4}", "2")
        (verifier,) = verifiers() - others
        verifier.kill()
        os.waitid(os.P_PID, verifier.pid, os.WEXITED | os.WNOWAIT)  # wait for its death; the pool reaps it
        assert pool.verify(r"\sqrt{4}", "2")
        (successor,) = verifiers() - others
        assert successor != verifier
    finally:
        pool.close()


def test_a_verifier_without_cpu_time_rejects_the_prompt(
    example: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suspended verifier, as on a busy machine, gives no verdict. The pool kills it and starts another one later."""
    others = verifiers()
    pool = example["verifier"].VerifierPool(1)
    try:
        assert pool.verify(r"\sqrt{4}", "2")
        (verifier,) = verifiers() - others
        verifier.suspend()
        with monkeypatch.context() as patch:
            patch.setattr(example["verifier"], "WALL_LIMIT_S", 0.1)
            with pytest.raises(example["verifier"].VerifierError, match="no verdict"):
                pool.verify(r"\sqrt{4}", "2")
        assert verifiers() == others  # the pool has killed it
    finally:
        pool.close()


def test_a_prompt_is_rejected_if_no_verifier_is_free(example: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer must not count as wrong because the machine is busy."""
    monkeypatch.setattr(example["verifier"], "BUSY_LIMIT_S", 0.01)
    with pytest.raises(example["verifier"].VerifierError, match="busy"):
        example["verifier"].VerifierPool(0).verify("x", "y")


def test_a_run_without_math_verify_does_not_start(example: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"asyncrl\[math\]"):
        example["verifier"].check_installed()


async def test_a_group_is_scored_concurrently_as_in_a_rollout_worker(example: dict[str, Any]) -> None:
    """The calls run in threads, and one member of the group exceeds the time limit."""
    reward = Reward(
        f"{FOLDER}/reward.py:correct",
        timeout_s=100,
        services=make_services(),
    )
    prompt = Prompt("e0-p0", "", [], "x^2-1", "gsm8k", {}, False)
    texts = [r"\boxed{(x-1)(x+1)}", HANGS, r"\boxed{x^2}", r"\boxed{x^2-1}"]
    group = [Completion(text, True) for text in texts]
    assert await asyncio.wait_for(reward.score(prompt, group), 100) == [1.0, 0.0, 0.0, 1.0]
