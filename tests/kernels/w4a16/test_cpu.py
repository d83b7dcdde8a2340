"""The CPU implementation: which layout serves how many rows, and each is exact."""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import threading

import pytest
import torch

from ridgeline.formats.base import QuantizedWeight
from ridgeline.kernels.w4a16 import cpu, cpu_bags, op
from ridgeline.kernels.w4a16.ref import w4a16_ref

from .weights import make_weight

BF16 = torch.bfloat16


def by_bags(act_MK: torch.Tensor, bags: cpu_bags.Bags, n: int) -> torch.Tensor:
    rows = cpu_bags.Rows(bags, n, len(act_MK))
    kept = cpu_bags.scratch_of({}, rows.sizes)
    for memory in (kept.spread, kept.out_CMc):
        memory.fill_(float("nan"))
    return rows(act_MK, kept)


@pytest.mark.parametrize(
    ("weight", "dtype", "reason"),
    [
        ({}, BF16, None),
        ({"act_order": True}, BF16, None),
        ({}, torch.float32, "bfloat16 activations only"),
        ({"symmetric": False}, BF16, "zero points"),
        ({"coarse": False}, BF16, "more bits than bfloat16"),
        ({"bits": 8}, BF16, "4 bits only"),
        ({"group": 24}, BF16, "groups of"),
        ({"n": 40}, BF16, "multiples of 16"),
    ],
)
def test_which_weights_go_through_int4(weight: dict, dtype: torch.dtype, reason) -> None:
    arguments = {"n": 48, "k": 192, "group": 64, "coarse": True} | weight
    made = make_weight(**arguments)
    why = cpu.int4_refusal(made, dtype)
    assert (why is None) if reason is None else (why is not None and reason in why)
    prepared = op.prepare(made, dtype)
    assert (cpu._int4_of(prepared) is not None) == (reason is None)


def test_act_order_with_unequal_groups_is_not_taken() -> None:
    weight = make_weight(32, 128, 64, act_order=True, coarse=True)
    assert weight.group_of_K is not None
    table = weight.group_of_K.clone()
    table[:] = 0
    table[:3] = 1
    uneven = dataclasses.replace(weight, group_of_K=table)
    assert "unequal" in (cpu.int4_refusal(uneven, BF16) or "")
    prepared = op.prepare(uneven, BF16)
    eye = torch.eye(128, dtype=BF16)
    assert torch.equal(op.w4a16_linear(eye, prepared).T, uneven.dequantize(BF16))


@pytest.mark.parametrize(
    ("fast_bf16", "amx"), [(False, False), (True, False), (True, True)], ids=["avx2", "bf16", "amx"]
)
@pytest.mark.parametrize("bags", [False, True])
@pytest.mark.parametrize("coarse", [False, True])
def test_rows_choose_the_layout(monkeypatch, fast_bf16, amx, bags, coarse) -> None:
    """One row: bags; a few: int4 where it is exact, else bags; many: wide."""
    if bags and not cpu_bags.has_bags():
        pytest.skip("this PyTorch has no byte bags")
    monkeypatch.setattr(cpu, "has_fast_bf16", lambda: fast_bf16)
    monkeypatch.setattr(cpu, "has_amx", lambda: amx)
    monkeypatch.setattr(cpu_bags, "has_bags", lambda: bags)
    monkeypatch.setattr(cpu, "LEAST_WEIGHTS", 0)
    weight = make_weight(32, 64, 32, coarse=coarse)
    prepared = op.prepare(weight, BF16)
    calls: list[tuple[str, int]] = []
    int4, rows_of = cpu._int4, cpu_bags.Rows.__call__
    monkeypatch.setattr(cpu, "_int4", lambda *a: calls.append(("int4", len(a[0]))) or int4(*a))
    monkeypatch.setattr(
        cpu_bags.Rows,
        "__call__",
        lambda self, *a: calls.append(("bags", len(a[0]))) or rows_of(self, *a),
    )
    monkeypatch.setattr(
        cpu_bags.Rows, "alone", lambda self: lambda act: self(act).to(act.dtype).clone()
    )
    limit = cpu.rows_for_wide(int4=coarse)
    assert limit == ((5 if amx else 16 if fast_bf16 else 32) if coarse else 3 if fast_bf16 else 24)
    for rows in (1, limit - 1, limit):
        out = op.w4a16_linear(torch.eye(64, dtype=BF16)[:rows], prepared)
        assert torch.equal(out.T, weight.dequantize(BF16)[:, :rows])
    made_bags = bags and not (coarse and fast_bf16)
    row = [("bags", 1)] if made_bags else [("int4", 1)] * coarse
    few, rest = [("int4", limit - 1)] * coarse, limit - 1
    while not coarse and bags and rest:
        few.append(("bags", min(rest, cpu_bags.ROWS_TOGETHER)))
        rest -= few[-1][1]
    assert calls == row + few


