"""The integer grids of uniform formats: scale and zero point of a group, rounding to codes.

    symmetric   scale = absmax / (2^(bits-1) - 1/2), zero = 2^(bits-1)
    asymmetric  scale = (max - min) / (2^bits - 1), zero = round(-min / scale), the range includes 0

A scale is rounded to the dtype it will be stored in before codes are made with it, so the file
holds what was calibrated. A group of zeros has scale 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.core.errors import bad_value
from ridgeline.formats.base import QuantizedWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSpec:
    """Width and symmetry of a code."""

    bits: int = 4
    symmetric: bool = True
    scale_dtype: torch.dtype = torch.float16
    """Storage dtype; every scale is exactly representable in it."""
    scale_mantissa_bits: int | None = None
    """Keep only so many explicit mantissa bits of a scale (7: exact in bf16 too); None: all."""

    @property
    def max_code(self) -> int:
        return 2**self.bits - 1

    @property
    def middle(self) -> int:
        return 2 ** (self.bits - 1)

    def store(self, scale: torch.Tensor) -> torch.Tensor:
        """Round scales (any float dtype, any sign) to what the file will hold, in the input's
        dtype.

        A magnitude stays between the smallest and the largest that the storage dtype holds.
        """
        info = torch.finfo(self.scale_dtype)
        size = scale.abs().clamp(min=info.tiny * info.eps, max=info.max)
        if self.scale_mantissa_bits is not None:
            fraction, exponent = torch.frexp(size)
            steps = 2.0 ** (self.scale_mantissa_bits + 1)
            size = torch.ldexp(torch.round(fraction * steps) / steps, exponent).clamp(max=info.max)
        return torch.copysign(size.to(self.scale_dtype).to(scale.dtype), scale)


def range_params(
    low: torch.Tensor, high: torch.Tensor, spec: GridSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, zero) of groups whose values span [low, high]; scale already as stored, zero a whole
    float."""
    if spec.symmetric:
        reach = torch.maximum(low.abs(), high.abs())
        scale = spec.store(torch.where(reach > 0, reach / (spec.middle - 0.5), 1.0))
        return scale, torch.full_like(scale, float(spec.middle))
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    width = high - low
    scale = spec.store(torch.where(width > 0, width / spec.max_code, 1.0))
    return scale, torch.round(-low / scale).clamp(0, spec.max_code)


def to_codes(
    w: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, max_code: int
) -> torch.Tensor:
    """Nearest codes as whole floats (shapes broadcast); ties to even before the zero point is
    added."""
    return (w / scale).round_().add_(zero).clamp_(0, max_code)


def group_view(w_NK: torch.Tensor, group_size: int) -> torch.Tensor:
    """[N, R, group]; a short last group is filled by repeating its last column (no new
    extremes)."""
    N, K = w_NK.shape
    if short := -K % group_size:
        w_NK = torch.cat([w_NK, w_NK[:, -1:].expand(N, short)], dim=1)
    return w_NK.reshape(N, -1, group_size)


def quantize_with(
    w_NK: torch.Tensor, scale_NR: torch.Tensor, zero_NR: torch.Tensor, spec: GridSpec, group: int
) -> QuantizedWeight:
    """Round a weight to given group parameters, in fp32 (fp64 stays)."""
    K = w_NK.shape[1]
    index = torch.arange(K, device=w_NK.device) // group
    code = to_codes(w_NK, scale_NR[:, index], zero_NR[:, index], spec.max_code)
    return QuantizedWeight(
        code_NK=code.to(torch.uint8),
        scale_NR=scale_NR.to(spec.scale_dtype),
        zero_NR=None if spec.symmetric else zero_NR.to(torch.uint8),
        bits=spec.bits,
        group_size=group,
    )


def quantize_rtn(w_NK: torch.Tensor, spec: GridSpec, group_size: int) -> QuantizedWeight:
    """Round to nearest with min-max group parameters.

    Raises: ValueError for a weight with NaN or infinity, which no code stands for.
    """
    if not bool(torch.isfinite(w_NK).all()):
        raise bad_value(
            "grid", "w_NK", "be finite", "NaN or infinity", "restore the weights from their source"
        )
    w_NK = w_NK if w_NK.dtype == torch.float64 else w_NK.float()
    grouped = group_view(w_NK, group_size)
    scale, zero = range_params(grouped.amin(-1), grouped.amax(-1), spec)
    return quantize_with(w_NK, scale, zero, spec, group_size)
