"""Which form of a step's fused operations a device runs: Triton's on a GPU that has Triton, else
plain PyTorch's. Inference only; shapes are the engine's own and not checked.

overlapped(): the same operations as kernels that start while the previous one of the stream ends.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


@lru_cache(maxsize=8)
def module_for(device_type: str) -> ModuleType:
    """ridgeline.kernels.step.triton or .ref."""
    fused = device_type == "cuda" and importlib.util.find_spec("triton") is not None
    return importlib.import_module(f"ridgeline.kernels.step.{'triton' if fused else 'ref'}")


def for_tensor(x: torch.Tensor) -> ModuleType:
    """The module for a tensor's device."""
    return module_for(x.device.type)


@lru_cache(maxsize=1)
def overlapped() -> Any:
    """Like the Triton module, for Hopper and later, without the operations on rows: those take
    theirs from a config."""
    made = importlib.import_module("ridgeline.kernels.step.triton")
    names = ("add_rms_norm", "rope_append", "silu_mul")
    return SimpleNamespace(**{name: partial(getattr(made, name), overlap=True) for name in names})


def row_configs() -> tuple[Any, ...]:
    """What the one-row kernels can be run with; the first is their default."""
    return importlib.import_module("ridgeline.kernels.step.triton_rows").CANDIDATES
