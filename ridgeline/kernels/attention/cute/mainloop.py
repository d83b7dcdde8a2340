"""A consumer warpgroup's walk over the key blocks of a tile: products, softmax, and their overlap.

s counts blocks from the right (tensor cores above, CUDA cores below):

    | S(s) = Q K^T | O += P(s-1) V     |                           | S(s+1) = Q K^T | O += P(s) V
                   |  softmax of S(s)  | scale O (rare), pack P(s) |

A tile's blocks are those that any of its rows sees. A warpgroup works only on those that its own 64
rows see and lets the others pass: under a causal mask or a window the first and last of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from ridgeline.kernels.attention.cute import softmax as sm
from ridgeline.kernels.attention.cute.blocks import BlockRange
from ridgeline.kernels.attention.cute.mask import Mask
from ridgeline.kernels.attention.cute.pipeline import WARPGROUP_THREADS, Ring, Turns
from ridgeline.kernels.attention.cute_sm90_config import ROWS, ForwardConfig, ForwardTraits

DTYPES = {"bfloat16": BFloat16, "float16": Float16}
FIRST_TURN_BARRIER = 1
FIRST_GROUP_BARRIER = 4
"""Named barriers: 0 is the block's, then one a warpgroup for turns, one a warpgroup for itself."""


@dataclass(frozen=True)
class Operands:
    """Descriptors of a warpgroup's operands in shared memory, and the rings that guard them."""

    tQ: cute.Tensor
    """Of the warpgroup's tile; with several stages of Q a fourth mode of all warpgroups' tiles"""
    tK: cute.Tensor
    tV: cute.Tensor
    sV: cute.Tensor
    q_ring: Ring
    k_ring: Ring
    v_ring: Ring


@dataclass(frozen=True)
class Consumer:
    """What a consumer warpgroup works with in every tile."""

    S: cute.Tensor
    """fp32 [64, N] accumulator; P replaces it in place."""
    O: cute.Tensor  # noqa: E741
    """fp32 [64, V] accumulator."""
    P: cute.Tensor
    """P in 16 bits, operand A of the second product."""
    operands: Operands
    softmax: sm.Softmax
    wg: Int32
    capped_scale: Float32
    """softmax_scale / softcap."""


class Products:
    """The two matrix products of attention as WGMMAs of one warpgroup."""

    def __init__(self, traits: ForwardTraits, config: ForwardConfig):
        self.traits = traits
        self.config = config
        self.dtype = DTYPES[traits.dtype]

    def qk(self) -> cute.TiledMma:
        """S [64, N] = Q K^T, both from shared memory."""
        op = warpgroup.MmaF16BF16Op(
            self.dtype,
            Float32,
            (ROWS, self.config.block_k, 16),
            warpgroup.OperandSource.SMEM,
            cute.nvgpu.OperandMajorMode.K,
            cute.nvgpu.OperandMajorMode.K,
        )
        return cute.make_tiled_mma(cute.make_mma_atom(op))

    def pv(self) -> cute.TiledMma:
        """O [64, V] += P V, P from registers, V as it lies in memory."""
        op = warpgroup.MmaF16BF16Op(
            self.dtype,
            Float32,
            (ROWS, self.traits.head_dim_v, 16),
            warpgroup.OperandSource.RMEM,
            cute.nvgpu.OperandMajorMode.K,
            cute.nvgpu.OperandMajorMode.MN,
        )
        return cute.make_tiled_mma(cute.make_mma_atom(op))


