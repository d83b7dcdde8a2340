"""Conversions keep every bit, transposes equal repacking, losses are refused with the reason."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.formats.awq import AWQFormat
from ridgeline.formats.compressed_tensors import CompressedTensorsFormat
from ridgeline.formats.convert import (
    FORMATS,
    SourceFacts,
    _transposed,
    convert_tensors,
    convert_weight,
    loss_of,
    target_layout,
)
from ridgeline.formats.gptq import GPTQFormat

from .test_awq import write_gemv
from .weights import assert_same, assert_same_tensors, random_weight


def gptq(symmetric: bool = True, **kwargs) -> GPTQFormat:
    version = "gptq" if symmetric else "gptq_v2"
    return GPTQFormat(symmetric=symmetric, checkpoint_format=version, **kwargs)


@given(
    rows=st.integers(1, 4),
    groups=st.integers(1, 3),
    group=st.sampled_from([8, 32, None]),
    symmetric=st.booleans(),
    bias=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_gptq_to_ct_to_awq_to_gptq_is_the_identity(rows, groups, group, symmetric, bias) -> None:
    forms = [
        gptq(symmetric, group_size=group),
        CompressedTensorsFormat(group_size=group, symmetric=symmetric),
        AWQFormat(group_size=group, symmetric=symmetric),
        gptq(symmetric, group_size=group),
    ]
    weight = random_weight(forms[0], 8 * rows, groups * (group or 16), bias=bias)
    first = tensors = forms[0].pack(weight)
    for source, target in zip(forms, forms[1:], strict=False):
        tensors = convert_tensors(tensors, source, target)
        assert_same(target.unpack(tensors), weight)
    assert_same_tensors(tensors, first)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [32, None])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("desc_act", [True, False])
def test_transposes_equal_repacking(bits, group, symmetric, desc_act) -> None:
    """The word path is taken, and gives what unpacking and packing give."""
    old = gptq(symmetric, bits=bits, group_size=group, desc_act=desc_act)
    new = CompressedTensorsFormat(
        bits=bits, group_size=group, symmetric=symmetric, desc_act=desc_act
    )
    weight = random_weight(old, 32, 96, bias=True)
    for source, target in ((old, new), (new, old)):
        tensors = source.pack(weight)
        moved = _transposed(tensors, source, target)
        assert moved is not None
        assert_same_tensors(moved, target.pack(source.unpack(tensors)))
        assert_same_tensors(convert_tensors(tensors, source, target), moved)


def test_what_is_not_a_matter_of_words_is_repacked() -> None:
    """v1 zero points, aligned or bf16 files, symmetric labels on other zeros."""
    ct = CompressedTensorsFormat(group_size=32, symmetric=False)
    v1 = GPTQFormat(group_size=32, symmetric=False)
    weight = random_weight(v1, 32, 64, low_zero=1)
    tensors = v1.pack(weight)
    assert _transposed(tensors, v1, ct) is None
    assert_same(ct.unpack(convert_tensors(tensors, v1, ct)), weight)
    narrow = dataclasses.replace(weight, scale_NR=weight.scale_NR.bfloat16())
    v2 = gptq(False, group_size=32)
    assert _transposed(ct.pack(narrow), ct, v2) is None
    exact = dataclasses.replace(weight, scale_NR=weight.scale_NR.bfloat16().half())
    assert_same(v2.unpack(convert_tensors(ct.pack(narrow), ct, v2)), exact)


def test_every_pair_keeps_values() -> None:
    for source in FORMATS:
        for target in FORMATS:
            for symmetric in (True, False):
                facts = SourceFacts(symmetric=symmetric)
                start = GPTQFormat(group_size=16)
                forms = [target_layout(start, name, facts) for name in (source, target)]
                weight = random_weight(forms[0], 16, 64)
                out = convert_tensors(forms[0].pack(weight), *forms)
                assert_same(forms[1].unpack(out), weight)


def test_gemv_is_read_and_written_as_gemm() -> None:
    source, target = AWQFormat(group_size=32, version="gemv"), AWQFormat(group_size=32)
    weight = random_weight(source, 8, 64)
    assert_same(target.unpack(convert_tensors(write_gemv(weight), source, target)), weight)


CT = CompressedTensorsFormat(group_size=16, symmetric=False)
ACT_ORDER = dataclasses.replace(CT, desc_act=True)


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        (ACT_ORDER, AWQFormat(group_size=16), r"groups in activation order \(act-order\)"),
        (ACT_ORDER, gptq(False, group_size=16), "groups in activation order"),
        (CT, gptq(True, group_size=16), "zero points, for which a symmetric form has no place"),
        (CT, AWQFormat(group_size=32), "groups of 16 inputs where it has 32"),
        (dataclasses.replace(CT, bits=3), AWQFormat(group_size=16), "3 bits where it has 4"),
    ],
)
def test_a_loss_is_refused_and_made_on_request(source, target, reason) -> None:
    weight = random_weight(source, 32, 64, bias=True)
    weight = dataclasses.replace(weight, scale_NR=weight.scale_NR.abs() + 0.5)
    with pytest.raises(
        ValueError, match=rf"convert: the weight must fit .* as it is, got {reason}"
    ):
        convert_weight(weight, target)
    back = target.unpack(convert_weight(weight, target, lossy=True))
    assert_same(back, dataclasses.replace(
        target.quantize_ref(weight.dequantize()), bias_N=weight.bias_N
    ))  # fmt: skip


def test_scales_that_fp16_cannot_hold() -> None:
    form = AWQFormat(group_size=16)
    weight = random_weight(CT, 8, 32, dtype=torch.float32)
    assert loss_of(weight, CT) is None
    reason = "scales in float32 that float16 cannot hold"
    assert loss_of(weight, form) == reason
    with pytest.raises(ValueError, match=reason):
        convert_weight(weight, form)
    weight.scale_NR[0, 0], weight.scale_NR[0, 1] = 1e-20, -1e9
    back = form.unpack(convert_weight(weight, form, lossy=True))
    assert torch.equal(back.code_NK, weight.code_NK)
    assert torch.equal(back.scale_NR[1:], weight.scale_NR[1:].half())
    assert back.scale_NR[0].tolist() == [2**-24, -65504.0]


def test_a_shape_that_cannot_be_packed_is_refused_even_lossy() -> None:
    weight = random_weight(CT, 9, 32)
    with pytest.raises(ValueError, match="awq: out_features must be a multiple of 8"):
        convert_weight(weight, AWQFormat(group_size=16), lossy=True)


def test_targets() -> None:
    facts = SourceFacts(symmetric=False, desc_act=True, scale_dtype="bfloat16")
    start = CompressedTensorsFormat(bits=8, group_size=None)
    assert target_layout(start, "gptq", facts) == GPTQFormat(
        bits=8, group_size=None, symmetric=False, desc_act=True, checkpoint_format="gptq_v2"
    )
    assert target_layout(start, "compressed-tensors", facts).scale_dtype == "bfloat16"
    with pytest.raises(ValueError, match="awq: bits must be 4, got 8"):
        target_layout(start, "awq", facts)
    with pytest.raises(ValueError, match="format must be one of gptq, awq, compressed-tensors"):
        target_layout(start, "gguf", facts)
