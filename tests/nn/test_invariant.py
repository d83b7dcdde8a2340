"""Every query by itself: on pages as on a GPU, and without, the attention of the whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ridgeline.kernels.attention import flash_attn_func
from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.invariant import ROWS, FixedRows, LoneQueries, in_tiles

SHAPE = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_seqlen=64,
)


@pytest.mark.parametrize("window", [(-1, -1), (4, 0)])
@pytest.mark.parametrize("tokens", [1, 16, 37])
def test_lone_queries_are_the_whole_attention(tokens, window):
    q, k, v = (torch.randn(tokens, heads, 8) for heads in (4, 2, 2))
    wanted = flash_attn_func(q[None], k[None], v[None], causal=True, window_size=window)
    attend = LoneQueries(SHAPE, torch.float32, 64)
    torch.testing.assert_close(attend(q[None], k[None], v[None], window), wanted)
    torch.testing.assert_close(attend._on_gpu(q, k, v, window), wanted[0])


def test_products_have_always_as_many_rows(monkeypatch):
    monkeypatch.setitem(ROWS, "cpu", 4)
    seen = []

    def product(tile):
        seen.append(tuple(tile.shape))
        return 2 * tile

    x = torch.randn(9, 3)
    assert torch.equal(in_tiles(x, product), 2 * x)
    assert seen == [(4, 3)] * 3
    linear = torch.nn.Linear(3, 5)
    with FixedRows():
        found = linear(x.unflatten(0, (3, 3)))
        assert torch.equal(F.relu(x), x.clamp_min(0))  # everything else is as it was
    torch.testing.assert_close(found, linear(x).unflatten(0, (3, 3)))
