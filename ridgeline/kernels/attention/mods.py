"""User functions inside attention: score_mod and mask_mod, and the blocks that a mask leaves.

    S = score_mod(softcap(scale * q.k) + bias - alibi, b, h, i, j)
    hidden where not mask_mod(b, h, i, j)

A mod is written once, with torch operations on tensors that broadcast against each other: score is
[.., S, T], b, h, i (query) and j (key) are integer tensors; i and j count from the start of their
sequence. `ref` and `cpu` call it; the Triton kernels compile the graph of its operations
(triton_mods.py), its derivative by autograd included. It may index tensors of the surrounding scope
(`slopes[h]`, `document[b, j]`); those take no gradient.

A `BlockMask` says for tiles of 128 x 128 whether mask_mod leaves nothing, something or everything:
kernels load only what is left and mask only what is partly left.
Source: the interface is FlexAttention's (https://pytorch.org/blog/flexattention/); nothing of its
code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ridgeline.core.errors import bad_value

ScoreMod = Callable[..., torch.Tensor]
"""(score, b, h, i, j) -> score"""
MaskMod = Callable[..., torch.Tensor]
"""(b, h, i, j) -> bool, True where query i sees key j"""
BLOCK = 128
"""Queries and keys of a block."""
_CHUNK_SCORES = 2**24


@dataclass(frozen=True, slots=True)
class BlockMask:
    """What a mask_mod leaves, by blocks of 128 queries and 128 keys.

    Lists of the blocks that are left, first to last: entry 2 * block + (1 where nothing in it is
    hidden). The first two dims are 1 where the mask does not depend on batch or head.
    """

    seqlen_q: int
    seqlen_k: int
    key_blocks: torch.Tensor
    """int32 [B or 1, H or 1, query blocks, key blocks]: the entries of a query block."""
    num_key_blocks: torch.Tensor
    """int32 [B or 1, H or 1, query blocks]."""
    query_blocks: torch.Tensor
    """int32 [B or 1, H or 1, key blocks, query blocks]: the same, seen from the keys."""
    num_query_blocks: torch.Tensor

    @property
    def share(self) -> float:
        """Blocks left over all blocks."""
        return float(self.num_key_blocks.sum()) / max(1, self.key_blocks.numel())


@dataclass(frozen=True, slots=True)
class Mods:
    """The user functions of a call."""

    score: ScoreMod | None = None
    mask: MaskMod | None = None
    blocks: BlockMask | None = None

    def scored(self, score: torch.Tensor, places: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """score_mod and mask_mod applied; places are b, h, i, j."""
        if self.score is not None:
            score = self.score(score, *places).to(score.dtype).expand_as(score)
        if self.mask is not None:
            score = score.masked_fill(~self.mask(*places), float("-inf"))
        return score

    def pulled_back(
        self, dscore: torch.Tensor, raw: torch.Tensor, places: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """Gradient of the score before score_mod, from that after it (0 where P is)."""
        if self.score is None:
            return dscore
        return score_gradient(self.score, raw, places, dscore).masked_fill(dscore == 0, 0.0)


def score_gradient(
    mod: ScoreMod, raw: torch.Tensor, places: tuple[torch.Tensor, ...], dscore: torch.Tensor
) -> torch.Tensor:
    """Autograd's gradient of a score_mod; zeros where it does not depend on the score."""
    with torch.enable_grad():
        leaf = raw.detach().requires_grad_()
        result = mod(leaf, *places)
        if not result.requires_grad:
            return torch.zeros_like(dscore)
        (found,) = torch.autograd.grad(result.expand_as(leaf), leaf, dscore.to(result.dtype))
    return found


def create_block_mask(
    mask_mod: MaskMod,
    batch: int | None,
    heads: int | None,
    seqlen_q: int,
    seqlen_k: int,
    device: torch.device | str = "cuda",
) -> BlockMask:
    """The blocks that a mask leaves, for `flex_attn_func`.

    batch, heads: None where the mask does not depend on it. Evaluates mask_mod on S x T once, some
    16 M entries at a time.
    """
    for name, size in (("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
        if size < 1:
            raise bad_value("create_block_mask", name, "be at least 1", size, "skip empty calls")
    rows, cols = -(-seqlen_q // BLOCK), -(-seqlen_k // BLOCK)
    shape = (batch or 1, heads or 1, rows, cols)
    some, every = (torch.zeros(shape, dtype=torch.bool, device=device) for _ in range(2))
    j = torch.arange(seqlen_k, device=device)[None, :]
    step = max(1, _CHUNK_SCORES // (BLOCK * seqlen_k))
    for b in range(shape[0]):
        for h in range(shape[1]):
            for first in range(0, rows, step):
                last = min(rows, first + step)
                i = torch.arange(first * BLOCK, min(last * BLOCK, seqlen_q), device=device)
                at = (torch.tensor([[n]], device=device) for n in (b, h))
                seen = mask_mod(*at, i[:, None], j).expand(len(i), seqlen_k)
                some[b, h, first:last] = _blocks_of(seen, False).any(-1).any(1)
                every[b, h, first:last] = _blocks_of(seen, True).all(-1).all(1)
    key_blocks, num_key_blocks = _listed(some, every)
    query_blocks, num_query_blocks = _listed(some.transpose(2, 3), every.transpose(2, 3))
    return BlockMask(seqlen_q, seqlen_k, key_blocks, num_key_blocks, query_blocks, num_query_blocks)


def _blocks_of(seen: torch.Tensor, beyond: bool) -> torch.Tensor:
    """[rows, BLOCK, cols, BLOCK] of a piece of the mask; `beyond` is what lies past its end."""
    pads = [-size % BLOCK for size in seen.shape]
    seen = torch.nn.functional.pad(seen, (0, pads[1], 0, pads[0]), value=beyond)
    return seen.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))


def _listed(some: torch.Tensor, every: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(entries, counts): along the last dim, the blocks that are left come first, in order."""
    order = torch.argsort(some.to(torch.int8), dim=-1, descending=True, stable=True)
    entries = 2 * order + every.gather(-1, order)
    return entries.to(torch.int32).contiguous(), some.sum(-1, dtype=torch.int32).contiguous()