def test_a_small_layer_is_not_worth_the_bags(monkeypatch) -> None:
    """One row of a small layer of any format: the wide matmul; of a large one: bags."""
    if not cpu_bags.has_bags():
        pytest.skip("this PyTorch has no byte bags")
    monkeypatch.setattr(cpu, "LEAST_WEIGHTS", 96 * 128)
    for n in (80, 96):
        weight = make_weight(n, 128, 64, symmetric=False)
        prepared = op.prepare(weight, torch.float32)
        out = op.w4a16_linear(torch.eye(128)[5:6], prepared)
        assert torch.equal(out[0], weight.dequantize()[:, 5])
        assert (1 in prepared.memo) == (n == 96)  # views of bags for one row


def test_the_wide_weight_is_called_the_short_way(monkeypatch) -> None:
    """The second call of a shape is not checked again; shapes are kept up to a number of rows."""
    monkeypatch.setattr(cpu, "MOST_KNOWN_ROWS", 6)
    monkeypatch.setattr(cpu, "rows_for_wide", lambda *, int4: 5)
    weight = make_weight(96, 128, 64, symmetric=False)
    prepared = op.prepare(weight, torch.float32)
    for rows in (5, 6, 7):
        act = torch.randn(rows, 128)
        first = op.w4a16_linear(act, prepared)
        assert (act.shape in prepared.memo) == (rows <= 6)
        assert torch.equal(op.w4a16_linear(act, prepared), first)
        assert torch.equal(first, torch.nn.functional.linear(act, weight.dequantize()))
    monkeypatch.setattr(op, "_check_call", None)  # whoever comes there fails
    assert op.w4a16_linear(torch.randn(6, 128), prepared).shape == (6, 96)
    with pytest.raises(TypeError, match="not callable"):
        op.w4a16_linear(torch.randn(7, 128), prepared)


def test_bags_hold_every_width_and_uneven_groups() -> None:
    """Exact for 2, 3, 4 and 8 bits, fp32 scales, groups that no input or few inputs use."""
    if not cpu_bags.has_bags():
        pytest.skip("this PyTorch has no byte bags")
    for bits in (2, 3, 4, 8):
        for scale_dtype in (torch.float16, torch.float32):
            weight = make_weight(
                200, 160, 32, bits=bits, symmetric=False, act_order=True, scale_dtype=scale_dtype
            )
            assert weight.group_of_K is not None
            table = torch.where(weight.group_of_K == 3, 1, weight.group_of_K)
            weight = dataclasses.replace(weight, group_of_K=table)
            packed = cpu_bags.pack(weight)
            for rows in (1, 3, 4):
                shown = [by_bags(part, packed, 200) for part in torch.eye(160).split(rows)]
                assert torch.equal(torch.cat(shown).T, weight.dequantize())


