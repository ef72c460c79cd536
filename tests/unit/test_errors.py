"""Classes of errors (protocol/errors.py): which failures are repeated, and for how long."""

import errno
import http.client
import os

import aiohttp
import pytest

from asyncrl.config.schema import ConfigError
from asyncrl.data.prompts import PromptError
from asyncrl.generation.server_client import ServerError
from asyncrl.protocol.errors import (
    ErrorClass,
    Failures,
    RunEndedError,
    class_of_code,
    class_of_status,
    classify,
    outlives_restart,
    refuses_content,
    same_cause,
)
from asyncrl.runtime.disk import StorageError, explain

PASSING, PERMANENT, UNKNOWN = ErrorClass.PASSING, ErrorClass.PERMANENT, ErrorClass.UNKNOWN


class Answered(Exception):
    def __init__(self, status):
        super().__init__(f"answered {status}")
        self.status = status


@pytest.mark.parametrize(
    ("error", "error_class"),
    [
        (TimeoutError(), PASSING),
        (ConnectionResetError(), PASSING),
        (aiohttp.ServerDisconnectedError(), PASSING),
        (http.client.IncompleteRead(b""), PASSING),
        (aiohttp.ClientPayloadError("too long"), UNKNOWN),
        (OSError(errno.ECONNREFUSED, "refused"), PASSING),
        (OSError(errno.ENOSPC, "full"), PASSING),
        (OSError(errno.EDQUOT, "full"), PASSING),
        (OSError(errno.EROFS, "read-only"), PERMANENT),
        (PermissionError(errno.EACCES, "forbidden"), PERMANENT),
        (OSError(errno.EMFILE, "too many open files"), PERMANENT),
        (OSError(errno.EIO, "i/o"), UNKNOWN),
        (FileNotFoundError(errno.ENOENT, "gone"), UNKNOWN),  # a network file system may show it late
        (ConfigError("a field"), PERMANENT),
        (PromptError("a prompt"), PERMANENT),
        (RunEndedError("over"), PERMANENT),
        (ModuleNotFoundError("no module"), PERMANENT),
        (ValueError("?"), UNKNOWN),
        (Answered(503), PASSING),
        (Answered(403), PERMANENT),
        (Answered(500), UNKNOWN),
        (ServerError("no answer"), PASSING),
        (ServerError("refused", 400), PERMANENT),
        (ServerError("an exception", 500), UNKNOWN),
    ],
)
def test_class_of_an_error(error, error_class):
    assert classify(error) is error_class


@pytest.mark.parametrize(
    ("error_class", "statuses"),
    [
        (PASSING, [408, 425, 429, 502, 503, 504]),
        (PERMANENT, [400, 401, 403, 404, 405, 409, 411, 413, 414, 422, 431, 451, 501]),
        (UNKNOWN, [500, 505, 520]),
    ],
)
def test_class_of_a_status(error_class, statuses):
    assert {status: class_of_status(status) for status in statuses} == dict.fromkeys(statuses, error_class)


def test_only_some_permanent_statuses_blame_the_content():
    assert [status for status in range(400, 600) if refuses_content(status)] == [400, 411, 413, 414, 415, 422, 431]
    assert all(class_of_status(status) is PERMANENT for status in (400, 411, 413, 414, 415, 422, 431))


def test_class_of_a_grpc_code():
    assert class_of_code("UNAVAILABLE") is PASSING
    assert class_of_code("UNAUTHENTICATED") is PERMANENT
    assert class_of_code("INVALID_ARGUMENT") is PERMANENT


@pytest.mark.parametrize(
    ("number", "error_class"), [(errno.ENOSPC, PASSING), (errno.EROFS, PERMANENT), (errno.EIO, UNKNOWN)]
)
def test_a_storage_error_has_the_class_of_its_cause(tmp_path, number, error_class):
    explained = explain(tmp_path / "file", OSError(number, os.strerror(number)))
    assert isinstance(explained, StorageError)
    assert (explained.errno, classify(explained)) == (number, error_class)
    assert str(explained).startswith(f"{tmp_path}/file could not be written: {os.strerror(number)}")


def test_errors_that_outlive_a_restart():
    lasting = [ConfigError("a"), PromptError("b"), StorageError("c", errno.ENOSPC), RunEndedError("d")]
    assert all(outlives_restart(error) for error in lasting)
    passing = [ValueError("a"), TypeError("b"), Answered(403), ModuleNotFoundError("c")]
    assert not any(outlives_restart(error) for error in passing)


def test_a_permanent_failure_is_the_last_one():
    assert Failures(60.0).failed(PERMANENT, "wrong key", now=0.0)


def test_passing_failures_are_repeated_until_the_limit():
    failures = Failures(60.0)
    assert not any(failures.failed(PASSING, "no answer", now) for now in range(61))
    assert failures.failed(PASSING, "no answer", 61.0)


def test_a_success_begins_a_new_time():
    failures = Failures(60.0)
    failures.failed(PASSING, "no answer", 0.0)
    failures.worked()
    assert not failures.failed(PASSING, "no answer", 61.0)


def test_unknown_failures_with_one_cause_are_repeated_a_few_times():
    failures = Failures(60.0, max_unknown=3)
    texts = ["port 4711 is broken", "port 4712 is broken", "port 4713 is broken"]
    assert [failures.failed(UNKNOWN, text, 0.0) for text in texts] == [False, False, True]


def test_unknown_failures_with_different_causes_end_by_time_only():
    failures = Failures(60.0, max_unknown=3)
    assert not any(failures.failed(UNKNOWN, cause, 0.0) for cause in "abcdefgh")
    assert failures.failed(UNKNOWN, "i", 61.0)


def test_same_cause_ignores_numbers_and_addresses():
    assert same_cause("object at 0x7f3a, ticket 12.4") == same_cause("object at 0x11, ticket 3.17")
    assert same_cause("a") != same_cause("b")
