"""What the Hopper kernel of trimmed tiles is compiled for (see tiles.py and cute_trimmed.py)."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.w4a16.tiles import MatmulConfig

REST_UNITS = 6
"""Units of 64 outputs of a block that computes what was trimmed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimmedConfig:
    """What the kernel of trimmed tiles is compiled for (its cache key)."""

    kind: str
    """Activations: "bf16" or "f16"."""
    scale: str
    """Stored scales: "bf16", "f16" or "f32"."""
    packed_group: int
    """32, 64, 128, 256, or 0 for one scale along K. No zero points."""
    rows: int
    """At most; of a whole unit: 128 or 256."""
    stages: int
    """In flight in blocks of two units ..."""
    rest_stages: int
    """... and in those of what is trimmed."""
    pdl: bool = True

    def _tile(self, block_m: int, row_mmas: int, stages: int) -> MatmulConfig:
        return MatmulConfig(
            kind=self.kind,
            scale=self.scale,
            symmetric=True,
            packed_group=self.packed_group,
            block_m=block_m,
            consumers=2,
            row_mmas=row_mmas,
            stages=stages,
            halves=2 if self.rows == 128 else 1,
        )

    @property
    def whole(self) -> MatmulConfig:
        """A block of two units as its first warpgroup sees it: one unit, all rows."""
        return self._tile(self.rows, 1, self.stages)

    @property
    def trimmed(self) -> MatmulConfig:
        """As its second warpgroup does: one unit, three quarters of the rows."""
        return self._tile(self.rows // 4 * 3, 1, self.stages)

    @property
    def rest(self) -> MatmulConfig:
        """A block of the last quarter of the rows of six units, three a warpgroup."""
        return self._tile(self.rows // 4, REST_UNITS // 2, self.rest_stages)

    @property
    def smem_bytes(self) -> int:
        """The larger of both kinds of blocks."""
        return max(self.whole.smem_bytes, self.rest.smem_bytes)
