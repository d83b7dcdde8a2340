"""Folders in every format: bit for bit there and back, stated exceptions, conversion, damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.core.errors import UserError
from ridgeline.formats.awq import AWQFormat
from ridgeline.formats.compressed_tensors import CompressedTensorsFormat
from ridgeline.formats.gptq import GPTQFormat
from ridgeline.formats.registry import describe
from ridgeline.quant.calibrate import quantize_model
from ridgeline.quant.checkpoint import (
    QuantizedCheckpoint,
    convert_checkpoint,
    load_quantized,
    read_quantization,
    save_quantized,
    write_checkpoint,
)
from ridgeline.quant.linear import replace_linears
from ridgeline.quant.recipe import Override, Recipe

from .models import TinyModel

CONFIG = {"model_type": "llama", "hidden_size": 32}
SKIP = Override(pattern=r"layers\.1\.mlp\.up", skip=True)
WIDER = Override(pattern=r"attn\.k", bits=8, group_size=32)
RECIPES = {
    "gptq": Recipe(method="rtn", layout=GPTQFormat(group_size=16), overrides=(WIDER, SKIP)),
    "gptq asymmetric": Recipe(
        method="rtn",
        layout=GPTQFormat(group_size=16, symmetric=False, checkpoint_format="gptq_v2"),
        overrides=(SKIP,),
    ),
    "awq": Recipe(method="rtn", layout=AWQFormat(group_size=16), overrides=(SKIP,)),
    "awq symmetric": Recipe(
        method="rtn", layout=AWQFormat(group_size=16, symmetric=True), overrides=(SKIP,)
    ),
    "ct": Recipe(
        method="rtn", layout=CompressedTensorsFormat(group_size=16), overrides=(WIDER, SKIP)
    ),
    "ct asymmetric": Recipe(
        method="rtn",
        layout=CompressedTensorsFormat(group_size=16, symmetric=False),
        overrides=(WIDER, SKIP),
    ),
}


def made(name: str):
    """(plain tensors, quantized weights) of a small model by a recipe."""
    torch.manual_seed(4)
    model = TinyModel(bias=True)
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return plain, quantize_model(model, None, RECIPES[name]).weights


@pytest.mark.parametrize("name", RECIPES)
def test_round_trip(tmp_path: Path, name: str) -> None:
    plain, weights = made(name)
    recipe = RECIPES[name]
    size = save_quantized(tmp_path / "out", CONFIG, plain, weights, recipe)
    assert (tmp_path / "out" / "quantize_config.json").exists() == name.startswith("gptq")
    back = load_quantized(tmp_path / "out")
    assert set(back.plain) == {"table.weight", "layers.1.mlp.up.weight"}
    unpacked = back.weights()
    assert unpacked.keys() == weights.keys()
    for layer, weight in weights.items():
        assert back.quantization.layout_of(layer) == recipe.layout_of(layer)
        assert torch.equal(unpacked[layer].code_NK, weight.code_NK)
        assert torch.equal(unpacked[layer].dequantize(), weight.dequantize())
        assert (unpacked[layer].bias_N is None) == (weight.bias_N is None)
    assert back.quantization.layout_of("layers.1.mlp.up") is None
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert size.total_bytes == sum(tensor.nbytes for tensor in stored.values())
    assert size.unquantized_bytes == 2 * sum(tensor.numel() for tensor in plain.values())


@pytest.mark.parametrize("name", RECIPES)
def test_the_models_state_dict_is_the_file(tmp_path: Path, name: str) -> None:
    """A layer holds any format's tensors bit for bit, and computes with what they stand for."""
    plain, weights = made(name)
    save_quantized(tmp_path / "out", CONFIG, plain, weights, RECIPES[name])
    model, wide = TinyModel(bias=True), TinyModel(bias=True)
    model.load_state_dict(plain)
    wide.load_state_dict(plain)
    for layer, weight in weights.items():
        linear = wide.get_submodule(layer)
        linear.weight.copy_(weight.dequantize())
        if weight.bias_N is not None:
            linear.bias.copy_(weight.bias_N)
    replace_linears(model, weights, RECIPES[name].layout_of, dtype=torch.float32, impl="ref")
    stored, state = load_file(tmp_path / "out" / "model.safetensors"), model.state_dict()
    assert stored.keys() == state.keys()
    for full, tensor in stored.items():
        assert torch.equal(tensor, state[full]) and tensor.dtype == state[full].dtype
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), wide(ids))


