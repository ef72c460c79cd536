#!/usr/bin/env bash
# Install bubblewrap, the sandbox for untrusted programs of code rewards, if it is missing: bash launcher/setup_sandbox.sh
set -euo pipefail
! command -v bwrap >/dev/null || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "bubblewrap is missing: install it (apt-get, dnf, apk, pacman: the package bubblewrap), as root" >&2
    exit 1
fi
echo "== installing bubblewrap"
log="$(apt-get install -y --no-install-recommends bubblewrap 2>&1)" || log="$(apt-get update 2>&1 && apt-get install -y --no-install-recommends bubblewrap 2>&1)" || {
    echo "bubblewrap could not be installed:" >&2
    tail -n 5 <<<"$log" >&2
    exit 1
}
