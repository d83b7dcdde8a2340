"""The fused forward of a GPU, run here with its plain operations: the general forward's logits."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from ridgeline.engine.device_forward import ASKINGS, Asking, DeviceForward, first_bytes
from ridgeline.engine.forward import Forward
from ridgeline.engine.graphs import DecodeGraphs, Recorded
from ridgeline.engine.paged import DeviceAttention, HostAttention
from ridgeline.engine.weights import weights_of
from ridgeline.kernels.step.op import for_tensor, row_configs
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


# ---- weights asked for early ---------------------------------------------------------------------


def test_the_first_bytes_of_tensors_read_side_by_side():
    """Codes and their scales: the same share of each; what follows begins where they ended."""
    codes, scales = torch.arange(3200), torch.arange(640, dtype=torch.int16)
    total = 8 * 3200 + 2 * 640
    (a, b), left = first_bytes([codes, scales], 0, total / 2)
    assert (a.numel(), b.numel(), left) == (12800, 640, 0)
    assert a.data_ptr() == codes.data_ptr() and b.data_ptr() == scales.data_ptr()
    (c, d), left = first_bytes([codes, scales], a.numel() + b.numel(), total)
    assert c.data_ptr() == codes.data_ptr() + 12800 and d.data_ptr() == scales.data_ptr() + 640
    assert (c.numel(), d.numel(), left) == (12800, 640, total / 2)
    assert first_bytes([codes, scales], total, 100) == ([], 100)
    assert first_bytes([codes], 0, 0) == ([], 0)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_small_kernels_ask_for_what_comes_next():
    """Each for its own layer's; attention for the projection behind it and a share of the next."""
    weights = weights_of(tiny_decoder())
    plain = DeviceForward(weights, 128)
    how = Asking(before_qkv=1, attention=weights.layers[0].out.read_bytes() / 2**20 + 1e-3)
    forward = plain.overlapped().asking(how)
    step, seen = plain.small(weights.embedding_VC), []

    def norm(x, delta, weight, eps, asked=None):
        seen.append(asked)
        return step.add_rms_norm(x, delta, weight, eps)

    forward.small = lambda like: SimpleNamespace(add_rms_norm=norm, silu_mul=step.silu_mul)
    forward.joined = SimpleNamespace(embed_norm=step.embed_norm)

    def attended(*args, asked=None, **options):
        seen.append(asked)
        return step.decode_attention(*args, **options)

    forward.joined.decode_attention = attended
    results = []
    for each in (plain, forward):
        torch.manual_seed(0)
        cache, _ = filled(torch.float32)
        attend = DeviceAttention(cache, device_batch(2))
        attend.batch.num_decoding, attend.batch.chunk_starts = 2, None
        attend.batch.slots_P = attend.batch.slots_P[:2]
        results.append(each.decode(torch.tensor([3, 9]), torch.tensor([20, 7]), attend))
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)
    starts = [[part.data_ptr() for part in asked.parts] if asked else [] for asked in seen]
    want = []
    for index, layer in enumerate(weights.layers):
        qkv, out, gate_up, _ = (x.streams()[0].data_ptr() for x in layer.linears())
        want += [[qkv]] * (index > 0) + [[out, gate_up], []]
    assert starts == [*want, []]  # the final norm asks for nothing


def test_which_ways_have_more_ways():
    """Overlapped joined ones ask; of one row by matmuls, the head may be the row kernel's."""

    def names(of, forward, rows: int) -> list[str]:
        recorded = Recorded(lambda: None, torch.zeros(rows, 8), None, forward)
        return [name for name, _ in of("x", recorded)]

    forward = DeviceForward(weights_of(tiny_decoder()), 128)
    asking, head = DecodeGraphs._asking_ways, DecodeGraphs._head_ways
    assert not names(asking, forward, 1) and not names(asking, forward.overlapped(), 1)
    joined = forward.overlapped().joining(2)
    found = names(asking, joined, 2)
    assert found == [f"x, {how}" for how in ASKINGS] and len(set(found)) == len(found)
    if importlib.util.find_spec("triton") is not None:
        assert len(set(names(head, joined, 1))) == 3
        assert not names(head, joined, 2) and not names(head, forward, 1)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton's configs")
def test_the_head_by_rows_is_the_head():
    forward = DeviceForward(weights_of(tiny_decoder()), 128)
    y_1C = torch.randn(1, forward.weights.config.hidden_size)
    ref = for_tensor(y_1C)
    made = forward.with_head(row_configs()[1])
    seen = []

    class Step:
        def row_linear(self, x, weight, dtype, config):
            seen.append(config)
            return ref.row_linear(x, weight, dtype=dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ridgeline.engine.device_forward.for_tensor", lambda like: Step())
        got = made._head(y_1C)
    torch.testing.assert_close(got, forward._head(y_1C), atol=1e-5, rtol=1e-5)
    assert [config.block_n for config in seen] == [row_configs()[1].block_n]
