"""Test double of the disk: weight versions and checkpoints, as far as processes read them. Writing takes time; renaming is instant.

If a writer dies, its folder stays unfinished under its temporary name, and no process can read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.protocol.messages import WeightVersion
from asyncrl.weights.versions import WeightsError


@dataclass
class Folder:
    """A complete folder: it has its final name."""

    version: WeightVersion | None
    content: Any = None
    num_bytes: int = 0


class Disk:
    def __init__(self) -> None:
        self.folders: dict[str, Folder] = {}
        self.damaged: set[str] = set()  # folders whose files do not match their manifests
        self.hidden_until: dict[str, float] = {}  # a network file system may show a folder late

    def rename(self, path: str, folder: Folder, *, replace: bool = False) -> None:
        """The last step of writing. Raises FileExistsError, like the real function."""
        if path in self.folders and not replace:
            raise FileExistsError(f"{path} exists already; a version or checkpoint is written only once")
        self.folders[path] = folder
        self.damaged.discard(path)

    def verify(self, path: Path, expected: WeightVersion | None, now: float) -> Folder:
        """Like weights.versions.verify_version."""
        folder = self.folders.get(str(path))
        if folder is None or self.hidden_until.get(str(path), 0.0) > now:
            raise WeightsError(f"{path} has no manifest.json: not a weight version, or it was pruned")
        if str(path) in self.damaged:
            raise WeightsError(f"{path}/model.safetensors has another checksum than the manifest")
        if expected is not None and folder.version != expected:
            raise WeightsError(f"{path} holds {folder.version}, expected {expected}")
        return folder

    def prune(self, directory: Path, *, keep: int, in_use: Iterable[WeightVersion]) -> list[WeightVersion]:
        """Like weights.versions.prune_versions."""
        prefix = f"{directory}/"
        here = {folder.version: path for path, folder in self.folders.items() if path.startswith(prefix)}
        versions = sorted(version for version in here if version is not None)
        kept = {*versions[max(0, len(versions) - keep) :], *in_use}
        removed = [version for version in versions if version not in kept]
        for version in removed:
            del self.folders[here[version]]
        return removed
