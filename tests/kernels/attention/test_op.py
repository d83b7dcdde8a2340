"""The public functions and the operators under them: autograd, fake, compile, packing, variants."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch

from ridgeline.core import arch as arches
from ridgeline.core import registry
from ridgeline.kernels.attention import (
    calls,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)
from ridgeline.kernels.attention.append_op import append_op
from ridgeline.kernels.attention.arguments import SCHEMA, Arguments
from ridgeline.kernels.attention.dispatch import _decide, attention_op, backward_op, module_for

from . import cases

OP_CASES = {
    "causal": cases.Case(name="causal", causal=True, dim_v=16, seqlen_k=20),
    "all": cases.Case(name="all", seqlen_q=7, seqlen_k=9, **cases.OPTIONS["everything"]),
    "varlen": cases.Case(name="varlen", layout="varlen", causal=True, bias="batch"),
}


def _values(a: Arguments) -> tuple:
    return tuple(getattr(a, field.name) for field in fields(Arguments))


def _with_grad(a: Arguments) -> Arguments:
    names = [n for n in ("q", "k", "v", "sinks", "bias") if getattr(a, n) is not None]
    leaves = {n: getattr(a, n).detach().requires_grad_() for n in names}
    return replace(a, needs_grad=True, **leaves)


def test_schema_and_dataclass_agree():
    assert [part.split()[-1] for part in SCHEMA.split(", ")] == [
        field.name for field in fields(Arguments)
    ]


# PyTorch 2.14's opcheck reads .grad of tensors that are no leaves and warns of it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", OP_CASES)
def test_opcheck_forward(name):
    a = _with_grad(cases.build(OP_CASES[name]).arguments)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    more = ("test_aot_dispatch_dynamic",) if name == "causal" else ()
    result = torch.library.opcheck(attention_op, _values(a), test_utils=tests + more)
    assert set(result.values()) == {"SUCCESS"}


# PyTorch 2.14's opcheck reads .grad of tensors that are no leaves and warns of it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", OP_CASES)
def test_opcheck_backward(name):
    built = cases.build(OP_CASES[name])
    out, lse = attention_op(*_values(built.arguments))
    given = (built.dout, built.dlse, out, lse, *_values(built.arguments))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    more = ("test_aot_dispatch_dynamic",) if name == "causal" else ()
    result = torch.library.opcheck(backward_op, given, test_utils=tests + more)
    assert set(result.values()) == {"SUCCESS"}


def test_opcheck_append():
    caches, new = (torch.zeros(2, 8, 1, 4), torch.zeros(2, 8, 1, 4)), torch.randn(2, 3, 1, 4)
    lengths = torch.tensor([0, 4], dtype=torch.int32)
    given = (*caches, new, new, lengths, None, None, torch.ones(8, 2), torch.zeros(8, 2), True)
    result = torch.library.opcheck(append_op, given, test_utils=("test_schema", "test_faketensor"))
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", OP_CASES)
def test_gradients_through_autograd_equal_fp64(name):
    built = cases.build(replace(OP_CASES[name], dlse=True))
    a = _with_grad(built.arguments)
    out, lse = attention_op(*_values(a))
    (out * built.dout).sum().add((lse * built.dlse).nan_to_num(0, 0, 0).sum()).backward()
    expected = cases.reference(built, torch.float64)
    for leaf in ("q", "k", "v", "sinks", "bias"):
        if getattr(a, leaf) is not None:
            got = getattr(a, leaf).grad.double()
            torch.testing.assert_close(got, expected["d" + leaf], rtol=1e-4, atol=1e-5)


THROUGH = {
    name: cases.Case(name=name, seqlen_q=9, seqlen_k=11, dim_v=24, **options)
    for name, options in cases.OPTIONS.items()
} | {
    "seqused": cases.Case(name="seqused", layout="seqused", batch=4, **cases.OPTIONS["everything"]),
    "seqused-plain": cases.Case(name="seqused-plain", layout="seqused", batch=4),
}


@pytest.mark.parametrize("name", THROUGH)
@pytest.mark.parametrize("impl", [impl.name for impl in cases.impls_here()])
def test_gradients_through_the_function_equal_fp64(impl, name):
    """An operator's kernel runs below autograd: an implementation must not lean on it."""
    built = cases.build(THROUGH[name])
    problem = built.arguments.problem("bwd")
    if refused := registry.refusal(_impl(impl), problem, arches.detect("cpu")):
        pytest.skip(refused)
    a = _with_grad(built.arguments)
    seed, offset = (None, 0) if a.seed_offset is None else a.seed_offset.tolist()
    out, lse = flash_attn_func(
        a.q, a.k, a.v, a.dropout_p, a.softmax_scale, a.causal, (a.window_left, a.window_right),
        a.softcap, a.alibi_slopes, sinks=a.sinks, bias=a.bias, seqused_q=a.seqused_q,
        seqused_k=a.seqused_k, dropout_seed=seed, dropout_offset=offset, impl=impl, return_lse=True,
    )  # fmt: skip
    results, given = [out], [built.dout]
    if built.dlse is not None:
        results, given = [out, lse], [built.dout, built.dlse]
    torch.autograd.backward(results, given)
    expected = cases.reference(built, torch.float64)
    for leaf in ("q", "k", "v", "sinks", "bias"):
        if getattr(a, leaf) is not None:
            got, want = getattr(a, leaf).grad.double(), expected["d" + leaf]
            assert want.any() or name == "window-0-0"  # one key a row: only v matters
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def _impl(name: str) -> registry.Impl:
    return next(impl for impl in registry.impls("attention") if impl.name == name)


