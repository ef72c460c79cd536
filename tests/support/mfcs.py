"""Functions declared with @mfc, for tests of what declarations mean."""

from __future__ import annotations

from typing import Any

from asyncrl.dataflow.mfc import mfc


def declare(name: str, **fields: Any) -> str:
    """Declare a function that changes nothing. Returns its entry for train.mfcs."""

    def unchanged(engine: Any, sample: Any, train: Any) -> Any:
        return sample

    globals()[name] = mfc(name=name, **fields)(unchanged)
    return f"{__name__}:{name}"
