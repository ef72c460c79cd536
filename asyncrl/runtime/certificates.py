"""A run's own TLS certificate, for runs on TCP. The private etcd, its clients and the run's HTTP servers present it, and
their clients trust only this one. With network.tls_cert, the HTTP servers use that certificate instead.

All of them share one self-signed certificate: a process that has its key belongs to the run. It is made by the openssl
program, which every cluster has.
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
    """The certificate could not be created; the text gives the reason."""


def make_certificate(hosts: Sequence[str]) -> tuple[str, str]:
    """Return a certificate and its private key as PEM, valid for these hosts (names or addresses) and this machine.
    Raises CertificateError.
    """
    program = shutil.which("openssl")
    if program is None:
        raise CertificateError(
            "a run on TCP needs a certificate, but the program openssl was not found; install it (apt install openssl), or "
            "set network.tls_cert and name_resolve.endpoints to your own"
        )
    command = [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", str(_DAYS), "-subj", "/CN=asyncrl", "-addext", f"subjectAltName={_alternatives(hosts)}"]
    command += ["-out", "/dev/stdout", "-keyout", "/dev/stdout"]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_LIMIT_S, check=False, text=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CertificateError(f"could not create a certificate: {error}") from error
    found = re.findall(r"(-----BEGIN ([A-Z ]+)-----.*?-----END \2-----\n)", done.stdout, re.DOTALL)
    blocks = {kind: block for block, kind in found}
    if done.returncode or set(blocks) != {"CERTIFICATE", "PRIVATE KEY"}:
        raise CertificateError(f"could not create a certificate: {' '.join(command)}: {done.stderr.strip()[-500:]}")
    return blocks["CERTIFICATE"], blocks["PRIVATE KEY"]


def _alternatives(hosts: Sequence[str]) -> str:
    """Return the names and their addresses, because processes may connect to either."""
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
