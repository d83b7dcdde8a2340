"""How the Hopper W4A16 kernels finish: bias, silu(gate) * up, one rounding, the store.

A lane of a tensor-core instruction holds outputs g and g + 8 of a block of 16, for two rows of
activations. With silu_mul the packed rows g of a block are gates and the rows g + 8 the ups of the
same outputs (layout.interleave), so a lane has both and writes half as many columns.

Legend: M rows of activations, N packed outputs (gates and ups both), values fp32.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ridgeline.kernels.w4a16 import cute_ptx as ptx


@cute.jit
def load_bias(bias, n, N, cfg: cutlass.Constexpr):
    """Bias of output n, 0 where there is none."""
    return ptx.load_narrow(bias + Int64(n) * 2, cfg.kind, Int32(n < N) & Int32(bias != 0))


@cute.jit
def write_rows(values, first, lane, m, dst, cfg: cutlass.Constexpr):
    """Store a lane's part of 16 outputs from `first` on, rows m and m + 1.

    values = (output g, row m), (g, m + 1), (g + 8, m), (g + 8, m + 1); dst = (out, bias, M, N,
    elements between rows of out).
    """
    out, bias, M, N, stride = dst
    if cutlass.const_expr(cfg.silu_mul):
        n = first // 2 + lane // 4
        outputs = N // 2
        gate_bias = load_bias(bias, n, outputs, cfg)
        up_bias = load_bias(bias + Int64(outputs) * 2 * Int64(bias != 0), n, outputs, cfg)
        for e in cutlass.range_constexpr(2):
            value = ptx.silu(values[e] + gate_bias) * (values[2 + e] + up_bias)
            keep = Int32(n < outputs) & Int32(m + e < M)
            ptx.store_narrow(out + (Int64(m + e) * stride + n) * 2, value, cfg.kind, keep)
    else:
        for half in cutlass.range_constexpr(2):
            n = first + 8 * half + lane // 4
            added = load_bias(bias, n, N, cfg)
            for e in cutlass.range_constexpr(2):
                keep = Int32(n < N) & Int32(m + e < M)
                at = out + (Int64(m + e) * stride + n) * 2
                ptx.store_narrow(at, values[2 * half + e] + added, cfg.kind, keep)
