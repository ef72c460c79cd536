"""The machine: card, versions, and how fast bytes are copied, checked and cast."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator

import torch
import transformers

from .bench import GIB, Bench
from .sheet import Row

_PCIE5_GBS = 64.0


def versions(_: Bench) -> Iterator[Row]:
    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm",
        "--format=csv,noheader",
    ]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        said = f"nvidia-smi: {error}"
    yield Row("nvidia-smi", note=said, anywhere=True)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    parts = [f"Python {platform.python_version()}", f"torch {torch.__version__}", f"CUDA {torch.version.cuda}"]
    parts += [f"NCCL {nccl}", f"transformers {transformers.__version__}", f"{len(os.sched_getaffinity(0))} cores"]
    yield Row("versions", note=", ".join(parts), anywhere=True)


def memory(bench: Bench) -> Iterator[Row]:
    free, total = torch.cuda.mem_get_info(bench.device) if bench.on_gpu else (0, 0)
    kind = bench.kind
    yield Row("memory of the card", total / GIB, "GiB", kind.memory / GIB if kind else None)
    yield Row("CUDA's context, with the kernels used so far", (total - free) / GIB, "GiB")


def copies(bench: Bench) -> Iterator[Row]:
    num_bytes = bench.size(GIB // 2, 1 << 16)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=bench.device)
    for pinned in (False, True):
        here = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=pinned and bench.on_gpu)
        kind, planned = ("pinned", _PCIE5_GBS) if pinned else ("pageable", None)
        for name, to, source in (("to the device", there, here), ("to the host", here, there)):
            seconds = bench.seconds(lambda to=to, source=source: to.copy_(source, non_blocking=True), calls=2)
            yield Row(f"copy {name}, {kind}", num_bytes / seconds / 1e9, "GB/s", planned)
    other = torch.empty_like(there)
    yield bench.timed("copy 0.5 GiB on the device", lambda: other.copy_(there), num_bytes=2 * num_bytes)


def checks_and_casts(bench: Bench) -> Iterator[Row]:
    count = bench.size(1 << 28, 1 << 12)
    on_device = bench.randn(count)
    yield bench.timed("isnan().any(), 0.27 G bf16", lambda: on_device.isnan().any(), num_bytes=2 * count)
    yield bench.timed("cast bf16 to float32, 0.27 G", on_device.float, num_bytes=6 * count)
    on_cpu, threads = on_device[: count // 8].cpu(), torch.get_num_threads()
    torch.set_num_threads(1)
    for name, function, one in (("isnan", lambda: on_cpu.isnan().any(), 0.38), ("cast", on_cpu.float, 0.49)):
        function()
        yield Row(
            f"{name} of bf16 on 1 core", len(on_cpu) / bench.clock(function) / 1e9, "G/s", one
        )  # planned: another core
    torch.set_num_threads(threads)


def matmul(bench: Bench) -> Iterator[Row]:
    size = bench.size(8192, 64)
    left, right = bench.randn(size, size), bench.randn(size, size)
    yield bench.timed(f"matmul of {size} x {size} bf16", lambda: left @ right, flops=2 * size**3)


MEASUREMENTS = (
    ("versions", versions),
    ("memory", memory),
    ("copies", copies),
    ("checks and casts", checks_and_casts),
    ("matmul", matmul),
)
