"""An etcd with restricted access: passwords, permissions, TLS, client certificates. Servers and certificates are real."""

from __future__ import annotations

import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from name_sessions import LIMIT_S, OpenSession, Recorder, Refreshes, gone, lives, patient, put, sessions

from asyncrl.config.schema import NameResolveConfig
from asyncrl.runtime.certificates import CertificateError, make_certificate
from asyncrl.runtime.names.etcd.access import EtcdAccess, Login
from asyncrl.runtime.names.etcd.resolver import open_name_resolver
from asyncrl.runtime.names.etcd.server import EtcdTls, find_etcd
from asyncrl.runtime.names.interface import NameEntryExists, NameResolveError, NameResolveTimeout
from tests.support.etcd_server import EtcdServer

pytestmark = pytest.mark.timeout(120)
FAST = ["--unsafe-no-fsync", "--auth-token", "simple"]


@dataclass(frozen=True)
class Certificates:
    """Certificates of an authority, a server, a client, and a client of another authority."""

    folder: Path

    def __getattr__(self, name: str) -> str:
        """The path of a file: `server_crt` is server.crt, `client_key` is client.key."""
        return str(self.folder / name.replace("_", "."))


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for authority, names in (("ca", ("server", "client")), ("other", ("stranger",))):
        ca = [str(folder / f"{authority}.{end}") for end in ("crt", "key")]
        openssl("req", "-x509", *key, "-days", "2", "-subj", f"/CN={authority}", "-out", ca[0], "-keyout", ca[1])
        for name in names:
            request, certificate, secret = (str(folder / f"{name}.{end}") for end in ("csr", "crt", "key"))
            extensions = folder / f"{name}.ext"
            extensions.write_text("subjectAltName=IP:127.0.0.1\n")
            openssl("req", *key, "-subj", f"/CN={name}", "-out", request, "-keyout", secret)
            signed_by = ["-CA", ca[0], "-CAkey", ca[1], "-CAcreateserial"]
            openssl(
                "x509",
                "-req",
                "-days",
                "2",
                "-in",
                request,
                *signed_by,
                "-out",
                certificate,
                "-extfile",
                str(extensions),
            )
    return Certificates(folder)


def etcdctl(endpoint: str, *arguments: str) -> None:
    program = [str(Path(find_etcd()).with_name("etcdctl")), "--dial-timeout", "30s", "--command-timeout", "30s"]
    subprocess.run([*program, "--endpoints", endpoint, *arguments], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EtcdServer, NameResolveConfig]]:
    """An etcd with passwords, and alice's config: she may read and write below team/alice."""
    folder = tmp_path_factory.mktemp("guarded")
    with EtcdServer(folder / "data", folder / "log", extra_args=[*FAST, "--auth-token-ttl", "2"]) as server:
        etcdctl(server.endpoint, "user", "add", "root:admin")
        etcdctl(server.endpoint, "user", "add", "alice:pass:w@rd")
        etcdctl(server.endpoint, "role", "add", "team")
        etcdctl(server.endpoint, "role", "grant-permission", "team", "--prefix=true", "readwrite", "team/alice/")
        etcdctl(server.endpoint, "user", "grant-role", "alice", "team")
        etcdctl(server.endpoint, "user", "grant-role", "root", "root")
        etcdctl(server.endpoint, "auth", "enable")
        password = folder / "password"
        password.write_text("pass:w@rd\n")
        password.chmod(0o600)
        config = NameResolveConfig(
            endpoints=[server.endpoint], prefix="team/alice", user="alice", password_file=str(password)
        )
        yield server, patient(config)


@pytest.fixture
def open_alice(guarded: tuple[EtcdServer, NameResolveConfig]) -> Iterator[OpenSession]:
    yield from sessions(guarded[1])


@pytest.fixture
def root() -> str:
    return f"test/{uuid.uuid4().hex}"


# --------------------------------------------------------------------------------------------------------------- passwords


