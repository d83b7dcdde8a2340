"""Whole checkpoints that other libraries wrote (benchmarks/quant/peer_checkpoints.py ran them in
their own environments), read by ours: weights bit for bit as the library itself dequantizes them,
logits as Transformers computes them from those, the same through `from_pretrained` and after a
conversion."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from ridgeline.engine import load
from ridgeline.formats.awq import AWQFormat
from ridgeline.formats.compressed_tensors import CompressedTensorsFormat
from ridgeline.formats.gptq import GPTQFormat
from ridgeline.integrations import transformers as plugin
from ridgeline.quant.checkpoint import convert_checkpoint, load_quantized, read_quantization
from ridgeline.quant.linear import quantized_linears

FOLDERS = sorted((Path(__file__).parent / "peer_checkpoints").iterdir())
IDS = [folder.name for folder in FOLDERS]
READ_AS = {
    "awq_gemm": (AWQFormat, False),
    "compressed_tensors_awq": (CompressedTensorsFormat, False),
    "compressed_tensors_gptq": (CompressedTensorsFormat, True),
    "compressed_tensors_gptq_asymmetric": (CompressedTensorsFormat, False),
    "gptq": (GPTQFormat, True),
    "gptq_asymmetric": (GPTQFormat, False),
    "gptq_desc_act": (GPTQFormat, True),
    "gptq_v2_asymmetric": (GPTQFormat, False),
}


def expected(folder: Path) -> tuple[torch.Tensor, torch.Tensor, dict[str, str]]:
    """(token ids, logits, SHA-256 of each layer's fp16 weight) by the library."""
    with safe_open(folder / "expected.safetensors", "pt") as opened:
        facts = opened.metadata()
        ids, logits = opened.get_tensor("ids"), opened.get_tensor("logits")
    return ids, logits, json.loads(facts["sha256"])


def same_logits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Up to the library's rounding of its dequantized weights to fp16, which our kernels spare."""
    torch.testing.assert_close(got.detach(), want, rtol=0.0, atol=2e-3 * float(want.abs().max()))
    assert torch.equal(got.argmax(-1), want.argmax(-1))


def test_every_form_is_there():
    assert IDS == sorted(READ_AS)


@pytest.mark.parametrize("folder", FOLDERS, ids=IDS)
def test_weights_are_the_librarys_own_bit_for_bit(folder):
    _, quantization = read_quantization(folder)
    assert quantization is not None
    kind, symmetric = READ_AS[folder.name]
    assert isinstance(quantization.layout, kind) and quantization.layout.group_size == 32
    _, _, digests = expected(folder)
    weights = load_quantized(folder).weights()
    assert weights.keys() == digests.keys() and len(weights) == 7
    for name, weight in weights.items():
        assert (weight.zero_NR is None) == symmetric, name
        assert (weight.group_of_K is not None) == (folder.name == "gptq_desc_act"), name
        half = weight.dequantize().half().contiguous()
        assert hashlib.sha256(half.numpy().tobytes()).hexdigest() == digests[name], name


@pytest.mark.parametrize("folder", FOLDERS, ids=IDS)
def test_logits_are_the_librarys(folder):
    ids, logits, _ = expected(folder)
    model, _ = load.load_quantized(folder, torch.float32, torch.device("cpu"))
    same_logits(model(ids), logits)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("folder", FOLDERS, ids=IDS)
def test_from_pretrained_runs_them_on_our_kernels(folder, monkeypatch):
    from transformers.quantizers import auto

    for table in (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING):
        for method in ("gptq", "awq", "compressed-tensors"):
            monkeypatch.setitem(table, method, table[method])  # put back afterwards
    plugin.enable_quantized()
    ids, logits, digests = expected(folder)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert {name for name, _ in quantized_linears(loaded)} == digests.keys()
    with torch.no_grad():
        same_logits(loaded(ids).logits, logits)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("gptq_asymmetric", "awq"),
        ("awq_gemm", "compressed-tensors"),
        ("compressed_tensors_awq", "gptq"),
        ("gptq_desc_act", "compressed-tensors"),
    ],
)
def test_a_conversion_keeps_every_weight(name, target):
    folder = next(folder for folder in FOLDERS if folder.name == name)
    before = load_quantized(folder).weights()
    converted = convert_checkpoint(load_quantized(folder), target)
    assert converted.quantization.layout.method == target
    for layer, weight in converted.weights().items():
        assert torch.equal(weight.dequantize(), before[layer].dequantize()), layer
