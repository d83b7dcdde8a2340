"""Round to nearest: every weight to the closest code of its group's range.

Symmetric scale absmax / (2^(bits-1) - 1/2), asymmetric (max - min) / (2^bits - 1) with a whole zero
point. `quantize_layer_rtn` takes the plain range, no calibration: the baseline.
`quantize_layers_clipped` searches ranges, all groups of a layer together, by the error they leave
in its output: AWQ's last step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from ridgeline.formats.base import QuantizedWeight
from ridgeline.formats.contract import WeightFormat
from ridgeline.formats.grid import GridSpec, quantize_with
from ridgeline.quant.gptq import LayerReport, check_inputs, check_weights, output_error
from ridgeline.quant.scales import JointRanges
from ridgeline.quant.together import run_together

_SWEEPS = 2
_ROWS = 768
"""Outputs whose ranges are searched at a time."""


def quantize_layer_rtn(w_NK: torch.Tensor, layout: WeightFormat) -> QuantizedWeight:
    """The nearest codes of a weight on a format's grid, groups in stored order."""
    return layout.quantize_ref(w_NK)


def quantize_layers_clipped(
    weights: list[torch.Tensor],
    hessian_KK: torch.Tensor,
    spec: GridSpec,
    group_size: int,
    clipped: list[bool],
    *,
    name: str = "layer",
) -> list[tuple[QuantizedWeight, LayerReport]]:
    """Round layers that share an input, each in searched ranges.

    Shapes: weights [N_i, K]; hessian [K, K], mean over tokens of x x^T; clipped: one flag a layer,
    whether its ranges may cut values off.
    Raises: UserError for a weight or an input that is not finite.
    """
    check_weights(weights, name)
    check_inputs(hessian_KK, name)
    dead = int((hessian_KK.diagonal() <= 0).sum())
    results = []
    for w_NK, scale_NR, zero_NR in _joint_ranges(weights, hessian_KK, spec, group_size, clipped):
        weight = quantize_with(w_NK, scale_NR, zero_NR, spec, group_size)
        loss, relative = output_error(w_NK, weight.dequantize(), hessian_KK)
        report = LayerReport(
            loss=loss, relative_error=relative, damping=None, damping_raises=0, dead_columns=dead
        )
        results.append((weight, report))
    return results


def _joint_ranges(
    weights: list[torch.Tensor],
    hessian_KK: torch.Tensor,
    spec: GridSpec,
    group_size: int,
    clipped: list[bool],
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(weight in fp32, scale [N, R], zero [N, R]) of each layer; rows are independent, so they are
    searched in parts beside each other."""

    def search(part_NK: torch.Tensor, clip: bool) -> tuple[torch.Tensor, torch.Tensor]:
        ranges = JointRanges(part_NK, hessian_KK, group_size, spec, clips=clip)
        for sweep in range(_SWEEPS):
            ranges.sweep(neighbours=sweep > 0)
        return ranges.scale_RN.T, ranges.zero_RN.T

    wide = [w_NK.float() for w_NK in weights]
    parts = [(part, clip) for w, clip in zip(wide, clipped, strict=True) for part in w.split(_ROWS)]
    pieces = [functools.partial(search, part, clip) for part, clip in parts]
    found = iter(run_together(pieces, hessian_KK.device))
    for w_NK in wide:
        scales, zeros = zip(*(next(found) for _ in w_NK.split(_ROWS)), strict=True)
        yield w_NK, torch.cat(scales), torch.cat(zeros)
