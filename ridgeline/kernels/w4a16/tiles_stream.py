"""What the Hopper kernel with clusters along K is compiled for (see tiles.py)."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.w4a16.tiles import SCALE_WIDTH


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """What the kernel with clusters along K is compiled for (its cache key)."""

    kind: str
    """Activations: "bf16" or "f16"."""
    scale: str
    """Stored scales: "bf16", "f16" or "f32"."""
    symmetric: bool
    packed_group: int
    """32, 64, 128, 256, or 0 for one scale along K."""
    nt: int
    """Columns of 8 rows of activations: M <= 8 nt; 1 or 2."""
    k_warps: int
    """Warps along K ..."""
    n_warps: int
    """... and along the outputs of a block."""
    tiles: int
    """Of 32 outputs a warp."""
    cluster: int
    """Blocks along K: all of it; 1 to 8."""
    units: int
    """Of K a warp: a copy of codes a tile."""
    rows: int
    """Rows of activations that are brought: 8 nt, or 1, 2 or 4. The others' sums are not used."""
    cast: int = 1
    """Blocks of neighbouring outputs that bring each other half of the rows (16): 1 or 2."""
    held: bool = False
    """The codes of a warp's first unit wait in registers, and where they lay its second unit's
    activations come: two tiles, two units, 16 rows."""
    blocks_per_sm: int = 2
    silu_mul: bool = False
    """Rows g of 16 are gates, rows g + 8 ups; writes silu(gate) * up."""
    pdl: bool = True

    @property
    def subnormal(self) -> bool:
        """As DecodeConfig."""
        return True

    @property
    def code_factors(self) -> tuple[float, float]:
        """As DecodeConfig."""
        return (2.0**69, 2.0**65) if self.kind == "bf16" else (2.0**24, 2.0**20)

    @property
    def per_channel(self) -> bool:
        return self.packed_group == 0

    @property
    def unit_k(self) -> int:
        """Inputs that a warp takes at once."""
        return max(128, self.packed_group)

    @property
    def unit_chunks(self) -> int:
        return self.unit_k // 64

    @property
    def flush_k(self) -> int:
        """Inputs between two uses of the scale."""
        return self.packed_group or 128

    @property
    def unit_groups(self) -> int:
        """Scale rows a unit brings."""
        return 1 if self.per_channel else self.unit_k // self.flush_k

    @property
    def block_k(self) -> int:
        """Inputs of a block."""
        return self.k_warps * self.units * self.unit_k

    @property
    def block_n(self) -> int:
        """Outputs of a block."""
        return 32 * self.n_warps * self.tiles

    @property
    def num_warps(self) -> int:
        return self.k_warps * self.n_warps

    @property
    def scale_row(self) -> int:
        """Bytes of the scales of 32 outputs."""
        return 32 * SCALE_WIDTH[self.scale]

    @property
    def code_bytes(self) -> int:
        """Of 32 outputs x a warp's units."""
        return self.units * self.unit_chunks * 1024

    @property
    def tile_groups(self) -> int:
        """Scale rows of a warp's units."""
        return 1 if self.per_channel else self.units * self.unit_groups

    @property
    def scale_bytes(self) -> int:
        return self.tile_groups * self.scale_row

    @property
    def zero_bytes(self) -> int:
        return 0 if self.symmetric else self.tile_groups * 32

    @property
    def tile_bytes(self) -> int:
        return self.code_bytes + self.scale_bytes + self.zero_bytes

    @property
    def slot_bytes(self) -> int:
        """A warp's codes of 32 outputs in shared memory; its sums of them take the same place."""
        return max(self.code_bytes, 1024 * self.nt)

    @property
    def factor_bytes(self) -> int:
        """Scales and zero points of a warp's units of 32 outputs."""
        return -(-(self.scale_bytes + self.zero_bytes) // 128) * 128

    @property
    def sum_factor(self) -> float:
        """What the sum of activations is kept times."""
        offset = -8.0 if self.symmetric else -1.0
        return offset if self.kind == "bf16" else offset * 2.0**-24

    @property
    def act_chunk_bytes(self) -> int:
        """64 inputs of 8 nt rows of activations."""
        return 1024 * self.nt

    @property
    def is_valid(self) -> bool:
        """Whether rows can be shared, and held codes leave room for activations."""
        room = self.units == 2 and self.n_warps == 1 and self.tiles >= self.nt
        return (self.cast == 1 or self.rows == 16) and (room or not self.held)

    @property
    def box_rows(self) -> int:
        """Rows a copy brings."""
        return self.rows // self.cast

    @property
    def act_unit_bytes(self) -> int:
        """What comes of a unit's activations."""
        return self.unit_chunks * 128 * self.rows

    @property
    def act_slots(self) -> int:
        """Units of activations with a place of their own."""
        return self.k_warps * (1 if self.held else self.units)

    @property
    def act_slot_bytes(self) -> int:
        return self.unit_chunks * self.act_chunk_bytes

    @property
    def reads_first(self) -> bool:
        """Whether there are registers for all of a warp's activations: then chains of products of
        its units run side by side."""
        registers = 65536 // (32 * self.num_warps * self.blocks_per_sm)
        taken = self.units * self.nt * self.unit_k // 8
        return not self.held and 2 * taken + 64 <= min(registers, 255)

    @property
    def fragments(self) -> int:
        """Of 16 outputs x 8 rows a block."""
        return self.n_warps * self.tiles * 2 * self.nt

    @property
    def share(self) -> int:
        """Fragments that a block of the cluster finishes, at most."""
        return -(-self.fragments // self.cluster)

    @property
    def code_barriers(self) -> int:
        return self.num_warps * self.tiles

    @property
    def act_barriers(self) -> int:
        return self.k_warps * self.units

    @property
    def barriers(self) -> int:
        """All of them; the last counts sums of the cluster."""
        return self.code_barriers + self.act_barriers + 1

    @property
    def dynamic_offset(self) -> int:
        """Where activations start, behind the barriers."""
        return -(-self.barriers * 8 // 1024) * 1024

    @property
    def codes_offset(self) -> int:
        return self.dynamic_offset + self.act_slots * self.act_slot_bytes

    @property
    def factors_offset(self) -> int:
        return self.codes_offset + self.code_barriers * self.slot_bytes

    @property
    def received_offset(self) -> int:
        return self.factors_offset + self.code_barriers * self.factor_bytes

    @property
    def smem_bytes(self) -> int:
        """Barriers, activations, codes, their scales, what the cluster's blocks send."""
        received = self.cluster * self.share * 512 if self.cluster > 1 else 0
        return self.received_offset + received
