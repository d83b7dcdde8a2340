"""Layers that hold a part of a matrix, under the names of the layers that they stand for.

    ColumnLinear     rows of W (outputs) split: y_r = x W_r^T                x whole, y a part
    RowLinear        columns of W (inputs) split: y = sum_r x_r W_r^T        x a part, y whole
    SharedHeads      k or v with fewer heads than ranks: W whole on each, only the rows used that
                     this rank's query heads need; its gradient is summed over ranks
    VocabEmbedding   rows of the table split: tokens of other ranks give 0, the sum is whole
    VocabHead        the head's rows split; the loss works on parts (loss.py)
    SharedNorm       whole weight, but this rank sees only some tokens or heads: gradient summed

Parameters are plain local tensors, so nothing below knows of sharding; `Piece` says which part of
the whole parameter they are. With sequence parallel the activations between the matrices are split
along the tokens: what is whole above is then gathered before and scattered after.
Source: Shoeybi et al. 2019 (arXiv 1909.08053); Korthikanti et al. 2022 (2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ridgeline.parallel.collectives import Group, copy, gather, reduce, scatter

Product = Callable[..., torch.Tensor]
"""(x, weight, bias = None) -> x @ weight.T + bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The tensor axis as a layer sees it."""

    group: Group
    rank: int
    size: int
    sequence_parallel: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Which part of a whole parameter is held here."""

    shape: tuple[int, ...]
    """Of the whole."""
    dim: int | None
    """The split dim; None: all of it is here (and on the other ranks)."""
    start: int = 0
    length: int = 0


def part(size: int, axis: Axis) -> tuple[int, int]:
    """(start, length) of a rank's part of `size` rows: the first ranks have one more where it does
    not divide (a vocabulary)."""
    least, more = divmod(size, axis.size)
    start = axis.rank * least + min(axis.rank, more)
    return start, least + (axis.rank < more)


class Split:
    """Cuts parameters once (a tied pair stays one) and remembers which part each is."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._cut: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self.pieces: dict[int, Piece] = {}
        """id of the parameter -> its part."""

    def cut(self, whole: torch.Tensor, dim: int | None) -> nn.Parameter:
        """The local parameter (on meta: filled later) of a whole one."""
        assert isinstance(whole, nn.Parameter)
        if id(whole) in self._cut:
            return self._cut[id(whole)][1]
        shape = list(whole.shape)
        start, length = (0, 0)
        if dim is not None:
            start, length = part(shape[dim], self.axis)
            shape[dim] = length
        local = whole if dim is None else nn.Parameter(whole.new_empty(shape), whole.requires_grad)
        self._cut[id(whole)] = (whole, local)  # the whole is kept, so that its id stays taken
        self.pieces[id(local)] = Piece(
            shape=tuple(whole.shape), dim=dim, start=start, length=length
        )
        return local


class ColumnLinear(nn.Module):
    """Part of a linear's outputs."""

    product: Product = F.linear
    """What multiplies (deferred.py puts its own here)."""

    def __init__(self, linear: nn.Linear, split: Split) -> None:
        super().__init__()
        self.weight = split.cut(linear.weight, 0)
        self.bias = None if linear.bias is None else split.cut(linear.bias, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.weight, self.bias)


class RowLinear(nn.Module):
    """Part of a linear's inputs; the result is whole, or with sequence parallel a part of the
    tokens."""

    product: Product = F.linear

    def __init__(self, linear: nn.Linear, split: Split) -> None:
        super().__init__()
        self.axis = split.axis
        self.weight = split.cut(linear.weight, 1)
        self.bias = None if linear.bias is None else split.cut(linear.bias, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        axis = self.axis
        if not axis.sequence_parallel:
            y = reduce(self.product(x, self.weight), axis.group)
            return y if self.bias is None else y + self.bias
        y = scatter(self.product(x, self.weight), axis.group)
        return y if self.bias is None else y + copy(self.bias, axis.group)


class SharedHeads(nn.Module):
    """The key or value heads that this rank's query heads read, of a weight that is whole here."""

    def __init__(self, linear: nn.Linear, split: Split, num_kv_heads: int) -> None:
        super().__init__()
        self.axis = split.axis
        self.weight = split.cut(linear.weight, None)
        self.bias = None if linear.bias is None else split.cut(linear.bias, None)
        ranks_a_head = split.axis.size // num_kv_heads
        self._rows = linear.weight.shape[0] // num_kv_heads
        self._start = split.axis.rank // ranks_a_head * self._rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group = self.axis.group
        weight = copy(self.weight, group).narrow(0, self._start, self._rows)
        if self.bias is None:
            return F.linear(x, weight)
        return F.linear(x, weight, copy(self.bias, group).narrow(0, self._start, self._rows))


class VocabEmbedding(nn.Module):
    """Part of an embedding's rows."""

    def __init__(self, embedding: nn.Embedding, split: Split) -> None:
        super().__init__()
        self.axis = split.axis
        self.weight = split.cut(embedding.weight, 0)
        self.start, self.length = part(embedding.weight.shape[0], split.axis)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        local = token_ids - self.start
        own = (local >= 0) & (local < self.length)
        x = F.embedding(torch.where(own, local, 0), self.weight)
        x = x * own.unsqueeze(-1)
        group = self.axis.group
        return scatter(x, group) if self.axis.sequence_parallel else reduce(x, group)


class VocabHead(nn.Module):
    """Part of the head's rows: logits of a part of the vocabulary, for the loss alone."""

    def __init__(self, linear: nn.Linear, split: Split) -> None:
        super().__init__()
        self.axis = split.axis
        self.weight = split.cut(linear.weight, 0)
        self.start, self.length = part(linear.weight.shape[0], split.axis)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of this rank's part of the vocabulary; x is whole."""
        return F.linear(copy(x, self.axis.group), self.weight)


class SharedNorm(nn.Module):
    """RMSNorm of a part of the tokens or heads."""

    def __init__(self, norm: nn.RMSNorm, split: Split) -> None:
        super().__init__()
        self.axis, self.eps, self.shape = split.axis, norm.eps, norm.normalized_shape
        assert norm.weight is not None
        self.weight = split.cut(norm.weight, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.shape, copy(self.weight, self.axis.group), self.eps)


def enter(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """What column-split linears read: whole activations, whose gradient is summed over ranks."""
    return gather(x, axis.group) if axis.sequence_parallel else copy(x, axis.group)
