"""flash_attn_with_kvcache equals attention over the whole sequence, however the cache lies."""

from __future__ import annotations

import pytest
import torch

from ridgeline.kernels.attention import flash_attn_func, flash_attn_with_kvcache
from ridgeline.kernels.attention.kvcache import rotate

H, G, D = 4, 2, 16


def _rotary(positions, dim=D):
    angles = torch.arange(positions)[:, None] * 0.3 ** torch.arange(dim // 2)
    return angles.cos(), angles.sin()


def _sequence(tokens, batch=2):
    return (torch.randn(batch, tokens, n, D) for n in (H, G, G))


def _whole(q, k, v, interleaved=True, **options):
    """Causal attention over a whole sequence, rotated beforehand."""
    cos, sin = _rotary(64)
    positions = torch.arange(q.shape[1]).expand(q.shape[0], -1)
    q, k = (rotate(x, cos, sin, positions, interleaved) for x in (q, k))
    return flash_attn_func(q, k, v, causal=True, **options)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("paged", [0, 16, 32])
@pytest.mark.parametrize("window", [(-1, -1), (5, -1)])
def test_token_by_token_equals_the_whole(interleaved, paged, window):
    q, k, v = _sequence(23)
    expected = _whole(q, k, v, interleaved, window_size=window)
    cos, sin = _rotary(64)
    table = None
    caches = [torch.full((2, 48, G, D), float("nan")) for _ in range(2)]
    if paged:
        pages = -(-48 // paged)
        table = torch.randperm(2 * pages).view(2, pages).int()
        caches = [torch.full((2 * pages, paged, G, D), float("nan")) for _ in range(2)]
    done = 0
    for tokens in (9, 1, 1, 4, 1, 7):
        new = slice(done, done + tokens)
        out = flash_attn_with_kvcache(
            q[:, new], *caches, k[:, new], v[:, new], cos, sin, cache_seqlens=done, causal=True,
            window_size=window, rotary_interleaved=interleaved, block_table=table,
        )  # fmt: skip
        torch.testing.assert_close(out, expected[:, new], rtol=1e-4, atol=1e-5)
        done += tokens


def test_lengths_of_each_sequence_and_rows_of_the_cache():
    lengths, new = [3, 0, 7], 2
    q, k, v = _sequence(9, batch=3)
    rows = torch.tensor([4, 1, 2], dtype=torch.int32)
    k_cache, v_cache = torch.full((5, 12, G, D), 7.0), torch.full((5, 12, G, D), 7.0)
    for b, length in enumerate(lengths):
        k_cache[rows[b], :length], v_cache[rows[b], :length] = k[b, :length], v[b, :length]
    ends = [slice(n, n + new) for n in lengths]
    new_q, new_k, new_v = (torch.stack([x[b, s] for b, s in enumerate(ends)]) for x in (q, k, v))
    out, lse = flash_attn_with_kvcache(
        new_q, k_cache, v_cache, new_k, new_v, cache_batch_idx=rows, causal=True,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32), return_softmax_lse=True,
    )  # fmt: skip
    for b, length in enumerate(lengths):
        used = slice(0, length + new)
        want, want_lse = flash_attn_func(
            new_q[b : b + 1], k[b : b + 1, used], v[b : b + 1, used], causal=True, return_lse=True
        )
        torch.testing.assert_close(out[b], want[0])
        torch.testing.assert_close(lse[b], want_lse[0])
        assert torch.equal(k_cache[rows[b], used], k[b, used])
        assert (k_cache[rows[b], length + new :] == 7.0).all()
    assert (k_cache[[0, 3]] == 7.0).all() and (v_cache[[0, 3]] == 7.0).all()


def test_leftpad_hides_the_first_keys():
    q, k, v = _sequence(10)
    pads = torch.tensor([3, 0], dtype=torch.int32)
    lengths = torch.tensor([10, 8], dtype=torch.int32)
    out = flash_attn_with_kvcache(
        q[:, -1:], k, v, cache_seqlens=lengths, cache_leftpad=pads, causal=True
    )
    for b, (pad, length) in enumerate(zip(pads.tolist(), lengths.tolist(), strict=True)):
        one = flash_attn_func(q[b : b + 1, -1:], k[b : b + 1, pad:length], v[b : b + 1, pad:length])
        torch.testing.assert_close(out[b : b + 1], one)


def test_without_mask_every_query_is_rotated_at_the_same_place():
    q, k, v = _sequence(4)
    caches = torch.zeros(2, 8, G, D), torch.zeros(2, 8, G, D)
    cos, sin = _rotary(16)
    out = flash_attn_with_kvcache(q, *caches, k, v, cos, sin, cache_seqlens=3)
    at = torch.full((2, 4), 3)
    turned = rotate(q, cos, sin, at, True)
    torch.testing.assert_close(out, flash_attn_func(turned, caches[0][:, :7], caches[1][:, :7]))


def test_rotation_is_a_complex_product():
    x, (cos, sin) = torch.randn(1, 5, 2, 8), _rotary(9, 6)
    at = torch.tensor([[3, 1, 8, 0, 2]])
    turn = torch.complex(cos, sin)[at][:, :, None]
    pairs = torch.view_as_complex(x[..., :6].reshape(1, 5, 2, 3, 2).contiguous())
    expected = torch.view_as_real(pairs * turn).flatten(-2)
    got = rotate(x, cos, sin, at, True)
    torch.testing.assert_close(got[..., :6], expected)
    assert torch.equal(got[..., 6:], x[..., 6:])
    halved = rotate(x[..., [0, 2, 4, 1, 3, 5, 6, 7]], cos, sin, at, False)
    torch.testing.assert_close(halved[..., [0, 3, 1, 4, 2, 5, 6, 7]], got)


def test_num_splits_changes_nothing():
    q, k, v = _sequence(40)
    one, four = (flash_attn_with_kvcache(q[:, -1:], k, v, num_splits=n) for n in (1, 4))
    torch.testing.assert_close(one, four)


def test_int_and_tensor_lengths_agree():
    q, k, v = _sequence(20)
    lengths = torch.full((2,), 13, dtype=torch.int32)
    one, other = (
        flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=n, causal=True) for n in (13, lengths)
    )
    assert torch.equal(one, other)


