"""Where each sequence of a call lies: dense, packed, padded or paged, seen as dense pieces.

Used by the implementations that walk the sequences one by one (ref, cpu); GPU kernels do this
arithmetic on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ridgeline.kernels.attention.problem import AttentionExtras, AttentionOptions


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
    """The used keys (or values) of a sequence, [T, G, D]: a view; a copy of pages."""
    if sequence.k_rows is not None:
        return kv[sequence.k_rows]
    assert extras.page_ids_BU is not None
    page_tokens = kv.shape[1]
    pages = -(-sequence.seqlen_k // page_tokens)
    ids = extras.page_ids_BU[sequence.index, :pages].long()
    return kv[ids].flatten(0, 1)[: sequence.seqlen_k]


@dataclass(frozen=True, slots=True)
class Given:
    """What backward is given of a part: gradients of its results, and the results."""

    dout_BSHV: torch.Tensor
    dlse_BHS: torch.Tensor | None
    out_BSHV: torch.Tensor
    lse_BHS: torch.Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Sequences of one length each, as a dense batch; keys before leftpad cut off.

    Row and key indices inside a part count as in problem.py, but for the keys cut off: key j of the
    part is key j + leftpad of the sequence.
    """

    q_BSHD: torch.Tensor
    k_BTGD: torch.Tensor
    v_BTGV: torch.Tensor
    batch_start: int
    """Index of the part's first sequence in the batch."""
    leftpad: int
    rows: tuple[int | slice, ...] | None
    """Index of the part's rows in q and out; None: the part is the whole dense batch."""
    keys: tuple[int | slice, ...] | None
    """Index of the part's keys in k and v; None: all of them, or paged."""

    @property
    def whole(self) -> bool:
        """Whether the part is the whole of a dense call, keys included."""
        return self.rows is None and self.keys is None

    @property
    def seqlen_q(self) -> int:
        return self.q_BSHD.shape[1]

    @property
    def seqlen_k(self) -> int:
        return self.k_BTGD.shape[1]

    @property
    def lse_rows(self) -> tuple[int | slice, ...]:
        """Index of the part's rows in lse."""
        assert self.rows is not None
        *lead, rows = self.rows
        return (*lead, slice(None), rows)

    def empty_result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse of rows that see nothing."""
        B, S, H, _ = self.q_BSHD.shape
        out_BSHV = self.q_BSHD.new_zeros((B, S, H, self.v_BTGV.shape[-1]))
        return out_BSHV, lse_empty((B, H, S), self.q_BSHD)

    def slopes(self, alibi_slopes: torch.Tensor) -> torch.Tensor:
        """ALiBi slopes of the part's sequences: [B or 1, H, 1, 1]."""
        if alibi_slopes.dim() == 1:
            return alibi_slopes[None, :, None, None]
        batch = slice(self.batch_start, self.batch_start + self.q_BSHD.shape[0])
        return alibi_slopes[batch, :, None, None]

    def given(
        self,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> Given:
        """The part's share of what backward is given."""
        if self.rows is None:
            return Given(dout, dlse, out, lse)
        return Given(
            dout[self.rows][None],
            None if dlse is None else dlse[self.lse_rows][None],
            out[self.rows][None],
            lse[self.lse_rows][None],
        )


def lse_empty(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """LSE of rows that see nothing: -inf, fp32 (fp64 for fp64 inputs)."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.full(shape, float("-inf"), dtype=dtype, device=like.device)


def parts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: AttentionExtras
) -> Iterator[Part]:
    """A call as dense batches: one for a dense call, one a sequence otherwise.

    A dense cache whose sequences all have the same lengths is one part too.
    """
    plain = extras.page_ids_BU is None and extras.kv_batch_idx is None
    lengths = (extras.seqused_q, extras.seqused_k, extras.leftpad_k)
    if plain and extras.cu_seqlens_q is None and all(t is None for t in lengths):
        yield Part(q, k, v, 0, 0, None, None)
        return
    found = list(sequences(q, k, extras))
    same = {(s.seqlen_q, s.seqlen_k, s.leftpad) for s in found}
    equal = len(same) == 1 and found[0].seqlen_q == q.shape[1]
    if plain and extras.cu_seqlens_q is None and equal:
        _, used, pad = same.pop()
        keys = (slice(None), slice(pad, used))
        yield Part(q, k[keys], v[keys], 0, pad, None, keys)
        return
    for s in found:
        keys = None
        if s.k_rows is not None:
            *lead, span = s.k_rows
            assert isinstance(span, slice)
            keys = (*lead, slice(span.start + s.leftpad, span.stop))
        k_TGD, v_TGV = (
            kv[keys] if keys is not None else keys_of(s, kv, extras)[s.leftpad :] for kv in (k, v)
        )
        yield Part(q[s.q_rows][None], k_TGD[None], v_TGV[None], s.index, s.leftpad, s.q_rows, keys)


def joined(
    some: Iterator[Part],
    q: torch.Tensor,
    v: torch.Tensor,
    one: Callable[[Part], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `one` on each part and put the results where they belong -> (out, lse)."""
    out = lse = None
    for part in some:
        part_out, part_lse = one(part)
        if part.rows is None:
            return part_out, part_lse
        if out is None or lse is None:
            out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
            lse = lse_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), q)
        out[part.rows], lse[part.lse_rows] = part_out[0], part_lse[0]
    if out is None or lse is None:
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        lse = lse_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), q)
    return out, lse


def bounds(
    options: AttentionOptions, seqlen_q: int, seqlen_k: int
) -> tuple[int | None, int | None]:
    """(left, right): query i sees i + T - S - left <= j <= i + T - S + right; None where the bound
    hides nothing for these lengths."""
    left, right = options.window_left, options.window_right
    if options.causal:
        right = 0 if right is None else min(0, right)
    if left is not None and left >= seqlen_k - 1:
        left = None
    if right is not None and right >= seqlen_q - 1:
        right = None
    return left, right
