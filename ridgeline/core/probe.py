"""Measuring a machine's ceilings: read and copy bandwidth, matmul rate by dtype.

Arrays are eight times the last-level cache (128 MiB at least; 4 GiB and an eighth of the memory at
most), so reads come from memory. A CPU's cache is what Linux states, else taken as 32 MiB.
Each figure is the best of repeated runs inside a time budget: a ceiling is what the machine has
been seen to do, and a busy neighbour only ever hides it. Method as STREAM's (McCalpin, 1995): bytes
are those the program asks for, copy counts read plus written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ridgeline.core import progress
from ridgeline.core.arch import Arch, Ceilings, detect
from ridgeline.core.errors import bad_value

if TYPE_CHECKING:
    import torch

_GPU_MATMUL = 8192
_CPU_MATMULS = (256, 512, 1024, 2048)
"""Square sizes, tried while a run takes at most _SLOWEST_RUN_S: a CPU without bf16 instructions
multiplies bf16 a hundred times slower than fp32."""
_SLOWEST_RUN_S = 0.3


def times_s(
    function: Callable[[], object], device: str, budget_s: float, at_least: int = 3
) -> list[float]:
    """Wall times of repeated calls, seconds, until the budget is used; on a GPU by CUDA events.

    The first call is a warm-up and does not count.
    """
    once = _timer(device)
    once(function)
    times: list[float] = []
    start = time.monotonic()
    while len(times) < at_least or time.monotonic() - start < budget_s:
        times.append(once(function))
    return times


def best_seconds(function: Callable[[], object], device: str, budget_s: float) -> float:
    """Least of `times_s`."""
    return min(times_s(function, device, budget_s))


def measure_ceilings(device: str = "cpu", budget_s: float = 0.5) -> Ceilings:
    """Read, copy and matmul ceilings of a device, about `budget_s` seconds for each figure.

    Raises: ValueError for a device that is not here or a budget that is not positive.
    """
    import torch

    if budget_s <= 0:
        raise bad_value("doctor", "budget_s", "be positive", budget_s, "give seconds, e.g. 0.5")
    arch = detect(device)
    dtypes = matmul_dtypes(arch)
    with progress.task(f"measure {device}", 2 + len(dtypes), "figures") as advance:
        read_gbps, copy_gbps = _bandwidths(arch, device, budget_s, advance)
        tflops = {}
        for name in dtypes:
            tflops[name] = _matmul_tflops(arch, device, name, budget_s)
            advance(note=f"{name} {tflops[name]:.3g} TFLOP/s")
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    count = torch.get_num_threads()
    threads = "" if arch.is_gpu else f", {count} thread{'s' * (count != 1)}"
    return Ceilings(
        read_gbps=read_gbps,
        copy_gbps=copy_gbps,
        matmul_tflops=tflops,
        source=f"measured {day} on {arch.device}, PyTorch {torch.__version__}{threads}",
        measured=True,
    )


def matmul_dtypes(arch: Arch) -> list[str]:
    """Dtypes whose matmul is worth a ceiling on that architecture."""
    if not arch.is_gpu:
        return ["float32", "bfloat16"]
    fp8 = ["float8_e4m3fn"] if int(arch.name[2:]) >= 89 else []
    return ["float32", "float16", "bfloat16", *fp8]


def _timer(device: str) -> Callable[[Callable[[], object]], float]:
    import torch

    def on_cpu(function: Callable[[], object]) -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    def on_gpu(function: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return on_gpu if device.startswith("cuda") else on_cpu


def _bandwidths(
    arch: Arch, device: str, budget_s: float, advance: progress.Advance
) -> tuple[float, float]:
    import torch

    size_bytes = min(max(8 * arch.l2_bytes, 2**27), 2**32, arch.memory_bytes // 8)
    source = torch.ones(size_bytes // 4, dtype=torch.float32, device=device)
    read = size_bytes / best_seconds(source.sum, device, budget_s) / 1e9
    advance(note=f"read {read:.3g} GB/s")
    target = torch.empty_like(source)
    copy = 2 * size_bytes / best_seconds(lambda: target.copy_(source), device, budget_s) / 1e9
    advance(note=f"copy {copy:.3g} GB/s")
    return read, copy


def _matmul_tflops(arch: Arch, device: str, dtype: str, budget_s: float) -> float:
    sizes = (_GPU_MATMUL,) if arch.is_gpu else _CPU_MATMULS
    best = 0.0
    for size in sizes:
        flops = 2.0 * size**3
        if best and flops / best > _SLOWEST_RUN_S:
            break
        seconds = best_seconds(_matmul(size, device, dtype), device, budget_s / len(sizes))
        best = max(best, flops / seconds)
    return best / 1e12


def _matmul(size: int, device: str, dtype: str) -> Callable[[], torch.Tensor]:
    import torch

    generator = torch.Generator(device).manual_seed(0)
    wide = [torch.randn(size, size, device=device, generator=generator) for _ in range(2)]
    if dtype == "float8_e4m3fn":
        a, b = wide[0].to(torch.float8_e4m3fn), wide[1].to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    a, b = (matrix.to(getattr(torch, dtype)) for matrix in wide)
    return lambda: a @ b
