"""GGUF to a Hugging Face folder: rows, names, metadata, tokenizer; bad files refused."""

from __future__ import annotations

import json

import gguf as library
import numpy as np
import pytest
import torch
import transformers
from gguf.quants import quantize

from ridgeline.core.errors import UserError
from ridgeline.nn import gguf
from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.decoder import Decoder
from ridgeline.nn.hf import load_pretrained
from ridgeline.nn.tokenizer import Tokenizer

from .conftest import CHATML, SPECIALS, TEXT, trained_bpe

BACK = {ours: theirs for theirs, ours in gguf.BLOCK_NAMES.items()}
TOP = {ours: theirs for theirs, ours in gguf.TOP_NAMES.items()}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of q and k."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def their_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{BACK[part]}.{kind}"


def small(family: str) -> DecoderConfig:
    return DecoderConfig(
        family=family, vocab_size=360, hidden_size=64, intermediate_size=96, num_layers=2,
        num_heads=4, num_kv_heads=2, head_dim=16, max_seqlen=128, tie_embeddings=family != "qwen3",
        qkv_bias=family == "qwen2", qk_norm=family == "qwen3", norm_eps=1e-6,
        bos_token_id=1, eos_token_ids=(2,), pad_token_id=0,
    )  # fmt: skip


def write(path, model: Decoder, *, arch=None, pre="gpt-2", extra=None, drop=(), model_kind="gpt2"):
    """A GGUF file of a model, matrices as Q8_0."""
    config = model.config
    arch = arch or config.family
    writer = library.GGUFWriter(path, arch)
    writer.add_context_length(config.max_seqlen)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.base)
    bpe = json.loads(trained_bpe().to_str())["model"]
    writer.add_tokenizer_model(model_kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(bpe["vocab"]))
    writer.add_token_types([3 if token in SPECIALS else 1 for token in bpe["vocab"]])
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHATML)
    for add in extra or ():
        add(writer)
    for name, parameter in model.named_parameters():
        if name in drop:
            continue
        values = parameter.detach().numpy()
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        for part, count in heads.items():
            if part in name and config.family == "llama":
                values = permute(values, count)
        kind = library.GGMLQuantizationType.Q8_0
        if values.ndim == 2:
            writer.add_tensor(their_name(name), quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(their_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def llama(tmp_path):
    return write(tmp_path / "m.gguf", Decoder(small("llama")))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_weights_and_config_come_back(tmp_path, family):
    model = Decoder(small(family))
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            parameter.data += torch.randn_like(parameter) * 0.1
    path = write(tmp_path / "m.gguf", model)
    assert gguf.convert(path, tmp_path / "hf", dtype=torch.float32) == model.config
    read = load_pretrained(tmp_path / "hf")
    assert read.config == model.config
    for name, expected in model.named_parameters():
        step = (
            expected.abs().max() / 127
        )  # of the 8-bit grid; its fp16 scale adds a little to a half
        assert (read.get_parameter(name) - expected).abs().max() <= 0.6 * step + 1e-7, name
    raw = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert raw["torch_dtype"] == "float32" and raw["architectures"] == [model.config.architecture]
    assert gguf.convert(path, tmp_path / "half").num_layers == 2
    assert load_pretrained(tmp_path / "half").lm_head.weight.dtype == torch.float16


def test_rows_matter():
    """Guards the test above: permuting rows is not the identity, and unpermute undoes it."""
    rows = np.arange(32.0).reshape(16, 2)
    assert not np.array_equal(permute(rows, 2), rows)
    assert np.array_equal(gguf.unpermute(permute(rows, 2), 2), rows)


@pytest.mark.parametrize("pre", ["gpt-2", "default", "smollm", "llama-bpe", "qwen2"])
def test_tokenizer_comes_back(tmp_path, pre):
    path = write(tmp_path / "m.gguf", Decoder(small("llama")), pre=pre)
    gguf.convert(path, tmp_path / "hf")
    ours = Tokenizer(tmp_path / "hf")
    for text in (TEXT, "a<|im_end|>b", "x  1234\n\n y"):
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    assert ours.encode("a<|im_end|>")[-1] == 2 and ours.is_special(2)
    assert ours.special_tokens == dict(
        bos_token=SPECIALS[1], eos_token=SPECIALS[2], pad_token=SPECIALS[0]
    )
    assert ours.apply_chat_template([{"role": "user", "content": "x"}]).endswith("assistant\n")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs(TEXT)["input_ids"] == ours.encode(TEXT)
    if pre in ("gpt-2", "default"):
        assert ours.encode(TEXT) == trained_bpe().encode(TEXT).ids
    digits = [ours.decode([token]) for token in ours.encode("12345")]
    assert (digits == list("12345")) or pre not in ("smollm", "qwen2")


def test_bos_is_added_where_the_file_says_so(tmp_path):
    extra = [lambda writer: writer.add_add_bos_token(True)]
    path = write(tmp_path / "m.gguf", Decoder(small("llama")), extra=extra)
    gguf.convert(path, tmp_path / "hf")
    ours = Tokenizer(tmp_path / "hf")
    assert ours.encode("a", add_special_tokens=True) == [1, *ours.encode("a")]


def test_rope_scaling_of_the_file(tmp_path):
    def linear(writer):
        writer.add_rope_scaling_type(library.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    path = write(tmp_path / "m.gguf", Decoder(small("llama")), extra=[linear])
    config = gguf.convert(path, tmp_path / "hf")
    assert config.rope.kind == "linear" and config.rope.factor == 2.0


def rope_tensor(writer):
    writer.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32))


def foreign_tensor(writer):
    writer.add_tensor("blk.0.ffn_gate_inp.weight", np.ones(8, dtype=np.float32))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(arch="gemma3"), "architecture must be one of llama, qwen2, qwen3, got gemma3"),
        (dict(pre="tekken"), "tokenizer.ggml.pre must be one of .*, got tekken"),
        (dict(model_kind="llama"), "tokenizer.ggml.model must be gpt2 .*, got llama"),
        (dict(extra=[rope_tensor]), "got a rope_freqs tensor"),
        (dict(extra=[foreign_tensor]), "tensor blk.0.ffn_gate_inp.weight must be one of"),
        (
            dict(drop=("model.layers.1.mlp.up_proj.weight",)),
            "must hold every tensor of the model, got none for model.layers.1.mlp.up_proj.weight",
        ),
    ],
)
def test_refused_by_name(tmp_path, options, match):
    path = write(tmp_path / "m.gguf", Decoder(small("llama")), **options)
    with pytest.raises(UserError, match=match) as caught:
        gguf.convert(path, tmp_path / "hf")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "hf").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("keep", [0, 3, 30, 3000, 30_000, -1])
