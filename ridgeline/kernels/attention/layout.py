"""Where each sequence of a call lies: dense, packed, padded, paged, all seen as (q_SHD, k_TGD, v_TGD).

Used by the implementations that walk the sequences one by one (ref, cpu); GPU kernels do this
arithmetic on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ridgeline.kernels.attention.problem import AttentionExtras


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence: the index of its rows in the batched tensors, and its lengths."""

    index: int
    """b, its place in the batch."""
    q_rows: tuple[int | slice, ...]
    """Index into q and out: the used query rows, [S, H, D]."""
    k_rows: tuple[int | slice, ...] | None
    """Index into k and v: the used key rows, [T, G, D]; None where they are paged."""
    seqlen_q: int
    seqlen_k: int
    leftpad: int

    @property
    def lse_rows(self) -> tuple[int | slice, ...]:
        """Index into lse ([B, H, S] or [H, P]): this sequence's [H, S]."""
        *lead, rows = self.q_rows
        return (*lead, slice(None), rows)


def _host(values: torch.Tensor | None) -> list[int] | None:
    return None if values is None else values.tolist()


def sequences(q: torch.Tensor, k: torch.Tensor, extras: AttentionExtras) -> Iterator[Sequence]:
    """The sequences of a validated call, in order; reads lengths on the host (a sync on a GPU)."""
    starts_q, starts_k = _host(extras.cu_seqlens_q), _host(extras.cu_seqlens_k)
    used_q, used_k = _host(extras.seqused_q), _host(extras.seqused_k)
    leftpads, rows_of_k = _host(extras.leftpad_k), _host(extras.kv_batch_idx)
    batch = len(starts_q) - 1 if starts_q is not None else q.shape[0]
    capacity = (
        k.shape[1] if extras.page_ids_BU is None else extras.page_ids_BU.shape[1] * k.shape[1]
    )
    for b in range(batch):
        start_q = starts_q[b] if starts_q is not None else 0
        seqlen_q = starts_q[b + 1] - start_q if starts_q is not None else q.shape[1]
        start_k = starts_k[b] if starts_k is not None else 0
        seqlen_k = starts_k[b + 1] - start_k if starts_k is not None else capacity
        seqlen_q = used_q[b] if used_q is not None else seqlen_q
        seqlen_k = used_k[b] if used_k is not None else seqlen_k
        span_q, span_k = slice(start_q, start_q + seqlen_q), slice(start_k, start_k + seqlen_k)
        k_rows: tuple[int | slice, ...] | None
        if extras.page_ids_BU is not None:
            k_rows = None
        elif starts_k is not None:
            k_rows = (span_k,)
        else:
            k_rows = (rows_of_k[b] if rows_of_k is not None else b, span_k)
        yield Sequence(
            index=b,
            q_rows=(span_q,) if starts_q is not None else (b, span_q),
            k_rows=k_rows,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            leftpad=min(leftpads[b], seqlen_k) if leftpads is not None else 0,
        )


def keys_of(sequence: Sequence, kv: torch.Tensor, extras: AttentionExtras) -> torch.Tensor:
    """The used keys (or values) of a sequence, [T, G, D]: a view, or a copy where they are paged."""
    if sequence.k_rows is not None:
        return kv[sequence.k_rows]
    assert extras.page_ids_BU is not None
    page_tokens = kv.shape[1]
    pages = -(-sequence.seqlen_k // page_tokens)
    ids = extras.page_ids_BU[sequence.index, :pages].long()
    return kv[ids].flatten(0, 1)[: sequence.seqlen_k]
