"""Read a GGUF file and write a Hugging Face folder: config, fp16 safetensors, tokenizer, template.

The `gguf` library parses the file and widens its block formats. Three things differ from the
original checkpoint and are turned back:
- for `llama`, rows of q and k are stored with the two halves of a rotary head interleaved;
- tensors carry other names;
- the tokenizer is a list of tokens and merges plus the name of a pre-tokenizer.
An architecture or tokenizer that is not known here is refused by name.
Source: the file format's documentation (ggml docs/gguf.md) and the keys of real files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from tokenizers import Regex, decoders, models, pre_tokenizers, processors

from ridgeline.core import progress
from ridgeline.core.dtypes import dtype_name
from ridgeline.core.errors import UserError
from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.hf import MAX_SHARD_BYTES, check_names, write_folder
from ridgeline.nn.rope import RopeConfig
from ridgeline.nn.tensorfile import one_line

FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""general.architecture -> family."""

BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
CONTROL, USER_DEFINED = 3, 4
"""tokenizer.ggml.token_type of special tokens and of added ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fields:
    """The metadata of a GGUF file."""

    path: Path
    reader: GGUFReader

    def get(self, key: str, default: Any = None) -> Any:
        field = self.reader.fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise UserError(
                f"gguf: {self.path.name} must have the key {key}, got none; use another"
            )
        return value


def convert(
    path: Path | str,
    folder: Path | str,
    *,
    dtype: torch.dtype = torch.float16,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> DecoderConfig:
    """Write the Hugging Face folder of a GGUF file, all or nothing; returns the model's config.

    Raises: UserError for a file that is no (whole) GGUF, an unknown architecture or tokenizer,
    missing tensors, a folder that exists, a disk that refuses.
    """
    fields = _open(Path(path))
    config = _config(fields)
    names = [hf_name(tensor.name) for tensor in fields.reader.tensors]
    check_names(config, names, path)
    tokenizer = _tokenizer(fields)
    companions = _TokenizerFiles(fields=fields, tokenizer=tokenizer, config=config)
    write_folder(
        folder,
        config.to_hf() | {"torch_dtype": dtype_name(dtype)},
        _tensors(fields, config, dtype),
        companions=companions.write,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
    )
    return config


def _open(path: Path) -> _Fields:
    if not path.is_file():
        raise UserError(f"gguf: {path} must be a file, got none; check the path")
    try:
        return _Fields(path=path, reader=GGUFReader(path))
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError, TypeError) as error:
        raise UserError(
            f"gguf: {path} must be a whole GGUF file, got {one_line(error)}; fetch it again"
        ) from error


def _config(fields: _Fields) -> DecoderConfig:
    arch = str(fields.need("general.architecture"))
    if arch not in FAMILIES:
        raise UserError(
            f"gguf: architecture must be one of {', '.join(FAMILIES)}, got {arch}; use another file"
        )
    names = {tensor.name for tensor in fields.reader.tensors}
    heads = int(fields.need(f"{arch}.attention.head_count"))
    hidden_size = int(fields.need(f"{arch}.embedding_length"))
    head_dim = int(fields.get(f"{arch}.attention.key_length") or hidden_size // heads)
    rotary = int(fields.get(f"{arch}.rope.dimension_count") or head_dim)
    if rotary != head_dim:
        raise UserError(
            f"gguf: {arch}.rope.dimension_count must be the head dim {head_dim}, got {rotary}; "
            "use another file"
        )
    tokens = fields.get("tokenizer.ggml.tokens") or []
    eos = fields.get("tokenizer.ggml.eos_token_id")
    try:
        return DecoderConfig(
            family=FAMILIES[arch],
            vocab_size=int(fields.get(f"{arch}.vocab_size") or len(tokens)),
            hidden_size=hidden_size,
            intermediate_size=int(fields.need(f"{arch}.feed_forward_length")),
            num_layers=int(fields.need(f"{arch}.block_count")),
            num_heads=heads,
            num_kv_heads=int(fields.get(f"{arch}.attention.head_count_kv") or heads),
            head_dim=head_dim,
            max_seqlen=int(fields.need(f"{arch}.context_length")),
            norm_eps=_short(fields.need(f"{arch}.attention.layer_norm_rms_epsilon")),
            rope=_rope(fields, arch, names),
            tie_embeddings="output.weight" not in names,
            qkv_bias="blk.0.attn_q.bias" in names,
            out_bias="blk.0.attn_output.bias" in names,
            mlp_bias="blk.0.ffn_gate.bias" in names,
            qk_norm="blk.0.attn_q_norm.weight" in names,
            bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=() if eos is None else (int(eos),),
            pad_token_id=fields.get("tokenizer.ggml.padding_token_id"),
        )
    except (ValueError, TypeError) as error:
        raise UserError(f"gguf: {fields.path.name}: {one_line(error)}") from error


def _short(value: float) -> float:
    """The decimal number that a float32 was written from: 9.99999974e-06 -> 1e-05."""
    return float(str(np.float32(value)))


def _rope(fields: _Fields, arch: str, names: set[str]) -> RopeConfig:
    if any(name.startswith("rope_freqs") for name in names):
        raise UserError(
            "gguf: rotary frequencies must follow from the metadata, got a rope_freqs tensor "
            "(Llama 3.1 scaling); convert from the original Hugging Face folder instead"
        )
    base = _short(fields.get(f"{arch}.rope.freq_base", 10_000.0))
    kind = fields.get(f"{arch}.rope.scaling.type", "none")
    if kind in ("none", None):
        return RopeConfig(base=base)
    scaling = {
        "rope_type": kind,
        "factor": fields.need(f"{arch}.rope.scaling.factor"),
        "original_max_position_embeddings": fields.get(
            f"{arch}.rope.scaling.original_context_length"
        ),
    }
    context = int(fields.need(f"{arch}.context_length"))
    try:
        return RopeConfig.from_hf({"rope_theta": base, "rope_scaling": scaling}, context)
    except ValueError as error:
        raise UserError(f"gguf: {fields.path.name}: {one_line(error)}") from error


# ---- tensors -----------------------------------------------------------------------------------


def _tensors(
    fields: _Fields, config: DecoderConfig, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = fields.reader.tensors
    with progress.task("convert weights", len(tensors), "tensors") as advance:
        for tensor in tensors:
            name = hf_name(tensor.name)
            yield name, _widen(tensor, fields, config).to(dtype)
            advance(1)


def hf_name(name: str) -> str:
    """ "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight".

    Raises: UserError for a tensor that these architectures do not have.
    """
    stem, _, kind = name.rpartition(".")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in BLOCK_NAMES:
        return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}.{kind}"
    raise UserError(f"gguf: tensor {name} must be one of a Llama-like decoder, got an unknown one")


def _widen(tensor: ReaderTensor, fields: _Fields, config: DecoderConfig) -> torch.Tensor:
    """The tensor in fp32, in Hugging Face's order of rows."""
    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise UserError(
            f"gguf: {tensor.name} must have a type that the gguf library widens, got "
            f"{tensor.tensor_type.name}; use another file"
        ) from error
    if config.family == "llama" and tensor.name.startswith("blk."):
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
        kind = tensor.name.split(".")[2]
        if kind in heads:
            values = unpermute(values, heads[kind])
    return torch.from_numpy(np.array(values, dtype=np.float32))


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from interleaved halves (0, D/2, 1, D/2 + 1, ...) to 0, 1, 2, ..."""
    half = rows.shape[0] // heads // 2
    paired = rows.reshape(heads, half, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)


# ---- tokenizer ---------------------------------------------------------------------------------


def _pre_tokenizer(name: str) -> tuple[pre_tokenizers.PreTokenizer, bool]:
    """(pre-tokenizer, whether a word of the vocabulary skips the merges) by tokenizer.ggml.pre."""
    if name in ("gpt-2", "default"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False), False
    if name == "smollm":
        steps = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
        return pre_tokenizers.Sequence(steps), False  # pyright: ignore[reportArgumentType]
    splits = {"llama-bpe": LLAMA3_SPLIT, "qwen2": QWEN2_SPLIT}
    if name not in splits:
        known = ", ".join(["gpt-2", "default", "smollm", *splits])
        raise UserError(
            f"gguf: tokenizer.ggml.pre must be one of {known}, got {name}; "
            "copy tokenizer.json from the original model instead"
        )
    steps = [
        pre_tokenizers.Split(Regex(splits[name]), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(steps), name == "llama-bpe"  # pyright: ignore[reportArgumentType]


def _tokenizer(fields: _Fields) -> tokenizers.Tokenizer:
    kind = fields.need("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UserError(
            f"gguf: tokenizer.ggml.model must be gpt2 (byte-level BPE), got {kind}; "
            "copy tokenizer.json from the original model instead"
        )
    tokens: list[str] = fields.need("tokenizer.ggml.tokens")
    kinds: list[int] = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    merges = [tuple(merge.split(" ", 1)) for merge in fields.need("tokenizer.ggml.merges")]
    pre_tokenizer, whole_words = _pre_tokenizer(str(fields.get("tokenizer.ggml.pre", "default")))
    try:
        model = models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,  # pyright: ignore[reportArgumentType]
            ignore_merges=whole_words,
        )
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"gguf: {fields.path.name}: {one_line(error)}") from error
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    for token, token_kind in zip(tokens, kinds, strict=True):
        if token_kind in (CONTROL, USER_DEFINED):
            special = token_kind == CONTROL
            added = tokenizers.AddedToken(token, special=special, normalized=False)
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])
    _add_bos(fields, tokenizer, tokens)
    return tokenizer


def _add_bos(fields: _Fields, tokenizer: tokenizers.Tokenizer, tokens: list[str]) -> None:
    """What `add_special_tokens=True` puts before a text."""
    bos = fields.get("tokenizer.ggml.bos_token_id")
    if not fields.get("tokenizer.ggml.add_bos_token", False) or bos is None:
        return
    token = tokens[int(bos)]
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=f"{token} $A", pair=f"{token} $A $B", special_tokens=[(token, int(bos))]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _TokenizerFiles:
    """Writes tokenizer.json, its two configuration files and chat_template.jinja."""

    fields: _Fields
    tokenizer: tokenizers.Tokenizer
    config: DecoderConfig

    def write(self, folder: Path) -> None:
        self.tokenizer.save(str(folder / "tokenizer.json"))
        roles = self._roles()
        tokenizer_config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self.config.max_seqlen,
            "clean_up_tokenization_spaces": False,
            "add_bos_token": bool(self.fields.get("tokenizer.ggml.add_bos_token", False)),
            **roles,
        }
        template = self.fields.get("tokenizer.chat_template")
        if template:
            tokenizer_config["chat_template"] = template
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        _dump(folder / "tokenizer_config.json", tokenizer_config)
        _dump(folder / "special_tokens_map.json", roles)

    def _roles(self) -> dict[str, str]:
        tokens = self.fields.need("tokenizer.ggml.tokens")
        keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        ids = {
            role: self.fields.get(f"tokenizer.ggml.{key}_token_id") for role, key in keys.items()
        }
        return {
            f"{role}_token": tokens[int(index)]
            for role, index in ids.items()
            if index is not None and 0 <= int(index) < len(tokens)
        }


def _dump(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
