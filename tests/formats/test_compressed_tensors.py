"""The compressed-tensors form: worked words, odd shapes, aligned 3-bit files, shards, damage."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.formats.base import QuantizedWeight
from ridgeline.formats.compressed_tensors import CompressedTensorsFormat

from .weights import assert_same, random_weight, words


@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    n=st.integers(1, 40),
    k=st.integers(1, 75),
    group=st.sampled_from([1, 7, 32, None]),
    symmetric=st.booleans(),
    desc_act=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
@settings(max_examples=60, deadline=None)
def test_round_trip_any_shape(bits, n, k, group, symmetric, desc_act, dtype) -> None:
    torch.manual_seed(n * 100 + k)
    form = CompressedTensorsFormat(
        bits=bits,
        group_size=group,
        symmetric=symmetric,
        desc_act=desc_act,
        scale_dtype=str(dtype).removeprefix("torch."),
    )
    weight = random_weight(form, n, k, bias=True, dtype=dtype)
    # At 3 bits a stream whose spare bits happen to be clear is an aligned file's (see below).
    weight.code_NK[:, -1:] = weight.code_NK[:, :1] = 2**bits - 1
    tensors = form.pack(weight)
    specs = form.tensor_specs(n, k, bias=True)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in specs.items()
    }
    assert form.shape_of(tensors) == (n, k)
    if bits != 3:
        assert_same(form.unpack(tensors), weight)
    assert tensors["weight_shape"].tolist() == [n, k]


@pytest.mark.parametrize("k", [31, 32, 64, 121, 128, 200])
@pytest.mark.parametrize("n", [32, 41, 128])
def test_dense_three_bits(n: int, k: int) -> None:
    form = CompressedTensorsFormat(bits=3, group_size=32, symmetric=False)
    weight = random_weight(form, n, k)
    tensors = form.pack(weight)
    assert tensors["weight_packed"].shape == (n, -(-k * 3 // 32))
    assert_same(form.unpack(tensors), weight)


def aligned(codes: torch.Tensor) -> torch.Tensor:
    """Ten 3-bit codes a word along the last dim, as writers before 2026 packed them."""
    rows, count = codes.shape
    out = torch.zeros(rows, -(-count // 10), dtype=torch.int32)
    for j in range(count):
        out[:, j // 10] |= codes[:, j].int() << 3 * (j % 10)
    return out


@pytest.mark.parametrize("k", [5, 20, 21, 31, 40, 100, 128])
def test_aligned_three_bits_are_read(k: int) -> None:
    """For k = 20, 40 and 100 both streams have as many words: the clear bits tell."""
    form = CompressedTensorsFormat(bits=3, group_size=8, symmetric=False)
    weight = random_weight(form, 36, k)
    tensors = form.pack(weight)
    assert weight.zero_NR is not None
    tensors["weight_packed"] = aligned(weight.code_NK)
    tensors["weight_zero_point"] = aligned(weight.zero_NR.T).T.contiguous()
    assert_same(form.unpack(tensors), weight)


def test_shards_of_an_aligned_file() -> None:
    form = CompressedTensorsFormat(bits=3, group_size=32, symmetric=False)
    weight = random_weight(form, 64, 64)
    tensors = form.pack(weight)
    assert weight.zero_NR is not None
    tensors["weight_packed"] = aligned(weight.code_NK)
    tensors["weight_zero_point"] = aligned(weight.zero_NR.T).T.contiguous()
    for axis, dim in (("column", 0), ("row", 1)):
        parts = [form.dequant_ref(form.shard(tensors, axis, r, 2)) for r in range(2)]
        assert torch.equal(torch.cat(parts, dim), weight.dequantize())


def test_golden_codes() -> None:
    """s = -8 .. -1 -> 0x76543210, its tail zero bits; zero points along N likewise."""
    form = CompressedTensorsFormat(group_size=None, symmetric=False)
    weight = QuantizedWeight(
        code_NK=torch.arange(9, dtype=torch.uint8).repeat(8, 1),
        scale_NR=torch.ones(8, 1).half(),
        zero_NR=torch.arange(8, dtype=torch.uint8)[:, None],
        bits=4,
        group_size=9,
    )
    tensors = form.pack(weight)
    assert words(tensors["weight_packed"][:, 0]) == {"76543210"}
    assert words(tensors["weight_packed"][:, 1]) == {"00000008"}
    assert words(tensors["weight_zero_point"]) == {"76543210"}


def test_golden_three_bits() -> None:
    form = CompressedTensorsFormat(bits=3, group_size=None)
    code_NK = torch.arange(32, dtype=torch.uint8)[None] % 8
    weight = QuantizedWeight(
        code_NK=code_NK, scale_NR=torch.ones(1, 1).half(), zero_NR=None, bits=3, group_size=32
    )
    got = [f"{word & 0xFFFFFFFF:08X}" for word in form.pack(weight)["weight_packed"][0].tolist()]
    assert got == ["88FAC688", "C688FAC6", "FAC688FA"]


def test_dequantized_value_is_the_formula() -> None:
    """weight_scale * (s - z) with signed codes, element by element."""
    form = CompressedTensorsFormat(group_size=8, symmetric=False)
    tensors = form.pack(random_weight(form, 9, 20))
    got = form.dequant_ref(tensors)
    for n in range(9):
        for k in range(20):
            word = int(tensors["weight_packed"][n, k // 8]) & 0xFFFFFFFF
            zero_word = int(tensors["weight_zero_point"][n // 8, k // 8]) & 0xFFFFFFFF
            s = ((word >> 4 * (k % 8)) & 15) - 8
            z = ((zero_word >> 4 * (n % 8)) & 15) - 8
            assert got[n, k].item() == float(tensors["weight_scale"][n, k // 8]) * (s - z)


def test_weight_shape_in_either_width() -> None:
    form = CompressedTensorsFormat(group_size=8)
    weight = random_weight(form, 4, 16)
    tensors = form.pack(weight)
    tensors["weight_shape"] = tensors["weight_shape"].int()
    assert_same(form.unpack(tensors), weight)


def test_ties_round_after_the_zero_point_is_added() -> None:
    """0.5 / 1 + 7 = 7.5 goes to 8; rounding before adding would give 7."""
    form = CompressedTensorsFormat(group_size=None, symmetric=False)
    w_NK = torch.tensor([[-7.0, 8.0, 0.5, 1.5]])
    weight = form.quantize_ref(w_NK)
    assert weight.zero_NR is not None and weight.zero_NR.tolist() == [[7]]
    assert weight.code_NK.tolist() == [[0, 15, 8, 8]]


@pytest.mark.parametrize("desc_act", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [16, None])
def test_shards_are_parts_of_the_whole(desc_act: bool, symmetric: bool, group) -> None:
    form = CompressedTensorsFormat(group_size=group, symmetric=symmetric, desc_act=desc_act)
    weight = random_weight(form, 32, 64, bias=True)
    whole, tensors = weight.dequantize(), form.pack(weight)
    columns = [form.dequant_ref(form.shard(tensors, "column", r, 2)) for r in range(2)]
    rows = [form.dequant_ref(form.shard(tensors, "row", r, 2)) for r in range(2)]
    assert torch.equal(torch.cat(columns, 0), whole)
    assert torch.equal(torch.cat(rows, 1), whole)


def test_shard_refuses_to_cut_words() -> None:
    form = CompressedTensorsFormat(group_size=16)
    tensors = form.pack(random_weight(form, 3, 48))
    with pytest.raises(ValueError, match="row split must give each of 2 ranks a multiple of 16"):
        form.shard(tensors, "row", 0, 2)
    with pytest.raises(ValueError, match="column split must give each of 2 ranks a multiple of 1"):
        form.shard(tensors, "column", 0, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_scale": torch.ones(9, 3).half()}, r"weight_scale must have shape \[9, 2\]"),
        ({"weight_shape": torch.tensor([9, 99])}, r"weight_shape must be \[N, K\] of 9 rows of 2"),
        ({"weight_shape": torch.tensor([9])}, r"weight_shape must be \[N, K\]"),
        ({"weight_packed": torch.zeros(9, 3, dtype=torch.int32)}, "must be 2 words for 16 codes"),
        ({"weight_packed": torch.zeros(9, 2)}, "weight_packed must be a matrix of int32"),
        ({"weight_zero_point": torch.zeros(1, 2, dtype=torch.int32)}, "packed dim 0 must be 2 wor"),
        ({"weight_zero_point": torch.zeros(2, 3, dtype=torch.int32)}, r"shape \[2, 2\] at 4 bits"),
        ({"bias": torch.zeros(8)}, r"bias must have shape \[9\]"),
        ({"weight_g_idx": torch.full((16,), 2, dtype=torch.int32)}, "must lie in 0 .. 1"),
    ],
)
def test_damaged_tensors_are_refused(change: dict, message: str) -> None:
    form = CompressedTensorsFormat(group_size=8, symmetric=False)
    tensors = form.pack(random_weight(form, 9, 16)) | change
    with pytest.raises(ValueError, match=message):
        form.unpack(tensors)


@pytest.mark.parametrize("name", ["weight_packed", "weight_scale", "weight_shape", "weight_g_idx"])
def test_missing_tensor_is_named(name: str) -> None:
    form = CompressedTensorsFormat(group_size=8, desc_act=True)
    tensors = form.pack(random_weight(form, 8, 16))
    del tensors[name]
    with pytest.raises(ValueError, match=f"compressed-tensors: tensors must hold .* got no {name}"):
        form.unpack(tensors)


def test_bad_specification_and_a_weight_of_another_form() -> None:
    with pytest.raises(ValueError, match="compressed-tensors: bits must be 2, 3, 4 or 8, got 5"):
        CompressedTensorsFormat(bits=5)
    form = CompressedTensorsFormat(group_size=8)
    weight = dataclasses.replace(random_weight(form, 8, 16), bits=8)
    with pytest.raises(ValueError, match="weight.bits must be 4, got 8"):
        form.pack(weight)