class Mainloop:
    """One S tile: its softmax hides behind the P V of the block before and other warpgroups."""

    def __init__(self, traits: ForwardTraits, config: ForwardConfig):
        self.traits = traits
        self.config = config
        self.dtype = DTYPES[traits.dtype]
        self.products = Products(traits, config)
        self.turns = Turns(FIRST_TURN_BARRIER, config.num_warpgroups if config.ping_pong else 1)

    # ---- set up ---------------------------------------------------------------------------------
    @cute.jit
    def consumer(self, sQ, sK, sV, rings, softmax_scale: Float32, softcap: Float32, wg: Int32):
        """Registers and descriptors of one warpgroup. sQ is its tile, or with several stages of Q
        all warpgroups' stages; rings: (q, k, v)."""
        mma_qk, mma_pv = self.products.qk(), self.products.pv()
        thread_qk, thread_pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        block_k, dim_v = self.config.block_k, self.traits.head_dim_v
        S_shape = mma_qk.partition_shape_C((ROWS, block_k))
        capped_scale = Float32(0.0)
        scale_log2 = softmax_scale * sm.LOG2_E
        if cutlass.const_expr(self.traits.softcap):
            capped_scale = softmax_scale / softcap
            scale_log2 = softcap * sm.LOG2_E
        return Consumer(
            S=cute.make_rmem_tensor(S_shape, Float32),
            O=cute.make_rmem_tensor(mma_pv.partition_shape_C((ROWS, dim_v)), Float32),
            P=cute.make_rmem_tensor(mma_pv.partition_shape_A((ROWS, block_k)), self.dtype),
            operands=Operands(
                tQ=mma_qk.make_fragment_A(thread_qk.partition_A(sQ)),
                tK=mma_qk.make_fragment_B(thread_qk.partition_B(sK)),
                tV=mma_pv.make_fragment_B(thread_pv.partition_B(sV)),
                sV=sV,
                q_ring=rings[0],
                k_ring=rings[1],
                v_ring=rings[2],
            ),
            softmax=self._softmax(scale_log2),
            wg=wg,
            capped_scale=capped_scale,
        )

    @cute.jit
    def _softmax(self, scale_log2: Float32) -> sm.Softmax:
        pair = cute.make_layout(2)
        return sm.Softmax(
            scale_log2=scale_log2,
            row_max=cute.make_rmem_tensor(pair, Float32),
            row_sum=cute.make_rmem_tensor(pair, Float32),
            rescale=cute.make_rmem_tensor(pair, Float32),
            lazy_log2=self.config.lazy_log2,
        )

    # ---- pieces ---------------------------------------------------------------------------------
    @cute.jit
    def first_product(
        self, c: Consumer, wanted, skipped: Int32, position: Int32, kv_position: Int32
    ):
        """Issue S of the rightmost block that a warpgroup sees, `skipped` from the tile's. Without
        such a tile it is issued all the same, on whatever the stage holds, and never read: a
        branch around it would end the overlap."""
        ring = c.operands.k_ring
        if wanted:
            c.operands.q_ring.wait_full(position)
            for i in cutlass.range(skipped, unroll=1):
                ring.wait_full(kv_position + i)
                release(ring, kv_position + i)
            ring.wait_full(kv_position + skipped)
        self.issue_qk(c, kv_position + skipped, position)

    @cute.jit
    def pass_values(self, c: Consumer, count: Int32, kv_position: Int32):
        """Let V of blocks go by that this warpgroup does not see, and its turns with them."""
        for i in cutlass.range(count, unroll=1):
            c.operands.v_ring.wait_full(kv_position + i)
            release(c.operands.v_ring, kv_position + i)
            self.turns.wait(c.wg)
            self.turns.give(c.wg)

    @cute.jit
    def pass_blocks(self, c: Consumer, count: Int32, kv_position: Int32):
        """Let K and V of blocks left of the warpgroup's own go by."""
        for i in cutlass.range(count, unroll=1):
            c.operands.k_ring.wait_full(kv_position + i)
            release(c.operands.k_ring, kv_position + i)
            self.pass_values(c, Int32(1), kv_position + i)

    @cute.jit
    def issue_qk(self, c: Consumer, position: Int32, tile: Int32):
        """S of the block at a ring position; tile counts the tiles before this one."""
        o = c.operands
        tQ = o.tQ
        if cutlass.const_expr(self.config.q_stages > 1):
            tQ = o.tQ[None, None, None, c.wg * self.config.q_stages + o.q_ring.stage(tile)]
        _multiply(self.products.qk(), c.S, tQ, o.tK, o.k_ring.stage(position), True)

    @cute.jit
    def issue_pv(self, c: Consumer, position: Int32):
        o = c.operands
        _multiply(self.products.pv(), c.O, c.P, o.tV, o.v_ring.stage(position), False)

    @cute.jit
    def softmax(
        self, c: Consumer, mask: Mask, block: Int32, masked: cutlass.Constexpr[bool]
    ) -> Boolean:
        """S becomes P; true where O must be rescaled."""
        scores = flat(c.S)
        if cutlass.const_expr(self.traits.softcap):
            sm.soft_cap(scores, c.capped_scale)
        if cutlass.const_expr(masked):
            mask.apply(scores, block * self.config.block_k)
        return c.softmax.update(scores, masked)

    @cute.jit
    def pinned_wait(self, c: Consumer, rescale: Boolean):
        """Wait for the O of the block before, then bring it to the new shift.

        The wait stands behind a branch on the finished softmax, or ptxas moves it up in front of
        the exponentials, which then no longer run beside the second product.
        """
        if cutlass.const_expr(self.config.lazy_log2 > 0):
            if rescale:
                warpgroup.wait_group(0)
                c.softmax.scale_output(flat(c.O))
            else:
                warpgroup.wait_group(0)
        else:
            warpgroup.wait_group(0)
            c.softmax.scale_output(flat(c.O))

    @cute.jit
    def pack(self, c: Consumer):
        sm.pack_operand(flat(c.S), flat(cute.recast_tensor(c.P, Int32)), self.dtype)

    @cute.jit
    def release_q(self, c: Consumer, position: Int32, is_last):
        """After a tile's last S: the next tile's Q may come in, unless O is to leave through it."""
        if cutlass.const_expr(not self.config.output_reuses_q):
            if is_last & (cute.arch.lane_idx() == 0):
                c.operands.q_ring.release(position)

    @cute.jit
    def clear_values(self, c: Consumer, mask: Mask, blocks: BlockRange, kv_position: Int32):
        """Zero the rightmost block's rows of V behind the sequence: there may lie anything, and
        0 * NaN is NaN. Every warpgroup writes the same zeros before its own product reads them."""
        if cutlass.const_expr(self.traits.varlen or self.traits.seqused):
            if blocks.end * self.config.block_k > mask.seqlen_k:
                ring, rows = c.operands.v_ring, self.config.block_k
                ring.wait_full(kv_position)
                first = cutlass.max(mask.seqlen_k - (blocks.end - 1) * rows, 0)
                sV = c.operands.sV[None, None, ring.stage(kv_position)]
                dim = self.traits.head_dim_v
                thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
                for i in cutlass.range(thread, (rows - first) * dim, WARPGROUP_THREADS, unroll=1):
                    sV[i % dim, first + i // dim] = self.dtype(0.0)
                cute.arch.fence_proxy("async.shared", space="cta")
                group_barrier(c.wg)

    # ---- the walk -------------------------------------------------------------------------------
    @cute.jit
    def walk(
        self, c: Consumer, mask: Mask, blocks: BlockRange, position: Int32, kv_position: Int32
    ) -> Int32:
        """A warpgroup's blocks, whose first S is under way, up to the P of the last one.

        Returns that block's ring position: its P V is still to be issued.
        """
        c.O.fill(0.0)
        warpgroup.wait_group(0)
        release(c.operands.k_ring, kv_position)
        self.release_q(c, position, blocks.end - 1 == blocks.begin)
        scores = flat(c.S)
        if cutlass.const_expr(self.traits.softcap):
            sm.soft_cap(scores, c.capped_scale)
        mask.apply(scores, (blocks.end - 1) * self.config.block_k)
        c.softmax.start(scores)
        self.pack(c)
        self.clear_values(c, mask, blocks, kv_position)
        for i in cutlass.range(blocks.end - 1 - blocks.full_end, unroll=1):
            kv_position += 1
            self._step(c, mask, blocks.end - 2 - i, blocks.begin, position, kv_position, True)
        for i in cutlass.range(blocks.full_end - blocks.full_begin, unroll=1):
            kv_position += 1
            block = blocks.full_end - 1 - i
            self._step(c, mask, block, blocks.begin, position, kv_position, False)
        if cutlass.const_expr(self.traits.has_left):
            for i in cutlass.range(blocks.full_begin - blocks.begin, unroll=1):
                kv_position += 1
                block = blocks.full_begin - 1 - i
                self._step(c, mask, block, blocks.begin, position, kv_position, True)
        return kv_position

    @cute.jit
    def _step(
        self,
        c: Consumer,
        mask: Mask,
        block: Int32,
        last_block: Int32,
        position: Int32,
        kv_position: Int32,
        masked: cutlass.Constexpr[bool],
    ):
        """One block: S of this block and O of the one before go to the tensor cores together."""
        c.operands.k_ring.wait_full(kv_position)
        self.turns.wait(c.wg)
        self.issue_qk(c, kv_position, position)
        c.operands.v_ring.wait_full(kv_position - 1)
        self.issue_pv(c, kv_position - 1)
        self.turns.give(c.wg)
        warpgroup.wait_group(1)
        release(c.operands.k_ring, kv_position)
        self.release_q(c, position, block == last_block)
        rescale = self.softmax(c, mask, block, masked)
        self.pinned_wait(c, rescale)
        release(c.operands.v_ring, kv_position - 1)
        self.pack(c)


def flat(tensor: cute.Tensor) -> cute.Tensor:
    """A register tensor as one mode, in register order."""
    return cute.make_tensor(tensor.iterator, cute.make_layout(cute.size(tensor)))


def group_barrier(wg: Int32) -> None:
    """All threads of one consumer warpgroup."""
    cute.arch.barrier(barrier_id=FIRST_GROUP_BARRIER + wg, number_of_threads=WARPGROUP_THREADS)


@cute.jit
def release(ring: Ring, position: Int32):
    """One arrival a warp."""
    if cute.arch.lane_idx() == 0:
        ring.release(position)


@cute.jit
def _multiply(mma, accumulator, a, b, stage: Int32, clear: cutlass.Constexpr[bool]):
    """Issue accumulator (+)= a b for one block, asynchronously, as one group."""
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, not (clear and k == 0))
        cute.gemm(mma, accumulator, a[None, None, k], b[None, None, k, stage], accumulator)
    warpgroup.commit_group()
