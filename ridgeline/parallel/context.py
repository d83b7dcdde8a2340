"""Context parallel: sequences cut over ranks, attention by passing keys and values around a ring.

Each sample of S tokens is cut into 2 cp pieces; rank r holds pieces r and 2 cp - 1 - r, so that
under the causal mask every rank sees about as many keys. Attention of this rank's queries over the
keys of source rank s is one call of our operator, which returns (out, lse); results are merged:

    lse = log(e^lse_1 + e^lse_2),   out = out_1 e^(lse_1 - lse) + out_2 e^(lse_2 - lse)

Documents: a query piece sees earlier keys only of the one document that its first token belongs to
(all other documents in it begin inside it), so each (query piece, source) is one sequence of a
varlen call without a mask; within a piece the documents are causal sequences of their own.
Backward: with the final out and lse the operator's backward gives each source's exact share
(P = exp(S - lse)); dK and dV travel on with their K and V and are home after cp hops.
Traffic: (cp - 1) hops of 2 P G D elements forward, twice that and one more of half backward, sent
while a rank computes. Sources: Liu et al. 2023 (Ring Attention, arXiv 2310.01889); Llama 3
(arXiv 2407.21783) section 3.3.2 for the pairing of pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ridgeline.core.errors import unsupported
from ridgeline.kernels.attention.arguments import Arguments
from ridgeline.kernels.attention.dispatch import attention_op, backward_op
from ridgeline.parallel.mesh import World
from ridgeline.parallel.stage import MicroBatch, Packed


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One varlen attention call: some local queries over some keys of one source."""

    rows_q: torch.Tensor | None
    """int64, local queries; None: all."""
    rows_k: torch.Tensor | None
    """int64, the source's keys; None: all."""
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPlan:
    """Who holds which tokens of a micro-batch, and the calls of its attention."""

    own_tokens: torch.Tensor
    """int64, places in the packed micro-batch of this rank's tokens, ascending."""
    within: Call
    """Each piece's own documents, causal."""
    across: tuple[Call | None, ...]
    """By source rank: earlier keys; None: nothing to attend to there."""
    group: dist.ProcessGroup

    @classmethod
    def of(cls, seqlens: Sequence[int], sample_tokens: int, world: World) -> ContextPlan:
        """The plan of a micro-batch with documents of these lengths. Host work, and copies to the
        device that wait for nothing."""
        assert world.context is not None
        cp, device = world.layout.cp, world.device
        ends: np.ndarray = np.asarray(seqlens, dtype=np.int64).cumsum()
        tokens = [held_tokens(int(ends[-1]), sample_tokens, cp, rank) for rank in range(cp)]
        own = tokens[world.cp_rank]
        piece = sample_tokens // (2 * cp)
        across = [_across(own, tokens[source], piece, ends, device) for source in range(cp)]
        return cls(
            own_tokens=_moved(own, device),
            within=_within(own, piece, ends, device),
            across=tuple(across),
            group=world.context,
        )

    def __call__(
        self,
        q_BSHD: torch.Tensor,
        k_BSGD: torch.Tensor,
        v_BSGD: torch.Tensor,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        """Causal attention of this rank's queries over all ranks' keys (nn.layers.Attend)."""
        if window_size != (-1, -1):
            raise unsupported("context", "window_size", "be none", window_size, "use cp = 1")
        o_PHD = ring(q_BSHD.flatten(0, 1), k_BSGD.flatten(0, 1), v_BSGD.flatten(0, 1), self)
        return o_PHD.unflatten(0, q_BSHD.shape[:2])


def held_tokens(num_tokens: int, sample_tokens: int, cp: int, rank: int) -> np.ndarray:
    """Places of the tokens that a rank holds: pieces r and 2 cp - 1 - r of each sample."""
    piece = sample_tokens // (2 * cp)
    starts = np.arange(0, num_tokens, sample_tokens)[:, None]
    pieces = np.asarray([rank, 2 * cp - 1 - rank]) * piece
    firsts = (starts + pieces).ravel()
    return (firsts[:, None] + np.arange(piece)).ravel()


def local_micro_batch(batch: Packed, plan: ContextPlan) -> MicroBatch:
    """This context rank's tokens of a micro-batch."""
    own = plan.own_tokens
    return MicroBatch(
        token_ids=batch.token_ids_P[own][None],
        targets=batch.targets_P[own],
        positions=batch.position_ids_P[own][None],
        cu_seqlens=plan.within.cu_seqlens_q,
        max_seqlen=batch.max_seqlen,
        attend=plan,
    )


def _within(own: np.ndarray, piece: int, ends: np.ndarray, device: torch.device) -> Call:
    """Causal sequences: documents cut at the ends of pieces."""
    first = own[::piece]
    inside = [ends[(ends > start) & (ends < start + piece)] - start for start in first]
    cuts = [np.diff(np.concatenate(([0], cut, [piece]))) for cut in inside]
    lengths = np.concatenate(cuts)
    cu = _cumulative(lengths, device)
    longest = int(lengths.max())
    return Call(
        rows_q=None,
        rows_k=None,
        cu_seqlens_q=cu,
        cu_seqlens_k=cu,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        causal=True,
    )


def _across(
    own: np.ndarray, source: np.ndarray, piece: int, ends: np.ndarray, device: torch.device
) -> Call | None:
    """For each own piece: the document of its first token, over the source's earlier part of it."""
    rows_q: list[np.ndarray] = []
    rows_k: list[np.ndarray] = []
    for place in range(0, len(own), piece):
        first = int(own[place])
        document = int(np.searchsorted(ends, first, side="right"))
        begin = int(ends[document - 1]) if document else 0
        low, high = np.searchsorted(source, (begin, first))
        if low < high:
            queries = min(int(ends[document]), first + piece) - first
            rows_q.append(np.arange(place, place + queries))
            rows_k.append(np.arange(low, high))
    if not rows_q:
        return None
    num_q, num_k = [len(rows) for rows in rows_q], [len(rows) for rows in rows_k]
    return Call(
        rows_q=_moved(np.concatenate(rows_q), device),
        rows_k=_moved(np.concatenate(rows_k), device),
        cu_seqlens_q=_cumulative(np.asarray(num_q), device),
        cu_seqlens_k=_cumulative(np.asarray(num_k), device),
        max_seqlen_q=max(num_q),
        max_seqlen_k=max(num_k),
        causal=False,
    )


def _cumulative(lengths: np.ndarray, device: torch.device) -> torch.Tensor:
    cu = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu[1:])
    return _moved(cu, device)


