"""Compiled kernels: ahead of time into a user cache, once per (traits, config).

A kernel is traced and compiled by the DSL (seconds, no GPU needed), exported as an object file with
a TVM-FFI entry, linked to a shared library and kept under
    <cache>/cute/<key>/<name>.so
where the key covers the DSL's version, the architecture and the source of these files. Later
processes, any Python version, load the file. Files appear by rename, and a lock file makes the
ranks of a node compile each kernel once.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.metadata
import shutil
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import cutlass.cute as cute
import tvm_ffi
from cutlass import Float32, Int32
from cutlass.base_dsl.ast_helpers import DSLOptimizationWarning
from cutlass.cute.runtime import find_runtime_libraries, make_fake_stream, make_fake_tensor

from ridgeline.core import env
from ridgeline.core.errors import UserError
from ridgeline.core.files import atomic_path
from ridgeline.kernels.attention.cute.backward import Backward
from ridgeline.kernels.attention.cute.forward import Forward
from ridgeline.kernels.attention.cute.mainloop import DTYPES
from ridgeline.kernels.attention.cute_sm90_backward_config import (
    ROW_STATISTICS,
    BackwardConfig,
    BackwardTraits,
)
from ridgeline.kernels.attention.cute_sm90_config import ForwardConfig, ForwardTraits

Traits = ForwardTraits | BackwardTraits
Config = ForwardConfig | BackwardConfig
ARCHITECTURE = "sm_90a"
DISTRIBUTION = "nvidia-cutlass-dsl"


@functools.cache
def cache_key() -> str:
    """DSL version, architecture and a digest of the kernels' source."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for file in [*sorted(here.glob("*.py")), *sorted(here.parent.glob("cute_sm90_*config.py"))]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    version = importlib.metadata.version(DISTRIBUTION)
    return f"{version}-{ARCHITECTURE}-{digest.hexdigest()[:16]}"


def kernel_name(traits: Traits, config: Config) -> str:
    """A C symbol naming one kernel: every field that differs from its default."""
    parts = ["attention_fwd" if isinstance(traits, ForwardTraits) else "attention_bwd"]
    for record in (traits, config):
        for field in fields(record):
            value = getattr(record, field.name)
            if value != field.default:
                initials = "".join(word[0] for word in field.name.split("_"))
                text = str(int(value) if isinstance(value, bool) else value).replace(".", "p")
                parts.append(f"{initials}{text}")
    return "_".join(parts)


def library_path(traits: Traits, config: Config) -> Path:
    """Where the compiled kernel is, or will be."""
    return env.cache_dir() / "cute" / cache_key() / f"{kernel_name(traits, config)}.so"


def compile_kernel(traits: Traits, config: Config) -> Path:
    """Make sure that the kernel is in the cache; needs the DSL and a C compiler's linker, no GPU.

    Raises: UserError without a linker or when linking fails.
    """
    path = library_path(traits, config)
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with atomic_path(path) as temporary:
                _build(traits, config, temporary)
    return path


@functools.cache
def kernel(traits: Traits, config: Config) -> Callable[..., None]:
    """The callable kernel, compiled if this machine has never seen it."""
    path = compile_kernel(traits, config)
    _load_runtime()
    return tvm_ffi.load_module(str(path))[kernel_name(traits, config)]


@functools.cache
def _load_runtime() -> None:
    """The DSL's runtime library, whose symbols the kernels' host code uses."""
    for path in find_runtime_libraries(enable_tvm_ffi=True):
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def _build(traits: Traits, config: Config, target: Path) -> None:
    compiler = next((c for c in ("cc", "gcc", "g++", "clang") if shutil.which(c)), None)
    if compiler is None:
        raise UserError(
            "attention: compiling a Hopper kernel needs a linker (cc, gcc or clang) on PATH; "
            "install one, or use impl='triton'"
        )
    compiled = trace(traits, config)
    object_file = target.with_suffix(".o")
    try:
        compiled.export_to_c(str(object_file), function_name=kernel_name(traits, config))
        libraries = find_runtime_libraries(enable_tvm_ffi=True)
        command = [compiler, "-shared", "-fPIC", "-o", str(target), str(object_file), *libraries]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise UserError(f"attention: linking a Hopper kernel failed: {done.stderr.strip()}")
    finally:
        object_file.unlink(missing_ok=True)


