"""Which part of which tile a block of the Hopper WGMMA kernel computes: arithmetic alone, so that
the kernel (on its integers) and a test without a GPU (on Python's) run the same lines.

Blocks take whole tiles in `waves`; the steps of K of the tiles that are left are one line, cut into
a share a block. A share ends where it ends: a tile's steps may be spread over several blocks. Who
has its first steps finishes it; the others leave sums for it. So that nobody waits for them, a
block computes what it leaves first, then its whole tiles, and what it finishes last.

Where a share is shorter than a tile and no whole tile comes in between, what a block leaves when it
has nothing to finish would come late. Then the first `head` steps of a tile are not counted when
shares are made equal: who finishes a tile has `head` steps more than who does not.
"""

from __future__ import annotations

from typing import Any


def head_steps(waves: int, left: int, blocks: int, steps: int) -> int:
    """Steps that a block that finishes a tile has more than one that does not."""
    return 0 if waves or left >= blocks else min(3, steps // 8)


def start_of(block: Any, left: Any, blocks: Any, steps: Any, head: Any) -> Any:
    """Where a block's share starts among the steps of the tiles that are left."""
    counted = steps - head
    place = block * (left * counted) // blocks
    tile, at = place // counted, place % counted
    # a share that starts inside a tile starts behind its head
    return tile * steps + at + (at + steps - 1) // steps * head
