"""Makes SGLang importable on a CPU without AMX: run by launcher/setup_sglang.sh --cpu with the interpreter of SGLang's environment.

Two packages that SGLang imports have a compiled part that cannot be had or loaded there, and which serving text never calls:

- sgl_kernel: the stub beside this file is copied into the environment, unless a real one is installed;
- torchvision: its wheel is built for another build of torch, so that its operators do not exist, and registering their shapes
  fails at import. The decorators that do so are commented out; the functions stay, unused.

Changes nothing outside that environment, and nothing there that was changed before.
"""

import importlib.util
import re
import shutil
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
STUB = HERE / "sgl_kernel"
REGISTRATION = re.compile(r'^@torch\.library\.register_fake\("torchvision::', re.MULTILINE)


def main() -> None:
    site = Path(sysconfig.get_path("purelib"))
    if sys.prefix == sys.base_prefix:
        sys.exit(f"{sys.executable} is not the interpreter of a virtual environment; nothing was changed")
    print(install_stub(site / "sgl_kernel"))
    print(patch_torchvision(_folder_of("torchvision") / "_meta_registrations.py"))


def install_stub(target: Path) -> str:
    """A real sgl_kernel is left alone: it has more than the one file of the stub."""
    if target.is_dir() and any(entry.name not in {"__init__.py", "__pycache__"} for entry in target.iterdir()):
        return f"{target} is a real sgl_kernel: left as it is"
    shutil.copytree(STUB, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    return f"{target} stands in for sgl_kernel"


def patch_torchvision(file: Path) -> str:
    source = file.read_text(encoding="utf-8")
    patched, count = REGISTRATION.subn(lambda match: f"# {match[0]}", source)
    if count:
        file.write_text(patched, encoding="utf-8")
    return f"{file}: {count} registrations of compiled operators commented out"


def _folder_of(package: str) -> Path:
    """Found without importing it, which would fail."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        sys.exit(f"{package} is not installed in {sys.prefix}")
    return Path(spec.origin).parent


if __name__ == "__main__":
    main()
