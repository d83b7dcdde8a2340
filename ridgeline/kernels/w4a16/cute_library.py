"""Compiled Hopper kernels: traced once per config, kept as shared libraries in the user cache.

A config is the whole compile key. A kernel is compiled for sm_90a by the DSL (seconds, no GPU
needed), exported, linked and kept as <cache>/cute/w4a16-<digest of the sources>/<name>.so; later
processes load the file in under a millisecond. Where the machine has no linker the kernel is
compiled in the process instead. A cache folder made elsewhere works on a machine without the DSL if
libcute_dsl_runtime.so lies in <cache>/cute (apache-tvm-ffi is needed in any case).
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import importlib
import importlib.util
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tvm_ffi

from ridgeline.core import env
from ridgeline.core.errors import UserError
from ridgeline.core.files import atomic_path
from ridgeline.kernels.w4a16.cute_cache import (
    ARCHITECTURE,
    RUNTIME,
    Config,
    cache_folder,
    kernel_name,
)
from ridgeline.kernels.w4a16.tiles import DecodeConfig, MatmulConfig
from ridgeline.kernels.w4a16.tiles_stream import StreamConfig
from ridgeline.kernels.w4a16.tiles_trimmed import TrimmedConfig

_TRACERS = {
    DecodeConfig: "ridgeline.kernels.w4a16.cute_decode",
    StreamConfig: "ridgeline.kernels.w4a16.cute_stream",
    MatmulConfig: "ridgeline.kernels.w4a16.cute_matmul",
    TrimmedConfig: "ridgeline.kernels.w4a16.cute_trimmed",
}


@functools.cache
def kernel(config: Config) -> Callable[..., None]:
    """The callable kernel, compiled if the cache does not have it.

    Raises: UserError where it has to be compiled and the DSL is not installed.
    """
    path = cache_folder() / f"{kernel_name(config)}.so"
    if not path.exists():
        if _linker() is None:
            return _trace(config)
        compile_kernel(config)
    load_runtime()
    return tvm_ffi.load_module(str(path))[kernel_name(config)]


def compile_kernel(config: Config) -> Path:
    """Make sure that a kernel is in the cache; needs the DSL and a linker, no GPU."""
    path = cache_folder() / f"{kernel_name(config)}.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with atomic_path(path) as temporary:
                _link(_trace(config), kernel_name(config), temporary)
    return path


def _trace(config: Config) -> Any:
    if importlib.util.find_spec("cutlass") is None:
        raise UserError(
            "w4a16: compiling a Hopper kernel needs the package nvidia-cutlass-dsl; install "
            "ridgeline[hopper], or use impl='triton'"
        )
    return importlib.import_module(_TRACERS[type(config)]).trace(config, ARCHITECTURE)


def _linker() -> str | None:
    return next((c for c in ("cc", "gcc", "g++", "clang") if shutil.which(c)), None)


def _link(compiled: Any, name: str, target: Path) -> None:
    object_file = target.with_suffix(".o")
    try:
        compiled.export_to_c(str(object_file), function_name=name)
        command = [_linker() or "cc", "-shared", "-fPIC", "-o", str(target), str(object_file)]
        done = subprocess.run(
            [*command, str(_runtime())], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise UserError(f"w4a16: linking a Hopper kernel failed: {done.stderr.strip()}")
    finally:
        object_file.unlink(missing_ok=True)


def _runtime() -> Path:
    """The DSL's runtime library: of the installed DSL, else carried beside the cache."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    for root in spec.submodule_search_locations or () if spec else ():
        for found in sorted(Path(root).glob(f"cu*/lib/{RUNTIME}"), reverse=True):
            return found
    return env.cache_dir() / "cute" / RUNTIME


@functools.cache
def load_runtime() -> None:
    """Load what every kernel of the DSL is linked against."""
    ctypes.CDLL(str(_runtime()), mode=ctypes.RTLD_GLOBAL)
