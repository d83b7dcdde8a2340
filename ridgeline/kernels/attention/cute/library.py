"""Compiled kernels: ahead of time into a user cache, once per (traits, config).

A kernel is traced and compiled by the DSL (seconds, no GPU needed), exported as an object file with
a TVM-FFI entry and linked to a shared library in the user cache (cache.py says where). Later
processes, any Python version, load the file without importing the DSL. Files appear by rename, and
a lock file makes the ranks of a node compile each kernel once. Where the machine has the DSL and no
linker, the kernel is compiled in the process instead.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import importlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tvm_ffi

from ridgeline.core.errors import UserError
from ridgeline.core.files import atomic_path
from ridgeline.kernels.attention.cute import cache
from ridgeline.kernels.attention.cute.cache import Config, Traits

_COMPILE = "ridgeline.kernels.attention.cute.compile"


@functools.cache
def kernel(traits: Traits, config: Config) -> Callable[..., None]:
    """The callable kernel, compiled if this machine has never seen it.

    Raises: UserError where it has to be compiled and the DSL is not installed.
    """
    path = cache.kernel_path(traits, config)
    if not path.exists():
        if _linker() is None:
            return trace(traits, config)
        compile_kernel(traits, config)
    _load_runtime()
    return tvm_ffi.load_module(str(path))[cache.kernel_name(traits, config)]


def compile_kernel(traits: Traits, config: Config) -> Path:
    """Make sure that the kernel is in the cache; needs the DSL and a C compiler's linker, no GPU.

    Raises: UserError without the DSL or a linker, or when linking fails.
    """
    path = cache.kernel_path(traits, config)
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with atomic_path(path) as temporary:
                _build(traits, config, temporary)
    return path


def trace(traits: Traits, config: Config, cubin_dir: Path | None = None) -> Any:
    """The kernel compiled in this process; it can be called or exported, the cubin kept."""
    if not cache.dsl_is_installed():
        raise UserError(
            "attention: compiling a Hopper kernel needs the package nvidia-cutlass-dsl; install "
            "ridgeline[hopper], or use impl='triton'"
        )
    return importlib.import_module(_COMPILE).trace(traits, config, cubin_dir)


@functools.cache
def _load_runtime() -> None:
    """The DSL's runtime library, whose symbols the kernels' host code uses."""
    ctypes.CDLL(str(cache.runtime()), mode=ctypes.RTLD_GLOBAL)


def _linker() -> str | None:
    return next((c for c in ("cc", "gcc", "g++", "clang") if shutil.which(c)), None)


def _build(traits: Traits, config: Config, target: Path) -> None:
    linker = _linker()
    if linker is None:
        raise UserError(
            "attention: compiling a Hopper kernel needs a linker (cc, gcc or clang) on PATH; "
            "install one, or use impl='triton'"
        )
    compiled = trace(traits, config)
    object_file = target.with_suffix(".o")
    try:
        name = cache.kernel_name(traits, config)
        compiled.export_to_c(str(object_file), function_name=name)
        command = [linker, "-shared", "-fPIC", "-o", str(target), str(object_file)]
        done = subprocess.run(
            [*command, str(cache.runtime())], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise UserError(f"attention: linking a Hopper kernel failed: {done.stderr.strip()}")
    finally:
        object_file.unlink(missing_ok=True)