@pytest.mark.parametrize("bits", [2, 4, 7, 8])
def test_zero_points_cost_no_input_where_a_byte_holds_the_difference(bits: int) -> None:
    """Extreme codes and zero points, 2^bits (a stored one and one) among them; 8 bits: a slot a
    group. Groups and whole rows, one row and several."""
    if not cpu_bags.has_bags():
        pytest.skip("this PyTorch has no byte bags")
    most = 2**bits - 1
    for group in (32, 96):
        weight = make_weight(104, 96, group, bits=bits, symmetric=False)
        assert weight.zero_NR is not None
        weight.code_NK[:, ::3], weight.code_NK[:, 1::3] = 0, most
        weight.zero_NR[::3], weight.zero_NR[1::3] = min(most + 1, 255), 0
        packed = cpu_bags.pack(weight)
        assert packed.has_zeros == (bits == 8)
        slots = packed.table.shape[0] // packed.scale_CRc.shape[0]
        assert slots == 96 + (96 // group if bits == 8 else 0)
        for rows in (1, 4):
            shown = [by_bags(part, packed, 104) for part in torch.eye(96).split(rows)]
            assert torch.equal(torch.cat(shown).T, weight.dequantize())


@pytest.mark.parametrize("symmetric", [False, True])
def test_bags_are_as_good_as_a_matmul_in_fp32(symmetric) -> None:
    """Against fp64, the error of PyTorch's fp32 linear at most twice; rows do not mix."""
    if not cpu_bags.has_bags():
        pytest.skip("this PyTorch has no byte bags")
    weight = make_weight(288, 1024, 128, symmetric=symmetric)
    packed, wide = cpu_bags.pack(weight), weight.dequantize()
    act_MK = torch.randn(16, 1024)
    exact = act_MK.double() @ wide.double().T
    ours = torch.cat([by_bags(part, packed, 288) for part in act_MK.split(4)])
    alone = torch.cat([by_bags(row[None], packed, 288) for row in act_MK])
    torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-5)
    plain = torch.cat([row[None] @ wide.T for row in act_MK])
    error, allowed = (ours - exact).abs(), (plain - exact).abs()
    assert error.max() <= 2 * allowed.max() + 1e-5
    assert error.mean() <= 2 * allowed.mean() + 1e-6


def test_layers_of_a_size_share_the_index() -> None:
    first, second = (cpu_bags.pack(make_weight(48, 64, 32)) for _ in range(2))
    assert first.index.data_ptr() == second.index.data_ptr()
    assert cpu_bags.read_bytes(first) < 1.35 * 48 * 64


