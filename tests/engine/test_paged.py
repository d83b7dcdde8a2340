"""The ways of attending over pages agree: neighbouring or scattered, one call or one a sequence."""

from __future__ import annotations

import pytest
import torch

from ridgeline.engine.forward import RotaryTable, rotate
from ridgeline.engine.paged import (
    FP8,
    FP8_MAX,
    DeviceAttention,
    DeviceBatch,
    GatheredAttention,
    HostAttention,
    PagedKV,
    Span,
    slots_of,
    to_fp8,
)
from ridgeline.engine.weights import weights_of
from ridgeline.kernels.attention import flash_attn_func
from ridgeline.nn.rope import cos_sin
from ridgeline.nn.rope import rotate as rotate_plain
from tests.engine.conftest import tiny_decoder

PAGE = 8
H, G, D = 4, 2, 16
LENGTHS = [(1, 21), (1, 8), (5, 5), (9, 30)]
"""(new tokens, keys with them) of each sequence; decoding ones first."""
PAGES = [[2, 3, 4], [9], [11], [7, 1, 14, 12]]


def spans() -> list[Span]:
    found, row = [], 0
    for (rows, keys), pages in zip(LENGTHS, PAGES, strict=True):
        found.append(Span(row, rows, pages, keys))
        row += rows
    return found


def filled(dtype: torch.dtype) -> tuple[PagedKV, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A cache with the earlier tokens of each sequence, and all keys and values of each."""
    shape = tiny_decoder().config
    cache = PagedKV(
        shape, num_pages=16, page_tokens=PAGE, kv_heads=G, dtype=dtype, device=torch.device("cpu")
    )
    kept = []
    for span in spans():
        k, v = torch.randn(span.num_keys, G, D), torch.randn(span.num_keys, G, D)
        kept.append((k, v))
        old = span.num_keys - span.rows
        slots = slots_of([Span(0, old, span.pages, old)], PAGE)
        cache.append(1, torch.tensor(slots, dtype=torch.int64), k[:old], v[:old])
    return cache, kept


def new_tokens(kept) -> tuple[torch.Tensor, torch.Tensor]:
    each = [(k[-s.rows :], v[-s.rows :]) for s, (k, v) in zip(spans(), kept, strict=True)]
    return torch.cat([k for k, _ in each]), torch.cat([v for _, v in each])


def device_batch(num_decoding: int, tile: int | None = None) -> DeviceBatch:
    some = spans()
    width = max(len(s.pages) for s in some)

    def table(part):
        rows = [s.pages + [16] * (width - len(s.pages)) for s in part]
        return torch.tensor(rows, dtype=torch.int32)

    def int32(values):
        return torch.tensor(values, dtype=torch.int32)

    chunks = some[num_decoding:]
    decoding = some[:num_decoding] + [Span(0, 1, [16], 1)] * (-num_decoding % (tile or 1))
    return DeviceBatch(
        slots_P=torch.from_numpy(slots_of(some, PAGE)),
        num_decoding=num_decoding,
        decode_seqlens_B=int32([s.num_keys for s in decoding]),
        decode_table_BU=table(decoding),
        tile=tile,
        chunk_starts=int32([s.row - num_decoding for s in chunks] + [16 - num_decoding]),
        chunk_seqlens=int32([s.num_keys for s in chunks]),
        chunk_table=table(chunks),
        max_rows=max(s.rows for s in chunks),
        max_keys=max(s.num_keys for s in chunks),
    )


WAYS = {
    "host": lambda cache: HostAttention(cache, spans()),
    "host, query by query": lambda cache: HostAttention(cache, spans(), invariant=True),
    "gathered": lambda cache: GatheredAttention(cache, spans()),
    "pages in place": lambda cache: DeviceAttention(cache, device_batch(2)),
    "pages in place, in tiles of 3": lambda cache: DeviceAttention(cache, device_batch(2, 3)),
    "pages in place, in tiles of 1": lambda cache: DeviceAttention(cache, device_batch(2, 1)),
    "pages in place, no decode": lambda cache: DeviceAttention(cache, device_batch(0)),
}


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_attention(way, window):
    cache, kept = filled(torch.float32)
    q = torch.randn(16, H, D)
    got = WAYS[way](cache).attend(1, q, *new_tokens(kept), window)
    bounds = (-1, -1) if window is None else (window - 1, 0)
    for span, (k, v) in zip(spans(), kept, strict=True):
        rows = slice(span.row, span.row + span.rows)
        want = flash_attn_func(
            q[rows][None], k[None], v[None], causal=True, window_size=bounds, impl="ref"
        )
        torch.testing.assert_close(got[rows], want[0])
    assert not cache.k[0].any() and not cache.k[1, 16].any()


@pytest.mark.parametrize("way", ["host", "gathered"])
def test_fp8_pages(way):
    """Each key and value within half a step of E4M3 (3 bits) of its head's scale."""
    cache, kept = filled(FP8)
    q = torch.randn(16, H, D)
    got = WAYS[way](cache).attend(1, q, *new_tokens(kept), None)
    for span, (k, v) in zip(spans(), kept, strict=True):
        slots = torch.from_numpy(
            slots_of([Span(0, span.num_keys, span.pages, span.num_keys)], PAGE)
        )
        k_kept, v_kept = cache.read(1, slots, torch.float32)
        for wide, narrow in ((k, k_kept), (v, v_kept)):
            step = wide.abs().clamp_min(wide.abs().amax(-1, keepdim=True) / 2**14) / 16
            assert ((wide - narrow).abs() <= step + 1e-6).all() and not torch.equal(wide, narrow)
        rows = slice(span.row, span.row + span.rows)
        want = flash_attn_func(q[rows][None], k_kept[None], v_kept[None], causal=True, impl="ref")
        torch.testing.assert_close(got[rows], want[0])


def test_fp8_scales_are_powers_of_two():
    x = torch.tensor([[[0.0, 448.0], [1e-3, -900.0]], [[0.0, 0.0], [3.0, 4.0]]])
    values, scale = to_fp8(x)
    assert torch.equal(scale.log2(), scale.log2().round())
    assert (values.float().abs() <= FP8_MAX).all()
    assert torch.equal(values.float()[1, 1] * scale[1, 1], x[1, 1])


def test_rotation_is_the_decoders():
    model = tiny_decoder()
    table = RotaryTable(weights_of(model), 128)
    positions = torch.tensor([0, 5, 99, 127])
    x = torch.randn(4, H, D)
    cos, sin = cos_sin(model.config.rope, D, positions)
    torch.testing.assert_close(
        rotate(x, *table.at(positions)), rotate_plain(x, cos, sin), atol=1e-6, rtol=1e-6
    )
