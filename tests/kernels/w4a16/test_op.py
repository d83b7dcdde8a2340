"""The W4A16 op for every implementation that runs on a CPU: values, exactness, compile,
refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ridgeline.core.arch import pretend
from ridgeline.core.registry import impls, refusal
from ridgeline.kernels.w4a16 import cpu, op
from ridgeline.kernels.w4a16.ref import w4a16_ref

from .weights import make_weight

ON_CPU = [impl.name for impl in impls("w4a16") if set(impl.archs) & {"cpu", "any"}]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
KINDS = [
    {"symmetric": symmetric, "act_order": act_order, "coarse": coarse}
    for symmetric in (True, False)
    for act_order in (False, True)
    for coarse in (False, True)
]


@pytest.fixture(autouse=True)
def small_layers_count(monkeypatch) -> None:
    """The CPU's layout for one row is taken for the small layers of this file too."""
    monkeypatch.setattr(cpu, "LEAST_WEIGHTS", 0)


def accepts(impl: str, weight, dtype: torch.dtype) -> bool:
    chosen = next(i for i in impls("w4a16") if i.name == impl)
    return refusal(chosen, op.problem_of(weight, dtype), pretend("cpu")) is None


@pytest.mark.parametrize("impl", ON_CPU)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("group", [32, 64, 96])
def test_one_hot_returns_every_weight_bit_for_bit(impl, dtype, kind, group) -> None:
    weight = make_weight(48, 192, group, **kind)
    if not accepts(impl, weight, dtype):
        pytest.skip(f"{impl} refuses this weight")
    prepared = op.prepare(weight, dtype, impl=impl)
    eye = torch.eye(192, dtype=dtype)
    for rows in (1, 7, 192):
        out = torch.cat([op.w4a16_linear(part, prepared) for part in eye.split(rows)])
        assert torch.equal(out.T, weight.dequantize(dtype)), rows


@pytest.mark.parametrize("impl", ON_CPU)
@pytest.mark.parametrize("bits", [2, 3, 8])
def test_other_widths_are_exact_or_refused(impl: str, bits: int) -> None:
    weight = make_weight(32, 64, 32, bits=bits, symmetric=False)
    if not accepts(impl, weight, torch.float32):
        pytest.skip(f"{impl} refuses {bits} bits")
    prepared = op.prepare(weight, torch.float32, impl=impl)
    assert torch.equal(op.w4a16_linear(torch.eye(64), prepared).T, weight.dequantize())


@pytest.mark.parametrize("impl", ON_CPU)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 2, 13, 15, 16, 17, 31, 32, 33, 130])
def test_numerics_rule(impl: str, dtype: torch.dtype, m: int) -> None:
    """max|impl - ref32| <= 2 max|same-dtype matmul - ref32| + floor, and the same of the mean."""
    weight = make_weight(80, 256, 64, coarse=True)
    act_MK, bias_N = torch.randn(m, 256).to(dtype), torch.randn(80).to(dtype)
    prepared = op.prepare(weight, dtype, impl=impl)
    for bias in (None, bias_N):
        exact = w4a16_ref(act_MK.float(), weight, None if bias is None else bias.float())
        plain = w4a16_ref(act_MK, weight, bias, compute_dtype=dtype).float()
        out = op.w4a16_linear(act_MK, prepared, bias)
        assert out.dtype == dtype and out.shape == (m, 80)
        error, allowed = (out.float() - exact).abs(), (plain - exact).abs()
        assert error.max() <= 2 * allowed.max() + 1e-5
        assert error.mean() <= 2 * allowed.mean() + 1e-6


@pytest.mark.parametrize("impl", ON_CPU)
def test_silu_mul(impl: str) -> None:
    weight = make_weight(64, 64, 32, coarse=True)
    prepared = op.prepare(weight, torch.float32, impl=impl, silu_mul=True)
    act = torch.randn(2, 3, 64)
    expected = w4a16_ref(act.reshape(6, 64), weight, silu_mul=True).reshape(2, 3, 32)
    torch.testing.assert_close(op.w4a16_linear(act, prepared), expected)


@pytest.mark.parametrize("impl", ON_CPU)
def test_batch_invariance(impl: str) -> None:
    """A row's bits are the same alone and among 40 others."""
    prepared = op.prepare(make_weight(64, 128, 64, coarse=True), torch.bfloat16, impl=impl)
    act_MK = torch.randn(41, 128, dtype=torch.bfloat16)
    together = op.w4a16_linear(act_MK, prepared, batch_invariant=True)
    alone = op.w4a16_linear(act_MK[17:18], prepared, batch_invariant=True)
    assert torch.equal(together[17:18], alone)


