"""What the Hopper kernels are compiled for: their tiles, and what follows from them.

A config is the whole compile key. Which config a layer gets is decided in config.py.
"""

from __future__ import annotations

from dataclasses import dataclass

KIND = {"bfloat16": "bf16", "float16": "f16"}
SCALE_KIND = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
SCALE_WIDTH = {"bf16": 2, "f16": 2, "f32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """What the decode kernel is compiled for (its cache key)."""

    kind: str
    """Activations: "bf16" or "f16"."""
    scale: str
    """Stored scales: "bf16", "f16" or "f32"."""
    symmetric: bool
    packed_group: int
    """32, 64, 128, 256, or 0 for one scale along K."""
    nt: int
    """Columns of 8 rows of activations: M <= 8 nt; 1 or 2."""
    warps: int
    """Compute warps a block."""
    stages: int
    """Bulk copies in flight a warp."""
    blocks_per_sm: int
    smem_bytes: int
    red_buffers: int = 2
    reducers: int = 1
    """Warps that add the compute warps' sums; tiles go to them in turn."""
    silu_mul: bool = False
    """Rows g of 16 are gates, rows g + 8 ups; writes silu(gate) * up."""
    pdl: bool = True
    """Start before the previous kernel of the stream ends; wait for it before using activations."""
    lean: bool = False
    """Activations by TMA tiles of 8 nt rows, instead of a copy a row."""
    raw: bool = False
    """bf16 codes stay subnormal, q 2^-133, and activations are multiplied by 2^64: two instructions
    less a word."""
    cluster: int = 1
    """2: K is cut in two, and both blocks' sums meet in their shared memory."""

    @property
    def subnormal(self) -> bool:
        """Codes are operands where their nibbles lie, those of rows g + 8 16 times as large."""
        return self.raw or self.kind == "f16"

    @property
    def code_factors(self) -> tuple[float, float]:
        """What sums of rows g and g + 8 are too small by."""
        if self.raw:
            return 2.0**69, 2.0**65
        return (2.0**24, 2.0**20) if self.subnormal else (1.0, 1.0)

    @property
    def per_channel(self) -> bool:
        return self.packed_group == 0

    @property
    def stage_k(self) -> int:
        """Inputs a stage."""
        return max(128, self.packed_group)

    @property
    def stage_chunks(self) -> int:
        return self.stage_k // 64

    @property
    def flush_k(self) -> int:
        """Inputs between two uses of the scale."""
        return self.packed_group or 128

    @property
    def stage_flushes(self) -> int:
        return self.stage_k // self.flush_k

    @property
    def stage_groups(self) -> int:
        """Scale rows a stage brings."""
        return 1 if self.per_channel else self.stage_flushes

    @property
    def code_bytes(self) -> int:
        return self.stage_chunks * 1024

    @property
    def scale_row(self) -> int:
        """Bytes of the scales of 32 outputs."""
        return 32 * SCALE_WIDTH[self.scale]

    @property
    def scale_bytes(self) -> int:
        return self.stage_groups * self.scale_row

    @property
    def zero_bytes(self) -> int:
        return 0 if self.symmetric else self.stage_groups * 32

    @property
    def stage_bytes(self) -> int:
        return self.code_bytes + self.scale_bytes + self.zero_bytes

    @property
    def slot_bytes(self) -> int:
        return -(-self.stage_bytes // 128) * 128

    @property
    def sum_factor(self) -> float:
        """What the sum of activations is kept times."""
        if self.raw:
            return -8.0 if self.symmetric else -1.0
        if not self.symmetric:
            return -1.0 if self.kind == "bf16" else -(2.0**-24)
        return -136.0 if self.kind == "bf16" else -8.0 * 2.0**-24

    @property
    def unit_sum_bytes(self) -> int:
        return self.stage_flushes * 8 * self.nt * 4

    @property
    def red_bytes(self) -> int:
        """A buffer of partial sums."""
        return self.warps * 2 * self.nt * 512

    @property
    def full_barriers(self) -> int:
        """Barriers of finished tiles: each is waited on by one reducer, and none is used twice
        before its buffer is."""
        return self.reducers * -(-self.red_buffers // self.reducers)

    def barrier_offsets(self) -> tuple[int, int, int, int]:
        """Ring, full, empty, activations."""
        full = self.warps * self.stages * 8
        empty = full + self.full_barriers * 8
        return 0, full, empty, empty + self.red_buffers * 8

    @property
    def there_offset(self) -> int:
        """Barriers of sums that the cluster's other block sends: two a reducer."""
        return self.barrier_offsets()[3] + self.warps * 8

    @property
    def ring_offset(self) -> int:
        end = self.there_offset + (2 * self.reducers * 8 if self.cluster > 1 else 0)
        return -(-end // 128) * 128

    @property
    def red_offset(self) -> int:
        return self.ring_offset + self.warps * self.stages * self.slot_bytes

    @property
    def received_offset(self) -> int:
        """What the other block sends: half a tile, two places a reducer."""
        return self.red_offset + self.red_buffers * self.red_bytes

    @property
    def dynamic_offset(self) -> int:
        """Where group sums and activations start; TMA's swizzle wants a multiple of 1024."""
        end = self.received_offset
        end += 2 * self.reducers * self.nt * 512 if self.cluster > 1 else 0
        return -(-end // 1024) * 1024 if self.lean else end

    def act_pitch(self, max_units: int) -> int:
        """Bytes between rows of a warp's activations: 16 extra against bank conflicts."""
        return max_units * self.stage_k * 2 + 16

    def needs_bytes(self, m: int, max_units: int) -> int:
        """Shared memory for m rows where a warp has at most `max_units` stages of K."""
        sums = self.warps * max_units * self.unit_sum_bytes
        if self.lean:
            chunks = self.warps * max_units * self.stage_chunks
            return self.dynamic_offset + sums + chunks * self.act_chunk_bytes
        return self.dynamic_offset + sums + self.warps * m * self.act_pitch(max_units)

    @property
    def act_chunk_bytes(self) -> int:
        """64 inputs of 8 nt rows of activations (lean)."""
        return 1024 * self.nt


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulConfig:
    """What the WGMMA kernel is compiled for (its cache key)."""

    kind: str
    """Activations: "bf16" or "f16"."""
    scale: str
    """Stored scales: "bf16", "f16" or "f32"."""
    symmetric: bool
    packed_group: int
    """32, 64, 128, 256, or 0 for one scale along K."""
    block_m: int
    """Rows of activations a tile: 16, 32, 64, 128 or 256 (WGMMA's n)."""
    consumers: int
    """Warpgroups that multiply: 2 or 4."""
    row_mmas: int
    """WGMMAs of 64 outputs a warpgroup: a tile has 64 consumers row_mmas outputs."""
    stages: int
    """In flight."""
    halves: int = 2
    """Parts of 64 inputs a stage: 1 or 2."""
    blocks_per_sm: int = 1
    cluster: int = 1
    """Blocks that share a tile, each a part of K; they add their sums in each other's shared
    memory."""
    parts: int = 1
    """The same through global memory, by neighbouring blocks that all run at once."""
    cast: int = 1
    """Blocks of a cluster, of neighbouring outputs, that bring each other's activations: 1 or 2
    (then `cluster` is 1)."""
    silu_mul: bool = False
    """Rows g of 16 are gates, rows g + 8 ups; writes silu(gate) * up."""
    pdl: bool = True

    @property
    def split(self) -> int:
        """Blocks that have a part of K of one tile each."""
        return self.cluster * self.parts

    @property
    def block_n(self) -> int:
        """Outputs a tile."""
        return 64 * self.consumers * self.row_mmas

    @property
    def per_channel(self) -> bool:
        return self.packed_group == 0

    @property
    def reallocates(self) -> bool:
        """Whether the producer's registers go to the consumers (then it is a whole warpgroup)."""
        return self.blocks_per_sm == 1 and self.block_m * self.row_mmas > 80

    @property
    def consumer_registers(self) -> int:
        """A thread's, where registers are given over."""
        return 232 if self.consumers == 2 else 112

    @property
    def producer_registers(self) -> int:
        return 40 if self.consumers == 2 else 32

    @property
    def threads(self) -> int:
        return self.consumers * 128 + (128 if self.reallocates else 32)

    @property
    def direct(self) -> bool:
        """Codes become rounded weights in one instruction: bf16, no zero points, bf16 scales."""
        return self.kind == "bf16" and self.scale == "bf16" and self.symmetric

    @property
    def weight_factor(self) -> float:
        """What the sums are multiplied by at the end: operands are weights over this."""
        return 2.0**33 if self.direct else 1.0

    @property
    def stage_groups(self) -> int:
        """Scale rows a stage needs."""
        stage_k = 64 * self.halves
        return stage_k // self.packed_group if 0 < self.packed_group < stage_k else 1

    @property
    def exact_scale(self) -> bool:
        """The stored scale is the operand's dtype; otherwise it is used as a sum of two."""
        return self.kind == self.scale

    @property
    def scale_row(self) -> int:
        """Bytes of the scales of 32 outputs."""
        return 32 * SCALE_WIDTH[self.scale]

    @property
    def store_regions(self) -> int:
        """Parts of 64 outputs that a warpgroup can hold in shared memory for the store."""
        return self.row_mmas if self.blocks_per_sm == 1 else 1

    @property
    def store_bytes(self) -> int:
        """Shared memory of the output: its tile, or what the cluster's other blocks send."""
        if self.cluster > 1:
            return self.cluster * -(-self.fragments // self.cluster) * 512
        if self.silu_mul or self.parts > 1:
            return 0
        return self.consumers * self.store_regions * self.block_m * 128

    @property
    def told(self) -> bool:
        """Whether sums of parts say themselves that they have come (cute_parts.py)."""
        return self.parts > 1 and self.block_m <= 16

    @property
    def takes_early(self) -> bool:
        """Whether there are registers for another block's sums beside the products."""
        one = self.split == 1 and self.row_mmas == 1
        return one and self.reallocates and self.block_m <= 128

    @property
    def warp_fragments(self) -> int:
        """Fragments of 16 outputs x 8 rows that a warp's sums are."""
        return self.row_mmas * self.block_m // 8

    @property
    def fragments(self) -> int:
        return 4 * self.consumers * self.warp_fragments

    @property
    def act_bytes(self) -> int:
        return self.halves * self.block_m * 128

    @property
    def code_bytes(self) -> int:
        return self.halves * self.block_n * 32

    @property
    def block_scale_bytes(self) -> int:
        """Scales of one 32-output block a stage."""
        return self.stage_groups * self.scale_row

    @property
    def block_zero_bytes(self) -> int:
        return 0 if self.symmetric else self.stage_groups * 32

    @property
    def stage_bytes(self) -> int:
        """Weight bytes of a full tile's stage: codes, scales, zeros."""
        return self.code_bytes + (self.block_n // 32) * (
            self.block_scale_bytes + self.block_zero_bytes
        )

    @property
    def slot_bytes(self) -> int:
        return -(-self.stage_bytes // 128) * 128

    @property
    def smem_bytes(self) -> int:
        """Barriers, activations, output tile, weights."""
        store = -(-self.store_bytes // 1024) * 1024
        return 1024 + self.stages * (self.act_bytes + self.slot_bytes) + store
