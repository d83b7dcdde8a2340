"""The decoder against transformers' own models, its cache, its packing, its counts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers

from ridgeline.core.protocols import BlockwiseModel
from ridgeline.nn.cache import KVCache
from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.decoder import Decoder, DecoderPart, initial_value, packed_positions
from ridgeline.nn.hf import load_pretrained

LLAMA3 = dict(
    rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64,
    beta_fast=8.0, beta_slow=1.0,
)  # fmt: skip
SIZES = dict(
    vocab_size=101, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
    num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip
QWEN_WINDOW = dict(use_sliding_window=True, sliding_window=20, max_window_layers=1)

CASES = {
    "llama": ("Llama", dict(rms_norm_eps=1e-5)),
    "llama-mha": ("Llama", dict(num_key_value_heads=6, tie_word_embeddings=True)),
    "llama-biases": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "llama-head-dim": ("Llama", dict(head_dim=16, num_key_value_heads=1)),
    "llama3-rope": ("Llama", dict(rope_parameters=LLAMA3, head_dim=32)),
    "linear-rope": ("Llama", dict(rope_parameters=dict(rope_type="linear", factor=2.5))),
    "yarn": ("Llama", dict(rope_parameters=YARN, head_dim=32)),
    "yarn-mscale": (
        "Llama",
        dict(rope_parameters=YARN | dict(mscale=1.5, mscale_all_dim=0.8, truncate=False)),
    ),
    "smollm2": ("Llama", dict(tie_word_embeddings=True, rope_parameters=dict(rope_theta=1e5))),
    "mistral-window": ("Mistral", dict(sliding_window=20)),
    "mistral": ("Mistral", dict(sliding_window=None)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen2-window": ("Qwen2", QWEN_WINDOW),
    "qwen3": ("Qwen3", dict(head_dim=16)),
    "qwen3-window": ("Qwen3", dict(head_dim=16, attention_bias=True) | QWEN_WINDOW),
}


def theirs(name: str) -> transformers.PreTrainedModel:
    """A random model of transformers, biases and norms not at their trivial values."""
    kind, options = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**(SIZES | options))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name, tmp_path):
    model = theirs(name)
    model.save_pretrained(tmp_path / "model")
    ours = load_pretrained(tmp_path / "model")
    token_ids = torch.randint(0, 101, (2, 70))
    with torch.no_grad():
        expected = model(token_ids).logits
        difference = (ours(token_ids) - expected).abs().max()
    assert difference < 1e-4
    assert expected.std() > 0.1  # the comparison means something
    assert ours.num_params() == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", CASES)
def test_config_round_trip_and_transformers_reads_ours(name):
    config = DecoderConfig.from_hf(theirs(name).config.to_dict())
    written = config.to_hf()
    assert DecoderConfig.from_hf(written) == config
    kind, _ = CASES[name]
    read = getattr(transformers, f"{kind}Config")(**written)
    assert DecoderConfig.from_hf(read.to_dict()) == config


def test_a_window_matters():
    """Guards the two tests above: with another window the logits differ."""
    config = DecoderConfig.from_hf(theirs("mistral-window").config.to_dict())
    wide = dataclasses.replace(config, sliding_window=21)
    token_ids = torch.randint(0, 101, (1, 40))
    narrow_logits, wide_logits = Decoder(config)(token_ids), Decoder(wide)(token_ids)
    assert torch.equal(narrow_logits[:, :20], wide_logits[:, :20])
    assert not torch.allclose(narrow_logits[:, 21:], wide_logits[:, 21:], atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3-window", "yarn"])
@pytest.mark.parametrize("prefill", [1, 7, 30])
def test_cached_decode_equals_full_forward(name, prefill):
    config = DecoderConfig.from_hf(theirs(name).config.to_dict())
    model = Decoder(dataclasses.replace(config, init_std=0.2)).eval()
    token_ids = torch.randint(0, 101, (2, 48))
    cache = KVCache(config, batch=2, capacity=48, dtype=torch.float32)
    steps = [prefill, 1, 1, 5, *[1] * (48 - prefill - 7)]
    with torch.no_grad():
        full = model(token_ids)
        parts = [model(part, cache=cache) for part in token_ids.split(steps, dim=1)]
    assert (torch.cat(parts, dim=1) - full).abs().max() < 1e-4
    assert cache.length == 48 and cache.seqlens_B.tolist() == [48, 48]


def test_cache_truncate_forgets(config):
    model = Decoder(config).eval()
    token_ids = torch.randint(0, 101, (1, 12))
    cache = KVCache(config, capacity=12, dtype=torch.float32)
    with torch.no_grad():
        model(token_ids, cache=cache)
        cache.truncate(8)
        again = model(token_ids[:, 8:], cache=cache)
        assert (again - model(token_ids)[:, 8:]).abs().max() < 1e-5
    with pytest.raises(ValueError, match="cache: length must lie in 0 .. 12, got 13"):
        cache.truncate(13)


def test_context_limits(config):
    model = Decoder(config)
    with pytest.raises(ValueError, match="decoder: sequence must be at most 96 tokens.*got 97"):
        model(torch.zeros(1, 97, dtype=torch.long))
    with pytest.raises(ValueError, match="cache: capacity must lie in 1 .. 96.*got 97"):
        KVCache(config, capacity=97, dtype=torch.float32)
    cache = KVCache(config, capacity=4, dtype=torch.float32)
    with pytest.raises(ValueError, match="cache: tokens must fit in the capacity of 4, got 5"):
        model(torch.zeros(1, 5, dtype=torch.long), cache=cache)
    with pytest.raises(ValueError, match="decoder: cu_seqlens must be None with a cache"):
        model(
            torch.zeros(1, 4, dtype=torch.long),
            cache=cache,
            cu_seqlens=torch.tensor([0, 4], dtype=torch.int32),
        )


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
@pytest.mark.parametrize("lengths", [[48], [1, 30, 17], [5, 5, 5, 5, 28], [47, 1]])
def test_packed_documents_equal_separate_ones(name, lengths):
    config = DecoderConfig.from_hf(theirs(name).config.to_dict())
    model = Decoder(dataclasses.replace(config, init_std=0.2)).eval()
    token_ids = torch.randint(0, 101, (48,))
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    with torch.no_grad():
        apart = torch.cat([model(part[None])[0] for part in token_ids.split(lengths)])
        packed = model(token_ids[None], cu_seqlens=cu_seqlens, max_seqlen=max(lengths))[0]
        asked = model(token_ids[None], cu_seqlens=cu_seqlens)[0]
    assert (packed - apart).abs().max() < 1e-4
    assert torch.equal(packed, asked)


def test_packed_rows_of_a_batch(config):
    """[B, S] rows with cu_seqlens over the flattened tokens."""
    model = Decoder(config).eval()
    token_ids = torch.randint(0, 101, (2, 12))
    cu_seqlens = torch.tensor([0, 5, 12, 24], dtype=torch.int32)
    with torch.no_grad():
        packed = model(token_ids, cu_seqlens=cu_seqlens, max_seqlen=12)
        assert (packed[0, :5] - model(token_ids[:1, :5])[0]).abs().max() < 1e-5
        assert (packed[0, 5:] - model(token_ids[:1, 5:])[0]).abs().max() < 1e-5
        assert (packed[1] - model(token_ids[1:])[0]).abs().max() < 1e-5


def test_no_gradient_crosses_a_document(config):
    model = Decoder(config)
    x = model.embed(torch.randint(0, 101, (1, 20))).detach().requires_grad_()
    model.model.embed_tokens = None  # a stage that takes hidden states
    cu_seqlens = torch.tensor([0, 8, 20], dtype=torch.int32)
    model.hidden(x, cu_seqlens=cu_seqlens, max_seqlen=12)[0, 8:].sum().backward()
    assert x.grad is not None
    assert x.grad[0, :8].abs().max() == 0
    assert x.grad[0, 8:].abs().min(dim=-1).values.max() > 0


def test_packed_positions():
    cu_seqlens = torch.tensor([0, 3, 3, 4, 6], dtype=torch.int32)
    assert packed_positions(cu_seqlens, 6).tolist() == [0, 1, 2, 0, 0, 1]


def test_blockwise_protocol(config):
    model = Decoder(config).eval()
    assert isinstance(model, BlockwiseModel)
    token_ids = torch.randint(0, 101, (2, 9))
    with torch.no_grad():
        x = model.embed(token_ids)
        for index in range(len(model.blocks)):
            x = model.run_block(index, x)
        assert torch.equal(model.head(x), model(token_ids))
    names = dict(model.named_modules())
    for index, block in enumerate(model.blocks):
        assert names[model.block_prefix(index)] is block
        for group in model.linear_groups():
            for name in group:
                assert isinstance(block.get_submodule(name), torch.nn.Linear)
    linears = {n for n, m in model.blocks[0].named_modules() if isinstance(m, torch.nn.Linear)}
    assert {name for group in model.linear_groups() for name in group} == linears


def test_fresh_weights_depend_on_seed_and_name_only(config):
    model, same, other = Decoder(config), Decoder(config), Decoder(config, seed=1)
    part = DecoderPart(first_layer=1, end_layer=2, embed=False, head=True)
    stage = dict(Decoder(config, part=part).named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(same.named_parameters())[name])
        if "norm" not in name:
            assert not torch.equal(parameter, dict(other.named_parameters())[name])
        if name in stage:
            assert torch.equal(parameter, stage[name])
    assert set(stage) == {n for n, _ in model.named_parameters() if ".layers.1." in n} | {
        "model.norm.weight",
        "lm_head.weight",
    }
    assert torch.equal(stage["lm_head.weight"], model.get_parameter("model.embed_tokens.weight"))


def test_fresh_weights_have_the_stated_spread(config):
    gate = initial_value(config, "model.layers.0.mlp.gate_proj.weight", (400, 300), 0)
    down = initial_value(config, "model.layers.0.mlp.down_proj.weight", (400, 300), 0)
    assert abs(gate.std() / 0.02 - 1) < 0.02
    assert abs(down.std() / (0.02 / 2) - 1) < 0.02  # 1 / sqrt(2 * 2 layers)
    assert initial_value(config, "model.norm.weight", (3,), 0).tolist() == [1, 1, 1]
    assert initial_value(config, "x.q_proj.bias", (2,), 0).tolist() == [0, 0]


def test_stages_joined_equal_the_whole(config):
    whole = Decoder(config).eval()
    first = Decoder(config, part=DecoderPart(first_layer=0, end_layer=1, embed=True, head=False))
    last = Decoder(config, part=DecoderPart(first_layer=1, end_layer=2, embed=False, head=True))
    token_ids = torch.randint(0, 101, (2, 9))
    with torch.no_grad():
        assert torch.equal(last(first(token_ids)), whole(token_ids))
    assert [*last.blocks.indices] == [1] and last.blocks[1] is next(iter(last.blocks))


def test_tied_head_is_one_parameter(config):
    model = Decoder(config)
    assert model.lm_head is not None and model.model.embed_tokens is not None
    assert model.lm_head.weight is model.model.embed_tokens.weight
    untied = Decoder(dataclasses.replace(config, tie_embeddings=False))
    assert untied.num_params() - model.num_params() == 101 * 48
    assert untied.num_params() == sum(p.numel() for p in untied.parameters())


def test_flops_count_linears_and_attention(config):
    """Against PyTorch's own counter (forward, every key counted, as its attention is dense)."""
    from torch.utils.flop_counter import FlopCounterMode

    model = Decoder(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 32, dtype=torch.long))
    linears = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * 32
    expected = linears / 32 + attention
    assert config.flops_per_token(32, causal=False, backward=False) == expected
    assert config.flops_per_token(32, causal=False) == 3 * expected
    causal = linears / 32 + attention * 33 / 64
    assert config.flops_per_token(32, causal=True, backward=False) == pytest.approx(causal)


