"""The arguments of the attention operators: one schema, one dataclass in the same order, one check.

`torch.library` operators take flat arguments; SCHEMA is that list, Arguments the same fields, and a
test holds the two together. `check` runs once a call, on the host, before anything is launched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ridgeline.core.dtypes import dtype_name
from ridgeline.core.errors import bad_type, bad_value, unsupported
from ridgeline.kernels.attention.problem import (
    AttentionExtras,
    AttentionOptions,
    AttentionProblem,
)

SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? bias, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor? leftpad_k, "
    "Tensor? kv_batch_idx, Tensor? block_table, Tensor? alibi_slopes, Tensor? seed_offset, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, float softmax_scale, bool causal, "
    "SymInt? window_left, SymInt? window_right, float softcap, float dropout_p, "
    "bool deterministic, int num_splits, bool kv_cache, bool needs_grad, str? impl"
)
_INF = float("inf")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Arguments:
    """A call as the operator receives it; meanings in problem.py."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqused_q: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    leftpad_k: torch.Tensor | None = None
    kv_batch_idx: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    seed_offset: torch.Tensor | None = None
    """int64 [2] on the CPU: seed and offset of the dropout mask."""
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    softmax_scale: float = 1.0
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False
    num_splits: int = 0
    kv_cache: bool = False
    needs_grad: bool = False
    impl: str | None = None

    @property
    def varlen(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def seqlen_q(self) -> int:
        """Query tokens of a sequence; the longest for varlen."""
        if self.cu_seqlens_q is None:
            return self.q.shape[1]
        assert self.max_seqlen_q is not None
        return self.max_seqlen_q

    @property
    def seqlen_k(self) -> int:
        """Key tokens of a sequence: the longest for varlen, the capacity for a cache."""
        if self.block_table is not None:
            return self.block_table.shape[1] * self.k.shape[1]
        if self.cu_seqlens_k is None:
            return self.k.shape[1]
        assert self.max_seqlen_k is not None
        return self.max_seqlen_k

    def problem(self, direction: str) -> AttentionProblem:
        """What `select` sees."""
        return AttentionProblem(
            batch=self.batch,
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
            heads=self.q.shape[-2],
            kv_heads=self.k.shape[-2],
            head_dim=self.q.shape[-1],
            head_dim_v=self.v.shape[-1],
            dtype=dtype_name(self.q.dtype),
            causal=self.causal,
            window_left=self.window_left,
            window_right=self.window_right,
            softcap=self.softcap,
            dropout=self.dropout_p > 0,
            alibi=self.alibi_slopes is not None,
            sinks=self.sinks is not None,
            bias=self.bias is not None,
            varlen=self.varlen,
            seqused=self.seqused_q is not None or self.seqused_k is not None,
            page_size=None if self.block_table is None else self.k.shape[1],
            kv_cache=self.kv_cache,
            leftpad=self.leftpad_k is not None,
            kv_batch_idx=self.kv_batch_idx is not None,
            needs_grad=self.needs_grad,
            deterministic=self.deterministic,
            direction=direction,
        )

    def options(self) -> AttentionOptions:
        """The scalars that an implementation receives."""
        return AttentionOptions(
            softmax_scale=self.softmax_scale,
            causal=self.causal,
            window_left=self.window_left,
            window_right=self.window_right,
            softcap=self.softcap,
            dropout_p=self.dropout_p,
            deterministic=self.deterministic,
            num_splits=self.num_splits,
        )

    def extras(self) -> AttentionExtras:
        """The optional tensors that an implementation receives, those of integers without gaps in
        their last dim (kernels read them by the element)."""
        seed, offset = (0, 0) if self.seed_offset is None else self.seed_offset.tolist()
        return AttentionExtras(
            cu_seqlens_q=dense(self.cu_seqlens_q),
            cu_seqlens_k=dense(self.cu_seqlens_k),
            max_seqlen_q=self.max_seqlen_q,
            max_seqlen_k=self.max_seqlen_k,
            seqused_q=dense(self.seqused_q),
            seqused_k=dense(self._used_k()),
            leftpad_k=dense(self.leftpad_k),
            kv_batch_idx=dense(self.kv_batch_idx),
            page_ids_BU=dense(self.block_table),
            alibi_slopes=self.alibi_slopes,
            sinks_H=self.sinks,
            bias=self.bias,
            dropout_seed=seed,
            dropout_offset=offset,
        )

    def _used_k(self) -> torch.Tensor | None:
        """Lengths of paged keys: seqused_k, else from cu_seqlens_k."""
        if self.block_table is None or self.seqused_k is not None or self.cu_seqlens_k is None:
            return self.seqused_k
        return (self.cu_seqlens_k[1:] - self.cu_seqlens_k[:-1]).to(torch.int32)


def dense(x: torch.Tensor | None) -> torch.Tensor | None:
    """x with a last dim without gaps (a slice of a wider table stays as it is)."""
    return x if x is None or x.stride(-1) == 1 or x.shape[-1] < 2 else x.contiguous()


def window_bounds(window_size: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """FlashAttention's window_size, where -1 is unbounded, as (left, right) with None for that.

    Raises: ValueError for other negative sizes or another length.
    """
    if len(window_size) != 2:
        raise bad_value(
            "attention", "window_size", "be a pair (left, right)", window_size, "give two numbers"
        )
    for size in window_size:
        if size is not None and size < -1:
            raise bad_value(
                "attention",
                "window_size",
                "have sizes of at least 0, or -1 or None for unbounded",
                window_size,
                "use None where there is no bound",
            )
    left, right = (None if size in (None, -1) else size for size in window_size)
    return left, right


def check(a: Arguments) -> None:
    """Refuse, by name, what a caller got wrong.

    Raises: ValueError, TypeError, NotImplementedError.
    """
    check_static(a)
    check_values(a)


def check_values(a: Arguments) -> None:
    """The rest of `check`: lengths and pages, and their values where they are on the host."""
    _check_lengths(a)
    _check_pages(a)


def check_static(a: Arguments) -> None:
    """The part of `check` that looks at no tensor's values: shapes, dtypes, scalars."""
    _check_scalars(a)
    _check_heads(a)
    _check_dense_shapes(a)
    _check_extras(a)


def _value(arg: str, must: str, got: object, do: str) -> ValueError:
    return bad_value("attention", arg, must, got, do)


def _check_scalars(a: Arguments) -> None:
    if not 0.0 <= a.dropout_p < 1.0:
        raise _value("dropout_p", "be in [0, 1)", a.dropout_p, "use 0.0 to switch dropout off")
    if not 0.0 <= a.softcap < _INF:  # false for NaN too
        raise _value("softcap", "be at least 0 and finite", a.softcap, "use 0.0 to switch it off")
    if not -_INF < a.softmax_scale < _INF:
        raise _value("softmax_scale", "be finite", a.softmax_scale, "use None for 1 / sqrt(D)")
    for name, size in (("window_left", a.window_left), ("window_right", a.window_right)):
        if size is not None and size < 0:
            raise _value(name, "be at least 0 or None", size, "use None where there is no bound")
    if a.num_splits < 0:
        raise _value("num_splits", "be at least 0", a.num_splits, "use 0 for an automatic choice")


def _check_heads(a: Arguments) -> None:
    rank = 3 if a.varlen else 4
    kv_rank = 4 if a.block_table is not None else rank
    for name, tensor, want in (("q", a.q, rank), ("k", a.k, kv_rank), ("v", a.v, kv_rank)):
        if tensor.dim() != want:
            layout = (
                "[tokens, heads, head_dim]" if want == 3 else "[batch, seqlen, heads, head_dim]"
            )
            raise _value(name, f"be {layout}", f"{tensor.dim()} dims", "reshape it")
        if tensor.dtype not in DTYPES:
            raise bad_type(
                "attention", name, "be bf16, fp16, fp32 or fp64", tensor.dtype, "convert it"
            )
        if tensor.dtype != a.q.dtype:
            raise bad_type(
                "attention", name, f"have q's dtype {a.q.dtype}", tensor.dtype, "convert it"
            )
        if tensor.device != a.q.device:
            raise _value(name, f"be on q's device {a.q.device}", tensor.device, "move it")
    heads, kv_heads = a.q.shape[-2], a.k.shape[-2]
    if kv_heads == 0 or heads % kv_heads:
        raise _value(
            "k",
            f"have a number of heads that divides q's {heads}",
            kv_heads,
            "repeat or drop heads",
        )
    if a.k.shape[-1] != a.q.shape[-1] or a.q.shape[-1] == 0:
        raise _value(
            "k", f"have q's head_dim {a.q.shape[-1]}", a.k.shape[-1], "project to one size"
        )
    if a.v.shape[:-1] != a.k.shape[:-1] or a.v.shape[-1] == 0:
        raise _value(
            "v",
            f"match k in all but the last dim, {tuple(a.k.shape[:-1])}",
            tuple(a.v.shape),
            "give a value to each key",
        )


def _check_dense_shapes(a: Arguments) -> None:
    if a.varlen or a.block_table is not None:
        return
    if a.kv_batch_idx is None and a.k.shape[0] != a.q.shape[0]:
        raise _value("k", f"have q's batch {a.q.shape[0]}", a.k.shape[0], "or give cache_batch_idx")


def _check_vector(a: Arguments, name: str, length: int) -> torch.Tensor | None:
    tensor: torch.Tensor | None = getattr(a, name)
    if tensor is None:
        return None
    if tensor.dtype != torch.int32:
        raise bad_type("attention", name, "be int32", tensor.dtype, "call .to(torch.int32)")
    if tuple(tensor.shape) != (length,):
        raise _value(name, f"have shape ({length},)", tuple(tensor.shape), "one entry a sequence")
    if tensor.device != a.q.device:
        raise _value(name, f"be on q's device {a.q.device}", tensor.device, "move it")
    return tensor if tensor.device.type == "cpu" else None


def _check_range(name: str, tensor: torch.Tensor | None, low: int, high: int) -> None:
    """Values on the host, where looking at them is cheap."""
    if tensor is None or tensor.numel() == 0:
        return
    values = tensor.flatten().tolist()  # short: three times faster than a reduction
    least, most = min(values), max(values)
    if least < low or most > high:
        got = least if least < low else most
        raise _value(name, f"have values from {low} to {high}", got, "check how it was computed")


def _check_lengths(a: Arguments) -> None:
    if (a.cu_seqlens_q is None) != (a.cu_seqlens_k is None) and a.block_table is None:
        raise _value("cu_seqlens_k", "be given with cu_seqlens_q", None, "give both or neither")
    if a.cu_seqlens_q is None and a.cu_seqlens_k is not None:
        raise _value("cu_seqlens_q", "be given with cu_seqlens_k", None, "give both or neither")
    batch = a.batch
    for name, tokens in (("cu_seqlens_q", a.q.shape[0]), ("cu_seqlens_k", a.k.shape[0])):
        if getattr(a, name) is None:
            continue
        longest = a.max_seqlen_q if name.endswith("q") else a.max_seqlen_k
        if longest is None or longest < 0:
            name = name.replace("cu", "max").replace("seqlens", "seqlen")
            raise _value(name, "be the longest length of the batch", longest, "give an integer")
        paged = a.block_table is not None and name.endswith("k")
        _check_starts(a, name, batch, None if paged else tokens, longest)
    for name, longest in (("seqused_q", a.seqlen_q), ("seqused_k", a.seqlen_k)):
        used = _check_vector(a, name, batch)
        _check_range(name, used, 0, longest)
        _check_used(a, name, used)
    _check_range("leftpad_k", _check_vector(a, "leftpad_k", batch), 0, a.seqlen_k)
    rows = _check_vector(a, "kv_batch_idx", batch)
    _check_range("cache_batch_idx", rows, 0, a.k.shape[0] - 1)


def _check_used(a: Arguments, name: str, used: torch.Tensor | None) -> None:
    """A used prefix ends within its own packed sequence, not in the next one."""
    starts = a.cu_seqlens_q if name.endswith("q") else a.cu_seqlens_k
    if used is None or starts is None or (a.block_table is not None and name.endswith("k")):
        return
    values = starts.tolist()
    for b, (length, start, end) in enumerate(
        zip(used.tolist(), values[:-1], values[1:], strict=True)
    ):
        if length > end - start:
            rule = f"be at most the length {end - start} of sequence {b}"
            raise _value(name, rule, length, "check how it was computed")


def _check_starts(a: Arguments, name: str, batch: int, tokens: int | None, longest: int) -> None:
    starts = _check_vector(a, name, batch + 1)
    if batch < 0:
        raise _value(name, "have batch + 1 entries", 0, "start it with 0")
    if starts is None:
        return
    values = starts.tolist()
    if values[0] != 0:
        raise _value(name, "start with 0", values[0], "prepend 0 to the sums of lengths")
    lengths = [end - start for start, end in zip(values, values[1:], strict=False)]
    if lengths and min(lengths) < 0:
        raise _value(name, "not decrease", values, "use sums of lengths")
    if tokens is not None and values[-1] > tokens:
        raise _value(
            name, f"stay within the {tokens} packed tokens", values[-1], "check the last entry"
        )
    if lengths and max(lengths) > longest:
        side = name[-1]
        raise _value(
            f"max_seqlen_{side}", f"be at least the longest {max(lengths)}", longest, "raise it"
        )


def _check_pages(a: Arguments) -> None:
    table = a.block_table
    if table is None:
        return
    if table.dtype != torch.int32:
        raise bad_type("attention", "block_table", "be int32", table.dtype, "convert it")
    if table.dim() != 2 or table.shape[0] != a.batch:
        raise _value(
            "block_table", f"be [{a.batch}, pages]", tuple(table.shape), "one row a sequence"
        )
    if a.seqused_k is None and a.cu_seqlens_k is None:
        raise _value("cache_seqlens", "be given with block_table", None, "give each length")
    if a.kv_batch_idx is not None:
        raise unsupported(
            "attention",
            "cache_batch_idx",
            "be None with block_table",
            "a tensor",
            "use block_table",
        )
    if a.needs_grad:
        raise unsupported(
            "attention", "k", "not need gradients with block_table", "requires_grad", "detach it"
        )
    lengths = a._used_k()
    if table.device.type != "cpu" or lengths is None or table.numel() == 0:
        return
    page = torch.arange(table.shape[1]) * a.k.shape[1]
    used = table[page[None, :] < lengths[:, None]]
    _check_range("block_table", used, 0, a.k.shape[0] - 1)
    _check_range("cache_seqlens", lengths, 0, a.seqlen_k)


def _check_extras(a: Arguments) -> None:
    heads = a.q.shape[-2]
    if a.sinks is not None and tuple(a.sinks.shape) != (heads,):
        raise _value("sinks", f"have shape ({heads},)", tuple(a.sinks.shape), "one logit a head")
    if a.alibi_slopes is not None:
        if tuple(a.alibi_slopes.shape) not in ((heads,), (a.batch, heads)):
            got = tuple(a.alibi_slopes.shape)
            raise _value(
                "alibi_slopes", f"be ({heads},) or ({a.batch}, {heads})", got, "reshape it"
            )
        if a.alibi_slopes.dtype != torch.float32:
            got = a.alibi_slopes.dtype
            raise bad_type("attention", "alibi_slopes", "be fp32", got, "call .float()")
    if a.bias is not None:
        want = (a.batch, heads, a.seqlen_q, a.seqlen_k)
        shape = tuple(a.bias.shape)
        fits = len(shape) == 4 and shape[2:] == want[2:]
        if not fits or shape[0] not in (1, want[0]) or shape[1] not in (1, heads):
            raise _value("bias", f"be {want}, the first two 1 or full", shape, "expand it")
        if a.bias.dtype not in (a.q.dtype, torch.float32):
            raise bad_type("attention", "bias", "be q's dtype or fp32", a.bias.dtype, "convert it")
    for name in ("sinks", "bias", "alibi_slopes", "block_table"):
        tensor = getattr(a, name)
        if tensor is not None and tensor.device != a.q.device:
            raise _value(name, f"be on q's device {a.q.device}", tensor.device, "move it")


def with_fp32_sinks(a: Arguments) -> Arguments:
    """Sinks as an implementation gets them: fp32 (fp64 beside fp64 inputs)."""
    if a.sinks is None:
        return a
    wide = torch.float64 if a.q.dtype == torch.float64 else torch.float32
    return a if a.sinks.dtype == wide else replace(a, sinks=a.sinks.to(wide))
