"""QuantizedLinear: values, state dict bit for bit, moves and casts, replacement, shards, bytes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from ridgeline.formats.base import QuantizedWeight
from ridgeline.formats.gptq import GPTQFormat
from ridgeline.kernels.w4a16 import cpu, cpu_bags
from ridgeline.quant.linear import (
    QuantizedLinear,
    concat_rows,
    empty_linears,
    prepare_linears,
    quantized_linears,
    replace_linears,
)

from .models import TinyModel

FORM = GPTQFormat(group_size=16)


def quantized(n: int = 32, k: int = 64, *, form: GPTQFormat = FORM, bias: bool = True):
    weight = form.quantize_ref(torch.randn(n, k))
    if form.desc_act:
        table = weight.groups_K().to(torch.int32)[torch.randperm(k)]
        weight = dataclasses.replace(weight, group_of_K=table)
    return dataclasses.replace(weight, bias_N=torch.randn(n).half() if bias else None)


@pytest.mark.parametrize("bias", [False, True])
def test_forward_is_a_linear_on_the_dequantized_weight(bias: bool) -> None:
    weight = quantized(bias=bias)
    linear = QuantizedLinear.from_weight(weight, FORM, dtype=torch.float32)
    x = torch.randn(2, 5, 64)
    bias_N = None if weight.bias_N is None else weight.bias_N.float()
    expected = nn.functional.linear(x, weight.dequantize(), bias_N)
    torch.testing.assert_close(linear(x), expected)
    assert torch.equal(linear.dequantize(), weight.dequantize())
    assert not list(linear.parameters())


def test_state_dict_is_the_checkpoints_tensors() -> None:
    weight = quantized()
    linear = QuantizedLinear.from_weight(weight, FORM)
    packed = FORM.pack(weight)
    assert linear.state_dict().keys() == packed.keys()
    for name, tensor in linear.state_dict().items():
        assert torch.equal(tensor, packed[name]) and tensor.dtype == packed[name].dtype
    other = QuantizedLinear(FORM, 32, 64, bias=True, dtype=torch.float32)
    other.load_state_dict(linear.state_dict())
    assert torch.equal(other.dequantize(), weight.dequantize())


def test_loading_drops_the_old_layout() -> None:
    """The kernel's layout is made again after load_state_dict and after a buffer is replaced."""
    first, second = quantized(bias=False), quantized(bias=False)
    linear = QuantizedLinear.from_weight(first, FORM, dtype=torch.float32)
    eye = torch.eye(64)
    assert torch.equal(linear(eye).T, first.dequantize())
    linear.load_state_dict(FORM.pack(second))
    assert torch.equal(linear(eye).T, second.dequantize())
    for name, tensor in FORM.pack(first).items():
        setattr(linear, name, tensor)
    assert torch.equal(linear(eye).T, first.dequantize())


