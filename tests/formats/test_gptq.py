"""The GPTQ form: worked words, round trips of every width, the zero-point traps, shards."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.formats.base import QuantizedWeight
from ridgeline.formats.bitpack import codes_per_block, pack_bits
from ridgeline.formats.gptq import GPTQFormat

FORMS = [
    GPTQFormat(bits=bits, group_size=group, symmetric=symmetric, checkpoint_format=version)
    for bits in (2, 3, 4, 8)
    for group in (32, None)
    for symmetric in (True, False)
    for version in ("gptq", "gptq_v2")
]


def random_weight(
    form: GPTQFormat, n: int, k: int, *, low_zero: int = 1, bias: bool = False
) -> QuantizedWeight:
    """Any codes and scales; zero points from low_zero up; shuffled groups under desc_act."""
    group = form.group_of(k)
    R = -(-k // group)
    zero = torch.randint(low_zero, 2**form.bits, (n, R), dtype=torch.uint8)
    table = None
    if form.desc_act and R > 1:
        table = (torch.arange(k, dtype=torch.int32) // group)[torch.randperm(k)]
    return QuantizedWeight(
        code_NK=torch.randint(0, 2**form.bits, (n, k), dtype=torch.uint8),
        scale_NR=torch.randn(n, R).half(),
        zero_NR=None if form.symmetric else zero,
        bits=form.bits,
        group_size=group,
        group_of_K=table,
        bias_N=torch.randn(n).half() if bias else None,
    )


def assert_same(a: QuantizedWeight, b: QuantizedWeight) -> None:
    for field in dataclasses.fields(QuantizedWeight):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if isinstance(left, torch.Tensor):
            assert right is not None and left.dtype == right.dtype, field.name
            assert torch.equal(left, right), field.name
        else:
            assert left == right, field.name


def words(tensor: torch.Tensor) -> set[str]:
    return {f"{word & 0xFFFFFFFF:08X}" for word in tensor.flatten().tolist()}


def zero_words(text: str) -> torch.Tensor:
    return torch.tensor([[int(text, 16)]], dtype=torch.int64).to(torch.int32)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("desc_act", [False, True])
def test_round_trip(form: GPTQFormat, desc_act: bool) -> None:
    form = dataclasses.replace(form, desc_act=desc_act)
    weight = random_weight(form, 32, 96, bias=desc_act)
    tensors = form.pack(weight)
    specs = form.tensor_specs(32, 96, bias=desc_act)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in specs.items()
    }
    back = form.unpack(tensors)
    assert_same(weight, back)
    for name, tensor in form.pack(back).items():
        assert torch.equal(tensor, tensors[name])
    assert torch.equal(form.dequant_ref(tensors), weight.dequantize())


@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    rows=st.integers(1, 3),
    blocks=st.integers(1, 3),
    group=st.sampled_from([8, 24, 32, None]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_round_trip_any_shape(
    bits: int, rows: int, blocks: int, group: int | None, seed: int
) -> None:
    torch.manual_seed(seed)
    form = GPTQFormat(bits=bits, group_size=group, symmetric=False, checkpoint_format="gptq_v2")
    unit = codes_per_block(bits)
    weight = random_weight(form, rows * unit, blocks * unit, low_zero=0)
    back = form.unpack(form.pack(weight))
    if weight.zero_NR is not None and bool((weight.zero_NR == 2 ** (bits - 1)).all()):
        weight = dataclasses.replace(weight, zero_NR=None)
    assert_same(weight, back)


def test_dequantized_value_is_the_formula() -> None:
    """W[n, k] = scales[g_idx[k], n] * (q[k, n] - zero[g_idx[k], n]), element by element."""
    form = GPTQFormat(group_size=8, symmetric=False, desc_act=True, checkpoint_format="gptq_v2")
    tensors = form.pack(random_weight(form, 8, 24, low_zero=0))
    got = form.dequant_ref(tensors)
    for n in range(8):
        for k in range(24):
            word = int(tensors["qweight"][k // 8, n]) & 0xFFFFFFFF
            g = int(tensors["g_idx"][k])
            zero_word = int(tensors["qzeros"][g, n // 8]) & 0xFFFFFFFF
            q = (word >> (4 * (k % 8))) & 15
            z = (zero_word >> (4 * (n % 8))) & 15
            assert got[n, k].item() == float(tensors["scales"][g, n]) * (q - z)


def test_golden_symmetric_zero_words() -> None:
    for version, expected in (("gptq", "77777777"), ("gptq_v2", "88888888")):
        form = GPTQFormat(group_size=32, checkpoint_format=version)
        assert words(form.pack(random_weight(form, 8, 32))["qzeros"]) == {expected}


def test_golden_codes_along_k() -> None:
    form = GPTQFormat(group_size=None)
    weight = QuantizedWeight(
        code_NK=torch.arange(8, dtype=torch.uint8).repeat(8, 1),
        scale_NR=torch.ones(8, 1).half(),
        zero_NR=None,
        bits=4,
        group_size=8,
    )
    assert words(form.pack(weight)["qweight"]) == {"76543210"}


def test_v1_zero_written_by_another_library_per_field() -> None:
    """v2 word 0x8107F080 in v1: each field minus one, masked, is 0x70F6EF7F."""
    form = GPTQFormat(group_size=8, symmetric=False, writer="auto-gptq:0.7")
    zeros = form._read_zeros(zero_words("70F6EF7F"))
    assert zeros[0].tolist() == [0, 8, 0, 15, 7, 0, 1, 8]


def test_v1_zero_written_by_gptqmodel_as_a_whole_word() -> None:
    """The same zeros, written as 0x8107F080 - 0x11111111: borrows run through the word."""
    form = GPTQFormat(group_size=8, symmetric=False, writer="gptqmodel:5.0.0")
    zeros = form._read_zeros(zero_words("6FF6DF6F"))
    assert zeros[0].tolist() == [0, 8, 0, 15, 7, 0, 1, 8]


def test_v1_three_bits_is_per_field_even_by_gptqmodel() -> None:
    zero = torch.arange(32, dtype=torch.uint8)[None] % 8
    stored = pack_bits((zero - 1) & 7, 3, 1)
    form = GPTQFormat(bits=3, group_size=32, symmetric=False, writer="gptqmodel:7.6.0")
    assert torch.equal(form._read_zeros(stored), zero)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_mislabelled_symmetric_zeros_are_read_as_what_they_are(bits: int) -> None:
    v1 = GPTQFormat(bits=bits, group_size=32)
    v2 = dataclasses.replace(v1, checkpoint_format="gptq_v2")
    weight = random_weight(v1, 32, 32)
    assert_same(v1.unpack(v2.pack(weight)), weight)
    assert_same(v2.unpack(v1.pack(weight)), weight)


def test_v1_refuses_a_zero_point_of_zero() -> None:
    form = GPTQFormat(group_size=8, symmetric=False)
    weight = random_weight(form, 8, 8)
    weight.zero_NR[0, 0] = 0
    with pytest.raises(
        ValueError, match="zero_NR must have no 0 .* write checkpoint_format gptq_v2"
    ):
        form.pack(weight)


def test_quantize_ref_is_rounding() -> None:
    w_NK = torch.randn(16, 64)
    weight = GPTQFormat(group_size=32).quantize_ref(w_NK)
    step = (w_NK.view(16, 2, 32).abs().amax(-1) / 7.5).half().float()
    nearest = (w_NK.view(16, 2, 32) / step[..., None]).round().clamp(-8, 7) * step[..., None]
    assert torch.equal(weight.dequantize().view(16, 2, 32), nearest)


@pytest.mark.parametrize("desc_act", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_shards_are_parts_of_the_whole(desc_act: bool, symmetric: bool) -> None:
    form = GPTQFormat(
        group_size=16, symmetric=symmetric, desc_act=desc_act, checkpoint_format="gptq_v2"
    )
    weight = random_weight(form, 32, 64, low_zero=0, bias=True)
    whole, tensors = weight.dequantize(), form.pack(weight)
    columns = [form.dequant_ref(form.shard(tensors, "column", r, 2)) for r in range(2)]
    rows = [form.dequant_ref(form.shard(tensors, "row", r, 2)) for r in range(2)]
    assert torch.equal(torch.cat(columns, 0), whole)
    assert torch.equal(torch.cat(rows, 1), whole)


def test_shard_refuses_to_cut_a_group() -> None:
    form = GPTQFormat(group_size=16)
    tensors = form.pack(random_weight(form, 32, 48))
    with pytest.raises(ValueError, match="row split must give each of 2 ranks a multiple of 16"):
        form.shard(tensors, "row", 0, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": torch.ones(3, 8).half()}, r"scales must have shape \[2, 8\]"),
        ({"g_idx": torch.full((16,), 2, dtype=torch.int32)}, r"g_idx must lie in 0 .. 1"),
        ({"qweight": torch.zeros(3, 8, dtype=torch.int32)}, "must have shape"),
    ],
)
def test_damaged_tensors_are_refused(change: dict, message: str) -> None:
    form = GPTQFormat(group_size=8)
    tensors = form.pack(random_weight(form, 8, 16)) | change
    with pytest.raises(ValueError, match=message):
        form.unpack(tensors)


def test_missing_tensor_is_named() -> None:
    form = GPTQFormat(group_size=8)
    tensors = form.pack(random_weight(form, 8, 16))
    del tensors["qzeros"]
    with pytest.raises(ValueError, match="no qzeros"):
        form.unpack(tensors)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 5}, "gptq: bits must be 2, 3, 4 or 8, got 5"),
        ({"group_size": 0}, "gptq: group_size must be positive or None, got 0"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format must be gptq or gptq_v2"),
    ],
)
def test_bad_specification(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTQFormat(**arguments)


def test_widths_that_do_not_pack_are_refused() -> None:
    with pytest.raises(ValueError, match="gptq: in_features must be a multiple of 32 at 3 bits"):
        GPTQFormat(bits=3, group_size=8).tensor_specs(32, 40)
    with pytest.raises(ValueError, match="gptq: out_features must be a multiple of 8 at 4 bits"):
        GPTQFormat(group_size=8).tensor_specs(12, 16)
