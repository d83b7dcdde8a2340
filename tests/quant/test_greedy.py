"""A decoder whose linears are all quantized says what the reference says."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from ridgeline.formats.gptq import GPTQFormat
from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.decoder import Decoder
from ridgeline.nn.generate import SamplingConfig, generate_ids
from ridgeline.quant.linear import (
    QuantizedLinear,
    prepare_linears,
    quantized_linears,
    replace_linears,
)

CONFIG = DecoderConfig(
    vocab_size=104,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_seqlen=64,
    tie_embeddings=False,
    bos_token_id=1,
    eos_token_ids=(),
    init_std=0.3,
)
PROMPT = [93, 5, 98, 30]
TOKENS = 12
MARGIN = 0.5
"""Least distance of the reference's first and second logit; fp16 moves a logit by some 0.1."""


def quantized_decoder(impl: str, dtype: torch.dtype, device: str = "cpu") -> Decoder:
    """The same weights for every implementation."""
    model = Decoder(CONFIG)
    form = GPTQFormat(group_size=32)
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    weights = {name: form.quantize_ref(model.get_submodule(name).weight) for name in names}
    replace_linears(model, weights, lambda name: form, impl=impl)
    assert not any(type(module) is nn.Linear for module in model.modules())
    return model.to(device=device, dtype=dtype).eval()


def reference_tokens() -> list[int]:
    """Greedy, in fp32, without a cache; every choice is a clear one."""
    model = quantized_decoder("ref", torch.float32)
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(TOKENS):
            first, second = model(torch.tensor([ids]))[0, -1].topk(2)[0].tolist()
            assert first - second > MARGIN
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(PROMPT) :]


def tokens_of(model: Decoder) -> list[int]:
    return list(generate_ids(model, PROMPT, SamplingConfig(max_new_tokens=TOKENS)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_on_a_cpu(dtype: torch.dtype) -> None:
    model = quantized_decoder("cpu", dtype)
    expected = reference_tokens()
    assert tokens_of(model) == expected and len(set(expected)) > 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_on_a_gpu(impl: str) -> None:
    model = quantized_decoder(impl, torch.float16, "cuda")
    tokens = tokens_of(model)  # not in the assertion: see pretended_hopper.py
    assert tokens == reference_tokens()
    prepare_linears(model)
    released = [linear.qweight.numel() == 0 for _, linear in quantized_linears(model)]
    tokens = tokens_of(model)
    assert all(released) and tokens == reference_tokens()
    stored = quantized_decoder("ref", torch.float16).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.cpu(), stored[name]), name
    chosen = {linear.prepare().impl for _, linear in quantized_linears(model)}
    hopper = torch.cuda.get_device_capability()[0] == 9 and importlib.util.find_spec("tvm_ffi")
    assert chosen == {"cute_sm90" if impl == "auto" and hopper else "triton"}


def test_every_linear_is_replaced() -> None:
    found = dict(quantized_linears(quantized_decoder("ref", torch.float32)))
    assert len(found) == 7 * CONFIG.num_layers + 1
    assert all(isinstance(module, QuantizedLinear) for module in found.values())
