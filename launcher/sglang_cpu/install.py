"""Makes SGLang importable on a CPU without AMX. launcher/setup_sglang.sh --cpu runs it with the Python of SGLang's environment.

SGLang imports two packages whose compiled parts do not exist for such a CPU or cannot be loaded. Serving text never calls these
parts.

- sgl_kernel: this script copies the stub beside this file into the environment, unless a real sgl_kernel is installed there.
- torchvision: its wheel is built for another build of torch. Its operators therefore do not exist, and registering their shapes
  fails at import. This script comments out the decorators that register them. The decorated functions stay, unused.

The script changes nothing outside that environment. A second run changes nothing.
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
    """Copy the stub to `target` and return what was done. A real sgl_kernel, which has more files than the stub's one, stays."""
    if target.is_dir() and any(entry.name not in {"__init__.py", "__pycache__"} for entry in target.iterdir()):
        return f"{target} is a real sgl_kernel: it is not changed"
    shutil.copytree(STUB, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    return f"{target} stands in for sgl_kernel"


def patch_torchvision(file: Path) -> str:
    source = file.read_text(encoding="utf-8")
    patched, count = REGISTRATION.subn(lambda match: f"# {match[0]}", source)
    if count:
        file.write_text(patched, encoding="utf-8")
    return f"{file}: {count} registrations of compiled operators commented out"


def _folder_of(package: str) -> Path:
    """Return the folder of an installed package. Do not import the package, which would fail."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        sys.exit(f"{package} is not installed in {sys.prefix}")
    return Path(spec.origin).parent


if __name__ == "__main__":
    main()
