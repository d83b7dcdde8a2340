"""What rooms that must not import each other agree on.

`quant` works on any model that is a `BlockwiseModel`; `nn` provides one. Neither imports the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


@runtime_checkable
class BlockwiseModel(Protocol):
    """A decoder that can be run block by block (calibration, streaming, pipeline stages)."""

    @property
    def blocks(self) -> Any:
        """The decoder blocks in order: an nn.ModuleList (keys are the global layer indices)."""
        ...

    def block_prefix(self, index: int) -> str:
        """Full parameter-name prefix of a block: "model.layers.3"."""
        ...

    def linear_groups(self) -> list[list[str]]:
        """Linears of a block that share one input, in data-flow order, named inside the block.

        [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"], ...]
        """
        ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids [B, S] -> hidden states [B, S, C]."""
        ...

    def run_block(self, index: int, x_BSC: torch.Tensor) -> torch.Tensor:
        """One block over full causal sequences starting at position 0."""
        ...

    def head(self, x_BSC: torch.Tensor) -> torch.Tensor:
        """Final norm and vocabulary projection -> logits [B, S, V]."""
        ...
