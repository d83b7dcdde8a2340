"""`ridgeline doctor`: the machine, its implementations and its measured ceilings."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

import ridgeline
from ridgeline.cli.command import Command, Result
from ridgeline.cli.problems import QUERIES, best_device, typical
from ridgeline.cli.tables import bytes_text, number, table
from ridgeline.core import env, registry
from ridgeline.core.arch import Arch, detect, load_ceilings, save_ceilings
from ridgeline.core.errors import UserError
from ridgeline.core.probe import measure_ceilings
from ridgeline.core.roofline import ridge

PACKAGES = (
    "torch", "numpy", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "safetensors", "tokenizers",
    "transformers",
)  # fmt: skip
"""Whose versions decide what runs here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """What this machine has, which implementations run on it, and its measured ceilings."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What to measure; auto: every device here."""
    measure: bool = True
    """Measure the ceilings and keep them in the cache; without, those kept earlier are shown."""
    budget_s: float = 0.5
    """Seconds a figure, above 0; more finds a quieter moment of a busy machine."""


def doctor(config: DoctorConfig) -> Result:
    """Facts, implementations and ceilings of this machine; ceilings are kept for later commands.

    Raises: UserError for a GPU that is not here; ValueError for a budget that is not positive.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("doctor: no CUDA device is usable here; use --device cpu")
    names = {"auto": sorted({"cpu", best_device()}), "cpu": ["cpu"], "cuda": ["cuda"]}
    devices = []
    for name in names[config.device]:
        if config.measure:
            save_ceilings(detect(name), measure_ceilings(name, config.budget_s))
        devices.append(_device_facts(name, detect(name)))
    return {
        "ridgeline": ridgeline.__version__,
        "machine": machine(),
        "versions": versions(),
        "cache": str(env.cache_dir()),
        "devices": devices,
    }


def machine() -> dict[str, Any]:
    """What the machine is, for results and reports."""
    cpu = detect("cpu")
    return {
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "cpu": cpu.device,
        "cores": cpu.num_units,
        "memory_bytes": cpu.memory_bytes,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def versions() -> dict[str, str | None]:
    """Installed versions of the packages that decide what runs here; None: not installed."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def implementations(arch: Arch) -> list[dict[str, Any]]:
    """Every implementation of every op with flags (explain's): the dtypes in which it takes the
    op's typical problem there, or why it takes it in none."""
    rows = []
    for op in QUERIES:
        for impl in registry.impls(op):
            why = {d: registry.refusal(impl, typical(op, d), arch) for d in impl.dtypes}
            takes = [dtype for dtype, reason in why.items() if reason is None]
            rows.append(
                {
                    "op": op,
                    "impl": impl.name,
                    "available": bool(takes),
                    "dtypes": takes,
                    "refusal": None if takes else next(iter(why.values())),
                    "summary": impl.summary,
                }
            )
    return rows


def show(result: Result) -> str:
    """The facts as tables."""
    facts = result["machine"]
    gpus = ", ".join(facts["gpus"]) or "none usable"
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else "a CPU build of PyTorch"
    packages = ", ".join(f"{n} {v or 'not installed'}" for n, v in result["versions"].items())
    lines = [
        f"ridgeline {result['ridgeline']}, Python {facts['python']}, {facts['system']}",
        f"CPU       {facts['cpu']} ({facts['cpu_capability']}), "
        f"{facts['memory_bytes'] / 2**30:.1f} GiB memory",
        f"GPU       {gpus} ({build})",
        f"packages  {packages}",
        f"cache     {result['cache']}",
    ]
    for device in result["devices"]:
        lines += ["", *_show_device(device)]
    return "\n".join(lines)


def _device_facts(name: str, arch: Arch) -> dict[str, Any]:
    ceilings = arch.ceilings
    return {
        "device": name,
        "arch": arch.name,
        "name": arch.device,
        "units": arch.num_units,
        "fast_memory_bytes": arch.smem_bytes,
        "cache_bytes": arch.l2_bytes,
        "memory_bytes": arch.memory_bytes,
        "ceilings": asdict(ceilings),
        "ridge": {dtype: ridge(ceilings, dtype) for dtype in ceilings.matmul_tflops},
        "measured": load_ceilings(arch) is not None,
        "impls": implementations(arch),
    }


def _show_device(device: dict[str, Any]) -> list[str]:
    ceilings = device["ceilings"]
    matmuls = [
        (
            f"matmul {dtype}",
            f"{number(rate)} TFLOP/s",
            f"{number(device['ridge'][dtype])} FLOP/byte",
        )
        for dtype, rate in ceilings["matmul_tflops"].items()
    ]
    return [
        f"{device['device']}: {device['arch']}, {device['name']}, "
        f"{bytes_text(device['memory_bytes'])}",
        f"ceilings {ceilings['source']}",
        table(
            ("ceiling", "value", "ridge"),
            [
                ("read", f"{number(ceilings['read_gbps'])} GB/s", ""),
                ("copy", f"{number(ceilings['copy_gbps'])} GB/s", ""),
                *matmuls,
            ],
        ),
        "",
        table(
            ("op", "implementation", "here", "what it is"),
            [
                (
                    row["op"],
                    row["impl"],
                    ", ".join(row["dtypes"]) if row["available"] else f"no: {row['refusal']}",
                    row["summary"],
                )
                for row in device["impls"]
            ],
        ),
    ]


def kept(config: DoctorConfig) -> str:
    """After Ctrl-C."""
    return f"ceilings already measured are kept in {env.cache_dir() / 'ceilings'}"


COMMAND = Command(run=doctor, config=DoctorConfig, show=show, kept=kept)