def test_gradcheck_in_fp64():
    q, k, v = (torch.randn(1, 4, n, 8, dtype=torch.float64) for n in (2, 1, 1))
    sinks = torch.randn(2, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]

    def function(q, k, v, sinks):
        return flash_attn_func(q, k, v, causal=True, softcap=2.0, sinks=sinks, return_lse=True)

    assert torch.autograd.gradcheck(function, leaves)


def test_second_derivative_is_refused():
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(flash_attn_func(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="attention: create_graph must be False"):
        grad.sum().backward()


def test_compile_fullgraph():
    def loss(q, k, v, sinks):
        out, lse = flash_attn_func(q * 2, k, v, causal=True, sinks=sinks, return_lse=True)
        return (out.square().sum() + lse.sum()).sin()

    inputs = [torch.randn(2, 12, n, 16) for n in (4, 2, 2)] + [torch.randn(4)]
    eager, compiled = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    expected = loss(*eager)
    expected.backward()
    got = torch.compile(loss, fullgraph=True, backend="aot_eager")(*compiled)
    got.backward()
    torch.testing.assert_close(got, expected)
    for one, other in zip(compiled, eager, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_compiled_dropout_draws_anew():
    q = torch.randn(1, 16, 2, 8)
    compiled = torch.compile(
        lambda q: flash_attn_func(q, q, q, 0.5), fullgraph=True, backend="aot_eager"
    )
    assert not torch.equal(compiled(q), compiled(q))


def test_dropout_repeats_from_its_seed_and_from_torchs():
    q = torch.randn(1, 16, 2, 8)
    seeded = [flash_attn_func(q, q, q, 0.5, dropout_seed=5) for _ in range(2)]
    assert torch.equal(*seeded)
    assert not torch.equal(
        seeded[0], flash_attn_func(q, q, q, 0.5, dropout_seed=5, dropout_offset=1)
    )
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(flash_attn_func(q, q, q, 0.5))
    assert torch.equal(*drawn)


def test_packed_variants_equal_the_plain_one():
    q, kv = torch.randn(2, 9, 4, 16), torch.randn(2, 9, 2, 4, 16)
    expected = flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], causal=True)
    assert torch.equal(flash_attn_kvpacked_func(q, kv, causal=True), expected)
    qkv = torch.cat((q[:, :, None], kv), dim=2)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, causal=True), expected)


def test_return_attn_probs_is_out_lse_none():
    q = torch.randn(1, 5, 2, 8)
    out, lse, probs = flash_attn_func(q, q, q, return_attn_probs=True)
    assert probs is None and lse.shape == (1, 2, 5) and torch.equal(out, flash_attn_func(q, q, q))


def test_varlen_equals_each_sequence_alone():
    lengths = [5, 0, 1, 12]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v = (torch.randn(18, n, 16, requires_grad=True) for n in (4, 2, 2))
    out = flash_attn_varlen_func(q, k, v, starts, starts, 12, 12, causal=True, window_size=(6, -1))
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    for start, length in zip(starts.tolist(), lengths, strict=False):
        span = slice(start, start + length)
        one = [x[span][None].detach().requires_grad_() for x in (q, k, v)]
        alone = flash_attn_func(*one, causal=True, window_size=(6, -1))
        torch.testing.assert_close(out[span], alone[0])
        for got, want in zip(grads, torch.autograd.grad(alone.square().sum(), one), strict=True):
            torch.testing.assert_close(got[span], want[0])


def test_impl_argument_and_environment(monkeypatch):
    a = cases.build(OP_CASES["causal"]).arguments
    assert module_for(a, "fwd").__name__.endswith(".cpu")
    assert module_for(replace(a, impl="tiled"), "fwd").__name__.endswith(".tiled")
    monkeypatch.setenv("RIDGELINE_IMPL_ATTENTION", "ref")
    assert module_for(a, "fwd").__name__.endswith(".ref")
    assert module_for(replace(a, impl="cpu"), "fwd").__name__.endswith(".cpu")
    with pytest.raises(ValueError, match="attention: impl must be one of .*got 'best'"):
        module_for(replace(a, impl="best"), "fwd")


