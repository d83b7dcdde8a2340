"""Hand-overs of the forward over caches, simulated in random order: rings, turns, and the ends.

A model of who waits for what, in the order of cached.py, cached_loads.py and mainloop.py, on the
real parts of blocks: it must never lock up, a stage must never be read when it holds another block,
and nothing may still be on its way when a block of threads ends.
"""

from __future__ import annotations

import random

import pytest

from ridgeline.kernels.attention.cute.cached_blocks import packed_range, split_range

from .test_cute_protocol import SimRing, Step, Turn


class Simulation:
    """One block of threads: a producer warp and warpgroups that all walk the same blocks."""

    def __init__(self, wgs: int, blocks: range, stages: int = 2):
        self.wgs, self.blocks = wgs, blocks
        self.k, self.v = SimRing(stages, wgs), SimRing(stages, wgs)
        self.turn = Turn([1 if w == 0 else 0 for w in range(wgs)], wgs > 1)
        self.read: list[list[int]] = [[] for _ in range(wgs)]

    def fill(self, ring: SimRing, at: int, block: int) -> Step:
        yield lambda: ring.is_empty(at)
        ring.fill(at, block)

    def producer(self) -> Step:
        end, count = self.blocks.stop, len(self.blocks)
        yield from self.fill(self.k, 0, end - 1)
        for i in range(1, count):
            yield from self.fill(self.k, i, end - 1 - i)
            yield from self.fill(self.v, i - 1, end - i)
        yield from self.fill(self.v, count - 1, self.blocks.start)

    def use(self, ring: SimRing, at: int, block: int) -> Step:
        yield lambda: ring.is_full(at)
        assert ring.holding(at) == block

    def take_turn(self, wg: int) -> Step:
        if self.turn.on:
            yield lambda: self.turn.tokens[wg] > 0
            assert self.turn.tokens[wg] == 1, "two arrivals at one named barrier"
            self.turn.tokens[wg] -= 1
            self.turn.tokens[(wg + 1) % self.wgs] += 1

    def consumer(self, wg: int) -> Step:
        end = self.blocks.stop
        yield from self.use(self.k, 0, end - 1)
        self.k.release(0)
        yield from self.use(self.v, 0, end - 1)  # clear_values waits for it
        at = 0
        for block in range(end - 2, self.blocks.start - 1, -1):
            at += 1
            yield from self.use(self.k, at, block)
            yield from self.take_turn(wg)
            yield from self.use(self.v, at - 1, block + 1)
            yield lambda: True
            self.k.release(at)
            self.read[wg].append(block + 1)
            self.v.release(at - 1)
        yield from self.use(self.v, at, self.blocks.start)
        self.read[wg].append(self.blocks.start)

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


@pytest.mark.parametrize("wgs", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_hand_overs_never_lock_up(wgs: int, count: int) -> None:
    for seed in range(30):
        sim = Simulation(wgs, range(5, 5 + count))
        sim.run(seed)
        for wg in range(wgs):
            assert sim.read[wg] == list(range(4 + count, 4, -1))
        for ring in (sim.k, sim.v):
            # Every fill was waited for: no copy is on its way into memory that is given back.
            assert sum(ring.full_phase) == count


@pytest.mark.parametrize("num_splits", [1, 2, 5])
@pytest.mark.parametrize("lengths", [(4, 500, None), (70, 130, 33), (1, 0, None)])
def test_parts_of_a_call_never_lock_up(lengths, num_splits: int) -> None:
    window = (1 << 29 if lengths[2] is not None else None, 0)
    for first in range(0, lengths[0] * 4, 128):
        whole = packed_range((first, 128, 4), 64, lengths, window)
        for split in range(num_splits):
            part, count = split_range(whole, split, num_splits)
            if count:
                Simulation(2, range(part.begin, part.end)).run(split)


def test_the_model_notices_a_missing_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimRing, "release", lambda self, position: None)
    with pytest.raises(AssertionError, match="locked up"):
        Simulation(2, range(6)).run(0)


def test_the_model_notices_a_read_of_the_wrong_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimRing, "is_empty", lambda self, position: True)
    with pytest.raises(AssertionError):
        for seed in range(20):
            Simulation(2, range(9)).run(seed)