def _moved(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """On the device; a copy from memory that is not pinned would wait for all that is queued."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _arguments(q: torch.Tensor, kv: torch.Tensor, call: Call) -> list[Any]:
    """The operator's arguments for a call; kv [2, P, G, D]."""
    keys = kv if call.rows_k is None else kv[:, call.rows_k]
    a = Arguments(
        q=q if call.rows_q is None else q[call.rows_q],
        k=keys[0],
        v=keys[1],
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k=call.cu_seqlens_k,
        max_seqlen_q=call.max_seqlen_q,
        max_seqlen_k=call.max_seqlen_k,
        softmax_scale=q.shape[-1] ** -0.5,
        causal=call.causal,
        needs_grad=True,
    )
    return [getattr(a, field.name) for field in fields(Arguments)]


class _Hop:
    """Tensors on their way to the next rank of the ring, and those that come."""

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        after = dist.get_global_rank(group, (rank + 1) % size)
        before = dist.get_global_rank(group, (rank - 1) % size)
        self._sent, self._incoming = tensor.contiguous(), torch.empty_like(tensor)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, after, group),
                dist.P2POp(dist.irecv, self._incoming, before, group),
            ]
        )

    def wait(self) -> torch.Tensor:
        for work in self._works:
            work.wait()
        return self._incoming


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: ContextPlan
    ) -> torch.Tensor:
        own = torch.stack((k, v))
        out, lse = attention_op(*_arguments(q, own, plan.within))
        total = out.float()
        kv = own
        rank, size = dist.get_rank(plan.group), dist.get_world_size(plan.group)
        for hop in range(size):
            coming = _Hop(kv, plan.group) if hop + 1 < size else None
            call = plan.across[(rank - hop) % size]
            if call is not None:
                share, lse_share = attention_op(*_arguments(q, kv, call))
                _merge(total, lse, share, lse_share, call.rows_q)
            if coming is not None:
                kv = coming.wait()
        out = total.to(q.dtype)
        ctx.plan = plan
        ctx.save_for_backward(q, own, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        q, own, out, lse = ctx.saved_tensors
        dout, plan = grads[0].contiguous(), ctx.plan
        found = backward_op(dout, None, out, lse, *_arguments(q, own, plan.within))
        dq = found[0].float()
        dkv = torch.stack((found[1], found[2])).float()
        kv = own
        rank, size = dist.get_rank(plan.group), dist.get_world_size(plan.group)
        for hop in range(size):
            coming = _Hop(kv, plan.group) if hop + 1 < size else None
            call = plan.across[(rank - hop) % size]
            if call is not None:
                rows = call.rows_q
                share = backward_op(
                    dout[rows],
                    None,
                    out[rows],
                    lse[:, rows].contiguous(),
                    *_arguments(q, kv, call),
                )
                dq.index_add_(0, rows, share[0].float())
                # Keys may serve two query pieces: index_add_ sums them.
                dkv.index_add_(1, call.rows_k, torch.stack((share[1], share[2])).float())
            if coming is not None:
                kv = coming.wait()
            if size > 1:
                dkv = _Hop(dkv, plan.group).wait()
        return dq.to(q.dtype), dkv[0].to(q.dtype), dkv[1].to(q.dtype), None


def _merge(
    total: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor,
    lse_out: torch.Tensor,
    rows: torch.Tensor | None,
) -> None:
    """Add a call's result to the running one, in place; every query has seen itself, so no LSE is
    -inf in `lse`."""
    assert rows is not None
    before = lse[:, rows]
    both = torch.logaddexp(before, lse_out)
    old = (before - both).exp().T.unsqueeze(-1)
    new = (lse_out - both).exp().T.unsqueeze(-1)
    total[rows] = total[rows] * old + out.float() * new
    lse[:, rows] = both


# Hops between ranks are nothing for a compiler.
_apply = cast(Callable[..., torch.Tensor], torch.compiler.disable(_Ring.apply))


def ring(
    q_PHD: torch.Tensor, k_PGD: torch.Tensor, v_PGD: torch.Tensor, plan: ContextPlan
) -> torch.Tensor:
    """Causal attention of packed documents whose tokens are spread over the plan's ranks.

    Shapes: q [P, H, D], k, v [P, G, D]: this rank's tokens -> [P, H, D] in q's dtype.
    Numerics: partial results merged, and gradients summed, in fp32.
    """
    return _apply(q_PHD, k_PGD, v_PGD, plan)
