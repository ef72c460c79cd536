"""A run's own certificate: its private etcd and all its clients show it, and trust nothing else.

One for all, signed by itself: whoever has its key belongs to the run. Made by the program openssl, which every cluster has.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from asyncrl.runtime.etcd_server import EtcdTls

_LIMIT_S = 30.0
_DAYS = 3650
_LOCAL = ("127.0.0.1", "localhost")


class CertificateError(RuntimeError):
    """There is no certificate, and why."""


def make_certificate(folder: Path, name: str, hosts: Sequence[str]) -> EtcdTls:
    """<folder>/<name>.crt and .key (mode 0600), valid for these hosts (names or addresses) and this machine. Raises
    CertificateError."""
    program = shutil.which("openssl")
    if program is None:
        raise CertificateError(
            "a private etcd that other hosts reach needs a certificate, and there is no program openssl to make it; install it "
            "(apt install openssl), or set name_resolve.endpoints to an etcd of yours"
        )
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", str(_DAYS), "-subj", "/CN=asyncrl", "-addext", f"subjectAltName={_alternatives(hosts)}"]
    command += ["-out", str(certificate), "-keyout", str(key)]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file in (certificate, key):
            file.unlink(missing_ok=True)
        os.close(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))  # openssl keeps the mode
        done = subprocess.run(
            command, capture_output=True, timeout=_LIMIT_S, check=False, text=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CertificateError(f"{certificate} could not be made: {error}") from error
    if done.returncode:
        raise CertificateError(f"{certificate} could not be made: {' '.join(command)}: {done.stderr.strip()[-500:]}")
    return EtcdTls(str(certificate), str(key), str(certificate))


def _alternatives(hosts: Sequence[str]) -> str:
    """Names and their addresses: processes may connect to either."""
    found: dict[str, None] = {}
    for host in (*_LOCAL, *hosts):
        found[_alternative(host)] = None
        with contextlib.suppress(OSError):
            for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
                found[_alternative(str(info[4][0]))] = None
    return ",".join(found)


def _alternative(host: str) -> str:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return f"DNS:{host}"
    return f"IP:{host}"
