"""Shape and options of a decoder, as in a Hugging Face config.json.

One family of decoders differs only in a few switches (biases, q/k norm, sliding windows, rotary
scaling, tied head); what config.json asks for beyond them is refused by name, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ridgeline.core.errors import bad_value, unsupported
from ridgeline.nn.rope import RopeConfig

ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""`architectures` of config.json -> family (= model_type); SmolLM2 is a LlamaForCausalLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder: RMSNorm, rotary GQA attention, SwiGLU."""

    vocab_size: int
    """V, tokens of the vocabulary."""
    hidden_size: int
    """C."""
    intermediate_size: int
    """F."""
    num_layers: int
    """L."""
    num_heads: int
    """H, a multiple of num_kv_heads."""
    num_kv_heads: int
    """G."""
    head_dim: int
    """D, even; H * D need not be C."""
    max_seqlen: int
    """Tokens of the longest context (max_position_embeddings)."""
    family: str = "llama"
    """llama, mistral, qwen2 or qwen3: which Hugging Face class reads the checkpoint."""
    norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_embeddings: bool = False
    """The head's weight is the embedding's."""
    qkv_bias: bool = False
    """Biases on q, k, v (always for qwen2, never for mistral)."""
    out_bias: bool = False
    """Bias on o (llama and qwen3 have it where they have qkv_bias)."""
    mlp_bias: bool = False
    """Biases on gate, up, down (llama only)."""
    qk_norm: bool = False
    """RMSNorm over each head's q and k (qwen3, always)."""
    sliding_window: int | None = None
    """Tokens a query of a windowed layer sees, itself included; None: no layer is windowed."""
    windowed_layers: tuple[int, ...] = ()
    """Layers with the window."""
    init_std: float = 0.02
    """Standard deviation of fresh weights."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a generation."""
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_seqlen",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise bad_value("decoder", name, "be a positive integer", value, "check the config")
        if self.num_heads % self.num_kv_heads:
            raise bad_value(
                "decoder",
                "num_heads",
                f"be a multiple of num_kv_heads {self.num_kv_heads}",
                self.num_heads,
                "check the config",
            )
        if self.head_dim % 2:
            raise bad_value("decoder", "head_dim", "be even", self.head_dim, "pad it")
        self._check_window()
        self._check_family()

    def _check_window(self) -> None:
        if (self.sliding_window is None) != (not self.windowed_layers):
            raise bad_value(
                "decoder",
                "windowed_layers",
                "name layers exactly when sliding_window is set",
                f"{self.windowed_layers} with sliding_window {self.sliding_window}",
                "give both or neither",
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise bad_value(
                "decoder", "sliding_window", "be at least 1", self.sliding_window, "use None"
            )
        if any(not 0 <= layer < self.num_layers for layer in self.windowed_layers):
            raise bad_value(
                "decoder",
                "windowed_layers",
                f"lie in 0 .. {self.num_layers - 1}",
                self.windowed_layers,
                "name existing layers",
            )

    def _check_family(self) -> None:
        """What the family's Hugging Face class cannot express would be lost when saved."""
        if self.family not in ARCHITECTURES.values():
            raise bad_value(
                "decoder",
                "family",
                f"be one of {', '.join(ARCHITECTURES.values())}",
                repr(self.family),
                "use one of these",
            )
        every_layer = self.windowed_layers == tuple(range(self.num_layers))
        rules = {
            "qk_norm": self.qk_norm == (self.family == "qwen3"),
            "qkv_bias": {"qwen2": self.qkv_bias, "mistral": not self.qkv_bias}.get(
                self.family, True
            ),
            "out_bias": self.out_bias
            == (self.qkv_bias if self.family in ("llama", "qwen3") else False),
            "mlp_bias": not self.mlp_bias or self.family == "llama",
            "windowed_layers": self.sliding_window is None
            or self.family in ("qwen2", "qwen3")
            or (self.family == "mistral" and every_layer),
        }
        for name, holds in rules.items():
            if not holds:
                raise bad_value(
                    "decoder",
                    name,
                    f"be what {self.family} has",
                    getattr(self, name),
                    "choose another family",
                )

    @property
    def architecture(self) -> str:
        """The Hugging Face class: "LlamaForCausalLM"."""
        return next(name for name, family in ARCHITECTURES.items() if family == self.family)

    def window(self, layer: int) -> int | None:
        """Tokens a query of that layer sees, itself included; None: all."""
        return self.sliding_window if layer in self.windowed_layers else None

    def num_params(self) -> int:
        """Distinct parameters (a tied head counts once)."""
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        biases = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.qkv_bias
        biases += self.hidden_size * self.out_bias
        biases += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        table = self.vocab_size * self.hidden_size
        layer = self._matmul_params_of_layer() + norms + biases
        tables = table if self.tie_embeddings else 2 * table
        return self.num_layers * layer + tables + self.hidden_size

    def matmul_params(self) -> int:
        """Parameters that each token is multiplied with: linears and head, not the lookup."""
        head = self.vocab_size * self.hidden_size
        return self.num_layers * self._matmul_params_of_layer() + head

    def _matmul_params_of_layer(self) -> int:
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    def flops_per_token(self, seqlen: int, *, causal: bool = True, backward: bool = True) -> float:
        """Floating-point operations a token of a sequence of `seqlen` tokens.

        Linears 2 N forward; attention 4 H D a visible key; three times that with the backward pass
        (so 6 N + 12 L H D T). causal=False counts every key of the sequence, as many published MFU
        figures do; causal=True only those the causal mask and the windows leave.
        Source of the counting: PaLM (arXiv 2204.02311), appendix B.
        """
        keys = sum(
            _mean_keys(seqlen, self.window(layer)) if causal else float(seqlen)
            for layer in range(self.num_layers)
        )
        forward = 2.0 * self.matmul_params() + 4.0 * self.num_heads * self.head_dim * keys
        return (3.0 if backward else 1.0) * forward

    def kv_bytes_per_token(self, itemsize_bytes: int) -> int:
        """Bytes that one token takes in the KV cache."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize_bytes

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> DecoderConfig:
        """Read a config.json.

        Raises: NotImplementedError for an architecture or option that this project lacks, or for
        `auto_map` (code of the checkpoint is never run); ValueError for impossible sizes.
        """
        family = _family(config)
        _refuse_what_is_not_ours(config)
        num_layers = _integer(config, "num_hidden_layers")
        num_heads = _integer(config, "num_attention_heads")
        hidden_size = _integer(config, "hidden_size")
        max_seqlen = _integer(config, "max_position_embeddings")
        head_dim = config.get("head_dim")
        if head_dim is None:
            if hidden_size % num_heads:
                raise bad_value(
                    "config.json",
                    "hidden_size",
                    f"be a multiple of num_attention_heads {num_heads}",
                    hidden_size,
                    "give head_dim",
                )
            head_dim = hidden_size // num_heads
        bias = bool(config.get("attention_bias")) and family in ("llama", "qwen3")
        window, layers = _windows(config, family, num_layers)
        return cls(
            family=family,
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_integer(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_integer(config, "num_key_value_heads", num_heads),
            head_dim=head_dim,
            max_seqlen=max_seqlen,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=RopeConfig.from_hf(config, max_seqlen),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bias or family == "qwen2",
            out_bias=bias,
            mlp_bias=bool(config.get("mlp_bias")) and family == "llama",
            qk_norm=family == "qwen3",
            sliding_window=window,
            windowed_layers=layers,
            init_std=float(config.get("initializer_range", 0.02)),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=token_ids(config.get("eos_token_id")),
            pad_token_id=config.get("pad_token_id"),
        )

    def to_hf(self) -> dict[str, Any]:
        """The config.json that `from_hf` reads back to an equal config."""
        eos = list(self.eos_token_ids)
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_seqlen,
            "initializer_range": self.init_std,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": (eos[0] if len(eos) == 1 else eos) if eos else None,
            "pad_token_id": self.pad_token_id,
            "attention_dropout": 0.0,
            "use_cache": True,
            **self.rope.to_hf(),
        }
        if self.family in ("llama", "qwen3"):
            config["attention_bias"] = self.qkv_bias
        if self.family == "llama":
            config["mlp_bias"] = self.mlp_bias
        if self.family == "mistral":
            config["sliding_window"] = self.sliding_window
        if self.family in ("qwen2", "qwen3"):
            config |= {
                "use_sliding_window": self.sliding_window is not None,
                "sliding_window": self.sliding_window,
                "max_window_layers": min(self.windowed_layers, default=self.num_layers),
                "layer_types": [
                    "full_attention" if self.window(layer) is None else "sliding_attention"
                    for layer in range(self.num_layers)
                ],
            }
        return config


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """`eos_token_id` of a config.json (a number, a list or null) as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _mean_keys(seqlen: int, window: int | None) -> float:
    """Keys a query sees on average under the causal mask."""
    width = seqlen if window is None else min(window, seqlen)
    return (width * (width + 1) / 2 + (seqlen - width) * width) / max(seqlen, 1)


def _integer(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool):
        raise bad_value("config.json", key, "be an integer", value, "complete config.json")
    return value


def _family(config: dict[str, Any]) -> str:
    if config.get("auto_map"):
        raise unsupported(
            "config.json",
            "auto_map",
            "be absent",
            config["auto_map"],
            "code of a checkpoint is never run; use a checkpoint of a built-in architecture",
        )
    names = config.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else None
    if name is None:
        by_type = {family: name for name, family in ARCHITECTURES.items()}
        name = by_type.get(str(config.get("model_type")))
    if name not in ARCHITECTURES:
        got = name or config.get("model_type") or "none"
        known = ", ".join(ARCHITECTURES)
        raise unsupported(
            "config.json", "architectures", f"be one of {known}", got, "use another checkpoint"
        )
    return ARCHITECTURES[name]


def _refuse_what_is_not_ours(config: dict[str, Any]) -> None:
    """Options that these architectures could carry and this decoder does not have."""
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise unsupported("config.json", "hidden_act", "be silu", activation, "use another model")
    dropout = config.get("attention_dropout")
    if dropout:
        raise unsupported("config.json", "attention_dropout", "be 0", dropout, "set it to 0")


def _windows(
    config: dict[str, Any], family: str, num_layers: int
) -> tuple[int | None, tuple[int, ...]]:
    """(window, windowed layers) of a config.json."""
    window = config.get("sliding_window")
    if family in ("qwen2", "qwen3") and not config.get("use_sliding_window"):
        window = None
    types = config.get("layer_types")
    known = ("full_attention", "sliding_attention")
    if types is not None and (len(types) != num_layers or any(kind not in known for kind in types)):
        raise bad_value(
            "config.json",
            "layer_types",
            f"hold {num_layers} of {' and '.join(known)}",
            types,
            "correct it",
        )
    if family == "llama" or window is None:
        return None, ()
    if types is not None:
        layers = tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
    else:
        first = 0 if family == "mistral" else config.get("max_window_layers", 28)
        layers = tuple(range(first, num_layers))
    return (int(window), layers) if layers else (None, ())
