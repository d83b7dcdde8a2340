"""The host's side of the Hopper forward over caches: its kernel, buffers and arguments."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.core.arch import Arch
from ridgeline.kernels.attention.buffers import Make, maker
from ridgeline.kernels.attention.cute import cache
from ridgeline.kernels.attention.cute_sm90_cached_config import (
    MAX_SPLITS,
    CachedConfig,
    CachedTraits,
    cached_config,
    cached_traits,
    rows_of,
    splits,
)
from ridgeline.kernels.attention.cute_sm90_config import rows_per_block
from ridgeline.kernels.attention.problem import AttentionExtras, AttentionProblem

_lengths: dict[tuple[int, torch.device], torch.Tensor] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cached:
    """What a kind of call needs beside its tensors."""

    batch: int
    part: Make | None
    part_lse: Make | None
    """The parts, [rows of all sequences, H, splits, V], and theirs, or None with one."""
    seqused: bool

    def arguments(
        self,
        qkv: tuple[torch.Tensor, ...],
        out: torch.Tensor,
        lse: torch.Tensor,
        extras: AttentionExtras,
    ) -> tuple[torch.Tensor | None, ...]:
        """The launch's tensors, in the kernel's order."""
        used_q = used_k = None
        if self.seqused:
            used_q, used_k = used_lengths(extras, self.batch, out.device)
        pages = extras.page_ids_BU
        if pages is not None and pages.stride(-1) != 1:
            pages = pages.contiguous()
        return (
            *qkv,
            out,
            lse,
            None if self.part is None else self.part(),
            None if self.part_lse is None else self.part_lse(),
            extras.sinks_H,
            extras.cu_seqlens_q,
            extras.cu_seqlens_k if pages is None else None,  # of pages, used_k has them
            used_q,
            used_k,
            None if extras.leftpad_k is None else extras.leftpad_k.contiguous(),
            None if extras.kv_batch_idx is None else extras.kv_batch_idx.contiguous(),
            pages,
        )


def cached(
    q: torch.Tensor, v: torch.Tensor, problem: AttentionProblem, arch: Arch, num_splits: int
) -> tuple[Cached, tuple[CachedTraits, CachedConfig], tuple[int, int]]:
    """(plan, compile key, the launch's last numbers) of a problem; num_splits 0 is automatic."""
    count = min(num_splits, MAX_SPLITS) or splits(problem, arch)
    config = cached_config(problem, arch)
    traits = cached_traits(problem, arch, count)
    if num_splits and cache.why_missing(traits, config) is not None:
        # A number of parts is a wish about speed: what was compiled ahead serves as well.
        count = splits(problem, arch)
        traits = cached_traits(problem, arch, count)
    rows = q.shape[0] if problem.varlen else q.shape[0] * q.shape[1]
    parts = (rows, problem.heads, count, v.shape[-1])
    plan = Cached(
        batch=problem.batch,
        part=maker(q, parts, torch.float32) if count > 1 else None,
        part_lse=maker(q, parts[:3], torch.float32) if count > 1 else None,
        seqused=traits.seqused,
    )
    row_tiles = -(-rows_of(problem) // rows_per_block(config))
    return plan, (traits, config), (count, row_tiles)


def used_lengths(
    extras: AttentionExtras, batch: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Used lengths of queries and of keys, both, where a call gives one."""
    used_q, used_k = extras.seqused_q, extras.seqused_k
    if used_k is None and extras.page_ids_BU is not None:
        used_k = _packed_lengths(extras)
    used_q = _whole(batch, device) if used_q is None else used_q.contiguous()
    used_k = _whole(batch, device) if used_k is None else used_k.contiguous()
    return used_q, used_k


def _packed_lengths(extras: AttentionExtras) -> torch.Tensor | None:
    """What cu_seqlens_k says of keys in pages."""
    starts = extras.cu_seqlens_k
    return None if starts is None else starts[1:] - starts[:-1]


def _whole(batch: int, device: torch.device) -> torch.Tensor:
    """Lengths beyond every sequence's, where only the other side's are given. A graph that is
    being captured gets its own, as its memory goes with it."""
    found = _lengths.get((batch, device))
    if found is None:
        found = torch.full((batch,), torch.iinfo(torch.int32).max, dtype=torch.int32, device=device)
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _lengths[batch, device] = found
    return found
