"""Name resolve in a shared folder: processes that are killed and frozen, a folder that hangs or is emptied, what is over goes."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from name_sessions import LIMIT_S, OpenSession, Recorder, gone, patient, put, sessions

from asyncrl.config import NameResolveConfig
from asyncrl.launch.commands.common import goes_on
from asyncrl.launch.rundir import RunRecord
from asyncrl.names import Names
from asyncrl.runtime import file_names
from asyncrl.runtime.file_store import FileStore, Version, fresh_stat, key_of, stem_of
from asyncrl.runtime.name_resolve import (
    MAX_NAME_BYTES,
    LeaseNotFound,
    NameEntryExists,
    NameResolveError,
    NameResolveTimeout,
    open_name_resolver,
)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "names"


@pytest.fixture
def open_session(folder: Path) -> Iterator[OpenSession]:
    yield from sessions(NameResolveConfig(backend="file", path=str(folder), poll_s=0.05))


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s: {what}"
        time.sleep(0.02)


def empty(folder: Path) -> None:
    """At once: whoever fills it again would have a deletion file by file fail."""
    away = folder.with_name(f"{folder.name}.away")
    folder.rename(away)
    shutil.rmtree(away)


@contextmanager
def child(folder: Path, program: str) -> Iterator[subprocess.Popen[str]]:
    """A process with a session, `names`."""
    start = (
        "import sys, time\n"
        "from asyncrl.runtime.file_names import FileNameResolver\n"
        f"names = FileNameResolver(sys.argv[1], timeout_s={LIMIT_S}, poll_s=0.05)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", start + program, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        with process:  # which closes its pipes
            process.kill()


COUNT = (
    "while True:\n"
    "    value = names.get('counter')\n"
    "    if names.compare_and_swap('counter', value, str(int(value) + 1)):\n"
    "        print('done', flush=True)\n"
)


def test_a_run_whose_launcher_was_killed_with_all_others_does_not_go_on(
    folder: Path, tmp_path: Path, open_session: OpenSession
) -> None:
    """Asked on another host, where nobody has looked at its lease since."""
    record = RunRecord(
        pid=1,
        attempt=1,
        experiment="e",
        trial="t",
        endpoints=[],
        started=0.0,
        host="another",
        name_resolve=patient(NameResolveConfig(backend="file", path=str(folder))),
    )
    assert not goes_on(tmp_path, record)
    assert not folder.exists()  # to ask makes nothing

    key = Names("e", "t").launcher()
    program = f"names.add({key!r}, 'x', lease=names.grant_lease(3).id)\nprint('there', flush=True)\ntime.sleep(600)\n"
    with child(folder, program) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        (lease,) = (folder / "leases").iterdir()
        granted = lease.stat().st_mtime
        wait_until(
            lambda: lease.stat().st_mtime > granted + 3.0, "it has refreshed its lease for longer than that lives"
        )
        assert goes_on(tmp_path, record)
        launcher.kill()
        launcher.wait()
    wait_until(lambda: not goes_on(tmp_path, record), "nobody has heard of it for so long")
    assert open_session().get(key) == "x"  # nobody has ended the lease yet


def test_the_killed_hold_nothing_up(folder: Path, open_session: OpenSession) -> None:
    """Processes that swap one entry, killed wherever they are: whoever is left goes on, and no increment is lost or doubled."""
    names = open_session()
    names.add("counter", "0")
    done = 0
    for _ in range(2):
        with child(folder, COUNT) as one, child(folder, COUNT) as two:
            for process in (one, two):
                assert process.stdout is not None
                process.stdout.readline()
                done += 1
            two.kill()
            assert one.stdout is not None
            for _ in range(3):
                one.stdout.readline()
                done += 1
            for process in (one, two):
                process.kill()
                process.wait(LIMIT_S)
                assert process.stdout is not None
                done += process.stdout.read().count("done")
    count = int(names.get("counter"))
    assert done <= count <= done + 4  # the last one of each may have been done and not said
    assert names.compare_and_swap("counter", str(count), "free")


def test_a_lease_ends_with_its_holder_and_comes_back_with_it(folder: Path, open_session: OpenSession) -> None:
    names = open_session()
    recorder = Recorder()
    names.watch("a", recorder)
    program = "names.add('a', 'here', lease=names.grant_lease(1).id)\nsys.stdin.read()\n"
    with child(folder, program) as holder:
        recorder.wait_for_turns("a", "here", 1)
        holder.send_signal(signal.SIGSTOP)
        recorder.wait_for_turns("a", "here", 2)
        holder.send_signal(signal.SIGCONT)
        recorder.wait_for_turns("a", "here", 3)
        holder.kill()
        recorder.wait_for_turns("a", "here", 4)


def test_whoever_stood_still_judges_nobody(folder: Path, open_session: OpenSession) -> None:
    """All hosts may stand still, or not reach the folder, for longer than leases live."""
    watches = "names.watch('a', lambda event: print(event.kind, flush=True))\nsys.stdin.read()\n"
    with (
        child(folder, "names.add('a', 'here', lease=names.grant_lease(9).id)\nsys.stdin.read()\n") as holder,
        child(folder, watches) as watcher,
    ):
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == "put\n"
        for process in (watcher, holder):
            process.send_signal(signal.SIGSTOP)
        time.sleep(11.0)
        for process in (holder, watcher):  # whose holder needs to be heard before the watcher has looked for long again
            process.send_signal(signal.SIGCONT)
        time.sleep(4.0)  # it looks every 1.5 s
        assert open_session().get("a") == "here"
        assert watcher.stdin is not None
        watcher.stdin.close()
        assert watcher.stdout.read() == ""  # nothing more was told


def test_somebody_elses_lease_that_comes_back(open_session: OpenSession) -> None:
    holder, user = open_session(), open_session()
    lease = holder.grant_lease(30)
    user.add("a", "1", lease=lease.id)
    user.add("stolen", "1", lease=lease.id)
    user.add("deleted", "1", lease=lease.id)
    assert holder.delete("deleted")
    recorder = Recorder()
    holder.watch("a", recorder)
    lease.revoke()
    recorder.wait_for(put("a", "1"), gone("a"))
    with pytest.raises(LeaseNotFound):
        user.add("b", "1", lease=lease.id)
    holder.add("stolen", "2")
    assert holder.grant_lease(30, lease_id=lease.id).alive
    recorder.wait_for(put("a", "1"), gone("a"), put("a", "1"))
    assert holder.get("stolen") == "2"


def test_a_folder_that_is_emptied_is_filled_again(folder: Path, open_session: OpenSession) -> None:
    holder, user, other = open_session(), open_session(), open_session()
    lease = holder.grant_lease(30)
    user.add("used", "1", lease=lease.id)
    holder.add("plain", "2")
    recorder = Recorder()
    other.watch("used", recorder)
    empty(folder)
    wait_until(lambda: _reads(other, "used") == "1" and _reads(other, "plain") == "2", "both are back")
    assert lease.alive
    recorder.wait_for_state({"used": "1"})


def test_who_was_not_looking_when_the_folder_was_emptied_reads_what_is_there_now(
    folder: Path, open_session: OpenSession
) -> None:
    """Versions begin with 1 again, under a lease that was granted again."""
    holder, other, watching = open_session(), open_session(), open_session()
    lease = holder.grant_lease(30)
    holder.add("used", "1", lease=lease.id)
    assert other.get("used") == "1"
    recorder = Recorder()
    watching.watch("used", recorder)
    with watching._lock:  # type: ignore[attr-defined]  # its poller stands still
        empty(folder)
        wait_until(lambda: _reads(holder, "used") == "1", "its holder has put it again")
    assert other.get("used") == "1"
    assert watching.get("used") == "1"
    recorder.wait_for_state({"used": "1"})
    holder.delete("used")
    recorder.wait_for_state({})


def _reads(names: object, key: str) -> str:
    try:
        return names.get(key)  # type: ignore[attr-defined, no-any-return]
    except (LookupError, NameResolveTimeout):
        return ""


def test_a_file_system_that_does_not_answer_is_an_error_not_a_hang(folder: Path) -> None:
    """A pipe in the place of a lease: whoever opens it waits for ever, as with a file server that is gone."""
    config = NameResolveConfig(backend="file", path=str(folder), poll_s=0.05, timeout_s=LIMIT_S)
    names = open_name_resolver(config)
    lease = names.grant_lease(30, keep_alive=False)
    names.add("a", "1", lease=lease.id)
    path = folder / "leases" / f"{lease.id:016x}"
    path.unlink()
    os.mkfifo(path)
    names._timeout_s = 0.3  # type: ignore[attr-defined]  # from now on
    operations: list[Callable[[], object]] = [
        lambda: lease.alive,
        lambda: names.get("a"),
        lambda: names.add("b", "1", lease=lease.id),
        lambda: names.wait("a", 0.3),
    ]
    for operation in operations:
        before = time.monotonic()
        with pytest.raises(NameResolveTimeout, match=r"name_resolve\.path='.*' .*within 0\.3 s|did not answer"):
            operation()
        assert time.monotonic() - before < 10.0
    before = time.monotonic()
    names.close()
    assert time.monotonic() - before < 10.0
    path.unlink()


def test_what_is_over_is_removed(folder: Path, open_session: OpenSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_names, "KEEP_S", 0.3)
    keeper, names = open_session(), open_session()
    keeper.grant_lease(30)
    lease = names.grant_lease(30, keep_alive=False)
    for number in range(30):
        names.add("often", str(number), replace=True)
    names.add("deleted", "1")
    names.delete("deleted")
    names.add("dead", "1", lease=lease.id)
    lease.revoke()
    (folder / "new" / "half").write_text("written")
    wait_until(lambda: len(os.listdir(folder / "entries")) == 1, "the newest version of the one that is there is left")
    wait_until(lambda: os.listdir(folder / "new") == [], "what was half written is gone")
    assert names.get("often") == "29"
    names.add("deleted", "2")  # begins anew
    assert keeper.get("deleted") == "2"


def test_a_broken_version_is_none(folder: Path, open_session: OpenSession) -> None:
    """As the crash of a writer's host may leave it."""
    names = open_session()
    names.add("a", "1")
    (folder / "entries" / "a.2").write_bytes(b"")
    (folder / "entries" / "nonsense").write_bytes(b"")
    with pytest.raises(LookupError):
        names.get("a")
    names.add("a", "2")
    assert open_session().get("a") == "2"


