"""What the parts of the backward share: arguments, shared memory, a block's work, the products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from ridgeline.kernels.attention.cute.backward_rows import Tiles
from ridgeline.kernels.attention.cute.blocks import BlockRange
from ridgeline.kernels.attention.cute.mainloop import DTYPES
from ridgeline.kernels.attention.cute.pipeline import Ring
from ridgeline.kernels.attention.cute.seqlens import Extent
from ridgeline.kernels.attention.cute_sm90_backward_config import (
    KEYS,
    BackwardConfig,
    BackwardTraits,
    dq_part,
)


@dataclass(frozen=True)
class Scalars:
    """Arguments of a launch that are numbers."""

    softmax_scale: Float32
    softcap: Float32
    window_left: Int32
    window_right: Int32
    heads_per_section: Int32
    together: Int32
    """1 where all blocks of keys of a head run at once"""


@dataclass(frozen=True)
class Globals:
    """Tensors of a launch, as TMA coordinates where TMA moves them; packed calls have no B mode."""

    mQ: cute.Tensor
    """[S, D, H, B]"""
    mdO: cute.Tensor
    """[S, V, H, B]"""
    mK: cute.Tensor
    """[T, D, G, B]"""
    mV: cute.Tensor
    """[T, V, G, B]"""
    mdK: cute.Tensor
    mdV: cute.Tensor
    mdK_plain: cute.Tensor
    mdV_plain: cute.Tensor
    """The same two as ordinary tensors"""
    statistics: cute.Tensor
    """fp32 [tiles, H, 2 * block_q]: -LSE log2(e), then delta"""
    dq_sum: cute.Tensor
    """fp32 [tiles, H, block_q * D], in the order of backward_rows.py"""
    turns: Any
    """int32 [tiles, H, 1] or None: blocks of keys that have added to a tile of dQ; the last row's
    first word counts the blocks of keys that persistent blocks have drawn."""
    tiles: Tiles
    rows: Any
    """RowTensors where the main kernel prepares or finishes rows, else None."""
    num_key_blocks: Int32
    num_batches: Int32
    tma_q: cute.CopyAtom
    tma_do: cute.CopyAtom
    tma_k: cute.CopyAtom
    tma_v: cute.CopyAtom
    tma_dk: cute.CopyAtom
    tma_dv: cute.CopyAtom


@dataclass(frozen=True)
class Layouts:
    """Shared-memory layouts: the tensor as it lies, and transposed for operand B where needed."""

    q: Any
    q_columns: Any
    do: Any
    do_columns: Any
    k: Any
    k_columns: Any
    v: Any
    ds: Any
    ds_columns: Any


@dataclass(frozen=True)
class Shared:
    """Shared memory of a block of threads. Columns: the transposed view of the same bytes."""

    sQ: cute.Tensor
    """[block_q, D, stages]"""
    sQ_columns: cute.Tensor
    sdO: cute.Tensor
    """[block_q, V, stages]"""
    sdO_columns: cute.Tensor
    sK: cute.Tensor
    """[64, D, stages of K and V * warpgroups]"""
    sK_columns: cute.Tensor
    sV: cute.Tensor
    """[64, V, stages of K and V * warpgroups]"""
    sdS: cute.Tensor
    """[block_q, 64, ds_stages * warpgroups]"""
    sdS_columns: cute.Tensor
    sStatistics: cute.Tensor
    """fp32 [2 * block_q, stages]"""
    sdQ: Any
    """fp32 [block_q * D] or None"""
    q_ring: Ring
    do_ring: Ring
    ds_ring: Ring
    turn_ring: Ring
    """Helpers: filled when a step's turn has come."""
    added_ring: Ring
    """Helpers: filled when a step's dQ was added."""
    kv_ring: Ring
    """K and V; of a block of threads that has one block of keys, its first use."""
    record_ring: Any
    sRecord: Any
    """int32 [stages * words]: numbers of blocks of keys, persistent, and their places where
    quick_end; else None."""


