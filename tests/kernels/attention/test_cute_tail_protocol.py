"""Hand-overs of a forward whose last tiles are cut, simulated in random order, by forward_tail.py.

Several blocks of threads share a launch: any of them may get any range, at any time. None may wait
for another; a tile's pieces must all be there, whole, for the one that merges them, which must be
one; and counters must be zero again behind a launch.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from ridgeline.kernels.attention.cute.blocks import BlockRange
from ridgeline.kernels.attention.cute.tail import Parts, Tail, tail

from .test_cute_protocol import Simulation
from .test_cute_tail import pieces_of

Step = Iterator[Callable[[], bool]]
WARPS = 4
CASES = [
    (9, 4, 6, 4),
    (5, 4, 7, 4),
    (7, 4, 5, 4),
    (3, 4, 9, 4),
    (6, 4, 1, 4),
    (5, 4, 8, 2),
    (8, 4, 3, 4),
]
"""Tiles, multiprocessors, key blocks, ranges: 1, 3 or all tiles cut, one key block, none cut."""


def always() -> bool:
    return True


@dataclass(frozen=True)
class Piece:
    tile: int
    begin: int
    count: int
    parts: Parts | None
    """None of a whole tile."""


def dealt(cut: Tail, units: int, chance: random.Random) -> list[list[Piece]]:
    """Each unit's pieces: numbers come in order, to whoever draws."""
    found: list[list[Piece]] = [[] for _ in range(units)]
    for item in range(cut.items()):
        unit = chance.randrange(units)
        for tile, begin, end in pieces_of(cut, item):
            whole = end - begin == cut.blocks
            parts = None if whole else cut.parts(item, tile - cut.whole)
            found[unit].append(Piece(tile, begin, end - begin, parts))
    return found


def run_all(running: dict[object, Step], chance: random.Random) -> None:
    """All processes to their ends, in random order."""
    waits = {}
    for name, process in [*running.items()]:
        if (condition := next(process, None)) is not None:
            waits[name] = condition
    while waits:
        ready = [name for name, condition in waits.items() if condition()]
        assert ready, f"locked up: {sorted(map(str, waits))} all wait"
        name = chance.choice(ready)
        condition = next(running[name], None)
        if condition is None:
            del waits[name]
        else:
            waits[name] = condition


class Threads(Simulation):
    """A block of threads whose tiles are pieces: rings and turns as ever."""

    def __init__(self, pieces: list[Piece], merged: Counter, counters: Counter, **options):
        super().__init__(2, 128, pieces, (0, 0), (None, None), **options)
        self.merged, self.counters = merged, counters

    def whole(self, tile: Piece) -> BlockRange:
        return BlockRange(begin=0, full_begin=0, full_end=tile.count - 1, end=tile.count)

    def epilogue(self, wg: int, t: int, tile: Piece) -> Step:
        yield always
        if tile.parts is None:
            self.merged[tile.tile, wg] += 1
            return
        self.counters[tile.tile, wg] += 1
        if self.counters[tile.tile, wg] == tile.parts.count:
            self.counters[tile.tile, wg] = 0
            self.merged[tile.tile, wg] += 1


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_blocks_of_threads_never_lock_up(case: tuple[int, ...], turns: bool, reuse: bool) -> None:
    cut = tail(*case)
    for seed in range(15):
        chance = random.Random(seed)
        merged, counters = Counter(), Counter()
        shares = dealt(cut, case[1], chance)
        sims = [Threads(p, merged, counters, turns=turns, reuse=reuse) for p in shares]
        running = {(n, "producer"): sim.producer() for n, sim in enumerate(sims)}
        running |= {(n, wg): sim.consumer(wg) for n, sim in enumerate(sims) for wg in range(2)}
        run_all(running, chance)
        assert merged == Counter({(tile, wg): 1 for tile in range(case[0]) for wg in range(2)})
        assert not any(counters.values())
        for sim, pieces in zip(sims, shares, strict=True):
            expected = [(p, b) for p in pieces for b in range(p.count - 1, -1, -1)]
            assert sim.read == [expected, expected]


class Barrier:
    """A warpgroup's named barrier; `on` False: nobody waits."""

    def __init__(self, on: bool = True):
        self.on, self.arrived = on, 0

    def wait(self) -> Step:
        goal = self.arrived // WARPS * WARPS + WARPS
        self.arrived += 1
        if self.on:
            yield lambda: self.arrived >= goal


class Memory:
    """Global memory between launches, and who merged what. A warp's stores are seen by others when
    its group's first thread has released them, if its own barrier had it gather them."""

    def __init__(self, forget: str = "nothing"):
        self.forget = forget
        self.counters: Counter = Counter()
        self.seen: dict[object, int] = {}
        self.merged: Counter = Counter()

    def warp(self, warp: int, group: dict, wg: int, pieces: list[Piece], launch: int) -> Step:
        """One warp's ends of pieces. group: what its warpgroup shares."""
        for piece in pieces:
            yield always
            if piece.parts is None:
                continue
            parts = piece.parts
            group["stores"].append((parts.first + parts.mine, wg, warp))
            if self.forget != "first barrier":
                yield from group["barrier"].wait()
            if warp == 0:
                for store in group["stores"]:
                    self.seen[store] = launch
                word = (parts.first, wg)
                self.counters[word] += 1
                last = self.counters[word] == parts.count
                if last and self.forget != "reset":
                    self.counters[word] = 0
                yield always
                group["last"] = last
            if self.forget != "second barrier":
                yield from group["barrier"].wait()
            yield always
            if group["last"]:
                for place in range(parts.first, parts.first + parts.count):
                    assert self.seen.get((place, wg, warp)) == launch, "a piece is not there"
                self.merged[launch, piece.tile, wg, warp] += 1


def hand_over(memory: Memory, seed: int) -> None:
    """Launches of all shapes, one after the other, on one memory."""
    chance = random.Random(seed)
    for launch, case in enumerate(CASES):
        cut = tail(*case)
        running: dict[object, Step] = {}
        cut_tiles = set()
        for unit, pieces in enumerate(dealt(cut, case[1], chance)):
            cut_tiles |= {p.tile for p in pieces if p.parts is not None}
            for wg in range(2):
                group = {"stores": [], "barrier": Barrier(), "last": False}
                for warp in range(WARPS):
                    step = memory.warp(warp, group, wg, pieces, launch)
                    running[unit, wg, warp] = step
        run_all(running, chance)
        assert not any(memory.counters.values()), "a counter is not zero"
        found = {key[1:]: n for key, n in memory.merged.items() if key[0] == launch}
        assert found == {(t, wg, w): 1 for t in cut_tiles for wg in range(2) for w in range(WARPS)}


def test_who_comes_last_finds_every_piece() -> None:
    for seed in range(40):
        hand_over(Memory(), seed)


@pytest.mark.parametrize("forgotten", ["first barrier", "second barrier", "reset"])
def test_the_model_notices_what_is_left_out(forgotten: str) -> None:
    with pytest.raises(AssertionError):
        for seed in range(40):
            hand_over(Memory(forgotten), seed)
