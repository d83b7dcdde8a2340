"""Round to nearest: every weight to the closest code of its group's plain range. The baseline.

Symmetric scale absmax / (2^(bits-1) - 1/2), asymmetric (max - min) / (2^bits - 1) with a whole zero
point; no calibration, no search. Bytes: each weight read once.
"""

from __future__ import annotations

import torch

from ridgeline.formats.base import QuantizedWeight
from ridgeline.formats.contract import WeightFormat


def quantize_layer_rtn(w_NK: torch.Tensor, layout: WeightFormat) -> QuantizedWeight:
    """The nearest codes of a weight on a format's grid, groups in stored order."""
    return layout.quantize_ref(w_NK)
