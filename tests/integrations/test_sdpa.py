"""scaled_dot_product_attention inside routed_sdpa() against PyTorch's own."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F

from ridgeline.integrations import sdpa
from ridgeline.integrations.sdpa import routed_sdpa

early = F.scaled_dot_product_attention  # a name imported before the block


@pytest.fixture
def calls(monkeypatch):
    """The calls that reached our attention."""
    seen = []
    ours = sdpa.flash_attn_func

    def spy(*args, **kwargs):
        seen.append(kwargs)
        return ours(*args, **kwargs)

    monkeypatch.setattr(sdpa, "flash_attn_func", spy)
    return seen


def _qkv(S=7, T=7, heads=4, kv_heads=4, dim_v=16, dtype=torch.float32, lead=(2,)):
    shapes = ((*lead, heads, S, 16), (*lead, kv_heads, T, 16), (*lead, kv_heads, T, dim_v))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def _both(calls, qkv, mask=None, **options):
    """(ours, PyTorch's): the result and the gradients of everything that has one."""
    inputs = [t for t in (*qkv, mask) if t is not None and t.requires_grad]
    found = []
    for routed in (True, False):
        if routed:
            with routed_sdpa():
                out = F.scaled_dot_product_attention(*qkv, mask, **options)
            assert calls
        else:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                out = F.scaled_dot_product_attention(*qkv, mask, **options)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
        grads = torch.autograd.grad((out * weight.to(out)).sum(), inputs)
        found.append((out.detach(), *grads))
    return found


def _assert_same(found, **tolerance):
    ours, torchs = found
    for got, want in zip(ours, torchs, strict=True):
        torch.testing.assert_close(got, want, **(tolerance or {"rtol": 1e-5, "atol": 1e-5}))


LENGTHS = [(7, 7), (5, 9), (9, 5), (1, 8), (8, 1), (64, 65)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("S, T", LENGTHS)
def test_lengths_and_the_top_left_mask(calls, S, T, is_causal):
    _assert_same(_both(calls, _qkv(S, T), is_causal=is_causal))


def test_causal_counts_from_the_top_left(calls):
    q, k, v = _qkv(2, 5)
    with routed_sdpa():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0])  # the first row sees the first key only


MASKS = [(7, 9), (1, 9), (7, 1), (2, 1, 7, 9), (1, 4, 7, 9), (2, 4, 7, 9), (4, 7, 9), (1, 1, 1, 9)]


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", MASKS)
def test_masks(calls, shape, kind):
    if kind == "bool":
        mask = torch.rand(shape) < 0.6
    else:
        mask = torch.randn(shape, requires_grad=True)
    _assert_same(_both(calls, _qkv(7, 9), mask))


def test_a_row_that_sees_nothing_is_zero(calls):
    mask = torch.ones(7, 9, dtype=torch.bool)
    mask[3] = False
    found = _both(calls, _qkv(7, 9), mask)
    assert not found[0][0][:, :, 3].any()
    _assert_same(found)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads(calls, kv_heads):
    _assert_same(_both(calls, _qkv(kv_heads=kv_heads), enable_gqa=True, is_causal=True))


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_leading_dims_scale_and_width(calls, lead):
    _assert_same(_both(calls, _qkv(lead=lead, dim_v=24), scale=0.3))


def test_leading_dims_with_a_mask(calls):
    _assert_same(_both(calls, _qkv(lead=(2, 3)), torch.rand(2, 1, 4, 7, 7) < 0.6))
    _assert_same(_both(calls, _qkv(lead=()), torch.rand(4, 7, 7) < 0.6))


def test_heads_and_batch_are_broadcast(calls):
    q, k, v = _qkv()
    _assert_same(_both(calls, [q, k[:1].detach(), v[:, :1].detach()]))


def test_double_and_half(calls):
    _assert_same(_both(calls, _qkv(dtype=torch.float64)), rtol=1e-10, atol=1e-10)
    _assert_same(_both(calls, _qkv(dtype=torch.bfloat16)), rtol=2e-2, atol=2e-2)


def test_autocast(calls):
    q, k, v = _qkv()
    with routed_sdpa(), torch.autocast("cpu", torch.bfloat16):
        out = F.scaled_dot_product_attention(q, k, v)
    assert out.dtype == torch.bfloat16 and calls


def test_dropout(calls):
    q, k, v = _qkv(64, 64)
    with routed_sdpa():
        torch.manual_seed(3)
        one = F.scaled_dot_product_attention(q, k, torch.ones_like(v), dropout_p=0.25)
        torch.manual_seed(3)
        again = F.scaled_dot_product_attention(q, k, torch.ones_like(v), dropout_p=0.25)
    assert torch.equal(one, again)
    one = one.detach()
    assert abs(float(one.mean()) - 1.0) < 0.02 and float(one.std()) > 0.01


