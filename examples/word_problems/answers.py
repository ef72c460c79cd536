"""Reads the number of an answer in GSM8K's format."""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = re.compile(r"(-?)\s*[$€£]?\s*(-?)\s*(\d[\d,]*(?:\.\d+)?|\.\d+)", re.ASCII)


def final_number(text: str) -> Decimal | None:
    """The first number after the last `####`: `#### -$1,080.00` is -1080. None if there is none."""
    _, marker, tail = text.replace("\u2212", "-").rpartition("####")  # a real minus sign
    match = _NUMBER.search(tail) if marker else None
    if match is None:
        return None
    number = Decimal(match[3].replace(",", ""))
    return -number if match[1] or match[2] else number
