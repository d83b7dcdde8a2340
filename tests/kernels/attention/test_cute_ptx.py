"""Arithmetic that the kernels do by integers, in NumPy's fp32 (no GPU runs here)."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (pip install ridgeline[hopper]) is not here")

from ridgeline.kernels.attention.cute import ptx


def by_polynomial(x: np.ndarray, degree: int) -> np.ndarray:
    """ptx.exp2_by_polynomial, an instruction a line."""
    magic = np.float32(1.5 * 2**23)
    x = np.maximum(x, np.float32(-127))
    shifted = (x + magic).astype(np.float32)
    f = x - (shifted - magic)
    *rest, p = (np.float32(c) for c in ptx.EXP2_POLYNOMIALS[degree])
    for c in reversed(rest):
        p = (p * f + c).astype(np.float32)
    bits = shifted.view(np.int32).astype(np.int64) << 23
    total = (np.broadcast_to(p, x.shape).view(np.int32) + bits) & 0xFFFFFFFF
    return total.astype(np.uint32).view(np.float32)


@pytest.mark.parametrize(("degree", "error"), [(3, 1.1e-4), (4, 3.1e-6)])
def test_powers_of_two_by_polynomial(degree: int, error: float) -> None:
    x = np.linspace(-126, 2, 400_001, dtype=np.float32)
    exact = 2.0 ** x.astype(np.float64)
    assert np.abs(by_polynomial(x, degree) / exact - 1).max() < error
    whole = np.arange(-126, 3, dtype=np.float32)
    assert np.array_equal(by_polynomial(whole, degree), 2.0 ** whole.astype(np.float64))
    hidden = np.array([-np.inf, -1e30, -300, -127], dtype=np.float32)
    assert np.array_equal(by_polynomial(hidden, degree), np.zeros(4))
    small = by_polynomial(np.linspace(-127, -126, 1001, dtype=np.float32), degree)
    assert (small >= 0).all() and (small < 2.4e-38).all()
