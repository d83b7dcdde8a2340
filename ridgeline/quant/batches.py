"""Calibration tokens as batches: rows of whole sequences, or sequences of any lengths packed.

Right padding never enters a forward: sequences of different lengths are laid end to end and told
apart by cu_seqlens, as the attention op takes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.core.errors import bad_value
from ridgeline.core.protocols import BlockwiseModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Some sequences on their way through the blocks: token ids at first, then hidden states."""

    x: torch.Tensor
    """[b, S, ...], or packed [1, P, ...] with cu_seqlens."""
    cu_seqlens: torch.Tensor | None = None
    """int32 [sequences + 1]; None: each row is one sequence."""

    @property
    def tokens(self) -> int:
        return self.x.shape[0] * self.x.shape[1]

    def carrying(self, x: torch.Tensor) -> Batch:
        """The same sequences with other contents."""
        return Batch(x=x, cu_seqlens=self.cu_seqlens)

    def sequences(self, first: int, end: int) -> Batch:
        """Some of the sequences (the end may lie beyond the last)."""
        if self.cu_seqlens is None:
            return Batch(x=self.x[first:end])
        starts = self.cu_seqlens[first : end + 1]
        return Batch(x=self.x[:, int(starts[0]) : int(starts[-1])], cu_seqlens=starts - starts[0])

    @property
    def count(self) -> int:
        """Sequences."""
        return len(self.x) if self.cu_seqlens is None else len(self.cu_seqlens) - 1


def token_batches(
    token_ids_BS: torch.Tensor, lengths_B: torch.Tensor | None, size: int
) -> list[Batch]:
    """Token ids [B, S] in batches of `size` sequences; tokens beyond a sequence's length (right
    padding) are left out.

    Raises: ValueError for lengths that do not fit.
    """
    if lengths_B is None:
        return [Batch(x=part) for part in token_ids_BS.split(size)]
    B, S = token_ids_BS.shape
    lengths = lengths_B.tolist()
    if len(lengths) != B or not all(1 <= length <= S for length in lengths):
        raise bad_value(
            "quantize",
            "lengths_B",
            f"hold {B} lengths from 1 to {S}",
            lengths[:8],
            "count each row's tokens without padding",
        )
    batches = []
    for first in range(0, B, size):
        held = lengths[first : first + size]
        rows = token_ids_BS[first : first + size]
        if min(held) == S:
            batches.append(Batch(x=rows))
            continue
        packed = torch.cat([row[:length] for row, length in zip(rows, held, strict=True)])
        starts = torch.tensor([0, *held], dtype=torch.int32).cumsum(0).to(torch.int32)
        batches.append(Batch(x=packed[None], cu_seqlens=starts.to(token_ids_BS.device)))
    return batches


def run_batch(model: BlockwiseModel, index: int, batch: Batch) -> torch.Tensor:
    """A block over a batch's hidden states."""
    if batch.cu_seqlens is None:
        return model.run_block(index, batch.x)
    return model.run_block(index, batch.x, batch.cu_seqlens)
