"""Errors of a GPU, as a user reads them: too little memory, and an assertion in a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from asyncrl.model.out_of_memory import OutOfDeviceMemory

from .bench import Bench
from .sheet import NEEDS_GPU, Row
from .step import Case, Step

_TOO_LONG = Case("0.6B", 1 << 18, checkpointing=False)


def too_many_tokens(bench: Bench) -> Iterator[Row]:
    """A micro-batch of 256k tokens without checkpointing."""
    step = Step(bench, _TOO_LONG)
    try:
        step()
    except torch.OutOfMemoryError as error:
        said = OutOfDeviceMemory("MFC actor_train", step.engine.where, step.engine.train, error)
        yield Row("256k tokens in a micro-batch", "refused", note=str(said))
    else:
        yield Row("256k tokens in a micro-batch", "fits")
    del step
    bench.free()
    allocated = torch.cuda.memory_allocated(bench.device) if bench.on_gpu else 0
    yield Row("allocated after it", allocated / 2**30, "GiB")


def assertion(bench: Bench) -> Iterator[Row]:
    """A token outside the vocabulary. The CUDA context does not survive it, so this comes last."""
    if not bench.on_gpu:
        yield Row("a token outside the vocabulary", note=NEEDS_GPU)
        return
    step = Step(bench, replace(_TOO_LONG, tokens=1 << 13))
    step.sample.data["packed_input_ids"][:] = step.engine.vocab_size
    try:
        step()
    except Exception as error:
        yield Row("a token outside the vocabulary", "refused", note=f"{type(error).__name__}: {str(error)[:600]}")
        return
    raise RuntimeError("a token outside the vocabulary was trained")


MEASUREMENTS = (("too many tokens", too_many_tokens), ("assertion", assertion))
