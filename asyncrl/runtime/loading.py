"""The progress of loading a model, for a worker's status: `loading actor, 1.2 of 3.0 GB`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock

_SHOWN_FROM_BYTES = 100_000_000  # smaller models load at once
_WEIGHTS_BAR = "Loading weights"  # transformers' name for the progress bar over the tensors of a model


def bytes_of_weights(model_path: str | Path) -> int:
    """The bytes of the weights in a model's folder; 0 if there are none."""
    return sum(file.stat().st_size for file in Path(model_path).expanduser().glob("*.safetensors"))


class LoadProgress:
    """Counts the tensors that transformers has loaded. The bytes shown are the same share of the model's files.

    Use `watched` and `enter` on the loading thread. `text` and `phases` may be called from any thread.
    """

    def __init__(self, model_path: str | Path, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._phases: list[tuple[str, float]] = []  # each with its begin
        self._num_bytes = bytes_of_weights(model_path)
        self._done = self._total = 0

    def text(self) -> str:
        """Return the suffix for the name of the wait; "" while the progress is unknown."""
        if not self._total or self._num_bytes < _SHOWN_FROM_BYTES:
            return ""
        return f", {self._num_bytes * self._done / self._total / 1e9:.1f} of {self._num_bytes / 1e9:.1f} GB"

    def enter(self, phase: str) -> None:
        """Begin a phase; the one before it ends."""
        self._phases.append((phase, self._clock.monotonic()))

    def phases(self) -> str:
        """Return all phases so far, each with its seconds: `weights 85 s, self-check 35 s`."""
        ends = [*(began for _, began in self._phases[1:]), self._clock.monotonic()]
        return ", ".join(f"{name} {end - began:.0f} s" for (name, began), end in zip(self._phases, ends, strict=False))

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Count from_pretrained's tensors inside the block. transformers has one hook per process, so models must load
        one after another.
        """
        from transformers.utils.logging import set_tqdm_hook

        previous = set_tqdm_hook(self._bar)
        try:
            yield
        finally:
            set_tqdm_hook(previous)

    def _bar(self, make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and kwargs.get("desc") == _WEIGHTS_BAR:
            args = (self._counted(args[0], len(args[0])), *args[1:])
        return make(*args, **kwargs)

    def _counted(self, tensors: Iterable[Any], total: int) -> Iterator[Any]:
        self._done, self._total = 0, total
        for tensor in tensors:
            yield tensor
            self._done += 1
