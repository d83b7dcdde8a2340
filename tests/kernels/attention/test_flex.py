"""User functions: every implementation that runs here, the block mask, and what is refused."""

from __future__ import annotations

import pytest
import torch

from ridgeline.kernels.attention.flex import create_block_mask, flex_attn_func
from ridgeline.kernels.attention.mods import Mods

from . import cases, mod_cases

NAMES = [mod.name for mod in mod_cases.MOD_CASES]


@pytest.mark.parametrize("mod", mod_cases.MOD_CASES, ids=NAMES)
@pytest.mark.parametrize("impl", ["ref", "cpu"])
def test_values_and_gradients(impl, mod):
    mod_cases.check(impl, mod)


@pytest.mark.gpu
@pytest.mark.parametrize("mod", mod_cases.MOD_CASES, ids=NAMES)
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_gpu_values_and_gradients(mod, dim):
    case = cases.replace(mod.case, dim=dim, dim_v=dim)
    mod_cases.check("triton", cases.replace(mod, case=case), "cuda", "bfloat16")


def qkv(seqlen=40, **more):
    torch.manual_seed(0)
    return [torch.randn(2, seqlen, 2, 16, requires_grad=True, **more) for _ in range(3)]


def by_hand(q, k, v, score, allowed):
    """Softmax attention written out, [B, S, H, D]."""
    s = torch.einsum("bshd,bthd->bhst", q, k) * q.shape[-1] ** -0.5
    at = torch.arange(q.shape[1])
    s = score(
        s, torch.arange(2)[:, None, None, None], torch.arange(2)[:, None, None], at[:, None], at
    )
    p = s.masked_fill(~allowed, float("-inf")).softmax(-1)
    return torch.einsum("bhst,bthd->bshd", p, v)


def test_against_a_softmax_written_out():
    q, k, v = qkv()
    weight = torch.tensor([0.5, 2.0])

    def score(s, b, h, i, j):
        return torch.tanh(s) * weight[h] + (i - j) * 0.01 * (b + 1)

    at = torch.arange(40)
    out = flex_attn_func(q, k, v, score, lambda b, h, i, j: i - j >= -2)
    want = by_hand(q, k, v, score, at[:, None] - at >= -2)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    assert isinstance(out, torch.Tensor)
    dout = torch.randn_like(out)
    got, wanted = (torch.autograd.grad(o, (q, k, v), dout) for o in (out, want))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_mods_join_the_other_options():
    q, k, v = qkv()
    sinks, bias = torch.zeros(2, requires_grad=True), torch.zeros(1, 2, 40, 40, requires_grad=True)
    results = {}
    for impl in ("ref", "cpu"):
        out, lse = flex_attn_func(
            q, k, v, lambda s, b, h, i, j: s * s * 0.3, lambda b, h, i, j: (i + j) % 3 != 0,
            causal=True, window_size=(20, 0), softcap=3.0, sinks=sinks, bias=bias, return_lse=True,
            impl=impl,
        )  # fmt: skip
        grads = torch.autograd.grad(out.sum() + lse[lse.isfinite()].sum(), (q, k, v, sinks, bias))
        results[impl] = (out, lse, *grads)
    for one, other in zip(*results.values(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_the_block_mask_says_what_is_left():
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, 300, 300, "cpu")
    assert blocks.num_key_blocks.tolist() == [[[1, 2, 3]]]
    assert blocks.key_blocks[0, 0, 2].tolist() == [2 * 0 + 1, 2 * 1 + 1, 2 * 2]  # the last in part
    assert blocks.num_query_blocks.tolist() == [[[3, 2, 1]]]
    assert blocks.query_blocks[0, 0, 1, :2].tolist() == [2 * 1, 2 * 2 + 1]
    assert blocks.share == pytest.approx(6 / 9)


def test_the_block_mask_of_a_ragged_full_mask_is_full():
    blocks = create_block_mask(lambda b, h, i, j: i + j >= 0, None, 2, 130, 257, "cpu")
    assert blocks.key_blocks[0, 1, 1].tolist() == [1, 3, 5]


def test_what_is_refused():
    q, k, v = qkv()
    mask = lambda b, h, i, j: i >= j  # noqa: E731
    blocks = create_block_mask(mask, None, None, 41, 40, "cpu")
    with pytest.raises(
        ValueError, match=r"block_mask must be of lengths \(40, 40\), got \(41, 40\)"
    ):
        flex_attn_func(q, k, v, mask_mod=mask, block_mask=blocks)
    with pytest.raises(ValueError, match="block_mask must be given with mask_mod"):
        flex_attn_func(q, k, v, block_mask=blocks)
    wide = create_block_mask(mask, 3, None, 40, 40, "cpu")
    with pytest.raises(ValueError, match=r"batch and heads of 1 or \(2, 2\), got \(3, 1\)"):
        flex_attn_func(q, k, v, mask_mod=mask, block_mask=wide)
    with pytest.raises(NotImplementedError, match="tiled: takes only causal, not mods"):
        flex_attn_func(q, k, v, mask_mod=mask, impl="tiled")
    with pytest.raises(ValueError, match="softcap must be at least 0"):
        flex_attn_func(q, k, v, softcap=-1.0)


def test_what_has_no_triton_form():
    triton_mods = pytest.importorskip("ridgeline.kernels.attention.triton_mods")
    table = torch.zeros(4, 4, requires_grad=True)
    for score, message in (
        (lambda s, b, h, i, j: torch.erfinv(s), "got aten.erfinv"),
        (lambda s, b, h, i, j: s + table[h, i], "captured tensor must not need gradients"),
        (lambda s, b, h, i, j: s + table.detach()[h].sum(-1), "index every dim"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            triton_mods.source_of(Mods(score), torch.device("cpu"))