@dataclass(frozen=True)
class Work:
    """One block of keys and the steps of its walk: every head of its group, every query block."""

    block: Int32
    kv_head: Int32
    batch: Int32
    extent: Extent
    queries: BlockRange
    group: Int32
    first: Int32
    """The block of queries that a head's walk starts with; it wraps around."""
    down: Boolean | None = None
    """Whether the walk goes from the last queries to the first; None: never."""
    before: Any = 0
    """Blocks of keys that this block of threads had before."""
    steps_before: Any = 0
    """Their steps."""

    def position(self, step):
        """A step's place in the rings."""
        return step + self.steps_before

    def steps_per_head(self):
        return self.queries.end - self.queries.begin

    def num_steps(self):
        return self.steps_per_head() * self.group

    def at(self, step):
        """(query head, block of queries) of a step."""
        per_head = self.steps_per_head()
        head = step // per_head
        behind = step - head * per_head
        block = self.first + behind
        block -= cutlass.select_(block < self.queries.end, Int32(0), Int32(per_head))
        if self.down is not None:
            block = cutlass.select_(self.down, self.first - behind, block)
        return self.kv_head * self.group + head, block

    def following(self, block):
        """The block of queries after one; after a head's last one the first again."""
        begin, end = self.queries.begin, self.queries.end
        up = cutlass.select_(block + 1 == end, Int32(begin), block + 1)
        if self.down is None:
            return up
        return cutlass.select_(
            self.down, cutlass.select_(block == begin, Int32(end) - 1, block - 1), up
        )

    def first_tile(self, tensors, block_q: int):
        """The first tile of the sequence's rows in statistics and dq_sum."""
        return tensors.tiles.first(self.extent, self.batch, block_q)


class Products:
    """The five matrix products as WGMMAs of one warpgroup."""

    def __init__(self, traits: BackwardTraits, config: BackwardConfig):
        self.traits = traits
        self.config = config
        self.dtype = DTYPES[traits.dtype]

    def _mma(self, columns: int, a_from, b_major) -> cute.TiledMma:
        k_major = cute.nvgpu.OperandMajorMode.K
        op = warpgroup.MmaF16BF16Op(
            self.dtype, Float32, (KEYS, columns, 16), a_from, k_major, b_major
        )
        return cute.make_tiled_mma(cute.make_mma_atom(op))

    def scores(self) -> cute.TiledMma:
        """S^T or dP^T [64, block_q], both operands from shared memory, rows along memory."""
        source = warpgroup.OperandSource.SMEM
        return self._mma(self.config.block_q, source, cute.nvgpu.OperandMajorMode.K)

    def sums(self, columns: int) -> cute.TiledMma:
        """dK or dV [64, columns], operand A from registers."""
        source = warpgroup.OperandSource.RMEM
        return self._mma(columns, source, cute.nvgpu.OperandMajorMode.MN)

    def dq(self) -> cute.TiledMma:
        """A part of dQ [block_q, D] = dS K."""
        source = warpgroup.OperandSource.SMEM
        return self._mma(self.dq_part()[1], source, cute.nvgpu.OperandMajorMode.MN)

    def dq_part(self) -> tuple[int, int]:
        return dq_part(self.config, self.traits)


def kv_piece(shared: Shared, work: Work, wg, wgs: int):
    """Where the keys of a warpgroup lie."""
    if shared.kv_ring.stages == 1:
        return wg
    return shared.kv_ring.stage(work.before) * wgs + wg


def statistics_pair(statistics: cute.Tensor, start):
    """Two neighbouring words of a stage's statistics, one 8-byte access."""
    pair = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    cute.autovec_copy(cute.local_tile(statistics, (2,), (start // 2,)), pair)
    return pair


@cute.jit
def multiply(mma, accumulator, a, b, clear: cutlass.Constexpr[bool]):
    """Issue accumulator (+)= a b, asynchronously, as one group."""
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, not (clear and k == 0))
        cute.gemm(mma, accumulator, a[None, None, k], b[None, None, k], accumulator)
    warpgroup.commit_group()