def trace(traits: Traits, config: Config, cubin_dir: Path | None = None) -> Any:
    """Compile for sm_90a without a GPU; the result can be exported, the cubin kept in a folder."""
    keep = f" --keep-ptx --keep-cubin --dump-dir {cubin_dir}" if cubin_dir else ""
    with warnings.catch_warnings():
        # Long unrolled loops are meant: registers can be indexed by constants only.
        warnings.simplefilter("ignore", DSLOptimizationWarning)
        return _compile(traits, config, f"--enable-tvm-ffi --gpu-arch {ARCHITECTURE}{keep}")


def _compile(traits: Traits, config: Config, options: str) -> Any:
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    numbers = (Float32(1), Float32(1), Int32(0), Int32(0), Int32(1), Int32(1))
    if isinstance(traits, ForwardTraits) and isinstance(config, ForwardConfig):
        arguments = (*_forward_tensors(traits), *numbers, stream)
        return cute.compile(Forward(traits, config), *arguments, options=options)
    assert isinstance(traits, BackwardTraits) and isinstance(config, BackwardConfig)
    arguments = (*_backward_tensors(traits, config), *numbers, Int32(1), stream)
    return cute.compile(Backward(traits, config), *arguments, options=options)


class _Shapes:
    """Stand-ins of a call's tensors: dynamic lengths, and strides but for the last."""

    def __init__(self, traits: Traits):
        self.packed = traits.varlen
        self.dtype = DTYPES[traits.dtype]
        self.b, self.s, self.t, self.h, self.g = (cute.sym_int32() for _ in range(5))
        self.dim_qk, self.dim_v = (cute.sym_int32(divisibility=8) for _ in range(2))
        self.entries = cute.sym_int32()

    def tokens(self, length: Any, heads: Any, dim: Any) -> Any:
        """Like q, k, v."""
        shape = (length, heads, dim) if self.packed else (self.b, length, heads, dim)
        strides = [cute.sym_int64(divisibility=8) for _ in shape[1:]]
        return make_fake_tensor(self.dtype, shape, (*strides, 1), assumed_align=16)

    def rows(self, wanted: bool = True) -> Any:
        """Like the LSE."""
        shape = (self.h, self.s) if self.packed else (self.b, self.h, self.s)
        strides = [cute.sym_int64() for _ in shape[1:]]
        return make_fake_tensor(Float32, shape, (*strides, 1), assumed_align=4) if wanted else None

    def vector(self, kind: Any, length: Any, wanted: bool = True) -> Any:
        return make_fake_tensor(kind, (length,), (1,), assumed_align=4) if wanted else None

    def tiles(self, words: int) -> Any:
        """fp32 [tiles, H, words], contiguous."""
        strides = [cute.sym_int64(divisibility=4) for _ in range(2)]
        shape = (cute.sym_int32(), self.h, words)
        return make_fake_tensor(Float32, shape, (*strides, 1), assumed_align=16)


def _forward_tensors(traits: ForwardTraits) -> list[Any]:
    x = _Shapes(traits)
    return [
        x.tokens(x.s, x.h, x.dim_qk),
        x.tokens(x.t, x.g, x.dim_qk),
        x.tokens(x.t, x.g, x.dim_v),
        x.tokens(x.s, x.h, x.dim_v),
        x.rows(),
        x.vector(Float32, x.h, traits.sinks),
        x.vector(Int32, x.entries, traits.varlen),
        x.vector(Int32, x.entries, traits.varlen),
        x.vector(Int32, cute.sym_int32(), traits.seqused),
        x.vector(Int32, 2),
    ]


def _backward_tensors(traits: BackwardTraits, config: BackwardConfig) -> list[Any]:
    x = _Shapes(traits)
    turns = None
    if traits.deterministic:
        shape = (cute.sym_int32(), x.h)
        turns = make_fake_tensor(Int32, shape, (cute.sym_int64(), 1), assumed_align=4)
    return [
        x.tokens(x.s, x.h, x.dim_qk),
        x.tokens(x.t, x.g, x.dim_qk),
        x.tokens(x.t, x.g, x.dim_v),
        x.tokens(x.s, x.h, x.dim_v),
        x.tokens(x.s, x.h, x.dim_v),
        x.rows(),
        x.rows(traits.dlse),
        x.vector(Int32, x.entries, traits.varlen),
        x.vector(Int32, x.entries, traits.varlen),
        x.tokens(x.s, x.h, x.dim_qk),
        x.tokens(x.t, x.g, x.dim_qk),
        x.tokens(x.t, x.g, x.dim_v),
        x.tiles(ROW_STATISTICS * config.block_q),
        x.tiles(config.block_q * traits.head_dim),
        turns,
    ]
