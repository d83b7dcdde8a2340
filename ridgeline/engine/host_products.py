"""A row of activations through a linear on a CPU: kept buffers in and out, as few operations as
will do.

    out = W in        or        out = W (x w f)        the norm of x in the first operation

A quantized linear is multiplied as bags (kernels/w4a16/cpu_bags) in fp32 from end to end: the norm
writes the activations as the bags want them, side by side for every chunk, and the sum over the
groups writes the output. Others take the general way: 16-bit activations, PyTorch's matmul.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from ridgeline.core.large_pages import in_large_pages
from ridgeline.engine.weights import Dense, Linear, Packed
from ridgeline.kernels.w4a16.cpu import bags_of, has_fast_bf16
from ridgeline.kernels.w4a16.cpu import forward as packed_forward
from ridgeline.kernels.w4a16.cpu_bags import Rows, Scratch, has_bags, scratch_of

Fill = Callable[[float], object]
"""Fills a buffer; with a norm, by its factor."""


class Source(Protocol):
    """A kept row that a product reads."""

    @property
    def size(self) -> int:
        """Its length."""
        ...

    def into(self, out_CK: torch.Tensor) -> Fill:
        """What puts it into every row of a buffer."""
        ...


class Kept:
    """The row as it is."""

    def __init__(self, x_1K: torch.Tensor) -> None:
        self.x_1K, self.size = x_1K, x_1K.shape[1]

    def into(self, out_CK: torch.Tensor) -> Fill:
        """The factor means nothing."""
        x_1K = self.x_1K
        return lambda factor: out_CK.copy_(x_1K)


class Normed:
    """x w f, one operation."""

    def __init__(self, x_1K: torch.Tensor, weight_K: torch.Tensor) -> None:
        self.x_1K, self.weight_1K, self.size = x_1K, weight_K.float()[None], x_1K.shape[1]

    def into(self, out_CK: torch.Tensor) -> Fill:
        """f: one over the root of the mean square."""
        parts = (torch.zeros(1, 1), self.x_1K, self.weight_1K)
        zero, x, weight = (part.expand(out_CK.shape) for part in parts)
        return lambda factor: torch.addcmul(zero, x, weight, value=factor, out=out_CK)


class Product:
    """A linear of a kept row; a call fills another one, out_1N in fp32."""

    def __init__(
        self,
        linear: Linear,
        source: Source,
        out_1N: torch.Tensor,
        scratch: Scratch,
        *,
        dtype: torch.dtype,
        gate: bool = False,
    ) -> None:
        """dtype: of activations where there are no bags. gate: the linear gives gate and up, the
        result is silu(gate) * up."""
        self._bias_1N = None
        rows = None
        if isinstance(linear, Packed) and (rows := _rows_of(linear)) is not None:
            gate = gate or linear.prepared.silu_mul
            if linear.bias_N is not None:
                self._bias_1N = linear.bias_N.float()[None]
        self._out_1N = out_1N
        self._wide_1N = out_1N if not gate else torch.empty(1, 2 * out_1N.shape[1])
        self._gate_up = self._wide_1N.chunk(2, dim=1) if gate else None
        if rows is not None and rows.is_plain:
            self._fill, self._multiply = _in_bags(rows, source, self._wide_1N, scratch)
            return
        in_1K, wide_1N = torch.empty(1, source.size), self._wide_1N
        self._fill = source.into(in_1K)
        call = _general(linear, dtype) if rows is None else _reordered(rows, scratch)
        self._multiply = lambda: wide_1N.copy_(call(in_1K))

    def __call__(self, factor: float = 1.0) -> None:
        """Fill the output; factor: of a normed source."""
        self._fill(factor)
        self._multiply()
        if self._bias_1N is not None:
            self._wide_1N.add_(self._bias_1N)
        if self._gate_up is not None:
            gate, up = self._gate_up
            torch.mul(F.silu(gate, inplace=True), up, out=self._out_1N)


def _rows_of(linear: Packed) -> Rows | None:
    bags = bags_of(linear.prepared) if linear.prepared.impl == "cpu" else None
    return None if bags is None else Rows(bags, linear.prepared.n, 1)


def _in_bags(
    rows: Rows, source: Source, out_1N: torch.Tensor, scratch: Scratch
) -> tuple[Fill, Callable[[], object]]:
    """The activations spread by the source itself; the sum over groups written to the output."""
    kept, N = scratch_of(scratch, rows.sizes), out_1N.shape[1]
    fill = source.into(kept.spread_CMS[:, 0])
    C, _, width = kept.out_CMc.shape
    if C * width == N:
        out_C1c = out_1N.view(C, 1, width)
        return fill, lambda: rows.of_spread(kept.spread, out_C1c)

    def multiply() -> None:
        rows.of_spread(kept.spread, kept.out_CMc)
        out_1N.copy_(kept.row_1N)

    return fill, multiply


def _reordered(rows: Rows, scratch: Scratch) -> Callable[[torch.Tensor], torch.Tensor]:
    kept = scratch_of(scratch, rows.sizes)
    return lambda x_1K: rows(x_1K, kept)


def _general(linear: Linear, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """A linear's function of an fp32 row, without the checks of a public call."""
    if isinstance(linear, Dense):
        weight_NK, bias_N = linear.weight_NK, linear.bias_N
        return lambda x_1K: F.linear(x_1K.to(dtype), weight_NK, bias_N)
    if isinstance(linear, Packed) and linear.prepared.impl == "cpu":
        prepared, bias = linear.prepared, linear.bias_N
        return lambda x_1K: packed_forward(x_1K.to(dtype), prepared, bias)
    return lambda x_1K: linear(x_1K.to(dtype))