def test_truncated_file(llama, tmp_path, keep):
    llama.write_bytes(llama.read_bytes()[:keep])
    with pytest.raises(UserError, match="gguf: .* must be a whole GGUF file"):
        gguf.convert(llama, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_damaged_bytes_never_escape_as_a_bug(llama, tmp_path):
    """Any byte of the header may be wrong: a UserError, or a file that still converts."""
    whole = llama.read_bytes()
    random = np.random.default_rng(0)
    refused = 0
    for number in range(40):
        damaged = bytearray(whole)
        for offset in random.integers(0, 2000, 8):
            damaged[offset] = int(random.integers(0, 256))
        llama.write_bytes(damaged)
        try:
            gguf.convert(llama, tmp_path / f"hf{number}")
        except UserError:
            refused += 1
    assert refused > 20


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match="gguf: .*nope.gguf must be a file, got none"):
        gguf.convert(tmp_path / "nope.gguf", tmp_path / "hf")


def test_an_existing_folder_is_kept(llama, tmp_path):
    gguf.convert(llama, tmp_path / "hf")
    with pytest.raises(UserError, match="exists already"):
        gguf.convert(llama, tmp_path / "hf")
    gguf.convert(llama, tmp_path / "hf", overwrite=True)


@pytest.mark.weights
def test_real_config(smollm):
    raw = json.loads((smollm / "config.json").read_text())
    expected = dict(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, max_position_embeddings=8192, rope_theta=1e5,
        rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
        pad_token_id=2, torch_dtype="float16",
    )  # fmt: skip
    assert {key: raw[key] for key in expected} == expected
