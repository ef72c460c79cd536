"""Test double of the disk: weight versions and checkpoints, as far as processes read them. Writing takes time; renaming is instant.

If a writer dies, its folder stays unfinished under its temporary name, and no process can read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.protocol.versions import WeightVersion
from asyncrl.weights.form import WeightsError


@dataclass
class Folder:
    """A complete folder: it has its final name."""

    version: WeightVersion | None
    content: Any = None
    num_bytes: int = 0
    base: Folder | None = None  # of a delta


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
        found = self.folders.get(str(path))
        for place, folder in self.chain(path):
            there = self.folders.get(place)
            if there is None or self.hidden_until.get(place, 0.0) > now:
                raise WeightsError(f"{place} has no manifest.json: not a weight version, or it was pruned")
            if place in self.damaged:
                raise WeightsError(f"{place}/model.safetensors has another checksum than the manifest")
            if there is not folder:
                raise WeightsError(f"{place} is not the base of {path}")
        if found is None:
            raise WeightsError(f"{path} has no manifest.json: not a weight version, or it was pruned")
        if expected is not None and found.version != expected:
            raise WeightsError(f"{path} holds {found.version}, expected {expected}")
        return found

    def chain(self, path: str | Path) -> Iterator[tuple[str, Folder]]:
        """Path and folder of a version and of each base below it, as they were when the deltas were written."""
        folder, directory = self.folders.get(str(path)), Path(path).parent
        while folder is not None:
            yield str(directory / str(folder.version)), folder
            folder = folder.base

    def with_bases(self, directory: Path, versions: set[WeightVersion]) -> set[WeightVersion]:
        """Like weights.versions.with_bases."""
        return versions | {
            folder.version
            for version in versions
            for _, folder in self.chain(directory / str(version))
            if folder.version is not None
        }

    def prune(self, directory: Path, *, keep: int, in_use: Iterable[WeightVersion]) -> list[WeightVersion]:
        """Like weights.versions.prune_versions. Returns the versions that are left, if it removes any."""
        prefix = f"{directory}/"
        here = {folder.version: path for path, folder in self.folders.items() if path.startswith(prefix)}
        versions = sorted(version for version in here if version is not None)
        kept = self.with_bases(directory, {*versions[max(0, len(versions) - keep) :], *in_use})
        removed = [version for version in versions if version not in kept]
        for version in removed:
            del self.folders[here[version]]
        return [version for version in versions if version in kept] if removed else []
