"""What an implementation makes of a quantized weight at load: its own tensors and the facts of the
layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch


class Memo(dict[Any, Any]):
    """What an implementation works out at a layer's first calls and keeps for the next (functions
    on the layer's own tensors); a copy of the layer starts with an empty one."""

    def __copy__(self) -> Memo:
        return Memo()

    def __deepcopy__(self, memo: dict[int, Any]) -> Memo:
        return Memo()

    def __reduce__(self) -> tuple[type[Memo], tuple[()]]:
        return Memo, ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One layer's weight in one implementation's layout; `forward` of that implementation reads
    it."""

    impl: str
    """Registry name of the implementation whose layout this is."""
    n: int
    """Output features of the weight (gate and up rows both, with silu_mul)."""
    k: int
    """Input features."""
    bits: int
    group_size: int
    dtype: torch.dtype
    """Of activations and output."""
    symmetric: bool
    act_order: bool
    silu_mul: bool
    """Rows [0, n/2) are gate, [n/2, n) up; the output is silu(gate) * up, n/2 columns."""
    tensors: tuple[torch.Tensor, ...]
    """The layout itself, in an order only the implementation knows; all on one device."""
    memo: Memo = field(default_factory=Memo, init=False, repr=False, compare=False)

    @property
    def columns(self) -> int:
        """Columns of the output."""
        return self.n // 2 if self.silu_mul else self.n

    @property
    def resident_bytes(self) -> int:
        """Memory that the layout holds."""
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def to(self, device: torch.device | str) -> Prepared:
        """The same layout on another device (only where the same implementation runs there)."""
        return replace(self, tensors=tuple(t.to(device) for t in self.tensors))
