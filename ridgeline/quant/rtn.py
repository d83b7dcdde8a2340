"""Round to nearest: every weight to the closest code of its group's range.

Symmetric scale absmax / (2^(bits-1) - 1/2), asymmetric (max - min) / (2^bits - 1) with a whole zero
point. `quantize_layer_rtn` takes the plain range, no calibration: the baseline.
`quantize_layers_clipped` searches ranges, all groups of a layer together, by the error they leave
in its output: AWQ's last step.
"""

from __future__ import annotations

import torch

from ridgeline.formats.base import QuantizedWeight
from ridgeline.formats.contract import WeightFormat
from ridgeline.formats.grid import GridSpec, quantize_with
from ridgeline.quant.gptq import LayerReport, check_inputs, check_weights, output_error
from ridgeline.quant.scales import JointRanges

_SWEEPS = 2


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
    results = []
    for w_NK, clip in zip(weights, clipped, strict=True):
        w_NK = w_NK.float()
        ranges = JointRanges(w_NK, hessian_KK, group_size, spec, clips=clip)
        for sweep in range(_SWEEPS):
            ranges.sweep(neighbours=sweep > 0)
        scale_NR, zero_NR = ranges.scale_RN.T.contiguous(), ranges.zero_RN.T.contiguous()
        weight = quantize_with(w_NK, scale_NR, zero_NR, spec, group_size)
        loss, relative = output_error(w_NK, weight.dequantize(), hessian_KK)
        report = LayerReport(
            loss=loss,
            relative_error=relative,
            damping=None,
            damping_raises=0,
            dead_columns=int((hessian_KK.diagonal() <= 0).sum()),
        )
        results.append((weight, report))
    return results