@pytest.mark.parametrize("target", ["gptq", "awq", "compressed-tensors"])
@pytest.mark.parametrize("name", ["gptq asymmetric", "awq", "awq symmetric", "ct"])
def test_convert(tmp_path: Path, name: str, target: str) -> None:
    """Every weight of the new folder is the old one's; a symmetric AWQ file is seen as that."""
    plain, weights = made(name)
    if name == "ct":
        weights = {n: w for n, w in weights.items() if w.bits == 4}
    save_quantized(tmp_path / "old", CONFIG, plain, weights, RECIPES[name])
    converted = convert_checkpoint(load_quantized(tmp_path / "old"), target)
    write_checkpoint(tmp_path / "new", converted)
    back = load_quantized(tmp_path / "new")
    entry = back.config["quantization_config"]
    assert entry["quant_method"] == target and back.config["hidden_size"] == 32
    if target == "gptq":
        assert entry["sym"] == (name in ("awq symmetric", "ct"))
    unpacked = back.weights()
    assert unpacked.keys() == weights.keys() and back.plain.keys() == converted.plain.keys()
    for layer, weight in weights.items():
        assert torch.equal(unpacked[layer].code_NK, weight.code_NK)
        assert torch.equal(unpacked[layer].dequantize(), weight.dequantize())
        if weight.bias_N is not None:
            assert torch.equal(unpacked[layer].bias_N, weight.bias_N)
    assert back.quantization.layout_of("layers.1.mlp.up") is None


def test_mixed_widths_convert_where_the_config_can_state_them(tmp_path: Path) -> None:
    plain, weights = made("ct")
    save_quantized(tmp_path / "old", CONFIG, plain, weights, RECIPES["ct"])
    new = convert_checkpoint(load_quantized(tmp_path / "old"), "gptq")
    assert {n: w.bits for n, w in new.weights().items()} == {n: w.bits for n, w in weights.items()}
    with pytest.raises(UserError, match=r"layers.0.attn.k: awq: bits must be 4, got 8"):
        convert_checkpoint(load_quantized(tmp_path / "old"), "awq")


def test_a_lossy_conversion_is_refused_then_made(tmp_path: Path) -> None:
    form = CompressedTensorsFormat(group_size=16, symmetric=False, desc_act=True)
    weights = {}
    for name, weight in made("gptq asymmetric")[1].items():
        tensors = CompressedTensorsFormat(group_size=16, symmetric=False).pack(weight)
        weights[name] = tensors | {"weight_g_idx": weight.groups_K().int().roll(1)}
    old = QuantizedCheckpoint(
        config=CONFIG,
        quantization=describe(form, {}),
        plain={},
        packed=weights,
    )
    write_checkpoint(tmp_path / "old", old)
    with pytest.raises(UserError, match=r"layers\.\S+: convert: .* groups in activation order"):
        convert_checkpoint(load_quantized(tmp_path / "old"), "awq")
    whole = load_quantized(tmp_path / "old")
    before = {name: weight.dequantize() for name, weight in whole.weights().items()}
    lossy = convert_checkpoint(whole, "awq", lossy=True).weights()
    for name, weight in lossy.items():
        error = (weight.dequantize() - before[name]).norm() / before[name].norm()
        assert 0 < error < 0.2
    kept = convert_checkpoint(load_quantized(tmp_path / "old"), "gptq").weights()
    assert all(torch.equal(kept[name].dequantize(), before[name]) for name in before)


def test_an_awq_recipe_with_other_widths_is_refused() -> None:
    plain, weights = made("awq")
    recipe = Recipe(
        method="rtn",
        layout=AWQFormat(group_size=16),
        overrides=(Override(pattern="up", group_size=32), SKIP),
    )
    with pytest.raises(ValueError, match="awq: layers must have one width and group size"):
        save_quantized("nowhere", CONFIG, plain, weights, recipe)


def test_pickled_awq_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    entry = {"w_bit": 4, "q_group_size": 128, "zero_point": True}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "quant_config.json").write_text(json.dumps(entry))
    (tmp_path / "llama-w4-g128.pt").write_bytes(b"\x80\x02K\x01.")
    found = read_quantization(tmp_path)[1]
    assert found is not None and found.layout.method == "awq"
    with pytest.raises(UserError, match="must hold safetensors, got llama-w4-g128.pt; .*AutoAWQ"):
        load_quantized(tmp_path)


@pytest.mark.parametrize("name", ["awq", "ct asymmetric"])
def test_damage_is_named_with_its_layer(tmp_path: Path, name: str) -> None:
    plain, weights = made(name)
    save_quantized(tmp_path / "out", CONFIG, plain, weights, RECIPES[name])
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    part = "qzeros" if name == "awq" else "weight_zero_point"
    del tensors[f"layers.0.mlp.down.{part}"]
    save_file(tensors, file)
    with pytest.raises(UserError, match=rf"checkpoint: layers.0.mlp.down: .* got no {part}"):
        load_quantized(tmp_path / "out").weights()
    with pytest.raises(UserError, match=rf"checkpoint: layers.0.mlp.down: .* got no {part}"):
        convert_checkpoint(load_quantized(tmp_path / "out"), "gptq")
