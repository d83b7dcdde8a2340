"""What rooms that must not import each other agree on.

`quant` works on any model that is a `BlockwiseModel`; `nn` provides one. Neither imports the other.
"""

from __future__ import annotations

from dataclasses import dataclass
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

    def run_block(
        self, index: int, x_BSC: torch.Tensor, cu_seqlens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One block over full causal sequences starting at position 0.

        cu_seqlens: int32 starts of packed sequences in the flattened B * S tokens; None: each row
        is one sequence.
        """
        ...

    def head(self, x_BSC: torch.Tensor) -> torch.Tensor:
        """Final norm and vocabulary projection -> logits [B, S, V]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFold:
    """A place in a block where input channels of some linears can be scaled at no cost: what they
    are multiplied by, the producer of these channels is divided by.

    One channel of the producer may feed several of the consumers' (value heads that query heads
    share): consumer channel c comes from producer channel c // (run * repeats) * run + c % run.
    """

    producer: str
    """A norm or a linear, named inside the block."""
    consumers: tuple[str, ...]
    """Every linear that reads the producer's output, named inside the block."""
    parent: str | None = None
    """The module by whose output a scale is judged; its first argument is the consumers' input.
    None: the one consumer itself."""
    mixes_positions: bool = False
    """Whether the parent's output at one position depends on others (attention)."""
    norm: str = ""
    """"w" or "1+w" for a norm that multiplies by its weight so; "" for a linear."""
    run: int = 1
    """Consecutive channels that are repeated together (a head)."""
    repeats: int = 1


@runtime_checkable
class FoldableModel(BlockwiseModel, Protocol):
    """A decoder that says where scales can be folded (AWQ)."""

    def scale_folds(self) -> list[ScaleFold]:
        """Of every block, in data-flow order."""
        ...

    def bilinear(self) -> tuple[str, ...]:
        """Linears of a block whose outputs are multiplied with each other (queries and keys)."""
        ...


@runtime_checkable
class HeadedModel(BlockwiseModel, Protocol):
    """A decoder whose vocabulary projection can be quantized too."""

    def head_linear(self) -> Any:
        """The projection, an nn.Linear with a weight of its own (a tied one is copied first)."""
        ...

    def head_input(self, x_BSC: torch.Tensor) -> torch.Tensor:
        """What the projection is applied to."""
        ...


@runtime_checkable
class StreamedModel(BlockwiseModel, Protocol):
    """A decoder whose blocks are in memory only while they are worked on."""

    def acquire_block(self, index: int) -> None:
        """Bring a block's weights onto the device."""
        ...

    def release_block(self, index: int) -> None:
        """Give the block's memory back; its weights are lost."""
        ...
