"""Quantized folders written by us, loaded by Transformers onto our kernels."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers

from ridgeline.core.errors import UserError
from ridgeline.formats.awq import AWQFormat
from ridgeline.formats.compressed_tensors import CompressedTensorsFormat
from ridgeline.formats.gptq import GPTQFormat
from ridgeline.integrations import transformers as plugin
from ridgeline.quant.checkpoint import save_quantized
from ridgeline.quant.linear import quantized_linears
from ridgeline.quant.recipe import Override, Recipe
from ridgeline.quant.rtn import quantize_layer_rtn
from tests.integrations.models import VOCAB, model_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def enabled(monkeypatch):
    from transformers.quantizers import auto

    for table in (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING):
        for method in ("gptq", "awq", "compressed-tensors"):
            monkeypatch.setitem(table, method, table[method])  # put back afterwards
    plugin.enable_quantized()


FORMS = {
    "gptq": GPTQFormat(group_size=16),
    "awq": AWQFormat(group_size=16),
    "compressed-tensors": CompressedTensorsFormat(group_size=16, symmetric=False),
}


@pytest.fixture(params=FORMS)
def folder(tmp_path, request):
    """(a folder of a tiny model, 4 bits but for one layer; the same weights as a plain model)."""
    model = model_of("qwen3", attention_bias=True)
    recipe = Recipe(
        method="rtn",
        layout=FORMS[request.param],
        overrides=(Override(pattern=r"layers\.1\.mlp\.up_proj", skip=True),),
    )
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = {}
    for name, module in model.model.layers.named_modules(prefix="model.layers"):
        layout = recipe.layout_of(name)
        if isinstance(module, torch.nn.Linear) and layout is not None:
            weight = quantize_layer_rtn(module.weight.detach(), layout)
            if module.bias is not None:
                weight = replace(weight, bias_N=module.bias.detach().half())
                module.bias.data = weight.bias_N.float()
            weights[name] = weight
            module.weight.data = weight.dequantize(torch.float32)
    config = {**model.config.to_dict(), "architectures": ["Qwen3ForCausalLM"]}
    config.pop("_attn_implementation", None)
    save_quantized(tmp_path / "out", config, plain, weights, recipe)
    return tmp_path / "out", model, set(weights)


def test_a_folder_of_ours_runs_on_our_kernels(enabled, folder):
    path, plain, names = folder
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert {name for name, _ in quantized_linears(loaded)} == names and len(names) == 13
    stored = [layer.tensors() for _, layer in quantized_linears(loaded)]
    scales = [parts.get("scales", parts.get("weight_scale")) for parts in stored]
    assert all(scale.dtype == torch.float16 for scale in scales)
    tokens = torch.randint(3, VOCAB, (2, 9))
    with torch.no_grad():
        got, want = loaded(tokens).logits, plain(tokens).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    answers = [m.generate(tokens, max_new_tokens=4, do_sample=False) for m in (loaded, plain)]
    assert torch.equal(*answers)


def test_a_folder_runs_in_bfloat16(enabled, folder):
    """Activations follow the dtype asked for; what is stored does not."""
    path, plain, names = folder
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    layers = dict(quantized_linears(loaded))
    assert set(layers) == names and {layer.dtype for layer in layers.values()} == {torch.bfloat16}
    tokens = torch.randint(3, VOCAB, (2, 9))
    with torch.no_grad():
        got, exact = loaded(tokens).logits.float(), plain(tokens).logits
        beside = plain.bfloat16()(tokens).logits.float()
    bound = 2 * (beside - exact).abs().max() + 1e-3
    assert (got - exact).abs().max() <= bound


HOSTILE = {
    "gptq": {"dynamic": {"(a+)+$": {"bits": 8}}},
    "awq": {"modules_to_not_convert": [""]},
    "compressed-tensors": {"ignore": ["re:(a|a)*$"]},
}


def test_a_hostile_config_executes_nothing(enabled, folder, tmp_path):
    """Code beside the weights, or named in the config, is not imported; patterns that would take
    exponential time, and pickles, are refused."""
    path, _, _ = folder
    marker = tmp_path / "ran"
    (path / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    config = json.loads((path / "config.json").read_text())
    entry = config["quantization_config"]
    named = {"modules": "evil.Evil", "quantizer": "evil", "kernel": "__import__('os').abort()"}
    config["quantization_config"] = {**entry, **named}
    (path / "config.json").write_text(json.dumps(config))
    transformers.AutoModelForCausalLM.from_pretrained(path)
    assert not marker.exists()
    config["quantization_config"] = {**entry, **HOSTILE[entry["quant_method"]]}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="quantization_config"):
        transformers.AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize("folder", ["gptq"], indirect=True)
def test_a_folder_that_cannot_be_read_is_refused(enabled, folder):
    path, _, _ = folder
    config = path / "config.json"
    config.write_text(
        config.read_text().replace('"checkpoint_format": "gptq"', '"is_marlin_format": true')
    )
    with pytest.raises(UserError, match="is_marlin_format"):
        transformers.AutoModelForCausalLM.from_pretrained(path)


def test_taking_over_twice_is_no_error(enabled):
    from transformers.quantizers import auto

    plugin.enable_quantized()
    for method in FORMS:
        assert auto.AUTO_QUANTIZER_MAPPING[method].__name__ == "RidgelineQuantizer"
    with pytest.raises(ValueError, match="methods must be among gptq, awq, compressed-tensors"):
        plugin.enable_quantized(["bitsandbytes"])
