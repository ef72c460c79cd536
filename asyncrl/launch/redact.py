"""Replaces secrets with ***: values whose name marks them as secret (a password, a token, an API key), and passwords in URLs.

Used for all output that people read: `check`, `--dry-run`, config.yaml, error messages. The configs from which processes start
(configs/attempt_N/) are complete, and readable only by their owner.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"

_WORDS = frozenset({"password", "passwd", "passphrase", "secret", "secrets", "credential", "credentials", "apikey"})
# A name is secret if one of these words stands before "key" or "keys" at its end, as in api_key
_KEYS = frozenset({"api", "access", "private", "auth", "encryption", "signing", "account", "wandb"})
# A name that ends with "token" is secret, unless one of these words stands before it: then it means a token of a vocabulary
_VOCABULARY = frozenset(
    {
        "bos",
        "eos",
        "eot",
        "pad",
        "unk",
        "sep",
        "cls",
        "mask",
        "stop",
        "start",
        "end",
        "special",
        "think",
        "first",
        "last",
    }
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# scheme://user:password@host, or user:password@host in a list of endpoints
_USER_INFO = re.compile(r"(?P<user>(?:\b[a-zA-Z][\w+.-]*://)?[^\s:/@'\"\[,=]*):(?P<secret>[^\s/@'\"]+)@(?=[\w\[])")
# name=value, --name value, "name": value
_ASSIGNED = re.compile(
    r"(?P<dash>(?<!\w)-)?(?P<name>\b(?=[\w-]*(?i:pass|secret|token|key|credential))[A-Za-z][\w-]*)"
    r"(?:['\"]?\s*[=:]\s*|(?(dash)\s+|(?!)))"
    r"(?P<value>'[^']*'|\"[^\"]*\"|[^\s&,;'\"}\])]+)"
)


def is_secret(name: str) -> bool:
    """Whether a field, variable or option of this name holds a secret."""
    words = [word.lower() for word in _WORD.findall(name)]
    if _WORDS.intersection(words) or "api_key" in name.lower():
        return True
    before = words[-2] if len(words) > 1 else ""
    return bool(words) and (
        (words[-1] == "token" and before not in _VOCABULARY) or (words[-1] in {"key", "keys"} and before in _KEYS)
    )


def redact(value: Any, name: str = "") -> Any:
    """Return a copy of nested dicts and lists without secrets. name: the name of the field that holds the value."""
    if isinstance(value, Mapping):
        return {key: redact(entry, str(key)) for key, entry in value.items()}
    if name and is_secret(name) and value not in (None, "", [], ()) and not isinstance(value, bool):
        return HIDDEN
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [redact(entry) for entry in value]
    return value


def redact_urls(text: str) -> str:
    """Return a text without the passwords of URLs. Use it for text that may be code, in which `token = ...` is not a secret."""
    return _USER_INFO.sub(rf"\g<user>:{HIDDEN}@", text)


def redact_text(text: str) -> str:
    """Return a text without the passwords of URLs and without the values of `secret_name=value` and `--secret-name value`."""
    text = redact_urls(text)
    shown, position = "", 0
    while match := _ASSIGNED.search(text, position):
        if is_secret(match["name"]):
            shown += text[position : match.start("value")] + HIDDEN
            position = match.end()
        else:  # the value may itself be an assignment
            shown += text[position : match.end("name")]
            position = match.end("name")
    return shown + text[position:]