def test_a_user_with_a_password_and_a_prefix(
    guarded: tuple[EtcdServer, NameResolveConfig], open_alice: OpenSession, root: str
) -> None:
    names, other = open_alice(), open_alice()
    lease = names.grant_lease(30)
    recorder, one = Recorder(), Recorder()
    other.watch(root, recorder, subtree=True)
    other.watch(f"{root}/a", one)
    names.add(f"{root}/a", "1", lease=lease.id)
    with pytest.raises(NameEntryExists, match=rf"name '{root}/a' already exists"):
        other.add(f"{root}/a", "1")
    assert names.compare_and_swap(f"{root}/a", "1", "2")
    assert other.get_subtree(root) == {f"{root}/a": "2"}
    assert names.delete(f"{root}/a")
    names.add(f"{root}/b", "3", lease=lease.id)
    assert other.wait(f"{root}/b", LIMIT_S) == "3"
    assert names.clear_subtree(root) == 1
    one.wait_for(put(f"{root}/a", "1"), put(f"{root}/a", "2"), gone(f"{root}/a"))
    assert [event.key.startswith(root) for event in recorder.events] == [True] * len(recorder.events)
    recorder.wait_for_state({})
    names.add(f"{root}/held", "4", lease=lease.id)
    recorder.wait_for_state({f"{root}/held": "4"})
    lease.revoke()
    recorder.wait_for_state({})
    names.add(f"{root}/plain", "5")
    config = replace(guarded[1], prefix="")
    with open_name_resolver(replace(config, prefix="team/alice/test")) as below:
        assert below.get(root.removeprefix("test/") + "/plain") == "5"


