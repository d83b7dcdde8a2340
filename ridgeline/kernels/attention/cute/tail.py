"""How the tiles that fill no whole wave are cut along their keys.

All tiles take equally long where there is no mask, and N of them on U multiprocessors take
ceil(N / U) rounds. So whole waves go tile by tile, and of the N mod U tiles behind them the key
blocks, laid end to end, are cut into contiguous ranges of equal length: N mod U times `blocks` over
U (or fewer) instead of one round more. A range holds pieces of one tile or of two neighbours.

    tile       |      whole      |      whole + 1      |      whole + 2      |
    key block  0 ............... blocks ............. 2 blocks .............
    range      |     0     |     1     |     2     |     3     |     4     |

Whoever has worked on a piece writes its O and row statistics down and counts it; the last of a
tile's pieces merges them in their order. Source: "hybrid" Stream-K, Osama et al. (arXiv 2301.03598,
section 5.2), of matrix products. Plain arithmetic on integers of either world, as blocks.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ridgeline.kernels.attention.cute.blocks import Integer

_MINE, _COUNT = 12, 22
"""First bits of the fields of a packed word."""
MOST_UNITS = 1 << (31 - _COUNT)
"""A tile has at most as many pieces as there are multiprocessors, and places are twice as many."""


@dataclass(frozen=True)
class Tail:
    """The items that blocks of threads draw: whole tiles first, then ranges of the others' keys."""

    whole: Any
    """Tiles [0, whole) are worked on whole."""
    left: Any
    """Tiles [whole, whole + left) are cut."""
    blocks: Any
    """Key blocks of a tile, at least one."""
    ranges: Any
    """At most left * blocks, so that none is empty, but where nothing is left."""

    def items(self) -> Any:
        return self.whole + self.ranges

    def span(self, item: Any, integer: Any = Integer) -> tuple[Any, Any, Any]:
        """(first, begin, end): an item's key blocks, counted from those of tile `first` on."""
        number = item - self.whole
        total = self.left * self.blocks
        cut = number >= 0
        begin = integer.choose(cut, number * total // integer.maximum(self.ranges, 1), 0)
        end = (number + 1) * total // integer.maximum(self.ranges, 1)
        end = integer.choose(cut, end, self.blocks)
        return integer.choose(cut, self.whole, item), begin, end

    def owner(self, key_block: Any) -> Any:
        """The range that holds a key block, counted from those of the first cut tile on."""
        return ((key_block + 1) * self.ranges - 1) // (self.left * self.blocks)

    def parts(self, item: Any, tile: Any) -> Parts:
        """Of a cut tile, and which of them an item has; tile counts from the first cut one."""
        first, last = self.owner(tile * self.blocks), self.owner((tile + 1) * self.blocks - 1)
        return Parts(self.slot(first, tile), item - self.whole - first, last - first + 1)

    def slot(self, part: Any, tile: Any) -> Any:
        """The place of the piece that a range has of a cut tile, below `places`: from a piece to
        the next one of the tiles laid end to end, the range or the tile is another. Both count
        from the first one that is cut."""
        return part + tile

    def places(self) -> Any:
        return self.ranges + self.left


@dataclass(frozen=True)
class Parts:
    """The pieces of a tile: places first .. first + count - 1, in the order of their keys."""

    first: Any
    """No other tile's, so that it also numbers the tile's counters."""
    mine: Any
    """Which of them this one is."""
    count: Any

    def packed(self) -> Any:
        """One register, not negative."""
        return self.first + (self.mine << _MINE) + (self.count << _COUNT)

    @staticmethod
    def unpacked(word: Any) -> Parts:
        mine = (word >> _MINE) & ((1 << (_COUNT - _MINE)) - 1)
        return Parts(word & ((1 << _MINE) - 1), mine, word >> _COUNT)


def tail(num_tiles: Any, num_units: Any, blocks: Any, ranges: Any, integer: Any = Integer) -> Tail:
    """The items of num_tiles equal tiles on num_units multiprocessors."""
    left = num_tiles % num_units
    ranges = integer.minimum(ranges, left * blocks)
    return Tail(whole=num_tiles - left, left=left, blocks=blocks, ranges=ranges)
