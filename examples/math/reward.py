r"""Rewards of the math tasks: 1 for a right final answer, else 0.

`correct` accepts any notation of the answer: it compares numbers as numbers, and formulas with math-verify. `lowest_terms` requires
a fraction that cannot be reduced. A response that was cut off at max_new_tokens is never right.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from final_answer import clean, final_answer, is_unit, number, same  # in this folder, which asyncrl puts on sys.path
from verifier import check_installed, verify

from asyncrl.rewards.score import Score

check_installed()

# If a text is not a number and does not match this, it consists of words
_FORMULA = re.compile(r"\\[A-Za-z]|[\^(\[{√π]")
# In the output of clean(): `48 + 24`, `2(36)`, `x > 42`, `42 \pm 1`. None of these is a number, even if its value would be.
_NOT_A_NUMBER = re.compile(
    r"(?<=[\w)}])\s*[-+*](?!\s*10\s*\^)|\d\s*\(|[<>!≈≠±]|\\(?:pm|mp|approx|neq?|leq?|geq?|sim|lt|gt)(?![A-Za-z])"
)
_WORDS = re.compile(r"[A-Za-z][A-Za-z .,'-]*")
_FRACTION = re.compile(
    r"(?P<minus>-?)\s*(?:\\frac\s*\{\s*(?P<over>\d{1,18})\s*\}\s*\{\s*(?P<under>\d{1,18})\s*\}"
    r"|(?P<over2>\d{1,18})\s*/\s*(?P<under2>\d{1,18})|(?P<integer>\d{1,18}))(?P<rest>.*)"
)


def correct(prompt: str, completion: str, answer: object, *, finished: bool = True) -> float:
    """1 for the right answer. answer: a number, a formula, or a solution in GSM8K's format, which ends with `#### 1,080`."""
    found = final_answer(completion) if finished else None
    return Score(found is not None and means_the_same(right_answer(answer), found), vote(found))


def lowest_terms(prompt: str, completion: str, answer: object, *, finished: bool = True) -> float:
    """1 for the right fraction in lowest terms, or the right integer. `2/4` gives 0, although it equals 1/2."""
    found = final_answer(completion) if finished else None
    return Score(found is not None and _is_lowest(found, answer), clean(found) if found is not None else None)


def _is_lowest(found: str, answer: object) -> bool:
    match = _FRACTION.fullmatch(clean(found).rpartition("=")[2].strip())
    if match is None or not is_unit(match["rest"]):
        return False
    if match["integer"]:
        value = Fraction(int(match["integer"]))
    else:
        over, under = int(match["over"] or match["over2"]), int(match["under"] or match["under2"])
        if under < 2 or math.gcd(over, under) != 1:
            return False
        value = Fraction(over, under)
    return value * (-1 if match["minus"] else 1) == Fraction(str(answer))


def vote(found: str | None) -> str | None:
    """The text by which evaluations count equal answers (majority@k): 42, 42.0 and $42 are the same vote."""
    if found is None:
        return None
    value = number(found)
    is_whole = value is not None and not value.percent and value.value.denominator == 1
    return str(value.value) if value is not None and is_whole else clean(found)


def right_answer(answer: object) -> str:
    """The right answer in the data: the text after the last ####, or the whole text without ####."""
    return str(answer).rpartition("####")[2].strip()


def means_the_same(right: str, found: str) -> bool:
    """Whether two answers are equal. Compares numbers directly, and calls math-verify only for formulas, because it is slow."""
    wanted, given = number(right), number(found)
    if wanted is not None and given is not None:
        return same(wanted, given)
    right_text, found_text = clean(right), clean(found)
    if right_text == found_text:
        return True
    if wanted is not None and (not _FORMULA.search(found) or _NOT_A_NUMBER.search(found_text)):
        return False
    if len(right_text) > 1 and _WORDS.fullmatch(right_text):  # math-verify would treat the letters as variables
        return right_text.casefold() == found_text.casefold()
    return verify(right, found)
