"""Which form of a step's fused operations a device runs: Triton's on a GPU that has Triton, else
plain PyTorch's. Inference only; shapes are the engine's own and not checked.

overlapped(): the same operations as kernels that start while the previous one of the stream ends.
joined(): what stands around the matmuls of a step of single tokens, as few kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
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


def joined(
    heads: tuple[int, int, int],
    sequences: int,
    device: torch.device,
    *,
    overlap: bool = False,
    config: Any = None,
) -> Any:
    """embed_norm, decode_attention and choose (ref.py says what each is) with memory of their own
    for at most so many sequences. heads: of queries, of keys, and their dim; config: of
    attend_configs."""
    if module_for(device.type).__name__.endswith(".ref"):
        ref = importlib.import_module("ridgeline.kernels.step.ref")
        names = ("embed_norm", "decode_attention", "choose")
        return SimpleNamespace(**{name: getattr(ref, name) for name in names})
    ends = importlib.import_module("ridgeline.kernels.step.triton_ends")
    attend = importlib.import_module("ridgeline.kernels.step.triton_attend")
    H, _, D = heads
    parts = attend.AttendScratch.of(sequences, H, D, device, config)
    found = ends.chooser(sequences, device)
    return SimpleNamespace(
        embed_norm=partial(ends.embed_norm, overlap=overlap),
        decode_attention=partial(attend.decode_attention, scratch=parts, overlap=overlap),
        choose=partial(ends.choose, scratch=found, overlap=overlap),
    )


def row_configs() -> tuple[Any, ...]:
    """What the one-row kernels can be run with; the first is their default."""
    return importlib.import_module("ridgeline.kernels.step.triton_rows").CANDIDATES


def attend_configs(sequences: int) -> tuple[Any, ...]:
    """What a joined step's attention of so many sequences can be run with."""
    attend = importlib.import_module("ridgeline.kernels.step.triton_attend")
    return attend.CANDIDATES if sequences <= attend.FEW else attend.OF_MANY


def asked(parts: Sequence[torch.Tensor], piece: int) -> Any:
    """What an overlapped kernel (add_rms_norm, decode_attention) asks for early: triton_ask.py."""
    return importlib.import_module("ridgeline.kernels.step.triton_ask").Asked(tuple(parts), piece)
