"""What a machine is: family, on-chip sizes, ceilings.

Facts of an architecture (`sm90`) come from NVIDIA's documents; ceilings (bytes/s, FLOP/s) are
either `measured` on the machine by `ridgeline doctor` and kept in the cache, or defaults measured
on one card of that family (named in `source`). Nothing here touches a GPU unless `detect("cuda")`
is called.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.core import env
from ridgeline.core.errors import bad_value
from ridgeline.core.files import atomic_write_text

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What the memory and the arithmetic units were seen to do."""

    read_gbps: float
    """Bytes read once from main memory (HBM or DRAM), GB/s (1e9)."""
    copy_gbps: float
    """Device-to-device copy, bytes read plus bytes written, GB/s."""
    matmul_tflops: dict[str, float]
    """Dense matmul by dtype name, TFLOP/s (1e12)."""
    source: str
    """Where the numbers come from: a machine and a date, or "default: ..."."""
    measured: bool = False
    """True when measured on this very machine."""

    def tflops(self, dtype: str) -> float:
        """Matmul ceiling of a dtype; the nearest wider one where it was not measured."""
        for name in (dtype, "bfloat16", "float32"):
            if name in self.matmul_tflops:
                return self.matmul_tflops[name]
        raise bad_value(
            "arch", "dtype", f"be one of {', '.join(self.matmul_tflops)}", dtype, "run doctor again"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """One kind of device; `name` is what an implementation declares and `--arch` takes."""

    name: str
    """cpu, sm80, sm86, sm89, sm90, sm100 ..."""
    device: str
    """The product's name, or the family's where it is pretended."""
    num_units: int
    """Streaming multiprocessors, or cores of a CPU."""
    smem_bytes: int
    """Shared memory one block can have (fast memory of a CPU: L2 per core)."""
    l2_bytes: int
    """Last-level cache."""
    memory_bytes: int
    """Main memory of the device."""
    ceilings: Ceilings
    pretended: bool = False
    """True where no such device is asked for work: what is installed here says nothing about it."""

    @property
    def is_gpu(self) -> bool:
        return self.name.startswith("sm")


_KIB, _MIB, _GIB = 2**10, 2**20, 2**30

# Shared memory per block and unit counts: CUDA C++ Programming Guide, compute capabilities.
# H200 ceilings: measured 2026-11-29, PyTorch 2.11.0+cu130; the others are datasheet rates x 0.8.
KNOWN: dict[str, Arch] = {
    "cpu": Arch(
        name="cpu",
        device="generic CPU, 2 cores",
        num_units=2,
        smem_bytes=1 * _MIB,
        l2_bytes=32 * _MIB,
        memory_bytes=16 * _GIB,
        ceilings=Ceilings(
            read_gbps=20.0,
            copy_gbps=20.0,
            matmul_tflops={"float32": 0.1, "bfloat16": 0.1},
            source="default: order of magnitude of two server cores; run `ridgeline doctor`",
        ),
    ),
    "sm80": Arch(
        name="sm80",
        device="A100 80GB",
        num_units=108,
        smem_bytes=163 * _KIB,
        l2_bytes=40 * _MIB,
        memory_bytes=80 * _GIB,
        ceilings=Ceilings(
            read_gbps=1630.0,
            copy_gbps=1630.0,
            matmul_tflops={"bfloat16": 250.0, "float16": 250.0, "float32": 15.6},
            source="default: A100 datasheet x 0.8",
        ),
    ),
    "sm86": Arch(
        name="sm86",
        device="RTX 3090",
        num_units=82,
        smem_bytes=99 * _KIB,
        l2_bytes=6 * _MIB,
        memory_bytes=24 * _GIB,
        ceilings=Ceilings(
            read_gbps=750.0,
            copy_gbps=750.0,
            matmul_tflops={"bfloat16": 57.0, "float16": 57.0, "float32": 28.0},
            source="default: RTX 3090 datasheet x 0.8",
        ),
    ),
    "sm89": Arch(
        name="sm89",
        device="RTX 4090",
        num_units=128,
        smem_bytes=99 * _KIB,
        l2_bytes=72 * _MIB,
        memory_bytes=24 * _GIB,
        ceilings=Ceilings(
            read_gbps=806.0,
            copy_gbps=806.0,
            matmul_tflops={"bfloat16": 132.0, "float16": 132.0, "float32": 66.0},
            source="default: RTX 4090 datasheet x 0.8",
        ),
    ),
    "sm90": Arch(
        name="sm90",
        device="H200",
        num_units=132,
        smem_bytes=227 * _KIB,
        l2_bytes=60 * _MIB,
        memory_bytes=143771 * _MIB,
        ceilings=Ceilings(
            read_gbps=4350.0,
            copy_gbps=4280.0,
            matmul_tflops={
                "bfloat16": 790.0,
                "float16": 790.0,
                "float8_e4m3fn": 1500.0,
                "float32": 50.0,
            },
            source="default: one H200, 2026-11-29, PyTorch 2.11.0+cu130",
        ),
    ),
    "sm100": Arch(
        name="sm100",
        device="B200",
        num_units=148,
        smem_bytes=227 * _KIB,
        l2_bytes=126 * _MIB,
        memory_bytes=180 * _GIB,
        ceilings=Ceilings(
            read_gbps=6400.0,
            copy_gbps=6400.0,
            matmul_tflops={"bfloat16": 1800.0, "float16": 1800.0, "float32": 60.0},
            source="default: B200 datasheet x 0.8",
        ),
    ),
}


def pretend(name: str) -> Arch:
    """The architecture of that name as a typical card has it; needs no such device.

    Raises: ValueError for a name that is not known.
    """
    if name not in KNOWN:
        raise bad_value(
            "arch", "name", f"be one of {', '.join(KNOWN)}", repr(name), "use one of these"
        )
    return replace(KNOWN[name], pretended=True)


def detect(device: torch.device | str = "cpu") -> Arch:
    """The architecture of a device at hand, with the ceilings that `doctor` measured on it.

    Raises: ValueError for a device type other than cpu and cuda.
    """
    kind = device if isinstance(device, str) else device.type
    kind = kind.split(":")[0]
    if kind == "cpu":
        found = _detect_cpu()
    elif kind == "cuda":
        found = _detect_cuda(device)
    else:
        raise bad_value("arch", "device", "be cpu or cuda", kind, "move the tensors there")
    kept = load_ceilings(found)
    return replace(found, ceilings=kept) if kept else found


def _detect_cpu() -> Arch:
    import os
    import platform

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            model = next((ln.split(":", 1)[1].strip() for ln in info if "model name" in ln), model)
    except OSError:
        pass
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return replace(
        KNOWN["cpu"],
        device=f"{model}, {cores} cores",
        num_units=cores,
        l2_bytes=_last_level_bytes() or KNOWN["cpu"].l2_bytes,
        memory_bytes=memory,
    )


def _last_level_bytes(folder: str = "/sys/devices/system/cpu/cpu0/cache") -> int | None:
    """Size of the highest cache level as Linux states it ("32768K", "96M"); None: not stated."""
    levels: dict[int, int] = {}
    for index in Path(folder).glob("index*"):
        try:
            level = int((index / "level").read_text())
            text = (index / "size").read_text().strip()
            unit = {"K": _KIB, "M": _MIB, "G": _GIB}.get(text[-1:], 1)
            levels[level] = max(levels.get(level, 0), int(text.rstrip("KMG")) * unit)
        except (OSError, ValueError):
            continue
    return levels[max(levels)] or None if levels else None


def _detect_cuda(device: torch.device | str) -> Arch:
    import torch

    facts = torch.cuda.get_device_properties(device)
    name = f"sm{facts.major}{facts.minor}"
    base = KNOWN.get(name) or KNOWN[_nearest_family(facts.major, facts.minor)]
    return replace(
        base,
        name=name,
        device=facts.name,
        num_units=facts.multi_processor_count,
        smem_bytes=getattr(facts, "shared_memory_per_block_optin", base.smem_bytes),
        l2_bytes=facts.L2_cache_size,
        memory_bytes=facts.total_memory,
    )


def _nearest_family(major: int, minor: int) -> str:
    known = sorted(int(name[2:]) for name in KNOWN if name.startswith("sm"))
    below = [version for version in known if version <= major * 10 + minor]
    return f"sm{below[-1] if below else known[0]}"


def _ceilings_file(arch: Arch):
    safe = "".join(c if c.isalnum() else "_" for c in arch.device)
    return env.cache_dir() / "ceilings" / f"{arch.name}_{safe}.json"


def load_ceilings(arch: Arch) -> Ceilings | None:
    """Ceilings measured earlier on this machine, or None."""
    path = _ceilings_file(arch)
    try:
        return Ceilings(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def best_of(kept: Ceilings | None, new: Ceilings) -> Ceilings:
    """New ceilings, raised to those measured here before: a busy machine lowers no ceiling."""
    if kept is None or not kept.measured:
        return new
    names = {**kept.matmul_tflops, **new.matmul_tflops}
    return replace(
        new,
        read_gbps=max(kept.read_gbps, new.read_gbps),
        copy_gbps=max(kept.copy_gbps, new.copy_gbps),
        matmul_tflops={
            name: max(kept.matmul_tflops.get(name, 0.0), new.matmul_tflops.get(name, 0.0))
            for name in names
        },
    )


def save_ceilings(arch: Arch, ceilings: Ceilings) -> None:
    """Keep measured ceilings in the cache, for `detect` to find; the best seen here count."""
    path = _ceilings_file(arch)
    ceilings = best_of(load_ceilings(arch), ceilings)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, json.dumps(asdict(ceilings), indent=1))
