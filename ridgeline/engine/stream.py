"""A decoder whose blocks are read from the checkpoint when they are worked on.

Embedding, final norm and head stay on the device; a block's weights come from its safetensors with
`acquire_block` and go with `release_block`. So a model larger than the device's memory, and larger
than the host's, runs block by block: core.protocols.StreamedModel.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ridgeline.core.errors import UserError
from ridgeline.core.protocols import ScaleFold
from ridgeline.nn.decoder import META, Decoder
from ridgeline.nn.hf import NOT_WEIGHTS, check_names, load_config, skeleton
from ridgeline.nn.layers import LayerList
from ridgeline.nn.tensorfile import TensorFolder


class StreamedDecoder:
    """A plain checkpoint folder as a model with one block in memory at a time.

    Raises: UserError for a folder that is incomplete or foreign.
    """

    def __init__(self, folder: Path | str, dtype: torch.dtype, device: torch.device) -> None:
        self.folder, self.dtype, self.device = Path(folder), dtype, device
        self.tensors = TensorFolder(folder)
        self.config = load_config(folder)
        names = {name for name in self.tensors if not name.endswith(NOT_WEIGHTS)}
        if self.config.tie_embeddings:
            names.discard("lm_head.weight")
        check_names(self.config, names, self.folder)
        self.decoder: Decoder = skeleton(self.config, dtype)
        self.decoder.eval().requires_grad_(False)
        for name in self.outer_names():
            self._assign(name)
        self.decoder.tie_weights()

    def outer_names(self) -> list[str]:
        """Tensors outside the blocks, as the checkpoint names them."""
        outer = {"model.embed_tokens.weight", "model.norm.weight"}
        if not self.config.tie_embeddings:
            outer.add("lm_head.weight")
        return sorted(outer)

    def _assign(self, full_name: str) -> None:
        owner, _, name = full_name.rpartition(".")
        module = self.decoder.get_submodule(owner)
        shape = tuple(getattr(module, name).shape)
        if self.tensors.shape(full_name) != shape:
            raise UserError(
                f"checkpoint: {full_name} must have shape {list(shape)}, got "
                f"{list(self.tensors.shape(full_name))}; config.json does not describe these "
                "weights"
            )
        tensor = self.tensors.get(full_name, self.device).to(self.dtype)
        setattr(module, name, nn.Parameter(tensor, requires_grad=False))

    # ---- core.protocols.StreamedModel --------------------------------------------------------

    def acquire_block(self, index: int) -> None:
        """Read a block's weights."""
        prefix = self.block_prefix(index)
        for name in self.blocks[index].state_dict():
            self._assign(f"{prefix}.{name}")

    def release_block(self, index: int) -> None:
        """Drop them."""
        for module in self.blocks[index].modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                empty = torch.empty_like(parameter, device=META)
                setattr(module, name, nn.Parameter(empty, requires_grad=False))

    @property
    def blocks(self) -> LayerList:
        return self.decoder.blocks

    def block_prefix(self, index: int) -> str:
        return self.decoder.block_prefix(index)

    def linear_groups(self) -> list[list[str]]:
        return self.decoder.linear_groups()

    def scale_folds(self) -> list[ScaleFold]:
        return self.decoder.scale_folds()

    def bilinear(self) -> tuple[str, ...]:
        return self.decoder.bilinear()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.decoder.embed(token_ids)

    def run_block(
        self, index: int, x_BSC: torch.Tensor, cu_seqlens: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.decoder.run_block(index, x_BSC, cu_seqlens)

    def head_input(self, x_BSC: torch.Tensor) -> torch.Tensor:
        return self.decoder.head_input(x_BSC)

    def head_linear(self) -> nn.Linear:
        return self.decoder.head_linear()

    def head(self, x_BSC: torch.Tensor) -> torch.Tensor:
        return self.decoder.head(x_BSC)
