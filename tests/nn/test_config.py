"""config.json of what this decoder is not, and impossible shapes, each refused by name."""

from __future__ import annotations

import dataclasses

import pytest

from ridgeline.nn.config import DecoderConfig, token_ids


@pytest.fixture
def raw(config) -> dict:
    return config.to_hf()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"architectures": ["FalconForCausalLM"]}, NotImplementedError, "got FalconForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, NotImplementedError, "got mamba"),
        ({"architectures": [], "model_type": None}, NotImplementedError, "got none"),
        ({"auto_map": {"AutoModel": "evil.py"}}, NotImplementedError, "auto_map must be absent"),
        ({"hidden_act": "gelu"}, NotImplementedError, "hidden_act must be silu, got gelu"),
        ({"attention_dropout": 0.1}, NotImplementedError, "attention_dropout must be 0, got 0.1"),
        ({"num_key_value_heads": 4}, ValueError, "num_heads must be a multiple of num_kv_heads 4"),
        ({"head_dim": None, "hidden_size": 50}, ValueError, "hidden_size must be a multiple of"),
        ({"head_dim": 7}, ValueError, "head_dim must be even, got 7"),
        ({"num_hidden_layers": "2"}, ValueError, "num_hidden_layers must be an integer, got 2"),
        ({"num_hidden_layers": True}, ValueError, "num_hidden_layers must be an integer"),
        ({"vocab_size": None}, ValueError, "vocab_size must be an integer, got None"),
        ({"intermediate_size": 0}, ValueError, "intermediate_size must be a positive integer"),
        ({"layer_types": ["full_attention"]}, ValueError, "layer_types must hold 2 of"),
        ({"layer_types": ["linear_attention"] * 2}, ValueError, "layer_types must hold 2 of"),
    ],
)
def test_refused(raw, change, error, match):
    with pytest.raises(error, match=match) as caught:
        DecoderConfig.from_hf(raw | change)
    assert "\n" not in str(caught.value)


def test_model_type_alone_is_enough(raw, config):
    del raw["architectures"]
    assert DecoderConfig.from_hf(raw) == config


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(family="gemma"), "family must be one of"),
        (dict(qk_norm=True), "qk_norm must be what llama has"),
        (dict(qkv_bias=True), "out_bias must be what llama has"),
        (dict(family="qwen2"), "qkv_bias must be what qwen2 has"),
        (dict(family="mistral", mlp_bias=True), "mlp_bias must be what mistral has"),
        (dict(sliding_window=8, windowed_layers=(0, 1)), "windowed_layers must be what llama has"),
        (dict(sliding_window=8), "windowed_layers must name layers exactly when"),
        (
            dict(family="mistral", sliding_window=8, windowed_layers=(1,)),
            "windowed_layers must be what mistral has",
        ),
        (
            dict(family="qwen3", qk_norm=True, sliding_window=8, windowed_layers=(2,)),
            "windowed_layers must lie in 0 .. 1",
        ),
        (
            dict(family="mistral", sliding_window=0, windowed_layers=(0, 1)),
            "sliding_window must be at least 1",
        ),
    ],
)
def test_what_a_family_cannot_express(config, change, match):
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(config, **change)


def test_old_and_new_rotary_keys_agree(raw, config):
    scaling = dict(rope_type="linear", factor=2.0)
    old = DecoderConfig.from_hf(raw | dict(rope_theta=5e5, rope_scaling=scaling))
    new = DecoderConfig.from_hf(
        {k: v for k, v in raw.items() if not k.startswith("rope")}
        | dict(rope_parameters=scaling | dict(rope_theta=5e5))
    )
    assert old == new and old.rope.base == 5e5 and old.rope.factor == 2.0


def test_end_tokens():
    assert token_ids(None) == () and token_ids(5) == (5,) and token_ids([5, 6]) == (5, 6)


def test_kv_bytes_and_window(config):
    assert config.kv_bytes_per_token(2) == 2 * 2 * 2 * 8 * 2
    mistral = dataclasses.replace(
        config, family="mistral", sliding_window=9, windowed_layers=(0, 1)
    )
    assert [mistral.window(0), config.window(0)] == [9, None]
