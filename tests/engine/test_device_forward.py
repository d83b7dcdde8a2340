"""The fused forward of a GPU, run here with its plain operations: the general forward's logits."""

from __future__ import annotations

import pytest
import torch

from ridgeline.engine.device_forward import DeviceForward
from ridgeline.engine.forward import Forward
from ridgeline.engine.paged import DeviceAttention, HostAttention
from ridgeline.engine.weights import weights_of
from tests.engine.conftest import tiny_decoder
from tests.engine.test_paged import device_batch, filled, spans

FAMILIES = {
    "llama": {},
    "qwen3": {"family": "qwen3", "qk_norm": True, "tie_embeddings": False},
    "mistral": {"family": "mistral", "sliding_window": 6, "windowed_layers": (0, 1)},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_is_plain(family):
    weights = weights_of(tiny_decoder(**FAMILIES[family]))
    cache, _ = filled(torch.float32)
    ids = torch.arange(16) * 7
    positions = torch.tensor([p for s in spans() for p in range(s.num_keys - s.rows, s.num_keys)])
    before = cache.k.clone(), cache.v.clone()
    table = weights.embedding_VC.clone()
    plain = Forward(weights, 128).hidden(ids, positions, HostAttention(cache, spans()))
    kept = cache.k.clone()
    cache.k.copy_(before[0])
    cache.v.copy_(before[1])
    attend = DeviceAttention(cache, device_batch(2))
    fused = DeviceForward(weights, 128).hidden(ids, positions, attend)
    torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache.k, kept, atol=1e-5, rtol=1e-5)
    assert torch.equal(weights.embedding_VC, table)
