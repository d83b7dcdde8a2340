"""Where compiled Hopper kernels are kept, and under which names; needs no package but our own.

A config is the whole compile key; the folder's name is a digest of the kernels' sources.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import json
from pathlib import Path

from ridgeline.core import env
from ridgeline.kernels.w4a16.tiles import DecodeConfig, MatmulConfig
from ridgeline.kernels.w4a16.tiles_stream import StreamConfig
from ridgeline.kernels.w4a16.tiles_trimmed import TrimmedConfig

ARCHITECTURE = "sm_90a"
RUNTIME = "libcute_dsl_runtime.so"
_SOURCES = (
    "tiles.py",
    "tiles_stream.py",
    "tiles_trimmed.py",
    "cute_decode.py",
    "cute_stream.py",
    "cute_matmul.py",
    "cute_trimmed.py",
    "cute_parts.py",
    "schedule.py",
    "cute_epilogue.py",
    "cute_ptx.py",
)
_FAMILIES = {
    DecodeConfig: "decode",
    StreamConfig: "stream",
    MatmulConfig: "matmul",
    TrimmedConfig: "trimmed",
}
Config = DecodeConfig | StreamConfig | MatmulConfig | TrimmedConfig


@functools.cache
def _digest() -> str:
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update((here / name).read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Where this version of the kernels is kept."""
    return env.cache_dir() / "cute" / f"w4a16-{ARCHITECTURE}-{_digest()}"


def kernel_name(config: Config) -> str:
    """A C symbol naming one kernel."""
    text = json.dumps(dataclasses.asdict(config), sort_keys=True)
    return f"w4a16_{_FAMILIES[type(config)]}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def can_run() -> bool:
    """Whether kernels can be compiled here, or were brought with the runtime they stand on."""
    if importlib.util.find_spec("cutlass") is not None:
        return True
    return (cache_folder().parent / RUNTIME).exists() and any(cache_folder().glob("*.so"))