def test_compiles_in_full_and_mutates_the_cache():
    def step(q, k_cache, v_cache, k, v, lengths):
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True
        )

    q, k, v = _sequence(1)
    lengths = torch.tensor([2, 5], dtype=torch.int32)
    caches = [torch.randn(2, 8, G, D) for _ in range(2)]
    eager, compiled = ([c.clone() for c in caches] for _ in range(2))
    expected = step(q, *eager, k, v, lengths)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(q, *compiled, k, v, lengths)
    assert torch.equal(got, expected)
    assert torch.equal(compiled[0], eager[0]) and not torch.equal(compiled[0], caches[0])


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(cache_seqlens=8), r"cache_seqlens must leave room for 1 new tokens in the cache's 8"),
        (dict(cache_seqlens=9), r"cache_seqlens must be in \[0, 8\]"),
        (dict(cache_seqlens=None), "cache_seqlens must be given with k, got None"),
        (dict(v=None), "v must be given with k"),
        (dict(k=None, v=None), "k must be given with rotary_cos"),
        (dict(rotary_sin=None), "rotary_sin must be given with rotary_cos"),
        (dict(rotary_cos=torch.ones(8, 9), rotary_sin=torch.ones(8, 9)), "rotary_cos must be"),
        (
            dict(rotary_cos=torch.ones(2, 8), rotary_sin=torch.ones(2, 8)),
            "rotary_cos must cover 4 positions",
        ),
        (dict(k=torch.zeros(2, 1, 3, D)), r"k must be \(2, 1, 2, 16\) in torch.float32"),
        (
            dict(block_table=torch.tensor([[0], [7]], dtype=torch.int32)),
            "block_table must be from 0 to 1, got 7",
        ),
        (
            dict(cache_batch_idx=torch.tensor([0, 2], dtype=torch.int32)),
            "cache_batch_idx must be from 0 to 1, got 2",
        ),
        (dict(window_size=(-2, 0)), r"window_size must have sizes of at least 0.*got \(-2, 0\)"),
        (dict(num_splits=-1), "num_splits must be at least 0"),
    ],
)
def test_bad_calls(change, message):
    q, k, v = _sequence(1)
    cos, sin = _rotary(64)
    call = dict(
        q=q, k_cache=torch.zeros(2, 8, G, D), v_cache=torch.zeros(2, 8, G, D), k=k, v=v,
        rotary_cos=cos, rotary_sin=sin, cache_seqlens=3, causal=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match="attention: " + message):
        flash_attn_with_kvcache(**{**call, **change})
    assert not call["k_cache"].any()  # refused before anything was written


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(impl="tiled"), NotImplementedError, "tiled refuses"),
        (dict(impl="magic"), ValueError, "impl must be one of"),
        (
            dict(cache_leftpad=torch.tensor([0, 99], dtype=torch.int32)),
            ValueError,
            "leftpad_k must have values from 0 to 8, got 99",
        ),
        (
            dict(q=torch.zeros(2, 6, H, D), rotary_cos=torch.ones(8, 8)),
            ValueError,
            "rotary_cos must cover 9 positions, got 8",
        ),
        (dict(softcap=float("nan")), ValueError, "softcap must be"),
    ],
)
@pytest.mark.parametrize("tensor_lengths", [False, True])
def test_a_refused_call_leaves_the_cache_alone(tensor_lengths, change, error, message):
    q, k, v = _sequence(1)
    call = dict(
        q=q, k_cache=torch.zeros(2, 8, G, D), v_cache=torch.zeros(2, 8, G, D), k=k, v=v,
        cache_seqlens=3, causal=True,
    )  # fmt: skip
    if tensor_lengths:
        call["cache_seqlens"] = torch.tensor([3, 3], dtype=torch.int32)
    if "rotary_cos" in change:
        change = {**change, "rotary_sin": change["rotary_cos"]}
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(**{**call, **change})
    assert not call["k_cache"].any() and not call["v_cache"].any()


def test_gradients_are_refused():
    q, k, v = _sequence(4)
    with pytest.raises(NotImplementedError, match="q must not need gradients"):
        flash_attn_with_kvcache(q.requires_grad_(), k, v)


@pytest.mark.parametrize("batch", [1, 4, 5, 9])
def test_append_of_few_and_of_many_sequences(batch):
    lengths = torch.arange(batch, dtype=torch.int32)
    cache = [torch.zeros(batch + 1, 16, 2, 8) for _ in range(2)]
    k, v = torch.randn(batch, 3, 2, 8), torch.randn(batch, 3, 2, 8)
    rows = torch.arange(batch, dtype=torch.int32).flip(0) + 1
    out = flash_attn_with_kvcache(
        torch.randn(batch, 1, 2, 8), *cache, k, v, cache_seqlens=lengths, cache_batch_idx=rows
    )
    assert isinstance(out, torch.Tensor) and out.isfinite().all()
    for kept, new in zip(cache, (k, v), strict=True):
        want = torch.zeros_like(kept)
        for b in range(batch):
            want[rows[b], b : b + 3] = new[b]
        assert torch.equal(kept, want)
