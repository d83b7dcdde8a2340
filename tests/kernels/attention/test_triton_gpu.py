"""The Triton implementation on a GPU: the whole grid, awkward lengths, races, capture, compile.

    pytest -m gpu -n 8 tests/kernels/attention/test_triton_gpu.py

Most of the time goes into compiling kernels, which workers share through Triton's cache on disk.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from ridgeline.kernels.attention import flash_attn_func, flash_attn_varlen_func
from ridgeline.kernels.attention.dispatch import attention_op, backward_op

from . import cases
from .test_op import _values, _with_grad

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here"),
]


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_grid(case):
    cases.check_forward("triton", case, "cuda")
    if not case.forward_only:
        cases.check_backward("triton", case, "cuda")


LENGTHS = [
    (1, 1), (1, 1023), (113, 203), (128, 217), (108, 256), (256, 512), (512, 256), (1024, 1024),
    (1023, 1024), (239, 1), (799, 3), (3, 799), (64, 2048), (2048, 64), (127, 129), (129, 127),
    (640, 128), (1000, 1000), (63, 4097), (333, 777),
]  # fmt: skip
MASKS = {"full": {}, "causal": dict(causal=True), "window": dict(window=(100, 0))}


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
def test_lengths(dim, mask, half):
    kind = dict(dim=dim, dim_v=dim, dtype="bfloat16", **MASKS[mask])
    for seqlen_q, seqlen_k in LENGTHS[half::2]:
        case = cases.Case(name="", seqlen_q=seqlen_q, seqlen_k=seqlen_k, **kind)
        cases.check_forward("triton", case, "cuda")
        cases.check_backward("triton", case, "cuda")


@pytest.mark.parametrize("dim", range(16, 257, 8))
def test_every_head_dim(dim):
    dtype = ("bfloat16", "float16")[dim // 8 % 2]
    for dim_v in {dim, 256 - dim + 16}:
        case = cases.Case(
            name="", seqlen_q=150, seqlen_k=170, causal=True, dim=dim, dim_v=dim_v, dtype=dtype
        )
        cases.check_forward("triton", case, "cuda")
        if dim == dim_v or dim <= 64:
            cases.check_backward("triton", case, "cuda")


NARROW = {
    "leftpad": {},
    "paged": {},
    "varlen_paged": {},
    "seqused": {},
    "decode": dict(seqlen_q=16, kv_heads=1, layout="paged"),
    "sliced": dict(strides="sliced", layout="dense"),
    "transposed": dict(strides="transposed", layout="dense"),
}


@pytest.mark.parametrize("dims", [(40, 24), (24, 40), (64, 32), (32, 128)])
@pytest.mark.parametrize("kind", NARROW)
def test_two_widths_without_tma(kind, dims):
    """K and V tiles of two widths, loaded by pointers (descriptors.py says what went wrong)."""
    base = dict(layout=kind, seqlen_q=100, seqlen_k=200, batch=3, causal=True, dtype="bfloat16")
    case = cases.Case(name=kind, dim=dims[0], dim_v=dims[1], **{**base, **NARROW[kind]})
    cases.check_forward("triton", case, "cuda")
    if not case.forward_only:
        cases.check_backward("triton", case, "cuda")


@pytest.mark.parametrize("page", [32, 64, 128, 256, 1024])
@pytest.mark.parametrize("seqlen_q", [1, 8, 100])
def test_page_sizes(seqlen_q, page):
    """Pages smaller than a tile of keys are gathered, others come by TMA."""
    for dim, heads in ((64, 4), (128, 8)):
        case = cases.Case(
            name="", layout="paged", page=page, seqlen_q=seqlen_q, seqlen_k=700, batch=3, dim=dim,
            dim_v=dim, heads=heads, causal=True, dtype="bfloat16",
        )  # fmt: skip
        cases.check_forward("triton", case, "cuda")


WIDE = {
    **cases.OPTIONS,
    **{kind: dict(layout=kind, causal=True) for kind in ("varlen", "seqused", "leftpad")},
    "varlen-full": dict(layout="varlen"),
    "batch_idx": dict(layout="batch_idx", causal=True),
    "transposed": dict(strides="transposed", causal=True),
}


MIXED = ("plain", "causal-window", "dropout", "everything", "varlen", "leftpad")
WIDE_DIMS = [(kind, (128, 128)) for kind in WIDE]
WIDE_DIMS += [(kind, dims) for kind in MIXED for dims in ((32, 128), (128, 40))]


@pytest.mark.parametrize("kind, dims", WIDE_DIMS)
def test_wide_heads(kind, dims):
    """Every option with the tiles of head dim 128, Q and dO of dQ in registers or not
    (machine_code.py says what went wrong)."""
    sizes = dict(seqlen_q=200, seqlen_k=330, batch=3, dtype="bfloat16")
    case = cases.Case(name=kind, dim=dims[0], dim_v=dims[1], **{**sizes, **WIDE[kind]})
    cases.check_forward("triton", case, "cuda")
    cases.check_backward("triton", case, "cuda")


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
def test_packed_lengths(dim, mask):
    kind = dict(dim=dim, dim_v=dim, dtype="bfloat16", layout="varlen", batch=9, **MASKS[mask])
    for seqlen_q, seqlen_k in ((700, 700), (129, 515), (515, 129)):
        case = cases.Case(name="", seqlen_q=seqlen_q, seqlen_k=seqlen_k, **kind)
        cases.check_forward("triton", case, "cuda")
        cases.check_backward("triton", case, "cuda")


@pytest.mark.parametrize("layout", ["dense", "varlen"])
@pytest.mark.parametrize("dim", [64, 128])
def test_repeats_bitwise_200_times(dim, layout):
    case = cases.Case(
        name="", seqlen_q=640, seqlen_k=640, dim=dim, dim_v=dim, dtype="bfloat16", causal=True,
        layout=layout, batch=3,
    )  # fmt: skip
    built = cases.build(case, "cuda")
    a, module = built.arguments, cases.module_of("triton")

    def once():
        out, lse = module.forward(a.q, a.k, a.v, a.options(), a.extras())
        grads = module.backward(built.dout, None, a.q, a.k, a.v, out, lse, a.options(), a.extras())
        return out, lse, grads.dq, grads.dk, grads.dv

    first = once()
    for _ in range(199):
        for one, other in zip(first, once(), strict=True):
            assert torch.equal(one, other)


def test_more_than_two_to_the_31_elements():
    heads, seqlen, dim = 2, 2**23 + 64, 128
    k = torch.zeros(1, seqlen, heads, dim, device="cuda", dtype=torch.bfloat16)
    k[:, -64:] = torch.randn(1, 64, heads, dim, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(1, 128, heads, dim, device="cuda", dtype=torch.bfloat16)
    assert k.numel() > 2**31
    a = cases.Arguments(q=q, k=k, v=k, softmax_scale=dim**-0.5, window_left=63 + 127)
    out, lse = cases.module_of("triton").forward(q, k, k, a.options(), a.extras())
    tail = k[:, -512:]
    b = cases.Arguments(q=q, k=tail, v=tail, softmax_scale=dim**-0.5, window_left=63 + 127)
    expected, expected_lse = cases.attention_ref(q, tail, tail, b.options(), b.extras())
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_a_bad_query_row_stays_in_its_row(layout, poison):
    case = cases.Case(
        name="", seqlen_q=200, seqlen_k=230, causal=True, dim=64, dim_v=64, dtype="bfloat16",
        layout=layout, batch=4,
    )  # fmt: skip
    a, module = cases.build(case, "cuda").arguments, cases.module_of("triton")
    clean, clean_lse = module.forward(a.q, a.k, a.v, a.options(), a.extras())
    q = a.q.clone()
    row = (7, 2) if layout == "varlen" else (1, 7, 2)
    q[row][3] = poison
    out, lse = module.forward(q, a.k, a.v, a.options(), a.extras())
    touched = torch.zeros_like(out, dtype=torch.bool)
    touched[row] = True
    assert not out[row].isfinite().all()
    assert torch.equal(out[~touched], clean[~touched])
    same = ~touched[..., 0].transpose(-1, -2)
    assert torch.equal(lse[same], clean_lse[same])


def test_the_next_sequence_may_hold_nan():
    starts = torch.tensor([0, 70, 300], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(300, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    results = []
    for poison in (0.0, float("nan")):
        leaves = [torch.cat((x[:70], x[70:] + poison)).requires_grad_() for x in (q, k, v)]
        out = flash_attn_varlen_func(*leaves, starts, starts, 230, 230, causal=True, impl="triton")
        assert isinstance(out, torch.Tensor)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        results.append([x[:70] for x in (out, *grads)])
    for clean, beside_nan in zip(*results, strict=True):
        assert clean.isfinite().all() and torch.equal(clean, beside_nan)


@pytest.mark.parametrize("layout", ["dense", "varlen", "paged"])
def test_captured_in_a_graph(layout):
    case = cases.Case(
        name="", seqlen_q=96, seqlen_k=150, dim=64, dim_v=64, dtype="bfloat16", causal=True,
        layout=layout, batch=3,
    )  # fmt: skip
    built = cases.build(case, "cuda")
    a, module = built.arguments, cases.module_of("triton")

    def once():
        out, lse = module.forward(a.q, a.k, a.v, a.options(), a.extras())
        if case.forward_only:
            return [out, lse]
        grads = module.backward(built.dout, None, a.q, a.k, a.v, out, lse, a.options(), a.extras())
        return [out, lse, grads.dq, grads.dk, grads.dv]

    once()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = once()
    a.q.normal_()
    graph.replay()
    for got, want in zip(captured, once(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("options", [{}, dict(sinks=True, bias="full", dropout=0.2, softcap=3.0)])
def test_opcheck(options):
    case = cases.Case(
        name="", seqlen_q=33, seqlen_k=40, causal=True, dtype="bfloat16", dim=32, **options
    )
    built = cases.build(case, "cuda")
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    a = _with_grad(built.arguments)
    assert set(torch.library.opcheck(attention_op, _values(a), test_utils=tests).values()) == {
        "SUCCESS"
    }
    out, lse = attention_op(*_values(built.arguments))
    given = (built.dout, built.dlse, out, lse, *_values(built.arguments))
    assert set(torch.library.opcheck(backward_op, given, test_utils=tests).values()) == {"SUCCESS"}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_in_one_graph():
    """Inductor's import of its own mkldnn lowerings warns (PyTorch 2.11, Python 3.12)."""
    q, k, v = (
        torch.randn(2, 70, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    )

    def layer(q, k, v):
        return flash_attn_func(q * 2, k, v, causal=True, window_size=(40, 0)).sin()

    compiled = torch.compile(layer, fullgraph=True)
    results = []
    for run in (layer, compiled):
        out = run(q, k, v)
        results.append([out, *torch.autograd.grad(out.float().sum(), (q, k, v))])
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager, atol=2e-2, rtol=2e-2)