def test_shapes_strides_and_emptiness() -> None:
    weight = make_weight(32, 64, 32)
    prepared = op.prepare(weight, torch.float32)
    assert op.w4a16_linear(torch.empty(0, 64), prepared).shape == (0, 32)
    assert op.w4a16_linear(torch.empty(2, 0, 64), prepared).shape == (2, 0, 32)
    assert op.w4a16_linear(torch.ones(64), prepared).shape == (32,)
    act = torch.randn(64, 5).T
    torch.testing.assert_close(op.w4a16_linear(act, prepared), w4a16_ref(act, weight))
    wide = torch.randn(5, 80)[:, 8:72]
    torch.testing.assert_close(op.w4a16_linear(wide, prepared), w4a16_ref(wide, weight))
    one = torch.randn(1, 64).expand(4, 64)
    torch.testing.assert_close(op.w4a16_linear(one, prepared), w4a16_ref(one, weight))


def call_arguments(weight, dtype: torch.dtype, m: int) -> tuple:
    p = op.prepare(weight, dtype)
    shape, flags = [p.n, p.k, p.bits, p.group_size], [p.symmetric, p.act_order, p.silu_mul]
    return torch.randn(m, p.k).to(dtype), list(p.tensors), None, p.impl, shape, flags, False


@pytest.mark.parametrize("m", [1, 40])
def test_opcheck(m: int) -> None:
    arguments = call_arguments(make_weight(32, 64, 32, coarse=True), torch.bfloat16, m)
    torch.library.opcheck(torch.ops.ridgeline.w4a16.default, arguments)


def test_compiles_without_a_graph_break() -> None:
    prepared = op.prepare(make_weight(32, 64, 32, coarse=True), torch.bfloat16)
    act = torch.randn(3, 64, dtype=torch.bfloat16)
    compiled = torch.compile(
        lambda x: op.w4a16_linear(x, prepared) * 2, fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(act), op.w4a16_linear(act, prepared) * 2)


def test_backward_is_refused_by_name() -> None:
    prepared = op.prepare(make_weight(32, 64, 32), torch.float32)
    out = op.w4a16_linear(torch.randn(2, 64, requires_grad=True), prepared)
    with pytest.raises(NotImplementedError, match="w4a16: act must not require grad"):
        out.sum().backward()


def test_explicit_impl_and_environment(monkeypatch) -> None:
    weight = make_weight(32, 64, 32)
    assert op.prepare(weight, torch.float32).impl == "cpu"
    monkeypatch.setenv("RIDGELINE_IMPL_W4A16", "ref")
    assert op.prepare(weight, torch.float32).impl == "ref"
    assert op.prepare(weight, torch.float32, impl="cpu").impl == "cpu"
    with pytest.raises(ValueError, match="w4a16: impl must be one of"):
        op.prepare(weight, torch.float32, impl="marlin")


def test_bad_weights_are_refused() -> None:
    weight = make_weight(32, 64, 32)
    for value in (0.0, float("inf"), float("nan")):
        scale = weight.scale_NR.clone()
        scale[3, 1] = value
        damaged = dataclasses.replace(weight, scale_NR=scale)
        with pytest.raises(ValueError, match="w4a16: scale_NR must be finite and not zero"):
            op.prepare(damaged, torch.float32)
    short = dataclasses.replace(weight, scale_NR=weight.scale_NR[:, :1])
    with pytest.raises(ValueError, match=r"w4a16: scale_NR must have shape \[32, 2\]"):
        op.prepare(short, torch.float32)
    with pytest.raises(TypeError, match="w4a16: dtype must be bfloat16, float16 or float32"):
        op.prepare(weight, torch.float64)


def test_bad_calls_are_refused() -> None:
    prepared = op.prepare(make_weight(32, 64, 32), torch.float32)
    act = torch.ones(2, 64)
    with pytest.raises(TypeError, match="w4a16: act must be torch.float32"):
        op.w4a16_linear(act.half(), prepared)
    with pytest.raises(ValueError, match="w4a16: act must end in K = 64"):
        op.w4a16_linear(torch.ones(2, 63), prepared)
    with pytest.raises(ValueError, match="w4a16: act must be on cpu"):
        op.w4a16_linear(act.to("meta"), prepared)
    with pytest.raises(ValueError, match=r"w4a16: bias_N must have shape \[32\]"):
        op.w4a16_linear(act, prepared, torch.ones(31))
    with pytest.raises(TypeError, match="w4a16: bias_N must be torch.float32"):
        op.w4a16_linear(act, prepared, torch.ones(32).half())