def test_casts_change_activations_not_scales() -> None:
    weight = quantized()
    linear = QuantizedLinear.from_weight(weight, FORM, dtype=torch.float32)
    linear(torch.randn(1, 64))
    linear.to(torch.bfloat16)
    assert linear.dtype == torch.bfloat16 and linear.scales.dtype == torch.float16
    assert torch.equal(linear.scales, weight.scale_NR.T)
    assert linear(torch.randn(1, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16
    model = nn.Sequential(linear).half()
    assert model(torch.randn(1, 64).half()).dtype == torch.float16
    assert linear.to("meta").qweight.device.type == "meta"


def test_a_meta_layer_is_filled_by_assignment() -> None:
    """What a loader does: shapes first, then the file's tensors one by one."""
    weight = quantized()
    linear = QuantizedLinear(FORM, 32, 64, bias=True, dtype=torch.float32, device="meta")
    with pytest.raises(ValueError, match="qweight must be loaded, got a meta tensor"):
        linear(torch.randn(1, 64))
    for name, tensor in FORM.pack(weight).items():
        assert getattr(linear, name).shape == tensor.shape
        setattr(linear, name, tensor)
    assert "qweight" in linear.state_dict()
    eye = torch.eye(64)
    assert weight.bias_N is not None
    torch.testing.assert_close(linear(eye).T - weight.bias_N[:, None], weight.dequantize())


@pytest.mark.parametrize("desc_act", [False, True])
def test_shards_add_up(desc_act: bool) -> None:
    form = dataclasses.replace(FORM, desc_act=desc_act)
    linear = QuantizedLinear.from_weight(quantized(form=form), form, dtype=torch.float32)
    x = torch.randn(3, 64)
    columns = [linear.shard("column", rank, 2)(x) for rank in range(2)]
    torch.testing.assert_close(torch.cat(columns, dim=1), linear(x))
    rows = [linear.shard("row", rank, 2) for rank in range(2)]
    summed = sum(part(x[:, 32 * rank : 32 * rank + 32]) for rank, part in enumerate(rows))
    torch.testing.assert_close(summed, linear(x))


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (GPTQFormat(group_size=16), 32 * 64 // 2 + 32 * 4 * 2),
        (
            GPTQFormat(group_size=16, symmetric=False, checkpoint_format="gptq_v2"),
            32 * 64 // 2 + 32 * 4 * 2 + 32 * 4 // 2,
        ),
        (GPTQFormat(bits=8, group_size=None), 32 * 64 + 32 * 2),
        (GPTQFormat(group_size=16, desc_act=True), 32 * 64 // 2 + 32 * 4 * 2 + 64 * 4),
    ],
)
def test_weight_bytes(form: GPTQFormat, expected: int) -> None:
    assert QuantizedLinear(form, 32, 64).weight_bytes() == expected
    assert QuantizedLinear(form, 32, 64, bias=True).weight_bytes() == expected + 64


def quantized_model() -> tuple[TinyModel, dict[str, QuantizedWeight]]:
    model = TinyModel(layers=1)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    weights = {name: FORM.quantize_ref(model.get_submodule(name).weight) for name in names}
    return model, weights


def test_replace_linears() -> None:
    model, weights = quantized_model()
    ids = torch.randint(0, 50, (2, 9))
    for name, weight in weights.items():
        model.get_submodule(name).weight.copy_(weight.dequantize())
    with torch.no_grad():
        expected = model(ids)
    assert replace_linears(model, weights, lambda name: FORM) is model
    assert dict(quantized_linears(model)).keys() == weights.keys()
    prepare_linears(model)
    assert all(linear._prepared is not None for _, linear in quantized_linears(model))
    torch.testing.assert_close(model(ids), expected)
    assert all(linear.dtype == torch.float32 for _, linear in quantized_linears(model))


def test_replace_is_all_or_nothing() -> None:
    model, weights = quantized_model()
    with pytest.raises(ValueError, match=r"replace_linears: layers.0.mlp.down must have a layout"):
        replace_linears(model, weights, lambda name: None if "down" in name else FORM)
    assert not list(quantized_linears(model))
    with pytest.raises(TypeError, match="quantize: table must name an nn.Linear, got Embedding"):
        replace_linears(model, {"table": next(iter(weights.values()))}, lambda name: FORM)


def test_empty_linears_then_load() -> None:
    model, weights = quantized_model()
    filled = replace_linears(model, weights, lambda name: FORM)
    with torch.device("meta"):
        empty = TinyModel(layers=1)
    empty_linears(
        empty,
        dict.fromkeys(weights, set(FORM.tensor_specs(32, 64))),
        lambda name: FORM,
        dtype=torch.float32,
    )
    assert empty.state_dict().keys() == filled.state_dict().keys()
    empty.load_state_dict(filled.state_dict(), assign=True)
    ids = torch.randint(0, 50, (1, 6))
    with torch.no_grad():
        assert torch.equal(empty(ids), filled(ids))
    with pytest.raises(ValueError, match="the checkpoint contradicts its config"):
        empty_linears(TinyModel(layers=1), {"layers.0.attn.q": {"qweight"}}, lambda name: None,
                      dtype=torch.float32)  # fmt: skip


def test_concat_rows_is_the_parts_in_order() -> None:
    parts = [quantized(n=n) for n in (32, 8, 8)]
    fused = concat_rows(parts)
    assert torch.equal(fused.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert fused.bias_N is not None and fused.bias_N.shape == (48,)
    form = GPTQFormat(group_size=16, symmetric=False, checkpoint_format="gptq_v2")
    mixed = [quantized(n=8, bias=False), quantized(n=8, form=form, bias=False)]
    assert torch.equal(
        concat_rows(mixed).dequantize(), torch.cat([part.dequantize() for part in mixed])
    )
    with pytest.raises(ValueError, match="concat_rows: weights must agree"):
        concat_rows([quantized(n=8), quantized(n=8, form=GPTQFormat(group_size=32))])


def test_compiles_whole() -> None:
    linear = QuantizedLinear.from_weight(quantized(), FORM, dtype=torch.float32)
    linear.prepare()
    x = torch.randn(3, 64)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), linear(x))


@pytest.mark.parametrize(
    ("symmetric", "dtype", "read"),
    [
        (True, torch.bfloat16, 32 * 64 // 2 + 2 * 2 * 32 * 2),  # int4 words, scale and zero each
        (False, torch.bfloat16, None),
        (True, torch.float32, 32 * 64 * 4),
    ],
)
@pytest.mark.parametrize("bags", [False, True])
def test_bytes_read_are_those_of_the_layout_that_is_used(
    monkeypatch, symmetric, dtype, read, bags
) -> None:
    if bags and not cpu_bags.has_bags():
        pytest.skip("this PyTorch has no byte bags")
    monkeypatch.setattr(cpu, "has_fast_bf16", lambda: False)
    monkeypatch.setattr(cpu_bags, "has_bags", lambda: bags)
    if bags:  # a byte a code with 8 a row, zero points in them; offsets, scales, sizes
        read = 64 * (32 + 8) + 3 * 4 + 2 * 32 * 4 + 2 * 8
    form = GPTQFormat(group_size=32, symmetric=symmetric)
    w_NK = torch.randint(-7, 8, (32, 64)).float()
    w_NK[:, ::32] = 7.5  # scale 1 exactly, so bf16 holds it
    linear = QuantizedLinear.from_weight(form.quantize_ref(w_NK), form, dtype=dtype, impl="cpu")
    packed = linear.weight_bytes()
    assert linear.read_bytes() == packed  # nothing chosen yet
    linear(torch.ones(1, 64, dtype=dtype))
    wide = linear.prepare().tensors[0]
    assert linear.read_bytes() == (wide.numel() * wide.element_size() if read is None else read)
    assert linear.weight_bytes() == packed


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("desc_act", [False, True])
def test_released_codes_are_made_again(symmetric: bool, desc_act: bool) -> None:
    """The kernel's layout stands for the checkpoint's codes: state, shards, moves, loads."""
    kernel = pytest.importorskip("ridgeline.kernels.w4a16.triton")
    form = GPTQFormat(group_size=32, symmetric=symmetric, desc_act=desc_act)
    linear = QuantizedLinear.from_weight(quantized(form=form), form, dtype=torch.float16)
    before = {name: tensor.clone() for name, tensor in linear.state_dict().items()}
    stored = linear.weight_bytes()
    assert not linear.release()  # a CPU's layout does not give codes back
    prepared = linear.prepare()
    tensors = kernel.prepare(linear.weight_of(), torch.float16)
    linear._prepared = dataclasses.replace(prepared, impl="triton", tensors=tensors)
    assert linear.release() and linear.qweight.numel() == 0
    assert linear.weight_bytes() == stored
    for name, tensor in linear.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert torch.equal(linear.shard("column", 1, 2).qweight, before["qweight"][:, 16:])
    other = QuantizedLinear.from_weight(quantized(form=form), form, dtype=torch.float16)
    linear.load_state_dict(other.state_dict())
    assert torch.equal(linear.dequantize(), other.dequantize())
    linear._prepared = dataclasses.replace(
        prepared, impl="triton", tensors=kernel.prepare(linear.weight_of(), torch.float16)
    )
    linear._prepared_from = linear._codes()
    assert linear.release()
    linear.to(torch.float32)
    assert torch.equal(linear.qweight, other.qweight)
