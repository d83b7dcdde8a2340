"""A 4-bit folder through the engine: the dtype its kernel wants, the model's own tokens."""

from __future__ import annotations

import pytest
import torch

from ridgeline.engine import host_products
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.llm import LLM
from ridgeline.engine.memory import plan
from ridgeline.engine.params import SamplingParams
from ridgeline.engine.weights import Dense
from ridgeline.formats.compressed_tensors import CompressedTensorsFormat
from ridgeline.kernels.w4a16 import cpu_bags
from ridgeline.nn.hf import copy_tokenizer, state_tensors
from ridgeline.quant.calibrate import quantize_model
from ridgeline.quant.checkpoint import save_quantized
from ridgeline.quant.recipe import Recipe
from tests.engine.conftest import tiny_decoder

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[1, 2, 3], [(i * i) % 256 for i in range(33)]]


def write(folder, source, scale_dtype: str):
    """The tiny decoder in 4 bits; returns it on the widened weights."""
    model = tiny_decoder()
    plain = {name: tensor.clone() for name, tensor in state_tensors(model).items()}
    layout = CompressedTensorsFormat(group_size=32, scale_dtype=scale_dtype)
    recipe = Recipe(method="rtn", layout=layout)
    weights = quantize_model(model, None, recipe).weights
    save_quantized(folder, model.config.to_hf(), plain, weights, recipe)
    copy_tokenizer(source, folder)
    wide = tiny_decoder()
    with torch.no_grad():
        for name, weight in weights.items():
            wide.get_submodule(name).weight.copy_(weight.dequantize(torch.float32))
    return wide


def tokens(llm: LLM) -> list[list[int]]:
    return [made.choices[0].token_ids for made in llm.generate(PROMPTS, GREEDY)]


def test_bf16_where_a_fast_kernel_takes_it(tmp_path, model_folder, monkeypatch):
    """bf16 scales: the int4 kernel; fp16 scales have more bits: bags, or else fp32. The plan says
    the same."""
    monkeypatch.setattr(cpu_bags, "has_bags", lambda: False)
    wide = write(tmp_path / "bf16", model_folder, "bfloat16")
    write(tmp_path / "fp16", model_folder, "float16")
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float32")):
        llm = LLM(tmp_path / name)
        assert (llm.info.dtype, plan(tmp_path / name, EngineConfig()).dtype) == (dtype, dtype)
        assert llm.info.weights == "compressed-tensors 4-bit group 32"
    monkeypatch.undo()
    fp16 = LLM(tmp_path / "fp16").info.dtype
    assert fp16 == ("bfloat16" if cpu_bags.has_bags() else "float32")
    asked = LLM(tmp_path / "bf16", EngineConfig(dtype="float32"))
    assert asked.info.dtype == "float32" and tokens(asked) == tokens(LLM(wide))


def test_joined_layers_in_bf16_are_the_decoders(tmp_path, model_folder):
    """Log-probabilities near those of fp32 on the widened weights, alone and together."""
    wide = write(tmp_path / "w4", model_folder, "bfloat16")
    params = SamplingParams(temperature=1, seed=3, max_tokens=12, ignore_eos=True, logprobs=0)
    for config in (EngineConfig(), EngineConfig(max_num_seqs=1)):
        for made in LLM(tmp_path / "w4", config).generate(PROMPTS, params):
            choice = made.choices[0]
            text = torch.tensor([made.prompt_ids + choice.token_ids])
            with torch.no_grad():
                want = wide(text).log_softmax(-1)[0, len(made.prompt_ids) - 1 : -1]
            own = want.gather(-1, text[0, len(made.prompt_ids) :, None])[:, 0]
            told = torch.tensor([each.logprob for each in choice.logprobs])
            assert (told - own).square().mean().sqrt() < 0.1


def test_a_row_of_logits_is_the_matmuls(monkeypatch):
    """The head's chunked copy against F.linear, a vocabulary that fills no whole chunk."""
    if not cpu_bags.has_bags():
        pytest.skip("this PyTorch has no byte bags")
    monkeypatch.setattr(host_products, "has_fast_bf16", lambda: False)
    head = Dense(torch.randn(200, 64, dtype=torch.bfloat16), None, False)
    x_1C = torch.randn(1, 64)
    found = host_products.Head(head, host_products.Kept(x_1C))()
    exact = x_1C.to(torch.bfloat16).double() @ head.weight_NK.double().T
    error = (found.double() - exact).abs()
    assert found.shape == (1, 200) and found.dtype == torch.float32
    assert error.max() <= 2 * (head(x_1C.to(torch.bfloat16)).double() - exact).abs().max() + 1e-6
    assert host_products.head_in_bags(torch.bfloat16)
    assert not host_products.head_in_bags(torch.float32)