def test_the_name_of_a_version_is_taken_once(folder: Path) -> None:
    store = FileStore(folder)
    store.make_folders()
    assert store.write_version("k", 1, Version("k", "1", "me", 1))
    assert not store.write_version("k", 1, Version("k", "2", "you", 2))
    assert store.read_version("k", 1) == Version("k", "1", "me", 1)
    before = fresh_stat(folder / "entries")
    plain = os.stat(folder / "entries")
    assert before == (plain.st_ino, plain.st_mtime_ns)
    numbers = itertools.count(2)

    def has_changed() -> bool:
        """A file system's clock may tick only every few milliseconds."""
        number = next(numbers)
        assert store.write_version("k", number, Version("k", "2", "you", number))
        return fresh_stat(folder / "entries") != before

    wait_until(has_changed, "the folder's time tells that it has changed")
    with pytest.raises(FileNotFoundError):
        fresh_stat(folder / "none")
    for key in ("a/b.c", "ключ/é", "a%2Fb", "=x", "." * 50):
        assert key_of(stem_of(key)) == key
        assert "/" not in stem_of(key)
    long = "x" * MAX_NAME_BYTES
    assert (len(stem_of(long)) < 255, key_of(stem_of(long))) == (True, None)


def test_nonsense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path='names': name a folder .*absolute path"):
        open_name_resolver(NameResolveConfig(backend="file", path="names"))
    with pytest.raises(ValueError, match=r"name_resolve\.poll_s is 0"):
        open_name_resolver(NameResolveConfig(backend="file", path=str(tmp_path), poll_s=0))
    (tmp_path / "file").write_text("")
    with pytest.raises(NameResolveError, match=r"first look is refused: Not a directory"):
        open_name_resolver(NameResolveConfig(backend="file", path=str(tmp_path / "file" / "names")))
    tmp_path.chmod(0o777)
    with pytest.raises(NameResolveError, match=r"everybody may write there; run `chmod o-w"):
        open_name_resolver(NameResolveConfig(backend="file", path=str(tmp_path)))


def test_a_prefix_is_a_space_of_its_own(tmp_path: Path) -> None:
    config = NameResolveConfig(backend="file", path=str(tmp_path / "names"))
    with (
        open_name_resolver(NameResolveConfig(backend="file", path=config.path, prefix="team/alice")) as alice,
        open_name_resolver(NameResolveConfig(backend="file", path=config.path, prefix="team/bob")) as bob,
    ):
        alice.add("a", "1")
        bob.add("a", "2")
        with pytest.raises(NameEntryExists):
            alice.add("a", "3")
        assert (alice.get("a"), bob.get("a")) == ("1", "2")
