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
    """Of K that a warp takes at once: a copy of codes a tile."""
    steps: int
    """Of k_warps x units units a block; with one the block's whole layer waits in shared memory."""
    stages: int
    """Steps whose codes are in flight ..."""
    act_stages: int
    """... and whose activations are; at most `steps` both."""
    box_rows: int
    """Rows of activations that are brought: 8 nt, or 1, 2 or 4. The others' sums are not used."""
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
    def step_k(self) -> int:
        """Inputs of a block's step."""
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
        """A warp's units of 32 outputs in shared memory; its sums of them take the same place."""
        return -(-max(self.tile_bytes, 1024 * self.nt) // 128) * 128

    @property
    def warp_bytes(self) -> int:
        return self.stages * self.tiles * self.slot_bytes

    @property
    def sum_factor(self) -> float:
        """What the sum of activations is kept times."""
        offset = -8.0 if self.symmetric else -1.0
        return offset if self.kind == "bf16" else offset * 2.0**-24

    @property
    def refill_unit(self) -> int | None:
        """After which unit of a step a tile's place can be filled again; None: it never is."""
        return self.units - 1 if self.steps > self.stages else None

    @property
    def act_chunk_bytes(self) -> int:
        """64 inputs of 8 nt rows of activations."""
        return 1024 * self.nt

    @property
    def act_box_bytes(self) -> int:
        """What a copy of 64 inputs brings."""
        return 128 * self.box_rows

    @property
    def act_slots(self) -> int:
        """Units of activations in shared memory."""
        return self.k_warps * self.act_stages * self.units

    @property
    def act_slot_bytes(self) -> int:
        return self.unit_chunks * self.act_chunk_bytes

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
        return self.num_warps * self.tiles * self.stages

    @property
    def barriers(self) -> int:
        """All of them; the last counts sums of the cluster."""
        return self.code_barriers + 2 * self.act_slots + 1

    @property
    def dynamic_offset(self) -> int:
        """Where activations start, behind the barriers."""
        return -(-self.barriers * 8 // 1024) * 1024

    @property
    def codes_offset(self) -> int:
        return self.dynamic_offset + self.act_slots * self.act_slot_bytes

    @property
    def received_offset(self) -> int:
        return self.codes_offset + self.num_warps * self.warp_bytes

    @property
    def smem_bytes(self) -> int:
        """Barriers, activations, codes, what the cluster's blocks send."""
        received = self.cluster * self.share * 512 if self.cluster > 1 else 0
        return self.received_offset + received
