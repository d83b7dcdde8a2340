"""The W4A16 problem: out_MN = act_MK @ dequant(W)_NK^T (+ bias_N), packed int4 weights."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.core.dtypes import itemsize_bytes
from ridgeline.core.roofline import Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class W4A16Problem:
    """What `select` sees."""

    m: int
    """Rows of activations (tokens)."""
    n: int
    """Output features."""
    k: int
    """Input features."""
    group_size: int
    """Inputs that share a scale; k for whole-channel."""
    dtype: str = "bfloat16"
    """Of activations and output."""
    scale_dtype: str = "float16"
    """Of the stored scales."""
    symmetric: bool = True
    act_order: bool = False
    """The group of an input is given by a table (g_idx)."""
    bias: bool = False
    silu_mul: bool = False
    """Epilogue: silu(gate) * up over a fused gate-up pair; the output then has n / 2 columns."""
    batch_invariant: bool = False
    """A row's result must not depend on the batch it sits in."""
    bits: int = 4
    """Of a code: 2, 3, 4 or 8 (4 is what the fast implementations take)."""

    @property
    def op(self) -> str:
        return "w4a16"

    @property
    def groups(self) -> int:
        """R, scale groups along K."""
        return -(-self.k // self.group_size)

    def weight_bytes(self) -> float:
        """Packed codes, scales and zero points."""
        code_bytes = self.bits / 8
        zeros = 0 if self.symmetric else self.n * self.groups * code_bytes
        scales = self.n * self.groups * itemsize_bytes(self.scale_dtype)
        return self.n * self.k * code_bytes + scales + zeros

    def cost(self) -> Cost:
        """2 M N K FLOPs; weights, activations and output moved once."""
        width = itemsize_bytes(self.dtype)
        columns = self.n // 2 if self.silu_mul else self.n
        moved = self.weight_bytes() + width * self.m * (self.k + columns)
        return Cost(flops=2.0 * self.m * self.n * self.k, bytes=moved)
