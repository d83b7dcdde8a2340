"""A tiny decoder in every format: the same logits, bit for bit, as on the weights it stands for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.core.errors import UserError
from ridgeline.engine.load import open_model
from ridgeline.formats.awq import AWQFormat
from ridgeline.formats.compressed_tensors import CompressedTensorsFormat
from ridgeline.formats.gptq import GPTQFormat
from ridgeline.nn.decoder import Decoder
from ridgeline.nn.hf import save_pretrained, state_tensors
from ridgeline.quant.calibrate import quantize_model
from ridgeline.quant.checkpoint import convert_checkpoint, load_quantized, save_quantized
from ridgeline.quant.linear import quantized_linears
from ridgeline.quant.recipe import Override, Recipe
from ridgeline.train.presets import preset
from ridgeline.train.tokens import byte_tokenizer

FORMS = {
    "gptq": GPTQFormat(group_size=32),
    "gptq_v2": GPTQFormat(group_size=32, symmetric=False, checkpoint_format="gptq_v2"),
    "awq": AWQFormat(group_size=32),
    "compressed-tensors": CompressedTensorsFormat(group_size=32),
    "compressed-tensors asymmetric": CompressedTensorsFormat(group_size=32, symmetric=False),
    "compressed-tensors bf16": CompressedTensorsFormat(group_size=32, scale_dtype="bfloat16"),
    "compressed-tensors 3 bits": CompressedTensorsFormat(bits=3, group_size=None),
}
IDS = torch.arange(24).view(2, 12)


def decoder() -> Decoder:
    tokenizer = byte_tokenizer()
    shape = replace(preset("tiny"), vocab_size=tokenizer.vocab_size, max_seqlen=64)
    return Decoder(shape, dtype=torch.float32, seed=1)


def written(folder: Path, form, *overrides: Override) -> torch.Tensor:
    """Write a quantized decoder; returns the logits of the same decoder on dequantized weights."""
    model = decoder()
    plain = {name: tensor.clone() for name, tensor in state_tensors(model).items()}
    recipe = Recipe(method="rtn", layout=form, overrides=overrides)
    weights = quantize_model(model, None, recipe).weights
    config = model.config.to_hf()
    save_quantized(folder, config, plain, weights, recipe)
    for name, text in byte_tokenizer().files().items():
        (folder / name).write_text(text, encoding="utf-8")
    with torch.no_grad():
        return model(IDS)


@pytest.fixture(autouse=True)
def _reference(monkeypatch):
    """The implementation whose arithmetic is a matmul on the dequantized weight."""
    monkeypatch.setenv("RIDGELINE_IMPL_W4A16", "ref")


@pytest.mark.parametrize("name", FORMS)
def test_logits_are_those_of_the_dequantized_weights(tmp_path: Path, name: str) -> None:
    expected = written(tmp_path / "q", FORMS[name])
    opened = open_model(tmp_path / "q", "float32", "cpu")
    form = FORMS[name]
    group = "whole rows" if form.group_size is None else f"group {form.group_size}"
    assert opened.weights == f"{form.method} {form.bits}-bit {group}"
    with torch.no_grad():
        assert torch.equal(opened.model(IDS), expected)
    stored = load_file(tmp_path / "q" / "model.safetensors")
    for full, linear in quantized_linears(opened.model):
        for part, tensor in linear.tensors().items():
            assert tensor.dtype == stored[f"{full}.{part}"].dtype
            assert torch.equal(tensor, stored[f"{full}.{part}"])


def test_mixed_widths_and_plain_layers(tmp_path: Path) -> None:
    overrides = (Override(pattern="down", bits=8), Override(pattern=r"\.1\.self_attn", skip=True))
    expected = written(tmp_path / "q", FORMS["compressed-tensors"], *overrides)
    with torch.no_grad():
        assert torch.equal(open_model(tmp_path / "q", "float32", "cpu").model(IDS), expected)


def test_older_three_bit_words_are_opened(tmp_path: Path) -> None:
    """Aligned words have another shape than ours; the loader takes the file's."""
    expected = written(tmp_path / "q", FORMS["compressed-tensors 3 bits"])
    file = tmp_path / "q" / "model.safetensors"
    tensors = load_file(file)
    for name, weight in load_quantized(tmp_path / "q").weights().items():
        rows, count = weight.code_NK.shape
        words = torch.zeros(rows, -(-count // 10), dtype=torch.int32)
        for j in range(count):
            words[:, j // 10] |= weight.code_NK[:, j].int() << 3 * (j % 10)
        tensors[f"{name}.weight_packed"] = words
    save_file(tensors, file)
    with torch.no_grad():
        assert torch.equal(open_model(tmp_path / "q", "float32", "cpu").model(IDS), expected)


def test_a_gptq_file_without_group_table_is_opened(tmp_path: Path) -> None:
    expected = written(tmp_path / "q", FORMS["gptq"])
    file = tmp_path / "q" / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if not n.endswith("g_idx")}, file)
    with torch.no_grad():
        assert torch.equal(open_model(tmp_path / "q", "float32", "cpu").model(IDS), expected)


def test_a_v2_file_labelled_v1_is_opened_as_what_it_is(tmp_path: Path) -> None:
    expected = written(tmp_path / "q", replace(FORMS["gptq"], checkpoint_format="gptq_v2"))
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq"
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        assert torch.equal(open_model(tmp_path / "q", "float32", "cpu").model(IDS), expected)
    converted = convert_checkpoint(load_quantized(tmp_path / "q"), "awq")
    assert all(weight.zero_NR is None for weight in converted.weights().values())


@pytest.mark.parametrize("name", ["gptq", "awq", "compressed-tensors"])
def test_damage_is_one_line_with_the_layer(tmp_path: Path, name: str) -> None:
    written(tmp_path / "q", FORMS[name])
    file = tmp_path / "q" / "model.safetensors"
    whole = load_file(file)
    full = next(each for each in whole if each.endswith((".scales", ".weight_scale")))
    for tensors, message in (
        (whole | {full: whole[full][:, :-1].contiguous()}, "must have shape"),
        ({n: t for n, t in whole.items() if n != full}, "got no"),
        (whole | {full.rpartition(".")[0] + ".extra": torch.ones(1)}, "got extra"),
    ):
        save_file(tensors, file)
        with pytest.raises(UserError, match=message) as error:
            open_model(tmp_path / "q", "float32", "cpu")
        assert full.rpartition(".")[0] in str(error.value) and "\n" not in str(error.value)


def test_a_config_over_plain_weights_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "q", FORMS["awq"])
    entry = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    model = decoder()
    save_pretrained(model, tmp_path / "p")
    config = json.loads((tmp_path / "p" / "config.json").read_text())
    (tmp_path / "p" / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
    for name, text in byte_tokenizer().files().items():
        (tmp_path / "p" / name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="must hold packed weights as its config says, got none"):
        open_model(tmp_path / "p", "float32", "cpu")
