"""Which form of a step's fused operations a device runs: Triton's on a GPU that has Triton, else
plain PyTorch's. Inference only; shapes are the engine's own and not checked."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from types import ModuleType

import torch


@lru_cache(maxsize=8)
def module_for(device_type: str) -> ModuleType:
    """ridgeline.kernels.step.triton or .ref."""
    fused = device_type == "cuda" and importlib.util.find_spec("triton") is not None
    return importlib.import_module(f"ridgeline.kernels.step.{'triton' if fused else 'ref'}")


def for_tensor(x: torch.Tensor) -> ModuleType:
    """The module for a tensor's device."""
    return module_for(x.device.type)
