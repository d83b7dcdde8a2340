"""Where compiled kernels are kept, and whether one is there; needs neither the DSL nor tvm-ffi.

    <cache>/cute/attention-<version of the DSL>-sm_90a-<digest of the sources>/<name>.so

A machine without the DSL uses any version's folder of these sources: what is compiled needs only
apache-tvm-ffi and the DSL's runtime library, which may lie beside the folders.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
from dataclasses import fields
from pathlib import Path
from typing import Any

from ridgeline.core import env
from ridgeline.kernels.attention.cute_sm90_backward_config import BackwardConfig, BackwardTraits
from ridgeline.kernels.attention.cute_sm90_cached_config import CachedTraits
from ridgeline.kernels.attention.cute_sm90_config import ForwardConfig, ForwardTraits
from ridgeline.kernels.attention.cute_sm90_roles_config import RolesConfig

Traits = ForwardTraits | BackwardTraits
Config = ForwardConfig | BackwardConfig | RolesConfig

ARCHITECTURE = "sm_90a"
DISTRIBUTION = "nvidia-cutlass-dsl"
RUNTIME = "libcute_dsl_runtime.so"
_SHORT = {
    "sinks": "sk", "seqused": "su", "split": "sp", "softcap": "sc", "deterministic": "dt",
    "ordered": "od",
}  # fmt: skip
"""Fields whose initials are another's: a kernel with softcap is not one with sinks."""


@functools.cache
def digest() -> str:
    """Of every file that a kernel's code comes from."""
    here = Path(__file__).parent
    found = hashlib.sha256()
    for file in [*sorted(here.glob("*.py")), *sorted(here.parent.glob("cute_sm90_*config.py"))]:
        found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:16]


def dsl_is_installed() -> bool:
    """Whether a kernel can be compiled here."""
    return importlib.util.find_spec("cutlass") is not None


def folder() -> Path:
    """The folder of this version's kernels; without the DSL, that of any version of it."""
    home, sources = env.cache_dir() / "cute", f"{ARCHITECTURE}-{digest()}"
    if dsl_is_installed():
        return home / f"attention-{importlib.metadata.version(DISTRIBUTION)}-{sources}"
    return max(home.glob(f"attention-*-{sources}"), default=home / f"attention-none-{sources}")


def kernel_name(traits: Traits, config: Config) -> str:
    """A C symbol naming one kernel: every field that differs from its default."""
    parts = ["attention_fwd" if isinstance(traits, ForwardTraits) else "attention_bwd"]
    if isinstance(config, RolesConfig):
        parts.append("roles")
    if isinstance(traits, CachedTraits):
        parts.append("cached")
    for record in (traits, config):
        for field in fields(record):
            value: Any = getattr(record, field.name)
            if value != field.default:
                text = str(int(value) if isinstance(value, bool) else value).replace(".", "p")
                parts.append(f"{short_name(field.name)}{text}")
    return "_".join(parts)


def short_name(field: str) -> str:
    """A field's part of a kernel's name."""
    return _SHORT.get(field, "".join(word[0] for word in field.split("_")))


def kernel_path(traits: Traits, config: Config) -> Path:
    """Where the compiled kernel is, or will be."""
    return folder() / f"{kernel_name(traits, config)}.so"


def why_missing(traits: Traits, config: Config) -> str | None:
    """Why this machine cannot have a kernel, or None."""
    if dsl_is_installed() or kernel_path(traits, config).exists():
        return None
    return "needs the package cutlass, or a cache that `ridgeline warmup` filled, and has neither"


def runtime() -> Path:
    """The runtime library: the installed DSL's, else one carried beside the kernels' folders."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    for root in spec.submodule_search_locations or () if spec else ():
        for found in sorted(Path(root).glob(f"cu*/lib/{RUNTIME}"), reverse=True):
            return found
    return env.cache_dir() / "cute" / RUNTIME
