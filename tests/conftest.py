"""Marks: what needs a GPU is skipped where there is none."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    if Path("/dev/nvidia0").exists():
        return
    skip = pytest.mark.skip(reason="there is no GPU on this machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
