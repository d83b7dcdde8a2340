"""The step of one token by hand beside the general forward: any pages, window, norm, cache."""

from __future__ import annotations

import pytest
import torch

from ridgeline.engine.forward import Forward
from ridgeline.engine.host_decode import HostDecoder
from ridgeline.engine.paged import HostAttention, PagedKV, Span, positions_of
from ridgeline.engine.weights import weights_of
from tests.engine.conftest import CONTEXT, tiny_decoder

PAGE = 16
WINDOW = {"sliding_window": 9, "windowed_layers": (1,)}
PLACES = {"neighbours": [2, 3, 4, 5], "scattered": [6, 2, 9, 4]}


def kept_for(weights, dtype: torch.dtype) -> PagedKV:
    return PagedKV(
        weights.config,
        num_pages=12,
        page_tokens=PAGE,
        kv_heads=weights.kv_heads,
        dtype=dtype,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("changes", [{}, {"family": "qwen3", "qk_norm": True} | WINDOW])
@torch.inference_mode()
def test_steps_are_those_of_the_general_forward(changes, places):
    weights = weights_of(tiny_decoder(**changes))
    forward = Forward(weights, CONTEXT)
    caches = [kept_for(weights, torch.float32) for _ in range(2)]
    host = HostDecoder(weights, forward.rotary, caches[0])
    ids, pages = [(7 * i) % 250 + 1 for i in range(40)], PLACES[places]

    def general(cache: PagedKV, start: int, end: int) -> torch.Tensor:
        spans = [Span(0, end - start, pages, end)]
        positions = torch.from_numpy(positions_of(spans))
        attend = HostAttention(cache, spans)
        return forward.logits(forward.hidden(torch.tensor(ids[start:end]), positions, attend))

    for cache in caches:
        general(cache, 0, 30)
    for at in range(30, 40):
        found = host.run(ids[at], Span(0, 1, pages, at + 1))
        want = general(caches[1], at, at + 1)
        assert found.dtype == torch.float32 and found.shape == want.shape
        torch.testing.assert_close(found, want, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(caches[0].k, caches[1].k, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(caches[0].v, caches[1].v, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_bf16_model_with_either_cache(dtype):
    """Near the fp32 model's logits, nearer than bf16 all along by half."""
    model = tiny_decoder()
    exact = weights_of(model)
    rough = weights_of(tiny_decoder().to(torch.bfloat16))
    ids, pages = [(5 * i) % 250 + 1 for i in range(20)], PLACES["scattered"]
    found = []
    for weights, kept in ((exact, torch.float32), (rough, dtype)):
        host = HostDecoder(weights, Forward(weights, CONTEXT).rotary, kept_for(weights, kept))
        assert HostDecoder.takes(weights, host.cache, invariant=False)
        steps = [host.run(token, Span(0, 1, pages, at + 1)) for at, token in enumerate(ids)]
        found.append(torch.cat(steps).log_softmax(-1))
    assert (found[0] - found[1]).square().mean().sqrt() < 0.1
