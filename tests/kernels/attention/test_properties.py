"""What holds for attention whatever the numbers: tried on random problems."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.kernels.attention import flash_attn_func, flash_attn_varlen_func
from ridgeline.kernels.attention.cpu import join

few = settings(max_examples=25, deadline=None, derandomize=True)
lengths = st.integers(1, 24)
windows = st.one_of(st.just(-1), st.integers(0, 12))
options = st.fixed_dictionaries(
    {
        "causal": st.booleans(),
        "window_size": st.tuples(windows, windows),
        "softcap": st.sampled_from([0.0, 3.0]),
        "impl": st.sampled_from(["cpu", "ref"]),
    }
)


def _inputs(S, T, batch=2, heads=(4, 2)):
    generator = torch.Generator().manual_seed(1000 * S + T)
    shapes = ((batch, S, heads[0], 16), (batch, T, heads[1], 16), (batch, T, heads[1], 16))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def _close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@few
@given(S=lengths, T=lengths, options=options)
def test_batch_order_does_not_matter(S, T, options):
    q, k, v = _inputs(S, T, batch=3)
    order = torch.tensor([2, 0, 1])
    out = flash_attn_func(q, k, v, **options)
    _close(flash_attn_func(q[order], k[order], v[order], **options), out[order])


@few
@given(S=st.integers(2, 24), options=options, data=st.data())
def test_the_future_does_not_matter(S, options, data):
    cut = data.draw(st.integers(1, S - 1))
    q, k, v = _inputs(S, S)
    options = {**options, "causal": True}
    whole = flash_attn_func(q, k, v, **options)
    prefix = flash_attn_func(q[:, :cut], k[:, :cut], v[:, :cut], **options)
    _close(prefix, whole[:, :cut])


@few
@given(S=lengths, T=st.integers(2, 24), data=st.data(), impl=st.sampled_from(["cpu", "ref"]))
def test_two_halves_join_by_lse(S, T, data, impl):
    cut = data.draw(st.integers(0, T))
    q, k, v = _inputs(S, T)
    whole = flash_attn_func(q, k, v, return_lse=True, impl=impl)
    halves = [
        flash_attn_func(q, k[:, part], v[:, part], return_lse=True, impl=impl)
        for part in (slice(0, cut), slice(cut, T))
    ]
    for got, want in zip(join(*halves[0], *halves[1]), whole, strict=True):
        _close(got, want)


@few
@given(S=lengths, T=lengths, options=options)
def test_keys_in_any_order_without_a_mask(S, T, options):
    q, k, v = _inputs(S, T)
    options = {**options, "causal": False, "window_size": (-1, -1)}
    order = torch.randperm(T, generator=torch.Generator().manual_seed(T))
    _close(
        flash_attn_func(q, k[:, order], v[:, order], **options), flash_attn_func(q, k, v, **options)
    )


@few
@given(S=lengths, T=lengths, options=options)
def test_grouped_heads_equal_repeated_heads(S, T, options):
    q, k, v = _inputs(S, T, heads=(6, 2))
    repeated = (x.repeat_interleave(3, dim=2) for x in (k, v))
    _close(flash_attn_func(q, k, v, **options), flash_attn_func(q, *repeated, **options))


@few
@given(S=lengths, T=lengths, options=options)
def test_output_is_a_mean_of_values(S, T, options):
    # v = 1: out is 1 where a row sees anything and 0 where it sees nothing, as its LSE says
    q, k, v = _inputs(S, T)
    out, lse = flash_attn_func(q, k, torch.ones_like(v), return_lse=True, **options)
    seen = lse.isfinite().transpose(1, 2)[..., None].expand_as(out)
    _close(out, seen.float())


@few
@given(S=lengths, T=lengths, options=options, shift=st.floats(-20, 20))
def test_a_common_key_shift_moves_only_the_lse(S, T, options, shift):
    # k + c adds q.c to a whole row of scores: softmax does not see it
    q, k, v = _inputs(S, T)
    options = {**options, "softcap": 0.0}
    out, lse = flash_attn_func(q, k, v, return_lse=True, **options)
    direction = torch.randn(16, generator=torch.Generator().manual_seed(1)) * shift / 20
    other, other_lse = flash_attn_func(q, k + direction, v, return_lse=True, **options)
    _close(other, out)
    torch.testing.assert_close(
        other_lse, lse + (q @ direction / 4).transpose(1, 2), rtol=1e-4, atol=1e-4
    )


@few
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5), options=options)
def test_packing_changes_nothing(sizes, options):
    longest = max(sizes)
    q, k, v = _inputs(max(longest, 1), max(longest, 1), batch=len(sizes))
    packed = [torch.cat([x[b, :n] for b, n in enumerate(sizes)]) for x in (q, k, v)]
    starts = torch.tensor([0, *sizes]).cumsum(0).int()
    out = flash_attn_varlen_func(*packed, starts, starts, longest, longest, **options)
    used = torch.tensor(sizes, dtype=torch.int32)
    padded = flash_attn_func(q, k, v, seqused_q=used, seqused_k=used, **options)
    _close(out, torch.cat([padded[b, :n] for b, n in enumerate(sizes)]))
    for b, n in enumerate(sizes):
        assert not padded[b, n:].any()
