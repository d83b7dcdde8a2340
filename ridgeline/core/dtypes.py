"""Dtype names, widths and their torch counterparts (imported only when needed)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

RunDtype = Literal["auto", "float32", "bfloat16", "float16"]
"""What a command runs a model in; auto: the machine and the weights say."""
Device = Literal["auto", "cpu", "cuda"]
"""Where a command runs; auto: on the GPU where there is one."""

ITEMSIZE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

ALIASES: dict[str, str] = {
    "fp64": "float64",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp8": "float8_e4m3fn",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}


def canonical(name: str) -> str:
    """Return the long name of a dtype: "bf16" -> "bfloat16".

    Raises: ValueError for an unknown name.
    """
    long_name = ALIASES.get(name, name)
    if long_name not in ITEMSIZE_BYTES:
        raise ValueError(
            f"dtype: name must be one of {', '.join([*ITEMSIZE_BYTES, *ALIASES])}, got {name!r}; "
            "use one of these"
        )
    return long_name


def itemsize_bytes(name: str) -> int:
    """Bytes of one element. Raises: ValueError for an unknown name."""
    return ITEMSIZE_BYTES[canonical(name)]


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """ "bf16" -> torch.bfloat16. Raises: ValueError for an unknown name."""
    import torch

    return getattr(torch, canonical(name))
