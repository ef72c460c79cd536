r"""Extracts the final answer of a response, and reads it as a number. Pure and fast: most answers need no computer algebra.

    final_answer(r"... so \boxed{\$1{,}080 \text{ a day}}")  ->  r"\$1{,}080 \text{ a day}"
    number(r"\$1{,}080 \text{ a day}")                        ->  1080

The final answer is the last `\boxed{}`; without one, the text after the last `####` (`#### 42`); without that, the text after the
last "the answer is" ("the answer is 42"); otherwise the whole response, if it is short. A number may have thousands separators, a
currency, a unit, a percent sign or an exponent, or be a fraction or a mixed number. A sum or product that still has to be computed
is not a number: `48 + 24` is not 72.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

TAIL_CHARS = 4000  # characters at the end of a response that are searched for the answer
MAX_ANSWER_CHARS = 300
_MAX_BARE_CHARS = 100  # longest response that is itself the answer if it marks none
_MAX_EXPONENT = 300
_ROUNDED_PLACES = 4  # minimum number of decimals of a rounded answer: 0.3333 is a third, 0.33 is not

# ------------------------------------------------------------------------------------------------- finding the answer

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_ANSWER_IS = re.compile(r"\banswer\b[^.\n:=]{0,40}?(?:\bis\b|[:=])[ \t]*:?", re.IGNORECASE)
_ADVERB = re.compile(r"(?:\s|\*|:|therefore|thus|simply|exactly|equal to|indeed|just)+", re.IGNORECASE)
_MATH = re.compile(r"\$\$(?P<d>[^$]+)\$\$|\$(?P<s>(?:\\\$|[^$\n])+)\$|\\\((?P<p>.+?)\\\)|\\\[(?P<b>.+?)\\\]", re.DOTALL)
_CURRENCY_TEXT = re.compile(r"\s*\d[\d,.]*\s+[A-Za-z]{2,}")  # `$42 for the hat and $5`: dollars, not formulas
_END = re.compile(
    r"\n|[.;!?](?=\s|$)|,(?=\s+(?!or\b|and\b)[A-Za-z])|\b(?:because|since|so|as|which|where|when|after|if|given)\b",
    re.IGNORECASE,
)


def final_answer(response: str) -> str | None:
    """The text of the answer, as written in the response. None if there is none."""
    tail = response[-TAIL_CHARS:]
    if boxes := list(_BOXED.finditer(tail)):
        found = _braced(tail, boxes[-1].end())
    elif "####" in tail:
        found = tail.rpartition("####")[2].strip().partition("\n")[0]
    elif phrases := list(_ANSWER_IS.finditer(tail)):
        found = _said(tail[phrases[-1].end() :])
    else:
        bare = response.strip() if len(response) <= TAIL_CHARS else ""
        found = bare if len(bare) <= _MAX_BARE_CHARS and "\n" not in bare else None
    return found if found and len(found) <= MAX_ANSWER_CHARS else None


def _braced(text: str, start: int) -> str | None:
    """The text from `start` to the brace that closes the one opened just before `start`. None if there is none, because the
    response was cut off."""
    depth = 1
    for at in range(start, len(text)):
        if text[at] == "\\":
            continue
        if text[at] in "{}" and text[at - 1] != "\\":
            depth += 1 if text[at] == "{" else -1
        if depth == 0:
            return text[start:at]
    return None


def _said(text: str) -> str:
    """The answer in the text after `the answer is`: a formula, or the words up to the end of the sentence or clause."""
    adverbs = _ADVERB.match(text)
    text = text[adverbs.end() :] if adverbs else text
    formula = _MATH.match(text)
    if formula and not (formula["s"] and _CURRENCY_TEXT.match(formula["s"])):
        return text[: formula.end()] + _END.split(text[formula.end() :], maxsplit=1)[0]
    return _END.split(text, maxsplit=1)[0].rstrip(" (")


# ----------------------------------------------------------------------------------------------------- cleaning it up

_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}")
_REPLACEMENTS = (
    (re.compile(r"\\(?:dfrac|tfrac|cfrac)"), r"\\frac"),
    (re.compile(r"\\(?:left|right|displaystyle|limits|bigl?|bigr?)(?![A-Za-z])"), ""),
    (re.compile(r"\{,\}|\\[,!;:]|\\ |~|\\q?quad"), " "),
    (re.compile(r"(?<=\d) (?=\d{3}(?!\d))"), ","),  # `1\,080` and `1 080`
    (re.compile(r"\\([$%#&_{}])"), r"\1"),
    (re.compile(r"\s+\^"), "^"),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)"), " degrees"),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])|[×·⋅]"), "*"),
    (re.compile(r"\\div(?![A-Za-z])|÷"), "/"),
    (re.compile(r"\\(?:euro|pounds|yen)(?![A-Za-z])\s*(?:\{\})?"), "$"),
    (re.compile(r"\\frac\s*(\d)\s*(\d)(?!\d)"), r"\\frac{\1}{\2}"),
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_SUPERSCRIPT = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
_VULGAR = re.compile(r"[¼-¾⅐-⅞]")
_DASHES = str.maketrans({"−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "\u00a0": " ", "\u202f": " ", "⁄": "/"})
_QUOTES = " \t\r\n*_`\"'“”‘’"


def clean(answer: str) -> str:
    """Normalise an answer: remove formula delimiters, bold, text commands and extra spaces; unify dashes."""
    text = answer.translate(_DASHES)
    text = _VULGAR.sub(lambda match: f" {unicodedata.normalize('NFKC', match[0]).translate(_DASHES)}", text)
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    text = unicodedata.normalize("NFKC", text)
    while (bare := _undress(text)) != text:
        text = bare
    for pattern, replacement in ((_TEXT_COMMAND, r" \1 "), (_TEXT_COMMAND, r" \1 "), *_REPLACEMENTS):
        text = pattern.sub(replacement, text)
    return " ".join(text.split())


def _undress(text: str) -> str:
    text = text.strip(_QUOTES).rstrip(".,;:?" + _QUOTES)
    formula = _MATH.fullmatch(text)
    return next(group for group in formula.groups() if group is not None) if formula else text


# ------------------------------------------------------------------------------------------------------------- numbers

_PLAIN = r"(?:\d{1,3}(?:,\s?\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(
    rf"""
    (?P<minus>(?:[-+]|minus\ |negative\ )?\s*)
    (?:(?:US|AU|CA)?\s?[$€£¥₹]|(?:USD|EUR|GBP|Rs\.?)\ ?)?\s*
    (?P<inner>-?)\s*
    (?:
        (?P<whole>\d+)?\s*\\frac\s*\{{\s*(?P<over>{_PLAIN})\s*\}}\s*\{{\s*(?P<under>{_PLAIN})\s*\}}
      | (?P<whole2>\d+)\ +(?P<over2>\d+)\s*/\s*(?P<under2>\d+)
      | (?P<over3>{_PLAIN})\s*/\s*(?P<under3>{_PLAIN})
      | (?P<mantissa>{_PLAIN})(?:\s*(?:[eE]|[*x]\s*10\s*\^)\s*\{{?\(?\s*(?P<exponent>[-+]?\d{{1,4}})\s*\)?\}}?)?
    )
    (?P<percent>\s*(?:%|percent\b|per\ cent\b|percentage\ points?\b))?
    (?P<rest>.*)
    """,
    re.VERBOSE | re.ASCII | re.IGNORECASE | re.DOTALL,
)
_INEQUALITY = re.compile(r"[<>!≈≠]|\\(?:approx|neq?|leq?|geq?|sim|lt|gt)(?![A-Za-z])")
_UNIT_WORD = re.compile(r"[A-Za-zµ°Ω€£$¥₹][A-Za-zµ'’.-]*(?:\^\s*\{?[23]\}?)?")
_ASIDE = re.compile(r"\s+\([A-Za-z ,'-]*\)\s*$")
_MAX_UNIT_WORDS = 8
_ATTACHED = re.compile(  # units that may follow a number without a space, or that are one letter; x is none: `42x` is not 42
    r"a|(?:m|cm|mm|km|ft)(?:\^\{?[23]\}?)?|nm|k?g|mg|m?[lL]|m?s|h|hrs?|mins?|mph|kph|in|lbs?|oz|am|pm|yd|mi|k?W|V|A|Hz|J|N|°[CF]?"
    r"|degrees|[€$£¥]"
)
_SCALES = re.compile(  # words that change the number if they are the first word after it
    r"and|(?:hundred|thousand|million|billion|trillion)(?:s|ths?)?|dozens?|score|halves|(?:quarter|third|fourth|fifth|sixth|seventh"
    r"|eighth|ninth|tenth)s?|percent|pi|sqrt|infinity|squared|cubed|factorial|mod|modulo|divided|over|out|point|to|through|until"
)
_NUMERALS = re.compile(  # words that change the number if they are anywhere in the text after it
    r"or|plus|minus|times|than|not|half|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|twenty|thirty"
    r"|forty|fifty|sixty|seventy|eighty|ninety"
)


@dataclass(frozen=True)
class Number:
    """A number and how it was written. For 50% `value` is 1/2, `percent` is True and `written` is 50."""

    value: Fraction
    percent: bool = False
    places: int | None = None  # number of decimals; None for a fraction

    @property
    def written(self) -> Fraction:
        return self.value * 100 if self.percent else self.value


def number(answer: str) -> Number | None:
    """An answer as a number; None if it is not one. Of an equation only the right side counts: `x = 42`, `6 * 7 = 42`."""
    left, _, text = clean(answer).rpartition("=")
    match = _NUMBER.fullmatch(text.strip())
    if match is None or not is_unit(match["rest"]) or _INEQUALITY.search(left):
        return None
    negative = match["minus"].strip() not in ("", "+")
    if negative and match["inner"]:
        return None
    value, places = _value(match)
    if value is None:
        return None
    value = -value if negative or match["inner"] else value
    percent = match["percent"] is not None
    return Number(value / 100 if percent else value, percent, places)


def _value(match: re.Match[str]) -> tuple[Fraction | None, int | None]:
    for over, under, whole in (("over", "under", "whole"), ("over2", "under2", "whole2"), ("over3", "under3", "")):
        if match[over] is not None:
            denominator = _plain(match[under])
            if denominator == 0:
                return None, None
            return (_plain(match[whole]) if whole and match[whole] else 0) + _plain(match[over]) / denominator, None
    exponent = int(match["exponent"] or 0)
    if abs(exponent) > _MAX_EXPONENT:
        return None, None
    mantissa = match["mantissa"]
    return _plain(mantissa) * Fraction(10) ** exponent, len(mantissa.partition(".")[2]) - exponent


def _plain(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").replace(" ", "").rstrip(".") or "0")


def is_unit(rest: str) -> bool:
    """Whether the text after a number is a unit, a noun or empty: `km/h`, `dollars per day`, `more apples`."""
    attached = rest[:1] not in ("", " ", "/", "-")
    words = _ASIDE.sub("", f" {rest}").strip(" .,;:-").replace("/", " per ").split()
    if not words:
        return rest.strip() not in ("/", "-")
    if len(words) > _MAX_UNIT_WORDS or not all(_UNIT_WORD.fullmatch(word.strip(",-")) for word in words):
        return False
    if (attached or len(words[0]) == 1) and not _ATTACHED.fullmatch(words[0]):
        return False
    plain = [word.strip(".,-").lower() for word in words]
    return not _SCALES.fullmatch(plain[0]) and not any(map(_NUMERALS.fullmatch, plain))


def same(right: Number, found: Number) -> bool:
    """Whether two numbers are equal. 50% equals 50 (as in answers of GSM8K) and 1/2. A decimal with enough places may be a
    rounded fraction."""
    if found.value == right.value:
        return True
    if found.percent != right.percent and found.written == right.written:
        return True
    endless = right.places is None and right.value.denominator > 1
    if not endless or found.places is None or found.places < _ROUNDED_PLACES:
        return False
    return round(right.value, found.places) == found.value