def test_tokens_that_a_server_forgets_are_renewed(
    guarded: tuple[EtcdServer, NameResolveConfig], open_alice: OpenSession, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server forgets a token that is not used for its auth-token-ttl (2 s here), and all tokens when it restarts. Leases and
    watches survive."""
    server = guarded[0]
    refreshes = Refreshes(monkeypatch)
    names, other = open_alice(), open_alice()
    recorder = Recorder()
    other.watch(root, recorder, subtree=True)
    lease = names.grant_lease(30)
    names.add(f"{root}/held", "1", lease=lease.id)
    told = [put(f"{root}/held", "1")]
    for value in ("idle", "restarted"):
        if value == "idle":
            time.sleep(4.0)
        else:
            server.restart()
        names.add(f"{root}/{value}", value)
        told.append(put(f"{root}/{value}", value))
        recorder.wait_for(*told)
        refreshes.wait_for_another(lease.id)
        assert lives(names, lease)
    with_threads = [threading.Thread(target=names.add, args=(f"{root}/{index}", "x")) for index in range(8)]
    server.restart()
    for thread in with_threads:
        thread.start()
    for thread in with_threads:
        thread.join(LIMIT_S)
    assert len(other.get_subtree(root)) == 11


def test_tokens_that_are_over_before_they_were_used(
    open_alice: OpenSession, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token may expire before its first use, for example if the machine is suspended. Here one call meets this three times."""
    names = open_alice()
    enter, ends = Login.enter, iter(range(3))

    def enter_late(login: Login, *arguments: Any) -> None:
        enter(login, *arguments)
        if next(ends, None) is not None:
            login.token = f"{login.token}ended"

    monkeypatch.setattr(Login, "enter", enter_late)
    names.add(f"{root}/a", "1")
    assert next(ends, None) is None
    assert names.get(f"{root}/a") == "1"


def test_refusals_say_what_to_do(guarded: tuple[EtcdServer, NameResolveConfig], tmp_path: Path) -> None:
    server, config = guarded
    wrong = tmp_path / "wrong"
    wrong.write_text("guess")
    wrong.chmod(0o600)
    readable = tmp_path / "readable"
    readable.write_text("pass:w@rd")
    readable.chmod(0o644)
    cases = [
        (
            NameResolveError,
            r"requires a user; set name_resolve\.user",
            patient(NameResolveConfig(endpoints=[server.endpoint])),
        ),
        (NameResolveError, r"'alice': wrong name or password; see", replace(config, password_file=str(wrong))),
        (
            NameResolveError,
            r"may not use the keys below 'team/bob/'; .*etcdctl role",
            replace(config, prefix="team/bob"),
        ),
        (NameResolveError, r"may not use the keys below 'asyncrl'", replace(config, prefix="")),
        (
            ValueError,
            r"is accessible to other users \(mode 0644\); run `chmod 600",
            replace(config, password_file=str(readable)),
        ),
        (ValueError, r"password_file='/none' cannot be read: No such file", replace(config, password_file="/none")),
        (
            ValueError,
            r"user='alice' and name_resolve.password_file='': set both or neither",
            replace(config, password_file=""),
        ),
        (ValueError, r"key_file='': a client certificate needs both", replace(config, cert_file="c")),
        (ValueError, r"set without name_resolve\.ca_file", replace(config, cert_file="c", key_file="k")),
        (ValueError, r"name 'a/\.\./b' has a part", replace(config, prefix="a/../b")),
    ]
    for kind, message, changed in cases:
        with pytest.raises(kind, match=message) as caught:
            open_name_resolver(changed)
        assert "pass:w@rd" not in str(caught.value)
        assert "guess" not in str(caught.value)


def test_a_password_for_an_etcd_that_asks_for_none(
    guarded: tuple[EtcdServer, NameResolveConfig], tmp_path: Path
) -> None:
    """The client refuses to use it, because the user gave a password and so believes that strangers have no access."""
    with EtcdServer(tmp_path / "data", tmp_path / "log", extra_args=FAST) as open_to_all:
        config = replace(guarded[1], endpoints=[open_to_all.endpoint])
        with pytest.raises(NameResolveError, match=r"does not use passwords: run `etcdctl auth enable`"):
            open_name_resolver(config)


# --------------------------------------------------------------------------------------------------------------------- TLS


def test_tls_with_client_certificates(certificates: Certificates, tmp_path: Path, root: str) -> None:
    tls = EtcdTls(certificates.server_crt, certificates.server_key, certificates.ca_crt)
    with EtcdServer(tmp_path / "data", tmp_path / "log", extra_args=FAST, tls=tls) as server:
        config = NameResolveConfig(
            endpoints=[server.endpoint],
            ca_file=certificates.ca_crt,
            cert_file=certificates.client_crt,
            key_file=certificates.client_key,
            timeout_s=LIMIT_S,
        )
        recorder = Recorder()
        with open_name_resolver(config) as names, open_name_resolver(config) as other:
            other.watch(root, recorder, subtree=True)
            names.add(f"{root}/a", "1", lease=names.grant_lease(30).id)
            server.kill()
            server.start()
            names.add(f"{root}/b", "2")
            recorder.wait_for(put(f"{root}/a", "1"), put(f"{root}/b", "2"))
        strangers = [
            NameResolveConfig(endpoints=[server.endpoint], timeout_s=1.0),  # does not speak TLS
            replace(config, cert_file="", key_file="", timeout_s=1.0),
            replace(config, cert_file=certificates.stranger_crt, key_file=certificates.stranger_key, timeout_s=1.0),
            replace(config, ca_file=certificates.other_crt, timeout_s=1.0),  # does not trust the server
        ]
        for stranger in strangers:
            with pytest.raises(NameResolveTimeout, match="did not answer the first request"):
                open_name_resolver(stranger)
        Path(certificates.client_key).chmod(0o640)
        with pytest.raises(ValueError, match=r"key_file='.*client\.key' is accessible to other users \(mode 0640\)"):
            open_name_resolver(config)
        Path(certificates.client_key).chmod(0o600)
        garbage = tmp_path / "garbage.crt"
        garbage.write_text("no certificate")
        with pytest.raises((NameResolveTimeout, ValueError), match=r"ca_file|first request"):
            open_name_resolver(replace(config, ca_file=str(garbage), timeout_s=1.0))


def test_nothing_of_the_secrets_shows(guarded: tuple[EtcdServer, NameResolveConfig]) -> None:
    assert "pass:w@rd" not in repr(EtcdAccess(guarded[1]))
    with open_name_resolver(guarded[1]) as names:
        assert "pass:w@rd" not in repr(vars(names))


def test_without_openssl_there_is_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        CertificateError, match=r"the program openssl was not found; install it .*name_resolve\.endpoints"
    ):
        make_certificate([])
