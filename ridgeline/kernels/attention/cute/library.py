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
from ridgeline.kernels.attention.cute.forward import Forward
from ridgeline.kernels.attention.cute.mainloop import DTYPES
from ridgeline.kernels.attention.cute_sm90_config import ForwardConfig, ForwardTraits

ARCHITECTURE = "sm_90a"
DISTRIBUTION = "nvidia-cutlass-dsl"


@functools.cache
def cache_key() -> str:
    """DSL version, architecture and a digest of the kernels' source."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for file in [*sorted(here.glob("*.py")), here.parent / "cute_sm90_config.py"]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    version = importlib.metadata.version(DISTRIBUTION)
    return f"{version}-{ARCHITECTURE}-{digest.hexdigest()[:16]}"


def kernel_name(traits: ForwardTraits, config: ForwardConfig) -> str:
    """A C symbol naming one kernel: every field that differs from its default."""
    parts = ["attention_fwd"]
    for record in (traits, config):
        for field in fields(record):
            value = getattr(record, field.name)
            if value != field.default:
                initials = "".join(word[0] for word in field.name.split("_"))
                text = str(int(value) if isinstance(value, bool) else value).replace(".", "p")
                parts.append(f"{initials}{text}")
    return "_".join(parts)


def library_path(traits: ForwardTraits, config: ForwardConfig) -> Path:
    """Where the compiled kernel is, or will be."""
    return env.cache_dir() / "cute" / cache_key() / f"{kernel_name(traits, config)}.so"


def compile_kernel(traits: ForwardTraits, config: ForwardConfig) -> Path:
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
def kernel(traits: ForwardTraits, config: ForwardConfig) -> Callable[..., None]:
    """The callable kernel, compiled if this machine has never seen it."""
    path = compile_kernel(traits, config)
    _load_runtime()
    return tvm_ffi.load_module(str(path))[kernel_name(traits, config)]


@functools.cache
def _load_runtime() -> None:
    """The DSL's runtime library, whose symbols the kernels' host code uses."""
    for path in find_runtime_libraries(enable_tvm_ffi=True):
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def _build(traits: ForwardTraits, config: ForwardConfig, target: Path) -> None:
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


def trace(traits: ForwardTraits, config: ForwardConfig, cubin_dir: Path | None = None) -> Any:
    """Compile for sm_90a without a GPU; the result can be exported, the cubin kept in a folder."""
    keep = f" --keep-cubin --dump-dir {cubin_dir}" if cubin_dir else ""
    with warnings.catch_warnings():
        # Long unrolled loops are meant: registers can be indexed by constants only.
        warnings.simplefilter("ignore", DSLOptimizationWarning)
        return _compile(traits, config, f"--enable-tvm-ffi --gpu-arch {ARCHITECTURE}{keep}")


def _compile(traits: ForwardTraits, config: ForwardConfig, options: str) -> Any:
    scalars = (Float32(1), Float32(1), Int32(0), Int32(0), Int32(1), Int32(1))
    return cute.compile(
        Forward(traits, config),
        *_fake_tensors(traits),
        *scalars,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )


def _fake_tensors(traits: ForwardTraits) -> list[Any]:
    """Shapes and strides of the arguments: dynamic but for the last stride."""
    dtype = DTYPES[traits.dtype]
    b, s, t, h, g, entries = (cute.sym_int32() for _ in range(6))

    dim_qk, dim_v = (cute.sym_int32(divisibility=8) for _ in range(2))

    def tokens(length: Any, heads: Any, dim: Any) -> Any:
        shape = (length, heads, dim) if traits.varlen else (b, length, heads, dim)
        strides = [cute.sym_int64(divisibility=8) for _ in shape[1:]]
        return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=16)

    def vector(kind: Any, length: Any, wanted: bool = True) -> Any:
        return make_fake_tensor(kind, (length,), (1,), assumed_align=4) if wanted else None

    lse_shape = (h, s) if traits.varlen else (b, h, s)
    lse_strides = [cute.sym_int64() for _ in lse_shape[1:]]
    return [
        tokens(s, h, dim_qk),
        tokens(t, g, dim_qk),
        tokens(t, g, dim_v),
        tokens(s, h, dim_v),
        make_fake_tensor(Float32, lse_shape, (*lse_strides, 1), assumed_align=4),
        vector(Float32, h, traits.sinks),
        vector(Int32, entries, traits.varlen),
        vector(Int32, entries, traits.varlen),
        vector(Int32, cute.sym_int32(), traits.seqused),
        vector(Int32, 2),
    ]
