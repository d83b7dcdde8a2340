"""Shapes of decoders by name, for training from fresh weights.

tiny, small and medium are ours, sized for a CPU; the others are published shapes: SmolLM2 (Allal et
al., arXiv 2502.02737) and Llama 3 (arXiv 2407.21783, table 3) with the two small ones of 3.2, at
their trained context of 8,192 without the later stretching of the rotary embedding.
"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.core.errors import bad_value
from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.rope import RopeConfig


def _shape(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=257,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        max_seqlen=2048,
        tie_embeddings=True,
    )


def _llama3(shape: DecoderConfig, *, tied: bool) -> DecoderConfig:
    return replace(
        shape,
        max_seqlen=8192,
        vocab_size=128256,
        rope=RopeConfig(base=500000.0),
        tie_embeddings=tied,
    )


PRESETS: dict[str, DecoderConfig] = {
    "tiny": _shape(64, 192, 2, 4, 2),
    "small": _shape(192, 512, 4, 6, 2),
    "medium": _shape(384, 1024, 6, 6, 3),
    "smollm2-135m": replace(
        _shape(576, 1536, 30, 9, 3),
        vocab_size=49152,
        max_seqlen=8192,
        rope=RopeConfig(base=100000.0),
        init_std=0.041666666666666664,
    ),
    "llama-1b": _llama3(_shape(2048, 8192, 16, 32, 8), tied=True),
    "llama-3b": _llama3(_shape(3072, 8192, 28, 24, 8), tied=True),
    "llama-8b": _llama3(_shape(4096, 14336, 32, 32, 8), tied=False),
    "llama-70b": _llama3(_shape(8192, 28672, 80, 64, 8), tied=False),
}


def preset(name: str) -> DecoderConfig:
    """A shape by name. Raises: ValueError for one that is not known."""
    if name not in PRESETS:
        raise bad_value(
            "train",
            "model.preset",
            f"be one of {', '.join(PRESETS)}",
            repr(name),
            "use one of these",
        )
    return PRESETS[name]
