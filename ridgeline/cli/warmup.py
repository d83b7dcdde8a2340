"""`ridgeline warmup`: compile the Hopper kernels ahead into the cache that processes load from."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import multiprocessing
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ridgeline.cli.command import Command, Result
from ridgeline.cli.problems import resolve_arch
from ridgeline.core import env, progress, registry
from ridgeline.core.arch import Arch
from ridgeline.core.dtypes import dtype_name
from ridgeline.core.errors import UserError, bad_value
from ridgeline.engine.weights import linear_shapes
from ridgeline.kernels.attention.cute_sm90_backward_config import backward_config, backward_traits
from ridgeline.kernels.attention.cute_sm90_backward_config import refuses as why_no_backward
from ridgeline.kernels.attention.cute_sm90_config import forward_config, forward_traits
from ridgeline.kernels.attention.problem import AttentionProblem
from ridgeline.kernels.w4a16.config import DECODE_ROWS, rows_launch, traits_for
from ridgeline.kernels.w4a16.problem import W4A16Problem
from ridgeline.nn.hf import load_config
from ridgeline.nn.tensorfile import TensorFolder
from ridgeline.quant.checkpoint import packed_layers, read_quantization
from ridgeline.train.presets import PRESETS

PACKAGES = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}
"""What compiling needs: importable name -> distribution."""
_ATTENTION = "ridgeline.kernels.attention.cute_sm90"
_W4A16 = "ridgeline.kernels.w4a16.cute_library"
LAYER = r"([1-9]\d*)x([1-9]\d*)(:silu)?"
_ROWS = (
    *range(1, DECODE_ROWS + 1),
    *range(DECODE_ROWS + 1, 1024, 8),
    *(256, 512),
    *range(1024, 8193, 32),
)
"""Rows of activations at which a layer is asked for its kernel (256, 512: timed plans)."""
_LENGTHS = (1024, 4096, 8192)
"""Of sequences: below and above where tiles change (cute_sm90_config.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupConfig:
    """Compile the Hopper kernels into the user cache, with or without a GPU."""

    ops: tuple[Literal["attention", "w4a16"], ...] = ("attention", "w4a16")
    """Whose kernels."""
    dtypes: tuple[Literal["bfloat16", "float16"], ...] = ("bfloat16",)
    """Of queries, keys and values; of activations."""
    head_dims: tuple[int, ...] = (64, 128)
    """Widths of an attention head, multiples of 8 up to 256."""
    masks: tuple[Literal["full", "causal", "window"], ...] = ("full", "causal")
    """window: causal and bounded on the left."""
    layouts: tuple[Literal["dense", "varlen"], ...] = ("dense", "varlen")
    """varlen: sequences packed by cu_seqlens."""
    softcap: bool = False
    """Attention with capped scores."""
    sinks: bool = False
    """Attention with one sink logit a head."""
    model: str | None = None
    """A folder or the name of a training preset: its head dim, and its W4A16 layers as the engine
    joins them; of a 4-bit folder group size, scale dtype and symmetry too."""
    layers: tuple[str, ...] = ("4096x4096", "4096x14336", "14336x4096", "8192x28672", "28672x8192")
    """W4A16 layers, inputs x outputs, with :silu for silu(gate) * up over a joined pair; layers of
    like sizes share kernels."""
    group_sizes: tuple[int, ...] = (128,)
    """Inputs that share a scale: 32, 64, 128, 256; 0: all of a layer's."""
    scale_dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    """Of the stored scales."""
    symmetric: bool = True
    """No zero points."""
    arch: str = "auto"
    """sm90, present or not; auto: this machine's GPU."""
    workers: int = 1
    """Processes that compile, at least 1; each holds about a gigabyte."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise bad_value("warmup", "workers", "be at least 1", self.workers, "give a count")
        for name, least in (("head_dims", 1), ("group_sizes", 0)):
            if any(value < least for value in getattr(self, name)):
                raise bad_value(
                    "warmup", name, "be positive", getattr(self, name), "give sizes such as 128"
                )
        for layer in self.layers:
            if not re.fullmatch(LAYER, layer):
                raise bad_value(
                    "warmup", "layers", "be inputs x outputs", repr(layer), "give e.g. 4096x14336"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One kernel to compile."""

    op: str
    what: str
    """The kernel in words."""
    argument: Any
    """An AttentionProblem, or the config of a W4A16 kernel."""


def warmup(config: WarmupConfig) -> Result:
    """Compile what the flags name and the cache does not have yet.

    Raises: UserError without the DSL or a linker; ValueError for an architecture other than sm90;
    NotImplementedError for a problem that the Hopper kernels refuse.
    """
    arch = resolve_arch(config.arch)
    if arch.name != "sm90":
        raise bad_value(
            "warmup", "arch", "be sm90", f"{arch.name} ({arch.device})",
            "pass --arch sm90 to compile for a Hopper GPU that is not here",
        )  # fmt: skip
    check_tools()
    config = of_model(config)
    jobs = [*attention_jobs(config, arch), *w4a16_jobs(config, arch)]
    cache, start = env.cache_dir() / "cute", time.monotonic()
    there = {str(file) for file in cache.rglob("*.so")}
    with progress.task("warmup", len(jobs), "kernels") as advance:
        rows = []
        for row in _run(jobs, arch, config.workers):
            rows.append({**row, "cached": row["file"] in there})
            advance(note=row["what"])
    return {
        "arch": arch.name,
        "device": arch.device,
        "cache": str(cache),
        "seconds": round(time.monotonic() - start, 1),
        "compiled": sum(not row["cached"] for row in rows),
        "kernels": sorted(rows, key=lambda row: (row["op"], row["what"], row["file"])),
    }


def of_model(config: WarmupConfig) -> WarmupConfig:
    """The config with what `model` says filled in.

    Raises: UserError for a folder that cannot be read; ValueError for a preset that is not known,
    and for a flag that says otherwise than the model.
    """
    if config.model is None:
        return config
    folder = Path(config.model)
    if config.model in PRESETS:
        shape, found = PRESETS[config.model], {}
    else:
        shape, found = load_config(folder), _quantized_with(folder)
    found |= {"head_dims": (shape.head_dim,), "layers": tuple(map(str, linear_shapes(shape)))}
    for name, value in found.items():
        given, usual = getattr(config, name), WarmupConfig.__dataclass_fields__[name].default
        if given not in (usual, value):
            raise bad_value("warmup", name, f"be {value}, the model's", given, "leave it out")
    return replace(config, model=None, **found)


def _quantized_with(folder: Path) -> dict[str, Any]:
    """Group sizes, scale dtype and symmetry of a quantized folder; nothing of a plain one."""
    quantization = read_quantization(folder)[1]
    if quantization is None:
        return {}
    tensors = TensorFolder(folder)
    sizes: set[int] = set()
    weight = None
    for layer, parts in packed_layers(tensors.names).items():
        layout = quantization.layout_of(layer)
        if layout is not None and layout.bits == 4:
            if weight is None:
                weight = layout.unpack({part: tensors.get(f"{layer}.{part}") for part in parts})
            sizes.add(layout.group_size or 0)
    if weight is None:
        raise UserError(f"warmup: model {folder} must hold 4-bit layers, got none; name the layers")
    return {
        "group_sizes": tuple(sorted(sizes)),
        "scale_dtype": dtype_name(weight.scale_NR.dtype),
        "symmetric": weight.zero_NR is None,
    }


def check_tools() -> None:
    """Raises: UserError naming what is missing."""
    missing = [name for module, name in PACKAGES.items() if not importlib.util.find_spec(module)]
    if missing:
        raise UserError(
            f"warmup: compiling Hopper kernels needs {' and '.join(missing)}, not installed here; "
            "run pip install 'ridgeline[hopper]'"
        )
    if not any(map(shutil.which, ("cc", "gcc", "g++", "clang"))):
        raise UserError("warmup: compiling Hopper kernels needs a linker; install gcc or clang")


def attention_jobs(config: WarmupConfig, arch: Arch) -> Iterator[Job]:
    """Forward, and backward where there is one, for every head dim, dtype, mask and layout. Some
    tiles depend on the length, so short and long sequences are asked for, each kernel once."""
    if "attention" not in config.ops:
        return
    found: set[tuple[Any, Any]] = set()
    for dtype in config.dtypes:
        for dim in config.head_dims:
            for mask in config.masks:
                for layout, length in itertools.product(config.layouts, _LENGTHS):
                    problem = AttentionProblem(
                        batch=1,
                        seqlen_q=length,
                        seqlen_k=length,
                        heads=8,
                        kv_heads=8,
                        head_dim=dim,
                        head_dim_v=dim,
                        dtype=dtype,
                        causal=mask != "full",
                        window_left=1024 if mask == "window" else None,
                        softcap=30.0 if config.softcap else 0.0,
                        sinks=config.sinks,
                        varlen=layout == "varlen",
                    )
                    registry.select(problem, arch, "cute_sm90")
                    what = f"{dtype} head dim {dim} {mask} {layout}"
                    forward = (forward_traits(problem), forward_config(problem, arch))
                    if forward not in found:
                        found.add(forward)
                        yield Job(op="attention", what=what, argument=problem)
                    problem = replace(problem, direction="bwd")
                    if why_no_backward(problem, arch) is not None:
                        continue
                    backward = (backward_traits(problem), backward_config(problem, arch))
                    if backward not in found:
                        found.add(backward)
                        yield Job(op="attention", what=f"{what} backward", argument=problem)


def w4a16_jobs(config: WarmupConfig, arch: Arch) -> Iterator[Job]:
    """Every kernel that the layers can ask for, each once."""
    if "w4a16" not in config.ops:
        return
    found: dict[Any, str] = {}
    for dtype in config.dtypes:
        for group_size in config.group_sizes:
            for layer in config.layers:
                match = re.fullmatch(LAYER, layer)
                assert match is not None
                k, n = int(match[1]), int(match[2])
                problem = W4A16Problem(
                    m=1,
                    n=n,
                    k=k,
                    group_size=group_size or k,
                    dtype=dtype,
                    scale_dtype=config.scale_dtype,
                    symmetric=config.symmetric,
                    silu_mul=match[3] is not None,
                )
                registry.select(problem, arch, "cute_sm90")
                for kernel in layer_kernels(problem, arch):
                    found.setdefault(kernel, f"{dtype} group {group_size} {layer}")
    for kernel, what in found.items():
        kind = type(kernel).__name__.removesuffix("Config").lower()
        yield Job(op="w4a16", what=f"{kind} {what}", argument=kernel)


def layer_kernels(problem: W4A16Problem, arch: Arch) -> set[Any]:
    """Configs of the kernels that a layer asks for over all numbers of rows."""
    traits = traits_for(problem)
    align = math.lcm(128, traits.packed_group or 128)
    n, k = -(-problem.n // 32) * 32, -(-problem.k // align) * align
    found: set[Any] = {rows_launch(traits, DECODE_ROWS, n, k, arch.num_units, True).config}
    for m in _ROWS:
        found.add(rows_launch(traits, m, n, k, arch.num_units, False).config)
    return found


def compile_job(job: Job, arch: Arch) -> dict[str, Any]:
    """Compile one kernel unless the cache has it."""
    start = time.monotonic()
    if job.op == "attention":
        [file] = importlib.import_module(_ATTENTION).warm([job.argument], arch)
    else:
        file = importlib.import_module(_W4A16).compile_kernel(job.argument)
    seconds = round(time.monotonic() - start, 1)
    return {"op": job.op, "what": job.what, "file": str(file), "seconds": seconds}


def _run(jobs: list[Job], arch: Arch, workers: int) -> Iterator[dict[str, Any]]:
    if workers == 1:
        yield from (compile_job(job, arch) for job in jobs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        running = [pool.submit(compile_job, job, arch) for job in jobs]
        try:
            for done in as_completed(running):
                yield done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def show(result: Result) -> str:
    """How many kernels, and where they are."""
    count = len(result["kernels"])
    return (
        f"{count} kernels for {result['arch']} are in {result['cache']}: {result['compiled']} "
        f"compiled in {result['seconds']:.0f} s, {count - result['compiled']} were there"
    )


def kept(_config: WarmupConfig) -> str:
    """After Ctrl-C."""
    return "finished kernels are kept; the same command goes on"


COMMAND = Command(
    run=warmup, config=WarmupConfig, show=show, kept=kept, flags={"arch.name": "--arch"}
)
