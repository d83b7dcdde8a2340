"""Rounding to nearest, element by element."""

from __future__ import annotations

import pytest
import torch

from ridgeline.formats.gptq import GPTQFormat
from ridgeline.quant.report import packed_bytes, weight_bytes
from ridgeline.quant.rtn import quantize_layer_rtn


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_against_a_loop(bits: int, symmetric: bool) -> None:
    form = GPTQFormat(bits=bits, group_size=8, symmetric=symmetric, checkpoint_format="gptq_v2")
    w_NK = torch.randn(3, 16)
    weight = quantize_layer_rtn(w_NK, form)
    top = 2**bits - 1
    for n in range(3):
        for r in range(2):
            values = w_NK[n, 8 * r : 8 * r + 8]
            low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
            raw = 2 * max(-low, high) / top if symmetric else (high - low) / top
            scale = float(torch.tensor(raw).half())
            zero = 2 ** (bits - 1) if symmetric else round(-low / scale)
            assert float(weight.scale_NR[n, r]) == scale
            for k, value in enumerate(values.tolist()):
                code = min(max(round(value / scale) + zero, 0), top)
                assert int(weight.code_NK[n, 8 * r + k]) == code


def test_bytes_read() -> None:
    w_NK = torch.randn(16, 64)
    symmetric = quantize_layer_rtn(w_NK, GPTQFormat(group_size=32))
    assert weight_bytes(symmetric) == 16 * 64 / 2 + 16 * 2 * 2
    form = GPTQFormat(bits=8, group_size=32, symmetric=False)
    assert weight_bytes(quantize_layer_rtn(w_NK, form)) == 16 * 64 + 16 * 2 * 2 + 16 * 2
    assert packed_bytes({"a": symmetric, "b": symmetric}) == 2 * weight_bytes(symmetric)
