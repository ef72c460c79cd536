"""launcher/install_packages.py, run by a real environment's Python with a pip and a uv that record their calls."""

import importlib.util
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "launcher" / "install_packages.py"
PIP = """import os, pathlib, sys
with open(os.environ["CALLS"], "a") as calls:
    print("pip", *sys.argv[1:], file=calls)
if sys.argv[1] == "config":
    print(os.environ.get("PIP_SETTINGS", ""))
elif "--target" in sys.argv and "FAKE_UV" in os.environ:
    folder = pathlib.Path(sys.argv[sys.argv.index("--target") + 1], "bin")
    folder.mkdir(parents=True)
    (folder / "uv").symlink_to(os.environ["FAKE_UV"])
elif "--target" in sys.argv:
    sys.exit(1)
else:
    sys.exit(int(os.environ.get("PIP_CODE", "0")))
"""
UV = """#!/usr/bin/env bash
echo "uv $* cert=${SSL_CERT_FILE:-} proxy=${HTTPS_PROXY:-}" >>"$CALLS"
echo "Resolved 3 packages" >&2
[ -z "${UV_KILLED:-}" ] || kill -9 $PPID
[ -z "${UV_FAILS:-}" ] || { echo "$UV_FAILS" >&2; exit 2; }
"""


@pytest.fixture
def install(tmp_path):
    """Returns a function that calls the script and returns the calls of uv and pip."""
    environment = tmp_path / "my venv"
    venv.create(environment, with_pip=False)
    fakes = tmp_path / "fakes"
    (fakes / "pip").mkdir(parents=True)
    (fakes / "pip" / "__main__.py").write_text(PIP)
    uv = tmp_path / "path" / "uv"
    uv.parent.mkdir()
    uv.write_text(UV)
    uv.chmod(0o755)
    calls = tmp_path / "calls"

    def call(*arguments, uv_in_path=True, code=0, **env):
        calls.write_text("")
        path = os.pathsep.join([str(uv.parent)] * uv_in_path + ["/usr/bin", "/bin"])
        done = subprocess.run(
            [environment / "bin" / "python", SCRIPT, *arguments],
            env={"PATH": path, "PYTHONPATH": str(fakes), "CALLS": str(calls), **env},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        call.output = done.stdout
        return [line.replace(str(environment), "VENV") for line in calls.read_text().splitlines()]

    call.uv = uv
    return call


UV_OPTIONS = "uv pip install --python VENV/bin/python --index-strategy unsafe-best-match"
UV_INSTALL = f"{UV_OPTIONS} --default-index https://pypi.org/simple"
PIP_INSTALL = "pip install --disable-pip-version-check --progress-bar off"
PIP_SETTINGS = """:env:.cert='/certs.pem'
:env:.find-links='/my wheels'
global.constraint='/constraints.txt'
global.extra-index-url='https://a https://b'
global.find-links='/never used'
global.index-url='https://mirror'
global.timeout='60'
install.proxy='http://proxy'
install.trusted_host='a'"""


def test_uv_installs_with_pips_settings(install):
    assert install("torch==2", "-e", "x[y]") == ["pip config list", f"{UV_INSTALL} torch==2 -e x[y] cert= proxy="]
    assert install("x", PIP_SETTINGS=PIP_SETTINGS)[1] == (
        f"{UV_OPTIONS} --index https://mirror --index https://a --default-index https://b --find-links /my "
        "--find-links wheels --constraints /constraints.txt --allow-insecure-host a x cert=/certs.pem proxy=http://proxy"
    )
    assert "asyncrl: " not in install.output


def test_pips_main_index_comes_first(install):
    """uv takes the wheel of the first index that has a version, even if another index has one that fits better."""
    called = install("x", PIP_SETTINGS="global.extra-index-url='https://a'")[1]
    assert called == f"{UV_OPTIONS} --index https://pypi.org/simple --default-index https://a x cert= proxy="


def test_indexes_that_uv_has_of_its_own_stay(install):
    called = install("x", PIP_SETTINGS=PIP_SETTINGS, UV_DEFAULT_INDEX="https://mine")[1]
    assert "https://mirror" not in called
    assert "--constraints /constraints.txt" in called


def test_pips_real_settings_are_read(tmp_path):
    spec = importlib.util.spec_from_file_location("install_packages", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://o'ne\nretries = 3\n[install]\nretries = 4\n")
    env = {
        "PATH": os.environ["PATH"],
        "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"),
        "PIP_EXTRA_INDEX_URL": "https://two",
    }
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], env=env, capture_output=True, text=True, check=True
    ).stdout
    settings = module.pip_settings(listed)
    assert (settings["index-url"], settings["extra-index-url"], settings["retries"]) == (
        "https://o'ne",
        "https://two",
        "4",
    )


def test_a_setting_without_a_counterpart_leaves_the_installation_to_pip(install):
    assert install("x", PIP_SETTINGS="global.only-binary=':all:'") == ["pip config list", f"{PIP_INSTALL} x"]
    assert (
        "asyncrl: pip instead of uv, which is faster: it has no counterpart of pip's setting only-binary"
        in install.output
    )


def test_pip_installs_uv_beside_the_packages(install):
    lines = install("x", uv_in_path=False, FAKE_UV=str(install.uv))
    assert lines[1].startswith(f"{PIP_INSTALL} --only-binary :all: --no-deps --target VENV/uv uv==")
    assert lines[2:] == [f"{UV_INSTALL} x cert= proxy="]
    assert install("x", uv_in_path=False) == ["pip config list", f"{UV_INSTALL} x cert= proxy="]


def test_without_uv_pip_installs(install):
    assert install("x", uv_in_path=False, code=3, PIP_CODE="3")[-1] == f"{PIP_INSTALL} x"
    assert "asyncrl: pip instead of uv, which is faster: pip could not install uv==" in install.output


def test_after_a_failure_of_uv_pip_writes_all_anew(install):
    """uv may have left a package half there, which pip would take as installed."""
    assert install("x", UV_FAILS="  × no x\n  ╰─▶ because")[-1] == f"{PIP_INSTALL} --force-reinstall x"
    assert install.output.count("asyncrl: pip instead of uv, which is faster: × no x\n") == 1


@pytest.mark.parametrize("uv_in_path", [True, False])
def test_after_a_kill_the_next_start_writes_all_anew(install, uv_in_path):
    install("x", code=-9, UV_KILLED="1")
    again = install("x", uv_in_path=uv_in_path)[-1]
    assert again == (f"{UV_INSTALL} --reinstall x cert= proxy=" if uv_in_path else f"{PIP_INSTALL} --force-reinstall x")
    assert "reinstall" not in install("x")[-1]


def test_modules_are_compiled_where_no_later_process_would_keep_the_result(install):
    assert "--compile-bytecode" in install("x", PYTHONDONTWRITEBYTECODE="1")[-1]


def test_only_a_virtual_environment_is_changed(tmp_path):
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    done = subprocess.run([base, SCRIPT, "x"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is not the interpreter of a virtual environment; nothing was changed" in done.stderr
