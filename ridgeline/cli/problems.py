"""The problems a person can spell as flags, one dataclass an op, and typical ones for the tables.

`explain` parses these; `doctor` and the README's support table ask every implementation about the
typical problem of its op. A new op joins by adding its dataclass to QUERIES.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

# Importing an op's module registers its implementations; their own modules load when chosen.
import ridgeline.kernels.attention.impls
import ridgeline.kernels.w4a16.impls  # noqa: F401
from ridgeline.core.arch import Arch, detect, pretend
from ridgeline.core.errors import bad_value
from ridgeline.kernels.attention.problem import AttentionProblem
from ridgeline.kernels.w4a16.problem import W4A16Problem


class Query(Protocol):
    """Flags that describe one problem of one op, on one architecture."""

    @property
    def arch(self) -> str: ...
    @property
    def impl(self) -> str: ...
    def problem(self) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Shapes and options of one attention call, what a kernel's speed hangs on."""

    seqlen: int
    """Query tokens of a sequence, at least 1."""
    seqlen_k: int | None = None
    """Key tokens of a sequence; as many as query tokens unless given."""
    batch: int = 1
    """Sequences."""
    heads: int = 32
    """Query heads; a multiple of the key/value heads."""
    kv_heads: int | None = None
    """Key/value heads; as many as query heads unless given."""
    head_dim: int = 128
    """Width of a head."""
    head_dim_v: int | None = None
    """Width of a value head; as the query's unless given."""
    dtype: Literal["float32", "bfloat16", "float16", "float8_e4m3fn"] = "bfloat16"
    """Of queries, keys and values."""
    causal: bool = False
    """Query i sees keys up to i + seqlen_k - seqlen (bottom-right aligned)."""
    window_left: int | None = None
    """Keys a query sees to its left, inclusive; unbounded unless given."""
    window_right: int | None = None
    """Keys a query sees to its right, inclusive; unbounded unless given."""
    softcap: float = 0.0
    """Scores are capped smoothly at this value; 0 is off."""
    dropout: bool = False
    """Dropout on the probabilities."""
    alibi: bool = False
    """ALiBi slopes."""
    sinks: bool = False
    """One sink logit a head in the denominator."""
    bias: bool = False
    """A dense additive bias."""
    varlen: bool = False
    """Sequences packed by cu_seqlens."""
    page_size: int | None = None
    """Tokens of a page of the KV cache; contiguous unless given."""
    direction: Literal["fwd", "bwd"] = "fwd"
    """The forward or the backward pass."""

    def __post_init__(self) -> None:
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        for name in ("seqlen", "batch", "heads", "head_dim"):
            _at_least_one(name, getattr(self, name))
        for name in ("seqlen_k", "kv_heads", "head_dim_v", "page_size"):
            if (value := getattr(self, name)) is not None:
                _at_least_one(name, value)
        if self.heads % kv_heads:
            raise bad_value(
                "attention", "heads", f"be a multiple of kv_heads ({kv_heads})", self.heads,
                "give counts that divide",
            )  # fmt: skip

    def problem(self) -> AttentionProblem:
        """The problem that the flags describe."""
        return AttentionProblem(
            batch=self.batch,
            seqlen_q=self.seqlen,
            seqlen_k=self.seqlen if self.seqlen_k is None else self.seqlen_k,
            heads=self.heads,
            kv_heads=self.heads if self.kv_heads is None else self.kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim if self.head_dim_v is None else self.head_dim_v,
            dtype=self.dtype,
            causal=self.causal,
            window_left=self.window_left,
            window_right=self.window_right,
            softcap=self.softcap,
            dropout=self.dropout,
            alibi=self.alibi,
            sinks=self.sinks,
            bias=self.bias,
            varlen=self.varlen,
            page_size=self.page_size,
            kv_cache=self.page_size is not None,
            needs_grad=self.direction == "bwd",
            direction=self.direction,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionQuery(AttentionShape):
    """Attention: O = softmax(scale Q K^T + mask) V, the call of one layer."""

    kv_cache: bool = False
    """A call of flash_attn_with_kvcache (decode)."""
    needs_grad: bool = False
    """A backward pass will follow."""
    deterministic: bool = False
    """The backward must be bitwise repeatable."""
    arch: str = "auto"
    """cpu, sm80, sm86, sm89, sm90 or sm100, present or not; auto: this machine's."""
    impl: str = "auto"
    """An implementation by name; auto: the best that accepts."""

    def problem(self) -> AttentionProblem:
        """The problem that the flags describe."""
        base = AttentionShape.problem(self)
        return replace(
            base,
            kv_cache=self.kv_cache or base.kv_cache,
            needs_grad=self.needs_grad or base.needs_grad,
            deterministic=self.deterministic,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class W4A16Query:
    """Linear layer on packed 4-bit weights: out_MN = act_MK @ dequant(W)_NK^T."""

    m: int
    """Rows of activations (tokens), at least 1."""
    n: int
    """Output features."""
    k: int
    """Input features."""
    group_size: int = 128
    """Inputs that share a scale; k for whole-channel."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of activations and output."""
    scale_dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    """Of the stored scales."""
    symmetric: bool = True
    """No zero points."""
    act_order: bool = False
    """Groups given by a table (g_idx)."""
    bias: bool = False
    """A bias is added."""
    silu_mul: bool = False
    """Epilogue silu(gate) * up over a fused pair; the output has n / 2 columns."""
    batch_invariant: bool = False
    """A row's result must not depend on the batch it sits in."""
    arch: str = "auto"
    """cpu, sm80, sm86, sm89, sm90 or sm100, present or not; auto: this machine's."""
    impl: str = "auto"
    """An implementation by name; auto: the best that accepts."""

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "group_size"):
            _at_least_one(name, getattr(self, name))

    def problem(self) -> W4A16Problem:
        """The problem that the flags describe."""
        return W4A16Problem(
            m=self.m,
            n=self.n,
            k=self.k,
            group_size=self.group_size,
            dtype=self.dtype,
            scale_dtype=self.scale_dtype,
            symmetric=self.symmetric,
            act_order=self.act_order,
            bias=self.bias,
            silu_mul=self.silu_mul,
            batch_invariant=self.batch_invariant,
        )


QUERIES: dict[str, type] = {"attention": AttentionQuery, "w4a16": W4A16Query}
"""Op -> its flags."""


def typical(op: str, dtype: str) -> Any:
    """The problem by which tables judge an op: a prefill layer, a decode linear of an 8B model."""
    if op == "attention":
        return AttentionQuery(seqlen=4096, heads=32, kv_heads=8, causal=True, dtype=dtype).problem()  # pyright: ignore[reportArgumentType]
    return W4A16Query(m=1, n=14336, k=4096, dtype=dtype).problem()  # pyright: ignore[reportArgumentType]


def resolve_arch(name: str) -> Arch:
    """`auto`: the GPU of this machine, else its CPU; any other name as core.arch knows it."""
    if name == "auto":
        return detect(best_device())
    if name == "cpu":
        return detect("cpu")
    return pretend(name)


def best_device() -> str:
    """cuda where there is one, else cpu."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise bad_value("problem", name, "be at least 1", value, "give a positive count")
