"""Which part of a whole parameter a rank holds: always one box, never strided.

Tensor parallel cuts one dim into contiguous parts, FSDP then cuts dim 0 of such a part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.parallel import fsdp
from ridgeline.parallel.mesh import World
from ridgeline.parallel.tensor import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """local == whole[offsets : offsets + sizes]."""

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    """May hold a 0: more ranks than rows."""
    is_owner: bool
    """Whether this rank is the one that writes the box; other holders are copies."""
    copies: int
    """Ranks that hold the same box."""

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """The box of a whole tensor (a view)."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            whole = whole.narrow(dim, offset, size)
        return whole


def box_of(piece: Piece, world: World, *, stages: int, owner: bool) -> Box:
    """The box of a parameter. stages: pipeline stages on different ranks that hold it; owner:
    whether this stage is the one that writes it."""
    replicate, shard = world.data_mesh.shape
    replica, index = world.data_mesh.get_coordinate() or (0, 0)
    offsets, sizes = [0] * len(piece.shape), list(piece.shape)
    if piece.dim is not None:
        offsets[piece.dim], sizes[piece.dim] = piece.start, piece.length
    start, length = fsdp.shard_rows(sizes[0], shard, index)
    offsets[0], sizes[0] = offsets[0] + start, length
    whole_on_tp = piece.dim is None
    return Box(
        global_shape=piece.shape,
        offsets=tuple(offsets),
        sizes=tuple(sizes),
        is_owner=owner and replica == 0 and (not whole_on_tp or world.tp_rank == 0),
        copies=replicate * stages * (world.layout.tp if whole_on_tp else 1),
    )
