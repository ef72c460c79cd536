"""Install packages into the environment of this interpreter: with uv where it is present or pip can install it, else with pip.

    .venv/bin/python launcher/install_packages.py ARGUMENTS OF `pip install`

uv needs a fifth of pip's CPU time. It gets pip's settings (indexes, links, constraints, certificates) as options, so both
choose the same packages. Where uv fails, or pip has a setting that this file does not know, pip installs, and one line says why.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# Installed where no uv is in PATH. This version and pip chose the same packages from requirements.lock
UV = "uv==0.13.9"

PIP = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off")

# pip's settings that say which packages are chosen or how they are fetched -> uv's option, given once for each value.
_OPTIONS = {
    "find-links": "--find-links",
    "constraint": "--constraints",
    "trusted-host": "--allow-insecure-host",
}
# The same for variables of uv's environment.
_VARIABLES = {"cert": ["SSL_CERT_FILE"], "proxy": ["HTTP_PROXY", "HTTPS_PROXY"]}
# pip's settings that change neither.
_HARMLESS = {"cache-dir", "default-timeout", "disable-pip-version-check", "log", "no-cache-dir", "no-color", "no-input"}
_HARMLESS |= {"progress-bar", "quiet", "require-virtualenv", "retries", "root-user-action", "timeout", "verbose"}
# Where one of these is set, uv has indexes of its own, which stay.
_UV_INDEXES = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS")


class UvUnusable(Exception):
    """uv cannot install; the message is the reason in a few words. has_begun: it may have left a package half there."""

    def __init__(self, reason: str, *, has_begun: bool = False) -> None:
        super().__init__(reason)
        self.has_begun = has_begun


def pip_settings(listed: str) -> dict[str, str]:
    """Return the settings that `pip install` uses, of the output of `pip config list`: a variable of the environment comes before
    the section `install`, and that before `global`."""
    found: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for line in listed.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(f"{section}."):
                found[key.removeprefix(f"{section}.").replace("_", "-")] = str(ast.literal_eval(value))
    return found


def uv_settings(settings: Mapping[str, str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return uv's options and further variables of its environment that do what pip's settings do. Raises UvUnusable."""
    known = {"index-url", "extra-index-url", *_OPTIONS, *_VARIABLES, *_HARMLESS}
    unknown = sorted(name for name, value in settings.items() if value and name not in known)
    if unknown:
        raise UvUnusable(f"it has no counterpart of pip's setting {', '.join(unknown)}")
    options = ["--index-strategy", "unsafe-best-match"]  # like pip: the best version of all indexes
    has_own = any(environ.get(name) for name in _UV_INDEXES)
    if not has_own:
        # Of a version that several indexes have, pip takes the most fitting wheel and uv the first index's. Another index may
        # have a wheel without the compiled parts, so pip's main index comes first.
        first = settings.get("index-url") or "https://pypi.org/simple"
        *indexes, last = first, *settings.get("extra-index-url", "").split()
        options += [part for index in indexes for part in ("--index", index)]
        options += ["--default-index", last]  # has the lowest priority
    for name, option in _OPTIONS.items():
        if not (has_own and name == "find-links"):
            options += [part for value in settings.get(name, "").split() for part in (option, value)]
    variables = {name: settings[key] for key, names in _VARIABLES.items() if settings.get(key) for name in names}
    return options, variables


def find_uv(prefix: Path) -> str:
    """Return the path of uv. Installs it if necessary, in a folder of its own, so that the environment has the same packages as
    with pip. Raises UvUnusable."""
    present = shutil.which("uv") or shutil.which("uv", path=prefix / "uv" / "bin")
    if present:
        return present
    done = subprocess.run([*PIP, "--only-binary", ":all:", "--no-deps", "--target", prefix / "uv", UV], check=False)
    installed = shutil.which("uv", path=prefix / "uv" / "bin")
    if done.returncode != 0 or not installed:
        raise UvUnusable(f"pip could not install {UV}")
    return installed


def install_with_uv(arguments: Sequence[str], prefix: Path) -> None:
    """Raises UvUnusable."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], stdout=subprocess.PIPE, text=True, check=False
    )
    if listed.returncode != 0:
        raise UvUnusable("pip could not list its settings")
    options, variables = uv_settings(pip_settings(listed.stdout), os.environ)
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        options.append("--compile-bytecode")  # later processes would compile their modules and not keep the result
    command = [find_uv(prefix), "pip", "install", "--python", sys.executable, *options, *arguments]
    environ = {**os.environ, **variables}
    causes = []
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True, encoding="utf-8") as process:
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", flush=True)  # launcher/setup.sh shows the last line meanwhile
            if line.strip().startswith(("error", "×")):
                causes.append(line.strip())
    if process.returncode != 0:
        raise UvUnusable(causes[0] if causes else f"it ended with {process.returncode}", has_begun=True)


def main(arguments: list[str]) -> int:
    prefix = Path(sys.prefix)
    # Left behind only if this script was killed. A package can then be half there, and pip and uv would take it as installed.
    unfinished = prefix / ".asyncrl-unfinished"
    is_anew = unfinished.exists()
    unfinished.touch()
    try:
        install_with_uv([*(["--reinstall"] if is_anew else []), *arguments], prefix)
        code = 0
    except UvUnusable as error:
        print(f"asyncrl: pip instead of uv, which is faster: {error}", flush=True)
        anew = ["--force-reinstall"] if is_anew or error.has_begun else []
        code = subprocess.run([*PIP, *anew, *arguments], check=False).returncode
    unfinished.unlink()
    return code


if __name__ == "__main__":
    if sys.prefix == sys.base_prefix:
        sys.exit(f"{sys.executable} is not the interpreter of a virtual environment; nothing was changed")
    sys.exit(main(sys.argv[1:]))