def test_every_name_and_multi_head_attention(calls):
    q, k, v = _qkv()
    with routed_sdpa():
        early(q, k, v)
    assert len(calls) == 1
    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 7, 16)
    want = layer(x, x, x, need_weights=False)[0]
    with routed_sdpa():
        got = layer(x, x, x, need_weights=False)[0]
    assert len(calls) == 2
    torch.testing.assert_close(got, want)


def test_the_route_ends_with_the_block(calls):
    q, k, v = _qkv()
    with pytest.raises(KeyError), routed_sdpa():
        raise KeyError
    with routed_sdpa():
        with routed_sdpa("ref"):
            F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, k, v)
    F.scaled_dot_product_attention(q, k, v)
    assert [call["impl"] for call in calls] == ["ref", None]


def test_other_threads_are_left_alone(calls):
    q, k, v = _qkv()
    with routed_sdpa():
        other = threading.Thread(target=F.scaled_dot_product_attention, args=(q, k, v))
        other.start()
        other.join()
    assert not calls


# PyTorch's word about vmap over its CPU kernel (2.14), none of ours.
@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not:UserWarning")
def test_what_is_not_ours_is_pytorchs_with_one_warning(calls, monkeypatch):
    monkeypatch.setattr(sdpa, "_warned", set())
    q, k, v = (x.detach() for x in _qkv())
    one = torch.func.vmap(lambda x: F.scaled_dot_product_attention(x, k[0], v[0]))
    want = one(q)
    with routed_sdpa():
        with pytest.warns(UserWarning, match="left to PyTorch: vmap"):
            got = one(q)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*left to PyTorch")
            one(q)
    torch.testing.assert_close(got, want)
    assert not calls


def test_a_wrong_call_is_pytorchs_error(monkeypatch):
    monkeypatch.setattr(sdpa, "_warned", {"key and value that do not match"})
    q, k, v = _qkv()
    with routed_sdpa(), pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, k[..., :8], v)


class _Layer(torch.nn.Module):
    def forward(self, q, k, v, mask):
        causal = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return causal + F.scaled_dot_product_attention(q, k, v, mask)


def _ops(graph_module) -> list[str]:
    return [
        str(node.target) for node in graph_module.graph.nodes if "ridgeline" in str(node.target)
    ]


def test_compile():
    """Compiled code follows the route: into a block, and out of it."""
    graphs = []

    def backend(graph_module, inputs):
        graphs.append(_ops(graph_module))
        return graph_module

    q, k, v = _qkv()
    mask = torch.rand(7, 7) < 0.6
    layer = _Layer()
    want = layer(q, k, v, mask)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for routed in (False, True, False, True):
        if routed:
            with routed_sdpa():
                got = compiled(q, k, v, mask)
        else:
            got = compiled(q, k, v, mask)
        torch.testing.assert_close(got, want)
    assert [len(ops) for ops in graphs] == [0, 2]


def test_export():
    q, k, v = (x.detach() for x in _qkv())
    mask = torch.rand(7, 7) < 0.6
    want = _Layer()(q, k, v, mask)
    with routed_sdpa():
        program = torch.export.export(_Layer(), (q, k, v, mask))
    assert len(_ops(program.graph_module)) == 2
    torch.testing.assert_close(program.module()(q, k, v, mask), want)


def _on_gpu(*tensors):
    return [x.detach().to("cuda").requires_grad_(x.requires_grad) for x in tensors]


@pytest.mark.gpu
@pytest.mark.parametrize("S, T", LENGTHS)
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
def test_values_and_gradients_on_a_gpu(calls, S, T, mask):
    masks = {"bool": torch.rand(S, T) < 0.6, "float": torch.randn(S, T, requires_grad=True)}
    chosen = _on_gpu(masks[mask])[0] if mask in masks else None
    qkv = _on_gpu(*_qkv(S, T, kv_heads=2))
    _assert_same(_both(calls, qkv, chosen, is_causal=mask == "causal", enable_gqa=True))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_compiled_and_exported_on_a_gpu():
    inputs = [x.detach() for x in _on_gpu(*_qkv(64, 64), torch.rand(64, 64) < 0.6)]
    layer = _Layer()
    want = layer(*inputs)
    torch._dynamo.reset()
    with routed_sdpa():
        got = torch.compile(layer, fullgraph=True)(*inputs)
        program = torch.export.export(layer, tuple(inputs))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(program.module()(*inputs), want, rtol=1e-5, atol=1e-5)
