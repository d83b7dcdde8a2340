"""Tiny random models of the families, and their inputs."""

from __future__ import annotations

import contextlib
import copy

import torch
import torch.nn.functional as F
import transformers

VOCAB = 97
WINDOW = 6
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = ["sliding_attention", "full_attention"]
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2Config",
        {"sliding_window": WINDOW, "layer_types": MIXED, "attn_logit_softcapping": 5.0},
    ),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": WINDOW, "layer_types": MIXED}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "sliding_window": WINDOW,
            "layer_types": MIXED,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
}


def model_of(family: str, **changes):
    """A model whose weights are large enough for attention to matter; fp32, eager, eval."""
    name, options = FAMILIES[family]
    config = getattr(transformers, name)(**{**SIZES, **options, **changes})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the grouped matmul knows no fp64
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            spread = 1.0 if "sinks" in key or "embed" in key else 0.25
            if "norm" not in key:
                parameter.normal_(0.0, spread)
    return model


def with_attention(model, name: str, dtype: torch.dtype | None = None):
    """A copy of a model with another attention (and dtype)."""
    other = copy.deepcopy(model)
    other.set_attn_implementation(name)
    return other if dtype is None else other.to(dtype)


@contextlib.contextmanager
def wide_softmax():
    """Transformers' `eager` takes its softmax in fp32 whatever the dtype: let fp64 stay fp64."""
    softmax = F.softmax

    def wide(x, dim=None, _stacklevel=3, dtype=None):
        return softmax(x, dim=dim, dtype=x.dtype if x.dtype == torch.float64 else dtype)

    F.softmax = wide
    try:
        yield
    finally:
        F.softmax = softmax