def test_flops_of_a_window():
    config = DecoderConfig.from_hf(theirs("mistral-window").config.to_dict())
    dense = dataclasses.replace(config, sliding_window=None, windowed_layers=())
    pairs = sum(min(i + 1, 20) for i in range(64))
    lost = 4 * 6 * 8 * 3 * (64 * 65 / 2 - pairs) / 64
    difference = dense.flops_per_token(64, backward=False) - config.flops_per_token(
        64, backward=False
    )
    assert difference == pytest.approx(lost)


def test_bytes_of_a_decode_step(config):
    model = Decoder(config, dtype=torch.bfloat16)
    cached = 2 * 2 * 2 * 8 * 2  # k and v, layers, kv heads, head dim, bytes
    assert model.bytes_per_token() == 2 * config.num_params()  # the tied table is read at the head
    assert model.bytes_per_token(10) - model.bytes_per_token() == 10 * cached
    untied = Decoder(dataclasses.replace(config, tie_embeddings=False), dtype=torch.bfloat16)
    assert untied.bytes_per_token() == 2 * (config.num_params())

    class Packed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.packed = torch.nn.Parameter(torch.zeros(1000))

        def weight_bytes(self) -> int:
            return 7

    before = model.weight_bytes()
    model.blocks[0].mlp.up_proj = Packed()
    assert model.weight_bytes() == before - 2 * 48 * 80 + 7


def test_meta_skeleton_has_shapes_and_no_memory(config):
    model = Decoder(config, device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    model.materialize("cpu")
    model.reset_parameters(0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    expected = Decoder(config, dtype=torch.bfloat16)
    for ours, theirs_ in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs_)


@pytest.mark.weights
def test_real_weights_equal_transformers(smollm):
    """SmolLM2-135M: fp32 logits, max difference under 1e-4."""
    token_ids = torch.randint(17, 49152, (1, 48))
    with torch.no_grad():
        ours = load_pretrained(smollm, dtype=torch.float32)(token_ids)
        reference = transformers.LlamaForCausalLM.from_pretrained(smollm, dtype=torch.float32)
        expected = reference(token_ids).logits
    assert (ours - expected).abs().max() < 1e-4
    assert expected.abs().max() > 10
