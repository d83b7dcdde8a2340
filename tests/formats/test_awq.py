"""The AWQ form: worked words, round trips, the two gemv layouts from their definitions, shards."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.formats.awq import AWQFormat
from ridgeline.formats.base import QuantizedWeight

from .weights import assert_same, random_weight, words


@given(
    columns=st.integers(1, 4),
    groups=st.integers(1, 4),
    group=st.sampled_from([1, 3, 8, 32, None]),
    symmetric=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_round_trip(columns, groups, group, symmetric, bias, seed) -> None:
    torch.manual_seed(seed)
    form = AWQFormat(group_size=group, symmetric=symmetric)
    weight = random_weight(form, 8 * columns, groups * (group or 5), bias=bias)
    tensors = form.pack(weight)
    specs = form.tensor_specs(*weight.shape_nk, bias=bias)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in specs.items()
    }
    assert form.shape_of(tensors) == weight.shape_nk
    assert_same(form.unpack(tensors), weight)
    assert torch.equal(form.dequant_ref(tensors), weight.dequantize())


def test_golden_codes_along_n() -> None:
    form = AWQFormat(group_size=None)
    weight = QuantizedWeight(
        code_NK=torch.arange(8, dtype=torch.uint8)[:, None].repeat(1, 4),
        scale_NR=torch.ones(8, 1).half(),
        zero_NR=torch.arange(8, dtype=torch.uint8)[:, None],
        bits=4,
        group_size=4,
    )
    tensors = form.pack(weight)
    assert words(tensors["qweight"]) == words(tensors["qzeros"]) == {"75316420"}


def test_symmetric_zeros_are_stored_as_they_are() -> None:
    form = AWQFormat(group_size=8, symmetric=True)
    assert words(form.pack(random_weight(form, 8, 16))["qzeros"]) == {"88888888"}


def test_dequantized_value_is_the_formula() -> None:
    """Element by element from the words: no minus one, nibble i is column order[i]."""
    form = AWQFormat(group_size=8)
    tensors = form.pack(random_weight(form, 16, 24))
    got, order = form.dequant_ref(tensors), [0, 2, 4, 6, 1, 3, 5, 7]
    for k in range(24):
        for c in range(2):
            word = int(tensors["qweight"][k, c]) & 0xFFFFFFFF
            zero_word = int(tensors["qzeros"][k // 8, c]) & 0xFFFFFFFF
            for i in range(8):
                n = 8 * c + order[i]
                q, z = (word >> 4 * i) & 15, (zero_word >> 4 * i) & 15
                assert got[n, k].item() == float(tensors["scales"][k // 8, n]) * (q - z)


def zero_width(k: int, g: int) -> int:
    """Words of zeros of a gemv row, as the writer computes them."""
    multiple = 1 if g >= 128 else 2 if g == 64 else 4
    base = -(-(k // g) // 8)
    return -(-base // multiple) * multiple


def signed(word: int, bits: int) -> int:
    return word - 2**bits if word >= 2 ** (bits - 1) else word


def write_gemv(weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """The gemv layout from its definition, word by word."""
    (n, k), g = weight.shape_nk, weight.group_size
    width, R = zero_width(k, g), k // g
    tensors = {
        "qweight": torch.zeros(n, k // 8, dtype=torch.int32),
        "qzeros": torch.zeros(n, width, dtype=torch.int32),
        "scales": torch.zeros(n, 8 * width, dtype=torch.float16),
    }
    assert weight.zero_NR is not None
    for row in range(n):
        for c in range(k // 8):
            word = sum(int(weight.code_NK[row, 8 * c + i]) << 4 * i for i in range(8))
            tensors["qweight"][row, c] = signed(word, 32)
        for c in range(width):
            held = range(8 * c, min(8 * c + 8, R))
            word = sum(int(weight.zero_NR[row, r]) << 4 * (r - 8 * c) for r in held)
            tensors["qzeros"][row, c] = signed(word, 32)
        tensors["scales"][row, :R] = weight.scale_NR[row]
    return tensors


def write_gemv_fast(weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """The gemv_fast layout from its definition, word by word."""
    (n, k), g = weight.shape_nk, weight.group_size
    width, R = zero_width(k, g), k // g
    tensors = {
        "qweight": torch.zeros(n // 4, k, dtype=torch.int16),
        "qzeros": torch.zeros(8 * width, n, dtype=torch.float16),
        "scales": torch.zeros(8 * width, n, dtype=torch.float16),
    }
    for n4 in range(n // 4):
        for c in range(k):
            row = 4 * n4 + (c % 64) // 16
            base = 64 * (c // 64) + 32 * ((c % 16) // 8) + c % 8
            word = sum(int(weight.code_NK[row, base + 8 * p]) << 4 * p for p in range(4))
            tensors["qweight"][n4, c] = signed(word, 16)
    assert weight.zero_NR is not None
    tensors["scales"][:R] = weight.scale_NR.T
    tensors["qzeros"][:R] = (-weight.scale_NR * weight.zero_NR).T.half()
    return tensors


@pytest.mark.parametrize(("group", "k"), [(32, 64), (32, 320), (64, 128), (128, 256), (None, 64)])
@pytest.mark.parametrize("version", ["gemv", "gemv_fast"])
def test_gemv_layouts_are_read(group: int | None, k: int, version: str) -> None:
    form = AWQFormat(group_size=group, version=version)
    weight = random_weight(form, 8, k)
    tensors = (write_gemv if version == "gemv" else write_gemv_fast)(weight)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in form.tensor_specs(8, k).items()
    }
    assert form.shape_of(tensors) == (8, k)
    assert_same(form.unpack(tensors), weight)


def test_gemv_layouts_are_not_written_and_not_split() -> None:
    form = AWQFormat(version="gemv")
    weight = random_weight(form, 8, 128)
    with pytest.raises(NotImplementedError, match="version must be gemm to be written, got 'gemv'"):
        form.pack(weight)
    with pytest.raises(NotImplementedError, match="convert the checkpoint to gemm first"):
        form.shard(write_gemv(weight), "row", 0, 2)


def test_gemv_fast_zeros_that_are_no_whole_numbers() -> None:
    form = AWQFormat(version="gemv_fast")
    tensors = write_gemv_fast(random_weight(form, 8, 128))
    tensors["qzeros"][0, 0] = -3.5 * tensors["scales"][0, 0]
    with pytest.raises(ValueError, match="qzeros must hold -scale . zero with whole zeros"):
        form.unpack(tensors)


def test_quantize_ref_is_asymmetric_rounding() -> None:
    w_NK = torch.randn(16, 64)
    weight = AWQFormat(group_size=32).quantize_ref(w_NK)
    assert weight.zero_NR is not None
    step = weight.scale_NR.float().repeat_interleave(32, 1)
    assert bool(((weight.dequantize() - w_NK).abs() <= 0.51 * step).all())


@pytest.mark.parametrize("group", [16, None])
def test_shards_are_parts_of_the_whole(group: int | None) -> None:
    form = AWQFormat(group_size=group)
    weight = random_weight(form, 32, 64, bias=True)
    whole, tensors = weight.dequantize(), form.pack(weight)
    columns = [form.dequant_ref(form.shard(tensors, "column", r, 2)) for r in range(2)]
    rows = [form.dequant_ref(form.shard(tensors, "row", r, 2)) for r in range(2)]
    assert torch.equal(torch.cat(columns, 0), whole)
    assert torch.equal(torch.cat(rows, 1), whole)


def test_shard_refuses_to_cut_a_group() -> None:
    form = AWQFormat(group_size=16)
    tensors = form.pack(random_weight(form, 8, 48))
    with pytest.raises(ValueError, match="row split must give each of 2 ranks a multiple of 16"):
        form.shard(tensors, "row", 0, 2)
    with pytest.raises(ValueError, match="axis must be column or row, got 'diagonal'"):
        form.shard(tensors, "diagonal", 0, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": torch.ones(3, 8).half()}, r"awq: scales must have shape \[2, 8\]"),
        ({"qzeros": torch.zeros(2, 2, dtype=torch.int32)}, r"qzeros must have shape \[2, 1\]"),
        ({"qzeros": torch.zeros(2, 1)}, "qzeros must be a matrix of int32, got torch.float32"),
        ({"qweight": torch.zeros(16, 1, dtype=torch.int16)}, "qweight must be a matrix of int32"),
        ({"qweight": torch.zeros(16, dtype=torch.int32)}, "qweight must be a matrix of int32"),
    ],
)
def test_damaged_tensors_are_refused(change: dict, message: str) -> None:
    form = AWQFormat(group_size=8)
    tensors = form.pack(random_weight(form, 8, 16)) | change
    with pytest.raises(ValueError, match=message):
        form.unpack(tensors)


def test_missing_tensor_is_named() -> None:
    form = AWQFormat(group_size=8)
    tensors = form.pack(random_weight(form, 8, 16))
    del tensors["scales"]
    with pytest.raises(ValueError, match="hold qweight, qzeros and scales, got no scales"):
        form.unpack(tensors)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 3}, "awq: bits must be 4, got 3"),
        ({"group_size": -1}, "awq: group_size must be positive or None, got -1"),
        ({"version": "marlin"}, "version must be one of gemm, gemv, gemv_fast, got 'marlin'"),
        ({"version": "gemv", "group_size": 16}, "group_size must be 32, 64, or 128 and more"),
    ],
)
def test_bad_specification(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AWQFormat(**arguments)


def test_shapes_that_do_not_pack_are_refused() -> None:
    with pytest.raises(ValueError, match="out_features must be a multiple of 8 in version gemm"):
        AWQFormat().tensor_specs(12, 128)
    with pytest.raises(ValueError, match="in_features must be a multiple of the group size 128"):
        AWQFormat().tensor_specs(8, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 8}, "weight.bits must be 4, got 8"),
        ({"group_size": 16}, "weight.group_size must be 8, got 16"),
        ({"group_of_K": torch.zeros(16, dtype=torch.int32)}, "got a group table"),
    ],
)
def test_a_weight_of_another_form(change: dict, message: str) -> None:
    form = AWQFormat(group_size=8)
    with pytest.raises(ValueError, match=message):
        form.pack(dataclasses.replace(random_weight(form, 8, 16), **change))
