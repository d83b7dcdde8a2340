"""The forward's hand-overs (rings, turns, passing of unseen blocks), simulated in random order.

A model of who waits for what, in the order of forward.py and mainloop.py, on the real block ranges:
it must never lock up, and a stage must never be read when it holds another block.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from ridgeline.kernels.attention.cute.blocks import block_range

ROWS = 64


@dataclass
class SimRing:
    """Full and empty barriers with real phase counting."""

    stages: int
    consumers: int
    full_phase: list[int] = field(default_factory=list)
    empty_phase: list[int] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)
    holds: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.full_phase = [0] * self.stages
        self.empty_phase = [0] * self.stages
        self.arrivals = [0] * self.stages
        self.holds = [None] * self.stages

    def is_full(self, position: int) -> bool:
        """mbarrier parity wait: true once the phase of this use has completed."""
        return self.full_phase[position % self.stages] % 2 != (position // self.stages) % 2

    def is_empty(self, position: int) -> bool:
        expected = ((position // self.stages) % 2) ^ 1
        return self.empty_phase[position % self.stages] % 2 != expected

    def fill(self, position: int, what: object) -> None:
        self.holds[position % self.stages] = what
        self.full_phase[position % self.stages] += 1

    def release(self, position: int) -> None:
        stage = position % self.stages
        self.arrivals[stage] += 1
        if self.arrivals[stage] == self.consumers:
            self.arrivals[stage] = 0
            self.empty_phase[stage] += 1

    def holding(self, position: int) -> object:
        return self.holds[position % self.stages]


@dataclass
class Turn:
    """Named barriers of the turns, as arrivals waiting to be met."""

    tokens: list[int]
    on: bool


Step = Iterator[Callable[[], bool]]


class Simulation:
    def __init__(
        self, wgs: int, block: int, tiles, lengths, window, *, turns: bool, reuse: bool,
        q_stages: int = 1, stages: int = 2,
    ):  # fmt: skip
        self.wgs, self.block, self.tiles = wgs, block, tiles
        self.lengths, self.window, self.reuse = lengths, window, reuse
        self.k, self.v = SimRing(stages, wgs), SimRing(stages, wgs)
        self.q = [SimRing(q_stages, 1) for _ in range(wgs)]
        self.queue = SimRing(2, wgs)
        self.turn = Turn([1 if w == 0 else 0 for w in range(wgs)], turns and wgs > 1)
        self.read: list[list[object]] = [[] for _ in range(wgs)]

    def whole(self, tile: int):
        rows = ROWS * self.wgs
        return block_range(tile * rows, rows, self.block, self.lengths, self.window)

    def own(self, tile: int, wg: int):
        if self.window == (None, None):
            return self.whole(tile)
        first = (tile * self.wgs + wg) * ROWS
        own = block_range(first, ROWS, self.block, self.lengths, self.window)
        return own.inside(self.whole(tile))

    def producer(self) -> Step:
        position = 0

        def load(ring: SimRing, at: int, what: object) -> Step:
            yield lambda: ring.is_empty(at)
            ring.fill(at, what)

        for t, tile in enumerate([*self.tiles, None]):
            yield from load(self.queue, t, tile)
            if tile is None:
                return
            blocks = self.whole(tile)
            for wg in range(self.wgs):
                yield from load(self.q[wg], t, tile)
            count = blocks.end - blocks.begin
            yield from load(self.k, position, (t, blocks.end - 1))
            for i in range(1, count):
                yield from load(self.k, position + 1, (t, blocks.end - 1 - i))
                yield from load(self.v, position, (t, blocks.end - i))
                position += 1
            yield from load(self.v, position, (t, blocks.begin))
            position += 1

    def take_turn(self, wg: int) -> Step:
        if self.turn.on:
            yield lambda: self.turn.tokens[wg] > 0
            assert self.turn.tokens[wg] == 1, "two arrivals at one named barrier"
            self.turn.tokens[wg] -= 1
            self.turn.tokens[(wg + 1) % self.wgs] += 1

    def use(self, ring: SimRing, at: int, expect: object) -> Step:
        yield lambda: ring.is_full(at)
        assert ring.holding(at) == expect

    def first_product(self, wg: int, t: int, tile: int | None, skipped: int, at: int) -> Step:
        if tile is None:
            return
        end = self.whole(tile).end
        yield lambda: self.q[wg].is_full(t)
        assert self.q[wg].holding(t) == tile
        for i in range(skipped):
            yield from self.use(self.k, at + i, (t, end - 1 - i))
            self.k.release(at + i)
        yield from self.use(self.k, at + skipped, (t, end - 1 - skipped))

    def pass_values(self, wg: int, t: int, first: int, count: int, at: int) -> Step:
        for i in range(count):
            yield from self.use(self.v, at + i, (t, first - i))
            self.v.release(at + i)
            yield from self.take_turn(wg)

    def consumer(self, wg: int) -> Step:
        at, t = 0, 0
        yield lambda: self.queue.is_full(0)
        tile = self.queue.holding(0)
        self.queue.release(0)
        yield from self.first_product(wg, 0, tile, self.skipped(tile, wg), 0)
        left_bounded = self.window[0] is not None
        while tile is not None:
            blocks, own = self.whole(tile), self.own(tile, wg)
            skip = blocks.end - own.end
            yield from self.pass_values(wg, t, blocks.end - 1, skip, at)
            at += skip
            self.k.release(at)
            if own.end - 1 == own.begin and not self.reuse:
                self.q[wg].release(t)
            for block in range(own.end - 2, own.begin - 1, -1):
                at += 1
                yield from self.use(self.k, at, (t, block))
                yield from self.take_turn(wg)
                yield from self.use(self.v, at - 1, (t, block + 1))
                yield lambda: True
                self.k.release(at)
                if block == own.begin and not self.reuse:
                    self.q[wg].release(t)
                self.read[wg].append((tile, block + 1))
                self.v.release(at - 1)
            yield lambda t=t: self.queue.is_full(t + 1)
            following = self.queue.holding(t + 1)
            self.queue.release(t + 1)
            left = own.begin - blocks.begin
            yield from self.use(self.v, at, (t, own.begin))
            self.read[wg].append((tile, own.begin))
            skipped = self.skipped(following, wg)
            if self.reuse or left_bounded:
                self.v.release(at)
                for i in range(left):
                    block = own.begin - 1 - i
                    yield from self.use(self.k, at + 1 + i, (t, block))
                    self.k.release(at + 1 + i)
                    yield from self.pass_values(wg, t, block, 1, at + 1 + i)
            if self.reuse:
                yield from self.epilogue(wg, t, tile)
                self.q[wg].release(t)
            yield from self.first_product(wg, t + 1, following, skipped, at + 1 + left)
            if not (self.reuse or left_bounded):
                self.v.release(at)
            if not self.reuse:
                yield from self.epilogue(wg, t, tile)
            tile, at, t = following, at + 1 + left, t + 1

    def epilogue(self, wg: int, t: int, tile: int) -> Step:
        """Storing waits for nobody."""
        yield from ()

    def skipped(self, tile: int | None, wg: int) -> int:
        return 0 if tile is None else self.whole(tile).end - self.own(tile, wg).end

    def run(self, seed: int) -> None:
        chance = random.Random(seed)
        running = {"producer": self.producer()}
        running |= {f"consumer {wg}": self.consumer(wg) for wg in range(self.wgs)}
        waits = {name: next(process) for name, process in running.items()}
        while waits:
            ready = [name for name, condition in waits.items() if condition()]
            assert ready, f"locked up: {sorted(waits)} all wait"
            name = chance.choice(ready)
            try:
                waits[name] = next(running[name])
            except StopIteration:
                del waits[name]


CASES = [
    (3, 128, (1024, 1024), (None, 0)),
    (3, 128, (500, 900), (200, 0)),
    (3, 96, (700, 700), (None, 0)),
    (2, 128, (512, 512), (None, 0)),
    (2, 64, (640, 640), (100, 30)),
    (2, 80, (512, 300), (None, 0)),
    (3, 128, (900, 900), (None, None)),
    (1, 64, (256, 256), (10, 0)),
]


@pytest.mark.parametrize(
    ("reuse", "q_stages", "stages"), [(False, 1, 2), (True, 1, 2), (False, 2, 2), (False, 2, 4)]
)
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize(("wgs", "block", "lengths", "window"), CASES)
def test_hand_overs_never_lock_up(
    wgs, block, lengths, window, turns, reuse, q_stages, stages
) -> None:
    tiles = list(range(-(-lengths[0] // (ROWS * wgs))))
    rings = {"q_stages": q_stages, "stages": stages}
    for seed in range(20):
        order = tiles[::-1] + tiles
        sim = Simulation(wgs, block, order, lengths, window, turns=turns, reuse=reuse, **rings)
        sim.run(seed)
        for wg in range(wgs):
            expected = [
                (tile, b)
                for tile in order
                for b in range(sim.own(tile, wg).end - 1, sim.own(tile, wg).begin - 1, -1)
            ]
            assert sim.read[wg] == expected


@pytest.mark.parametrize(("wgs", "block", "lengths", "window"), CASES)
def test_a_warpgroup_sees_all_that_its_rows_see(wgs, block, lengths, window) -> None:
    sim = Simulation(wgs, block, [], lengths, window, turns=False, reuse=False)
    left, right = window
    shift = lengths[1] - lengths[0]
    for tile, wg in itertools.product(range(-(-lengths[0] // (ROWS * wgs))), range(wgs)):
        own = sim.own(tile, wg)
        first = (tile * wgs + wg) * ROWS
        for i in range(first, min(first + ROWS, lengths[0])):
            low = 0 if left is None else max(0, i + shift - left)
            high = lengths[1] - 1 if right is None else min(lengths[1] - 1, i + shift + right)
            if low <= high:
                assert own.begin <= low // block and high // block < own.end


def test_the_model_notices_a_missing_release(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: Simulation, wg: int, t: int, first: int, count: int, at: int) -> Step:
        for i in range(count):
            yield from self.use(self.v, at + i, (t, first - i))

    monkeypatch.setattr(Simulation, "pass_values", forget)
    sim = Simulation(3, 128, [5, 4, 3], (1152, 1152), (None, 0), turns=False, reuse=False)
    with pytest.raises(AssertionError, match="locked up"):
        sim.run(0)


def test_the_model_notices_a_read_of_the_wrong_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimRing, "is_empty", lambda self, position: True)
    sim = Simulation(2, 128, [3, 2, 1, 0], (512, 512), (None, 0), turns=False, reuse=False)
    with pytest.raises(AssertionError):
        for seed in range(20):
            sim.run(seed)
