"""A run's own certificate, where it is on TCP: its private etcd and that etcd's clients show it, its HTTP servers too, and their
clients trust nothing else.

One for all, signed by itself: whoever has its key belongs to the run. Made by the program openssl, which every cluster has.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence

_LIMIT_S = 30.0
_DAYS = 3650
_LOCAL = ("127.0.0.1", "localhost")


class CertificateError(RuntimeError):
    """There is no certificate, and why."""


def make_certificate(hosts: Sequence[str]) -> tuple[str, str]:
    """It and its private key, PEM, valid for these hosts (names or addresses) and this machine. Raises CertificateError."""
    program = shutil.which("openssl")
    if program is None:
        raise CertificateError(
            "a run on TCP needs a certificate, and there is no program openssl to make it; install it (apt install openssl), or "
            "set network.tls_cert and name_resolve.endpoints to what is yours"
        )
    command = [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", str(_DAYS), "-subj", "/CN=asyncrl", "-addext", f"subjectAltName={_alternatives(hosts)}"]
    command += ["-out", "/dev/stdout", "-keyout", "/dev/stdout"]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_LIMIT_S, check=False, text=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CertificateError(f"a certificate could not be made: {error}") from error
    found = re.findall(r"(-----BEGIN ([A-Z ]+)-----.*?-----END \2-----\n)", done.stdout, re.DOTALL)
    blocks = {kind: block for block, kind in found}
    if done.returncode or set(blocks) != {"CERTIFICATE", "PRIVATE KEY"}:
        raise CertificateError(f"a certificate could not be made: {' '.join(command)}: {done.stderr.strip()[-500:]}")
    return blocks["CERTIFICATE"], blocks["PRIVATE KEY"]


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