@pytest.mark.parametrize("m", [1, 15, 40])
def test_act_order_gathers_the_activations(m: int) -> None:
    weight = make_weight(48, 192, 64, act_order=True, coarse=True)
    act_MK = torch.randn(m, 192, dtype=BF16)
    out = op.w4a16_linear(act_MK, op.prepare(weight, BF16)).float()
    exact = w4a16_ref(act_MK.float(), weight)
    plain = w4a16_ref(act_MK, weight, compute_dtype=BF16).float()
    assert (out - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-5


@pytest.fixture
def bags_to_23(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 23 rows go through the bags of a large layer, whatever is fastest on this processor."""
    if not cpu_bags.has_bags():
        pytest.skip("this PyTorch has no byte bags")
    monkeypatch.setattr(cpu, "rows_for_wide", lambda *, int4: 24)


@pytest.mark.usefixtures("bags_to_23")
def test_a_layer_keeps_what_it_worked_out() -> None:
    """The functions of the first call serve the next; a copy of the layer has its own."""
    weight = make_weight(704, 768, 64, symmetric=False)
    assert 704 * 768 >= cpu.LEAST_WEIGHTS
    prepared = op.prepare(weight, torch.float32)
    act_MK = torch.randn(2, 768)
    first = op.w4a16_linear(act_MK, prepared)
    kept = prepared.memo[2]
    assert torch.equal(op.w4a16_linear(act_MK, prepared), first) and prepared.memo[2] is kept
    for other in (copy.deepcopy(prepared), prepared.to("cpu")):
        assert not other.memo
        assert torch.equal(op.w4a16_linear(act_MK, other), first)
        assert other.memo[2] is not kept


def large_layer(**kind: object) -> QuantizedWeight:
    """As large as `forward` wants for bags."""
    weight = make_weight(704, 768, 64, **kind)
    assert 704 * 768 >= cpu.LEAST_WEIGHTS
    return weight


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        {"symmetric": False},
        {"symmetric": False, "act_order": True},
        {"symmetric": False, "bits": 8},
    ],
    ids=str,
)
def test_a_known_row_takes_the_short_way(kind, dtype) -> None:
    """From the second call on: the same bits, in memory of its own, for strided rows too."""
    if not cpu_bags.has_bags():
        pytest.skip("this PyTorch has no byte bags")
    weight = large_layer(**kind)
    prepared = op.prepare(weight, dtype)
    rows = torch.randn(3, 768).to(dtype)
    assert not prepared.memo
    first = [op.w4a16_linear(row[None], prepared) for row in rows]
    assert torch.Size((1, 768)) in prepared.memo
    for given in (rows, rows.T.contiguous().T):
        again = [op.w4a16_linear(row[None], prepared) for row in given]
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    shown = op.w4a16_linear(torch.eye(768, dtype=dtype)[9:10], prepared)
    assert torch.equal(shown[0], weight.dequantize(dtype)[:, 9])


@pytest.mark.usefixtures("bags_to_23")
@pytest.mark.parametrize("m", [1, 2, 7])
def test_results_are_not_the_kept_memory(m: int) -> None:
    """A later call leaves an earlier one's result alone, in fp32 too."""
    prepared = op.prepare(large_layer(symmetric=False), torch.float32)
    act_MK = torch.randn(m, 768)
    first = op.w4a16_linear(act_MK, prepared)
    kept = first.clone()
    op.w4a16_linear(torch.randn(m, 768), prepared)
    assert torch.equal(first, kept)


@pytest.mark.usefixtures("bags_to_23")
def test_the_short_way_is_for_plain_rows_only() -> None:
    """After a row is known: checks, biases, gradients and compiled calls are as before."""
    prepared = op.prepare(large_layer(symmetric=False), torch.float32)
    row, bias_N = torch.randn(1, 768), torch.randn(704)
    plain = op.w4a16_linear(row, prepared)
    assert prepared.memo
    torch.testing.assert_close(op.w4a16_linear(row, prepared, bias_N), plain + bias_N)
    assert torch.equal(op.w4a16_linear(row[None], prepared), plain[None])
    rows = torch.randn(3, 768)
    together = [op.w4a16_linear(rows, prepared) for _ in range(2)]
    assert torch.equal(*together) and rows.shape in prepared.memo
    each = torch.cat([op.w4a16_linear(one, prepared) for one in rows.split(1)])
    assert torch.equal(op.w4a16_linear(rows, prepared, batch_invariant=True), each)
    with pytest.raises(TypeError, match="act must be torch.float32"):
        op.w4a16_linear(row.half(), prepared)
    with pytest.raises(ValueError, match="act must be on cpu"):
        op.w4a16_linear(row.to("meta"), prepared)
    with pytest.raises(NotImplementedError, match="backward"):
        op.w4a16_linear(row.clone().requires_grad_(), prepared).sum().backward()
    compiled = torch.compile(
        lambda x: op.w4a16_linear(x, prepared) * 2, fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(row), plain * 2)


def test_threads_do_not_share_scratch() -> None:
    """Two threads in one layer at once: each has its own result."""
    if not cpu_bags.has_bags():
        pytest.skip("this PyTorch has no byte bags")
    prepared = op.prepare(make_weight(704, 768, 64, symmetric=False), torch.float32)
    rows = [torch.randn(1, 768) for _ in range(2)]
    want = [op.w4a16_linear(row, prepared) for row in rows]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            found = list(pool.map(lambda row: op.w4a16_linear(row, prepared), rows))
            assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.usefixtures("bags_to_23")
def test_scratch_of_inference_mode_serves_outside_it(monkeypatch) -> None:
    monkeypatch.setattr(cpu, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(cpu_bags, "_of_thread", threading.local())
    prepared = op.prepare(make_weight(40, 96, 32, symmetric=False), torch.float32)
    act_MK = torch.randn(3, 96)
    with torch.inference_mode():
        inside = op.w4a16_linear(act_MK, prepared).clone()
    assert torch.equal(op.w4a16_linear(act_MK, prepared), inside)