# ---- the head --------------------------------------------------------------------------------


HEAD_CHUNK = 96
"""Tokens side by side in the head's second layout, as in kernels/w4a16/cpu_bags."""


def head_in_bags(dtype: torch.dtype) -> bool:
    """Whether a row's logits are computed from a second, chunked copy of the head: FBGEMM's bf16
    embedding bag instead of PyTorch's bf16 matrix-vector product. Milliseconds for 576 x 49,152,
    one thread of a busy EPYC (AVX2), 2026-11-30: 10.4 against 18.9."""
    return dtype == torch.bfloat16 and has_bags() and not has_fast_bf16()


class Head:
    """Logits of a kept row; a call gives them in fp32 [1, V]: sums in fp32, rounded once to the
    head's dtype (an argmax over fp32 takes a quarter of one over bf16)."""

    def __init__(self, head: Dense, source: Source) -> None:
        weight_NK = head.weight_NK
        self._in_1C = torch.empty(1, source.size)
        self._fill = source.into(self._in_1C)
        self._bags = head_in_bags(weight_NK.dtype) and head.bias_N is None
        if not self._bags:
            self._call = _general(head, weight_NK.dtype)
            return
        self._vocabulary, C = weight_NK.shape
        chunks = -(-self._vocabulary // HEAD_CHUNK)
        padded = F.pad(weight_NK, (0, 0, 0, chunks * HEAD_CHUNK - self._vocabulary))
        table = padded.view(chunks, HEAD_CHUNK, C).transpose(1, 2).reshape(-1, HEAD_CHUNK)
        self._table = in_large_pages(table)
        self._index = in_large_pages(torch.arange(chunks * C, dtype=torch.int32))
        self._offsets = torch.arange(0, chunks * C + 1, C, dtype=torch.int32)
        self._weights = torch.empty(chunks, C, dtype=weight_NK.dtype)

    def __call__(self, factor: float = 1.0) -> torch.Tensor:
        """factor: of a normed source."""
        self._fill(factor)
        if not self._bags:
            return self._call(self._in_1C).float()
        weights = self._weights.copy_(self._in_1C.to(self._weights.dtype)).view(-1)
        tables = self._table, self._index, self._offsets
        logits = torch.embedding_bag(*tables, False, 0, False, weights, True)[0]
        return logits.view(1, -1)[:, : self._vocabulary].float()
