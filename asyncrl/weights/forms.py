"""The table of weight forms (form.py has their life cycle)."""

from __future__ import annotations

from collections.abc import Collection

from asyncrl.weights.adapter import ADAPTER, AdapterForm
from asyncrl.weights.delta import DeltaForm
from asyncrl.weights.form import WeightForm

FULL = "full"
FORMS: dict[str, WeightForm] = {  # by the kind in the manifest
    FULL: WeightForm(),
    "delta": DeltaForm(),
    ADAPTER: AdapterForm(),
}
BETWEEN_FULL = FORMS["delta"]  # the form of the versions between two full ones (weights.full_every)


def kind_of(names: Collection[str]) -> str:
    """The kind of a version with these files: full, unless one of them is of another form only."""

    def has(form: WeightForm) -> bool:
        return form.about in names or (bool(form.suffix) and any(name.endswith(form.suffix) for name in names))

    return next((kind for kind, form in FORMS.items() if has(form)), FULL)
