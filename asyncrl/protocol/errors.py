"""The classes of errors (pure): whether the same attempt can succeed later. Every loop that repeats failed work asks here.

PASSING    The cause lies outside the work and may end by itself: no answer, a lost connection, a full queue, a full disk. The work
           is repeated until the loop's time limit.
PERMANENT  The same attempt fails in the same way as long as its inputs stay as they are: a refused request, a wrong key, weights
           that do not fit the model. The loop ends at once, with the cause and the remedy.
UNKNOWN    Nothing decides between the two. The work is repeated while its cause changes, at most MAX_UNKNOWN times with the same
           cause, and within the loop's time limit.

A type of errors may state its class in the attribute `error_class`. All others are classified below, by HTTP status, by the number
of the system's error, or by type. `Failures` counts the failures of one piece of work, and decides when its repetition ends.

Two questions are different. `classify` concerns the repeated attempt. `outlives_restart` concerns the process: whether its
successor would meet the same error. docs/design/bounds.md lists the loops with their classes and limits.
"""

from __future__ import annotations

import errno
import re
from enum import StrEnum

import msgspec

from asyncrl.config.schema import ConfigError

MAX_UNKNOWN = 5


class CodecError(ValueError):
    """The received data is not a sample; the message names the fault."""


# Errors from decoding received bytes. Besides MsgspecError: UnicodeDecodeError (not UTF-8) and RecursionError (nested
# too deeply).
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_PASSING_STATUSES = frozenset({408, 425, 429, 502, 503, 504})
# The server has understood the request and refuses its content: another server of the same kind refuses it, too. Other permanent
# statuses (401, 403, 404, 405, ...) concern the server: its key, its address or its program
_CONTENT_STATUSES = frozenset({400, 411, 413, 414, 415, 422, 431})

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})  # passing: other files may be removed
FORBIDDEN = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
NO_MORE_FILES = frozenset({errno.EMFILE, errno.ENFILE})  # open files, including sockets and pipes
_PERMANENT_NUMBERS = (
    FORBIDDEN
    | NO_MORE_FILES
    | {errno.EFBIG, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOEXEC, errno.ENOSYS}
)
_PASSING_NUMBERS = NO_SPACE | {
    *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ENOTCONN, errno.ESHUTDOWN),
    *(errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET),
    *(errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ENOBUFS, errno.ENOMEM, errno.ESTALE, errno.ETXTBSY),
}
# Names of gRPC's codes. A connection that breaks during an answer may appear as CANCELLED or INTERNAL. A deadline that the server
# sees first appears as UNKNOWN
_PASSING_CODES = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL", "UNKNOWN", "ABORTED"})
# Errors in the code, or in its surroundings, that no repetition changes
_PERMANENT_TYPES = (
    ConfigError,
    ImportError,
    NotImplementedError,
    SyntaxError,
    NameError,
    AttributeError,
    RecursionError,
)
_PASSING_TYPES = (TimeoutError, ConnectionError, EOFError)
# Types of libraries, by name, because this module must not import them
_PASSING_NAMES = frozenset({"aiohttp.client_exceptions.ClientConnectionError", "http.client.HTTPException"})

_VARIABLE = re.compile(r"0x[0-9a-f]+|\d+")  # parts of a text that differ from one failure to the next
_SAME_CHARS = 400  # the beginnings of two texts are compared


class ErrorClass(StrEnum):
    PASSING = "passing"
    PERMANENT = "permanent"
    UNKNOWN = "unknown"


class RunEndedError(RuntimeError):
    """The run ends for a reason outside the code. The text gives the event, the reason and the remedy."""

    error_class = ErrorClass.PERMANENT
    outlives_restart = True


def classify(error: BaseException) -> ErrorClass:
    """Return the class of an error: its own (`error_class`), or that of its HTTP status, its system's number or its type."""
    own = getattr(error, "error_class", None)
    if isinstance(own, ErrorClass):
        return own
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int) and status >= 400:
        return class_of_status(status)
    if isinstance(error, OSError) and error.errno is not None:
        return class_of_number(error.errno)
    names = {f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__}
    if isinstance(error, _PASSING_TYPES) or names & _PASSING_NAMES:
        return ErrorClass.PASSING
    return ErrorClass.PERMANENT if isinstance(error, _PERMANENT_TYPES) else ErrorClass.UNKNOWN


def class_of_status(status: int) -> ErrorClass:
    """Return the class of an HTTP answer. That of a success is unknown: the answer, not its status, shows an error."""
    if status in _PASSING_STATUSES:
        return ErrorClass.PASSING
    return ErrorClass.PERMANENT if 400 <= status < 500 or status == 501 else ErrorClass.UNKNOWN


def refuses_content(status: int) -> bool:
    """Whether this HTTP status blames the content of the request, so that every server of the same kind would refuse it."""
    return status in _CONTENT_STATUSES


def class_of_number(number: int) -> ErrorClass:
    """Return the class of one of the system's error numbers (errno)."""
    if number in _PASSING_NUMBERS:
        return ErrorClass.PASSING
    return ErrorClass.PERMANENT if number in _PERMANENT_NUMBERS else ErrorClass.UNKNOWN


def class_of_code(name: str) -> ErrorClass:
    """Return the class of one of gRPC's codes, by its name."""
    return ErrorClass.PASSING if name in _PASSING_CODES else ErrorClass.PERMANENT


def outlives_restart(error: BaseException) -> bool:
    """Whether a restarted process would meet the same error: its cause lies in the user's input, on the disk, or in a decision to
    end the run. Errors of other types may depend on the process's own state."""
    return isinstance(error, ConfigError) or bool(getattr(error, "outlives_restart", False))


def same_cause(text: str) -> str:
    """Return what two texts about the same cause have in common: the text without numbers, and without what follows its start."""
    return _VARIABLE.sub("#", text)[:_SAME_CHARS]


class Failures:
    """Consecutive failures of one piece of work (pure). Decides when to stop repeating it."""

    def __init__(self, limit_s: float, *, max_unknown: int = MAX_UNKNOWN, max_permanent: int = 1) -> None:
        """limit_s: time for which passing and unknown failures may last, counted from the first one. max_permanent: more than 1
        where the inputs of the work may be replaced meanwhile."""
        self._limit_s, self._max_unknown, self._max_permanent = limit_s, max_unknown, max_permanent
        self._since: float | None = None
        self._cause = ""
        self._num_same = 0  # unknown failures in a row with the same cause
        self._num_permanent = 0

    def failed(self, error_class: ErrorClass, text: str, now: float) -> bool:
        """Record a failure. Returns whether the work must not be repeated."""
        self._since = now if self._since is None else self._since
        self._num_permanent += error_class is ErrorClass.PERMANENT
        if error_class is ErrorClass.UNKNOWN:
            cause = same_cause(text)
            self._num_same = self._num_same + 1 if cause == self._cause else 1
            self._cause = cause
        too_often = self._num_permanent >= self._max_permanent or self._num_same >= self._max_unknown
        return too_often or now - self._since > self._limit_s

    def worked(self) -> None:
        """Record a success: later failures are counted anew."""
        self._since, self._cause, self._num_same, self._num_permanent = None, "", 0, 0