def test_a_refused_backward_is_refused_before_the_forward(monkeypatch):
    def forward_only(problem, arch):
        return "forward only" if problem.direction == "bwd" else None

    impl = replace(_impl("cpu"), name="half", refuses=forward_only, priority=1000)
    monkeypatch.setitem(registry._impls["attention"], "half", impl)
    q = torch.randn(1, 5, 2, 8)
    assert flash_attn_func(q, q, q, impl="half").shape == q.shape
    with pytest.raises(NotImplementedError, match="half refuses .*half: forward only"):
        flash_attn_func(q.requires_grad_(), q, q, impl="half")
    assert flash_attn_func(q, q, q).requires_grad  # left to choose, backward takes another
    _decide.cache_clear()
    calls.forget()


def test_decision_is_cached():
    q = torch.randn(1, 5, 2, 8)
    numbers = [getattr(Arguments(q, q, q), field.name) for field in fields(Arguments)[3:]]
    attention_op(q, q, q, *numbers)
    before = _decide.cache_info()
    attention_op(q, q, q, *numbers)
    after = _decide.cache_info()
    assert (after.hits, after.misses) == (before.hits + 1, before.misses)


def test_plain_calls_are_checked_once_a_kind(monkeypatch):
    checked = []
    real = calls.check_static
    monkeypatch.setattr(calls, "check_static", lambda a: (checked.append(a), real(a)))
    calls.forget()
    q, k = torch.randn(1, 6, 4, 16), torch.randn(1, 7, 2, 16)
    first = flash_attn_func(q, k, k)
    assert torch.equal(flash_attn_func(q, k, k), first) and len(checked) == 1
    others = [
        flash_attn_func(q, k, k, causal=True),
        flash_attn_func(q, k, k, softmax_scale=0.5),
        flash_attn_func(q, k, k, window_size=(1, 0)),
        flash_attn_func(q[:, :5], k, k),
        flash_attn_func(q.transpose(1, 2).contiguous().transpose(1, 2), k, k),
        flash_attn_func(q, k[:, :6], k[:, :6]),
        flash_attn_func(q.double(), k.double(), k.double()),
        flash_attn_func(q, k, k, impl="ref"),
    ]
    assert len(checked) == 1 + len(others)
    for again in range(2):  # what is refused stays refused
        with pytest.raises(ValueError, match="attention: k must have a number of heads"):
            flash_attn_func(q[:, :, :3], k, k)
        with pytest.raises(ValueError, match="attention: softcap must be"):
            flash_attn_func(q, k, k, softcap=-1.0)
        assert len(checked) == 1 + len(others) + 2 * (again + 1)
    monkeypatch.setenv("RIDGELINE_IMPL_ATTENTION", "ref")
    flash_attn_func(q, k, k)
    assert len(checked) == 1 + len(others) + 5


def test_import_brings_no_triton():
    code = (
        "import sys, ridgeline.kernels.attention; "
        "print([m for m in sys.modules if m.split('.')[0] in ('triton', 'cutlass')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("impl", ["ref", "cpu"])
def test_left_padding_hides_the_first_keys_and_moves_nothing(impl):
    """Forward and backward against each sequence with its keys cut off."""
    q, k, v = (torch.randn(2, 7, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    first = torch.tensor([3, 0], dtype=torch.int32)
    out = flash_attn_func(q, k, v, causal=True, leftpad_k=first, impl=impl)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    rows = [
        flash_attn_func(q[b : b + 1], k[b : b + 1, n:], v[b : b + 1, n:], causal=True, impl="ref")
        for b, n in enumerate(first.tolist())
    ]
    want = torch.cat(rows)
    wanted = torch.autograd.grad(want.square().sum(), (q, k, v))
    torch.testing.assert_close(out, want)
    for got, expected in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("impl", ["ref", "cpu", "tiled"])
def test_gradients_through_the_function_are_the_formulas(impl):
    """Not the module's backward alone: inside an operator autograd is off unless asked for."""
    q, k, v = (torch.randn(2, 5, 2, 16, requires_grad=True) for _ in range(3))
    weight = torch.randn(2, 5, 2, 16)
    p = torch.softmax(torch.einsum("bshd,bthd->bhst", q, k) / 4, dim=-1)
    plain = torch.einsum("bhst,bthd->bshd", p, v)
    found = [
        torch.autograd.grad((out * weight).sum(), (q, k, v))
        for out in (plain, flash_attn_func(q, k, v, impl=impl))
    ]
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want)
