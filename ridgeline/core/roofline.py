"""The floor of a problem's time: no version runs much faster than the larger of two quotients.

floor = max(FLOPs / arithmetic ceiling, bytes / read ceiling); the ridge is the arithmetic
intensity (FLOPs per byte) at which the two are equal.
Source: Williams, Waterman, Patterson, "Roofline", 2009.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.core.arch import Ceilings


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a problem must do at the least."""

    flops: float
    """Floating-point operations (a multiply-add is two)."""
    bytes: float
    """Bytes through main memory: each input read once, each output written once."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(flops=self.flops + other.flops, bytes=self.bytes + other.bytes)

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The two quotients of a cost on a machine, microseconds."""

    compute_us: float
    memory_us: float

    @property
    def us(self) -> float:
        return max(self.compute_us, self.memory_us)

    @property
    def bound(self) -> str:
        """Which unit is the limit: "compute" or "memory"."""
        return "compute" if self.compute_us >= self.memory_us else "memory"


def floor(cost: Cost, ceilings: Ceilings, dtype: str) -> Floor:
    """Floor time of a cost for matmuls in `dtype`."""
    return Floor(
        compute_us=cost.flops / (ceilings.tflops(dtype) * 1e6),
        memory_us=cost.bytes / (ceilings.read_gbps * 1e3),
    )


def ridge(ceilings: Ceilings, dtype: str) -> float:
    """Arithmetic intensity (FLOPs per byte) where the roof turns from slope to flat."""
    return ceilings.tflops(dtype) * 1e3 / ceilings.read_gbps
