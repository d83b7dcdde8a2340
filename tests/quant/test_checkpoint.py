"""Quantized folders: bit for bit there and back, shards, side files, damage, atomicity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ridgeline.core.errors import UserError
from ridgeline.formats.gptq import GPTQFormat
from ridgeline.quant import checkpoint
from ridgeline.quant.calibrate import quantize_model
from ridgeline.quant.checkpoint import (
    Extras,
    load_quantized,
    packed_layers,
    read_quantization,
    save_quantized,
)
from ridgeline.quant.linear import replace_linears
from ridgeline.quant.recipe import Override, Recipe

from .models import TinyModel

CONFIG = {"model_type": "llama", "hidden_size": 32}
RECIPE = Recipe(
    layout=GPTQFormat(group_size=16),
    overrides=(
        Override(pattern=r"attn\.k", bits=8, group_size=32),
        Override(pattern=r"layers\.1\.mlp\.up", skip=True),
    ),
)


@pytest.fixture(scope="module")
def run():
    torch.manual_seed(3)
    model = TinyModel(bias=True)
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = quantize_model(model, torch.randint(0, 50, (4, 16)), RECIPE)
    return model, plain, result.weights


@pytest.mark.parametrize("limit", [10**9, 3000])
def test_round_trip(tmp_path: Path, run, limit: int) -> None:
    model, plain, weights = run
    folder = tmp_path / "out"
    (tmp_path / "tokenizer.json").write_text("{}")
    extras = Extras(
        files=(tmp_path / "tokenizer.json",), texts=(("README.md", "made"),), max_shard_bytes=limit
    )
    size = save_quantized(folder, CONFIG, plain, weights, RECIPE, extras=extras)
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert (folder / "README.md").read_text() == "made"
    assert len(list(folder.glob("*.safetensors"))) == (1 if limit > 10**6 else 9)
    back = load_quantized(folder)
    assert back.config["hidden_size"] == 32
    assert set(back.plain) == {"table.weight", "layers.1.mlp.up.weight"}
    assert torch.equal(back.plain["layers.1.mlp.up.weight"], plain["layers.1.mlp.up.weight"])
    unpacked = back.weights()
    assert unpacked.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(unpacked[name].code_NK, weight.code_NK)
        assert torch.equal(unpacked[name].scale_NR, weight.scale_NR)
        assert unpacked[name].bits == weight.bits
        assert (unpacked[name].bias_N is None) == (weight.bias_N is None)
    stored = sum(t.nbytes for f in folder.glob("*.safetensors") for t in load_file(f).values())
    assert size.total_bytes == stored == size.quantized_bytes + size.plain_bytes
    assert size.unquantized_bytes == 2 * sum(tensor.numel() for tensor in plain.values())


def test_saved_tensors_are_the_models_state_dict(tmp_path: Path, run) -> None:
    """The model with QuantizedLinears has exactly the file's names and bits."""
    _, plain, weights = run
    save_quantized(tmp_path / "out", CONFIG, plain, weights, RECIPE)
    model = TinyModel(bias=True)
    model.load_state_dict(plain)
    replace_linears(model, weights, RECIPE.layout_of, dtype=torch.float32)
    stored, state = load_file(tmp_path / "out" / "model.safetensors"), model.state_dict()
    assert stored.keys() == state.keys()
    for name, tensor in stored.items():
        assert torch.equal(tensor, state[name]) and tensor.dtype == state[name].dtype


def test_config_says_what_is_quantized_how(tmp_path: Path, run) -> None:
    _, plain, weights = run
    save_quantized(tmp_path / "out", CONFIG, plain, weights, RECIPE)
    config, quantization = read_quantization(tmp_path / "out")
    assert config["quantization_config"]["quant_method"] == "gptq"
    side = json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    assert side == config["quantization_config"]
    assert quantization is not None
    for name in weights:
        assert quantization.layout_of(name) == RECIPE.layout_of(name)
    assert quantization.layout_of("layers.1.mlp.up") is None
    assert quantization.static_groups and quantization.damping == RECIPE.gptq.damping


def test_packed_layers_of_names() -> None:
    names = ["a.qweight", "a.bias", "b.qweight", "b.scales", "c.weight"]
    assert packed_layers(names) == {"a": {"qweight", "bias"}, "b": {"qweight", "scales"}}


def test_plain_and_unknown_folders(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert read_quantization(tmp_path)[1] is None
    with pytest.raises(UserError, match="must be quantized, got a plain one"):
        load_quantized(tmp_path)
    entry = {"quantization_config": {"quant_method": "exl3"}}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | entry))
    with pytest.raises(UserError, match="quant_method must be one of gptq.*, got 'exl3'"):
        load_quantized(tmp_path)
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(UserError, match="config.json must be JSON"):
        load_quantized(tmp_path)
    with pytest.raises(UserError, match="could not read .*nowhere"):
        load_quantized(tmp_path / "nowhere")


def test_damage_is_named(tmp_path: Path, run) -> None:
    _, plain, weights = run
    folder = tmp_path / "out"
    save_quantized(folder, CONFIG, plain, weights, RECIPE)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="model.safetensors must be whole safetensors"):
        load_quantized(folder)
    file.unlink()
    with pytest.raises(UserError, match="must hold safetensors, got none"):
        load_quantized(folder)


def test_a_wrong_width_in_the_config_is_named(tmp_path: Path, run) -> None:
    _, plain, weights = run
    folder = tmp_path / "out"
    save_quantized(folder, CONFIG, plain, weights, RECIPE)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["bits"] = 8
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"checkpoint: layers.0.attn.o: gptq: .* at 8 bits"):
        load_quantized(folder).weights()


def test_an_index_that_leaves_the_folder_is_refused(tmp_path: Path, run) -> None:
    _, plain, weights = run
    folder = tmp_path / "out"
    save_quantized(folder, CONFIG, plain, weights, RECIPE, extras=Extras(max_shard_bytes=3000))
    index = {"weight_map": {"a": "../secret.safetensors"}}
    (folder / checkpoint.INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match="must name files of"):
        load_quantized(folder)


def test_nothing_is_left_of_a_failed_write(tmp_path: Path, run, monkeypatch) -> None:
    _, plain, weights = run

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(UserError, match="could not write .*out: No space left on device"):
        save_quantized(tmp_path / "out", CONFIG, plain, weights, RECIPE)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    save_quantized(tmp_path / "out", CONFIG, plain, weights, RECIPE)
    with pytest.raises(UserError, match="exists already"):
        save_quantized(tmp_path / "out", CONFIG, plain, weights, RECIPE)
    save_quantized(tmp_path / "out", CONFIG, plain, weights, RECIPE, overwrite=True)
