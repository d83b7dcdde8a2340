"""Appending to the cache and rotating queries in one launch, beside plain PyTorch. On a GPU, or
under the interpreter (test_triton_append_interpreted.py runs this file so)."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from ridgeline.core import env
from ridgeline.kernels.attention import flash_attn_func, flash_attn_with_kvcache, kvcache

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from ridgeline.kernels.attention import triton_append

HERE = "cpu" if env.triton_interpreted() else "cuda"
pytestmark = [] if HERE == "cpu" else [pytest.mark.gpu]
B, S, G, D, V, T, POSITIONS = 3, 2, 2, 24, 40, 48, 64
LENGTHS = [0, 17, 45]


def where_of(layout, half, interleaved, batch=B):
    def ints(values):  # with gaps
        return torch.tensor(values, dtype=torch.int32, device=HERE)[..., None].repeat_interleave(
            2, -1
        )[..., 0]

    cos = sin = None
    if half:
        angle = torch.rand(POSITIONS, 2 * half, device=HERE)[:, ::2] * 6  # strided
        cos, sin = angle.cos(), angle.sin()
    table = torch.randperm(3 * batch).view(batch, 3).tolist() if layout == "paged" else None
    rows = list(range(batch, 0, -1)) if layout == "rows" else None
    return kvcache.Where(
        cache_seqlens=ints(LENGTHS[:batch]),
        kv_batch_idx=None if rows is None else ints(rows),
        block_table=None if table is None else ints(table),
        rotary_cos=cos,
        rotary_sin=sin,
        rotary_interleaved=interleaved,
    )


def caches(layout, dtype=torch.float32):
    shape = (3 * B, 16) if layout == "paged" else (B + 2, T)
    return [torch.full((*shape, G, dim), -7.0, device=HERE, dtype=dtype) for dim in (D, V)]


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape, device=HERE).to(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [0, 4, 12])
@pytest.mark.parametrize("layout", ["rows", "dense", "paged"])
def test_append(layout, half, interleaved):
    where = where_of(layout, half, interleaved)
    k = randn(B, S, D, G).transpose(2, 3)  # no stride is 1 where it could be thought to be
    v = randn(B, G, S, V).transpose(1, 2)
    mine, plain = caches(layout), caches(layout)
    triton_append.append_kv(*mine, k, v, where)
    kvcache.append(*plain, k, v, where)
    for got, want in zip(mine, plain, strict=True):
        assert (want != -7.0).sum() == B * S * G * want.shape[-1]
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("advance", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_queries(interleaved, advance):
    where = where_of("dense", 8, interleaved)
    q = randn(B, 5, S, D).transpose(1, 2)
    want = kvcache.rotate_queries(q, where, advance)
    got = triton_append.rotate_queries(q, where, advance)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def test_half_precision_is_rounded_once():
    where = where_of("dense", 12, False)
    k, v = randn(B, S, G, D, dtype=torch.float16), randn(B, S, G, V, dtype=torch.float16)
    mine, plain = caches("dense", torch.float16), caches("dense", torch.float16)
    triton_append.append_kv(*mine, k, v, where)
    kvcache.append(*plain, k, v, where)
    torch.testing.assert_close(mine[0], plain[0], atol=2e-3, rtol=1e-3)
    assert torch.equal(mine[1], plain[1])


@pytest.mark.parametrize("layout", ["rows", "dense", "paged"])
def test_nothing_is_written_outside(layout):
    """Lengths without room, rows and pages that are not there: only what exists is written."""
    where = where_of(layout, 4, True)
    where.cache_seqlens[2] = T + 3
    if layout == "rows":
        where.kv_batch_idx[0] = -1
    if layout == "paged":
        where.block_table[0, 0] = 10**6
    k, v = randn(B, S, G, D), randn(B, S, G, V)
    mine = caches(layout)
    triton_append.append_kv(*mine, k, v, where)
    sequences = 2 if layout == "dense" else 1
    assert (mine[0] != -7.0).sum() == sequences * S * G * D
    assert (mine[1] != -7.0).sum() == sequences * S * G * V


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("page", [0, 16, 32, 128])
def test_gpu_steps_equal_the_whole(page, interleaved):
    """Prefill of 100 tokens, then steps: as attention over everything that was rotated at once."""
    if HERE == "cpu":
        pytest.skip("the public function takes this path on a GPU")
    heads, kv_heads, dim, longest = 4, 2, 64, 128
    cos, sin = (f(torch.rand(longest, dim // 2, device=HERE) * 6) for f in (torch.cos, torch.sin))
    kind = dict(dtype=torch.bfloat16)
    q, k, v = (randn(2, 110, h, dim, **kind) for h in (heads, kv_heads, kv_heads))
    table, shape = None, (2, longest)
    if page:
        pages = -(-longest // page)
        table = torch.randperm(2 * pages, device=HERE).int().view(2, pages)
        shape = (2 * pages, page)
    stored = [randn(*shape, kv_heads, dim, **kind) for _ in range(2)]
    rotary = dict(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved)
    done, at = [], 0
    for size in (100, 1, 1, 7, 1):
        part = slice(at, at + size)
        lengths = torch.full((2,), at, dtype=torch.int32, device=HERE)
        done.append(
            flash_attn_with_kvcache(
                q[:, part], *stored, k[:, part], v[:, part], cache_seqlens=lengths,
                block_table=table, causal=True, impl="triton", **rotary,
            )
        )  # fmt: skip
        at += size
    everywhere = kvcache.positions_of(torch.zeros(2, dtype=torch.int32, device=HERE), 110)
    q_all, k_all = (kvcache.rotate(x, cos, sin, everywhere, interleaved) for x in (q, k))
    whole = flash_attn_func(q_all.float(), k_all.float(), v.float(), causal=True, impl="ref")
    torch.testing.assert_close(torch.cat(done, 1).float(), whole, atol=3e-2, rtol=3e-2)
