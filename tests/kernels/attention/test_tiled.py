"""FlashAttention-1 and -2 as tiled.py writes them: right results, bounded traffic."""

from __future__ import annotations

import math

import pytest
import torch

from ridgeline.kernels.attention.problem import AttentionExtras, AttentionOptions
from ridgeline.kernels.attention.ref import attention_ref
from ridgeline.kernels.attention.tiled import (
    Saved,
    Traffic,
    _Mask,
    flash_1,
    flash_2,
    flash_2_backward,
    naive_traffic,
    tiles_for,
)

FLAT = AttentionOptions(softmax_scale=0.25)
CAUSAL = AttentionOptions(softmax_scale=0.25, causal=True)


def _head(S, T, D, V=None):
    return torch.randn(S, D), torch.randn(T, D), torch.randn(T, V or D)


def _reference(q, k, v, options):
    out, lse = attention_ref(*(x[None, :, None] for x in (q, k, v)), options, AttentionExtras())
    return out[0, :, 0], lse[0, 0]


@pytest.mark.parametrize("flash", [flash_1, flash_2])
@pytest.mark.parametrize("options", [FLAT, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("S, T", [(1, 1), (37, 37), (64, 41), (40, 67)])
@pytest.mark.parametrize("fast", [160, 1000])
def test_forward(flash, options, S, T, fast):
    q, k, v = _head(S, T, 16, 20)
    out, lse = flash(q, k, v, options, fast, Traffic())
    expected, expected_lse = _reference(q, k, v, options)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("options", [FLAT, CAUSAL], ids=["full", "causal"])
def test_backward(options):
    q, k, v = (x.double().requires_grad_() for x in _head(29, 43, 16))
    out, lse = _reference_double(q, k, v, options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    expected = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    saved = Saved(out.detach(), lse.detach(), dout, dlse)
    inputs = (x.detach() for x in (q, k, v))
    grads = flash_2_backward(*inputs, saved, options, 500, Traffic())
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def _reference_double(q, k, v, options):
    heads = (x[None, :, None] for x in (q, k, v))
    out, lse = attention_ref(*heads, options, AttentionExtras(), torch.float64)
    return out[0, :, 0], lse[0, 0]


def _moved(flash, T, D, fast, options=FLAT):
    traffic = Traffic()
    flash(*_head(T, T, D), options, fast, traffic)
    return traffic.elements


def _exponent(flash, low, high):
    """d log(traffic) / d log(one of T, D, M), from two settings that differ in it alone."""
    (changed,) = [n for n in range(3) if low[n] != high[n]]
    return math.log(_moved(flash, *high) / _moved(flash, *low)) / math.log(
        high[changed] / low[changed]
    )


@pytest.mark.parametrize("flash", [flash_1, flash_2])
def test_traffic_follows_the_bound(flash):
    # T^2 D^2 / M: exponents 2 in T, 2 in D, -1 in M
    assert _exponent(flash, (128, 8, 512), (512, 8, 512)) == pytest.approx(2, abs=0.1)
    assert _exponent(flash, (256, 8, 1024), (256, 32, 1024)) == pytest.approx(2, abs=0.15)
    assert _exponent(flash, (128, 16, 256), (128, 16, 1024)) == pytest.approx(-1, abs=0.15)


@pytest.mark.parametrize("flash", [flash_1, flash_2])
@pytest.mark.parametrize("T, D, M", [(128, 16, 256), (256, 16, 1024), (256, 32, 2048)])
def test_traffic_is_a_small_multiple_of_the_bound(flash, T, D, M):
    # FlashAttention-1 reads Q and O and writes O (3 T D) in each of T 4D / M steps: 12 T^2 D^2 / M;
    # FlashAttention-2 reads K and V (2 T D) as often: 8. Both besides the inputs and l, m.
    ratio = _moved(flash, T, D, M) / (T * T * D * D / M)
    assert (11 if flash is flash_1 else 7.5) < ratio < (16 if flash is flash_1 else 9)


def test_second_version_moves_less_and_causal_half():
    assert _moved(flash_2, 256, 16, 512) < 0.75 * _moved(flash_1, 256, 16, 512)
    ratio = _moved(flash_2, 256, 16, 512, CAUSAL) / _moved(flash_2, 256, 16, 512)
    assert 0.5 < ratio < 0.56


def test_naive_moves_the_square():
    small, large = naive_traffic(2048, 2048, 16), naive_traffic(8192, 8192, 16)
    assert large.elements / small.elements == pytest.approx(16, rel=0.02)
    assert large.elements == pytest.approx(4 * 8192**2, rel=0.01)
    # M well above D^2: tiling wins by about M / D^2 times a constant; below, it does not
    assert _moved(flash_2, 512, 16, 8192) < naive_traffic(512, 512, 16).elements / 10
    assert _moved(flash_2, 64, 64, 512) > naive_traffic(64, 64, 64).elements


def test_tile_sizes():
    tiles = tiles_for(4096, 32)
    assert (tiles.q_rows, tiles.kv_rows) == (32, 32)
    assert (tiles_for(65536, 32).q_rows, tiles_for(65536, 32).kv_rows) == (32, 512)
    with pytest.raises(ValueError, match="attention: fast_elements must be at least 256, got 255"):
        tiles_for(255, 64)


@pytest.mark.parametrize("M, D", [(160, 16), (1000, 20), (48 * 1024, 16), (48 * 1024, 128)])
def test_the_working_set_fits_in_fast_memory(M, D, monkeypatch):
    seen = []

    def apply(mask, score, rows, keys):
        seen.append(tuple(score.shape))
        return score

    monkeypatch.setattr(_Mask, "apply", apply)
    T = 1024 if M > 2000 else 64
    q, k, v = _head(T, T, D)
    out, lse = flash_2(q, k, v, FLAT, M, Traffic())
    r, c = (max(sizes) for sizes in zip(*seen, strict=True))
    assert 0.4 * M < 2 * r * D + 2 * c * D + r * c <= M  # Q, O; K, V; S
    seen.clear()
    saved = Saved(out, lse, torch.randn_like(out), torch.zeros_like(lse))
    flash_2_backward(q, k, v, saved, FLAT, M, Traffic())
    r, c = (max(sizes) for sizes in zip(*seen, strict=True))
    assert 0.4 * M < 4 * c * D + 3 * r * D + 2 * r * c <= M  # K, V, dK, dV; Q, dO, dQ; P, dS


def test_too_little_fast_memory():
    with pytest.raises(ValueError, match="fast_elements must be at least 65, got 64; a row"):
        flash_2(*_head(4, 4, 16), FLAT, 64, Traffic())


def test_backward_traffic_is_of_the_same_order():
    def moved(T, M):
        q, k, v = _head(T, T, 16)
        out, lse = flash_2(q, k, v, FLAT, M, Traffic())
        traffic = Traffic()
        saved = Saved(out, lse, torch.randn_like(out), torch.zeros_like(lse))
        flash_2_backward(q, k, v, saved, FLAT, M, traffic)
        return traffic.elements

    assert math.log(moved(512, 2048) / moved(128, 2048), 4) == pytest.approx(2, abs=0.1)
    assert math.log(moved(256, 4096) / moved(256, 1024), 4) == pytest.approx(-1, abs=0.15)
