"""Rotary position embedding with default, linear, Llama-3 and YaRN frequency scaling.

Dims i and i + D/2 of a head form a pair that is turned by the angle position * f_i:

    f_i = base^(-2i/D)                                        default
    f_i / factor                                              linear
    f_i, f_i / factor or a blend by wavelength                llama3
    ramp between f_i (fast dims) and f_i / factor (slow)      yarn; cos, sin x attention_factor

Nothing is stored: the D/2 frequencies come from the config on the device that asks, so a model has
no buffer to convert, shard or restore. Angles and rotation are fp32, rounded once to q's dtype.
Sources: Su et al. 2021 (RoPE); Peng et al. 2023, arXiv 2309.00071, section 3 (YaRN: ramp between
rotation counts beta_fast and beta_slow, temperature 0.1 ln(factor) + 1); Llama 3.1 model card and
the `rope_type` keys of Hugging Face's config.json.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ridgeline.core.errors import bad_value

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Base and scaling of the rotary embedding."""

    base: float = 10_000.0
    """rope_theta, > 1."""
    kind: str = "default"
    """One of ROPE_KINDS."""
    factor: float = 1.0
    """How many times the trained context is stretched, >= 1; unused by default."""
    original_max_seqlen: int = 8192
    """Tokens of the context before stretching; llama3 and yarn."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths over original / low are divided by `factor`."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths under original / high stay."""
    beta_fast: float = 32.0
    """yarn: dims that turn more often than this over the original context stay."""
    beta_slow: float = 1.0
    """yarn: dims that turn less often than this are divided by `factor`."""
    attention_factor: float = 1.0
    """yarn: multiplies cos and sin."""
    truncate: bool = True
    """yarn: round the ramp's ends to whole dims."""

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise bad_value(
                "rope", "kind", f"be one of {', '.join(ROPE_KINDS)}", repr(self.kind), "use another"
            )
        if not self.base > 1.0:
            raise bad_value("rope", "base", "be > 1", self.base, "check rope_theta")
        if self.factor < 1.0:
            raise bad_value("rope", "factor", "be at least 1", self.factor, "check rope_scaling")
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor > 0:
            raise bad_value(
                "rope",
                "high_freq_factor",
                f"exceed low_freq_factor {self.low_freq_factor}",
                self.high_freq_factor,
                "check rope_scaling",
            )

    @classmethod
    def from_hf(cls, config: dict[str, Any], max_seqlen: int) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

        Raises: ValueError for a scaling that this project lacks or a key that it misses.
        """
        scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        base = float(scaling.get("rope_theta") or config.get("rope_theta") or 10_000.0)
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        rotary = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        if rotary not in (None, 1.0):
            raise bad_value("rope", "partial_rotary_factor", "be 1", rotary, "use another model")
        if kind == "default":
            return cls(base=base)
        original = (
            scaling.get("original_max_position_embeddings")
            or config.get("original_max_position_embeddings")
            or max_seqlen
        )
        factor = scaling.get("factor")
        if factor is None and kind == "yarn":
            factor = max_seqlen / original
        if factor is None and kind in ROPE_KINDS:
            raise bad_value(
                "rope", "rope_scaling", "have a factor", scaling, "complete config.json"
            )
        return cls(
            base=base,
            kind=str(kind),
            factor=float(factor or 1.0),
            original_max_seqlen=int(original),
            low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
            high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
            beta_fast=float(scaling.get("beta_fast") or 32.0),
            beta_slow=float(scaling.get("beta_slow") or 1.0),
            attention_factor=_attention_factor(scaling, float(factor or 1.0)),
            truncate=bool(scaling.get("truncate", True)),
        )

    def to_hf(self) -> dict[str, Any]:
        """The keys `rope_theta` and `rope_scaling` of config.json."""
        scaling: dict[str, Any] = {"rope_type": self.kind, "factor": self.factor}
        if self.kind == "llama3":
            scaling |= {
                "low_freq_factor": self.low_freq_factor,
                "high_freq_factor": self.high_freq_factor,
                "original_max_position_embeddings": self.original_max_seqlen,
            }
        if self.kind == "yarn":
            scaling |= {
                "beta_fast": self.beta_fast,
                "beta_slow": self.beta_slow,
                "attention_factor": self.attention_factor,
                "truncate": self.truncate,
                "original_max_position_embeddings": self.original_max_seqlen,
            }
        return {
            "rope_theta": self.base,
            "rope_scaling": None if self.kind == "default" else scaling,
        }


def _attention_factor(scaling: dict[str, Any], factor: float) -> float:
    """Factor of cos and sin: given, else from the stretch (yarn's temperature), else 1."""
    if scaling.get("rope_type", scaling.get("type")) != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return temperature(above) / temperature(below) if above and below else temperature(1.0)


def inverse_frequencies(rope: RopeConfig, head_dim: int, device: torch.device) -> torch.Tensor:
    """Angle a position of each pair of dims, fp32 [D / 2]."""
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequency = 1.0 / (rope.base**exponent)
    if rope.kind == "linear":
        return frequency / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_seqlen * frequency / (2 * math.pi)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return keep * frequency + (1 - keep) * frequency / rope.factor
    if rope.kind == "yarn":
        low, high = _yarn_ramp(rope, head_dim)
        pair = torch.arange(head_dim // 2, device=device, dtype=torch.float32)
        stretch = ((pair - low) / (high - low)).clamp(0.0, 1.0)
        return stretch * frequency / rope.factor + (1 - stretch) * frequency
    return frequency


def _yarn_ramp(rope: RopeConfig, head_dim: int) -> tuple[float, float]:
    """First and last pair of the ramp: the pairs that turn beta_fast and beta_slow times over the
    original context (solve original * base^(-2i/D) = 2 pi beta for i)."""

    def pair_turning(turns: float) -> float:
        ratio = rope.original_max_seqlen / (2 * math.pi * turns)
        return head_dim * math.log(ratio) / (2 * math.log(rope.base))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high if high > low else low + 1e-3


def cos_sin(
    rope: RopeConfig, head_dim: int, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the angles of integer positions [..., S]: fp32 [..., S, 1, D / 2]."""
    frequency = inverse_frequencies(rope, head_dim, positions.device)
    angle = (positions.to(torch.float32).unsqueeze(-1) * frequency).unsqueeze(-2)
    return angle.cos() * rope.attention_factor, angle.sin() * rope.attention_factor


def rotate(x_BSHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the pairs of dims of each head; cos and sin [B or 1, S, 1, D / 2]; same dtype as x."""
    low, high = x_BSHD.float().chunk(2, dim=-1)
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    return turned.to(x_BSHD.dtype)
