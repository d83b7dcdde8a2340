"""The hand-overs of the backward with helpers, simulated in random order, over blocks of one head.

Who waits for what, in the order of backward_keys.py and backward_queries.py (`help`): loads, turns
polled ahead, additions, turns handed on behind. It must never lock up, no stage may be overwritten
before its use, and a tile of dQ must be added to in the order of `blocks.turn`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from ridgeline.kernels.attention.cute.blocks import Integer, Walk, query_range, turn

from .test_cute_roles_protocol import Ring

Step = Iterator[Callable[[], bool]]
BLOCK_Q, BLOCK_K = 64, 128


class KeyBlock:
    """A block of threads: its walk, its rings and what lies in their stages."""

    def __init__(self, block: int, length: int, window: tuple[int | None, int | None]):
        self.block, self.window = block, window
        self.queries = query_range(block * BLOCK_K, BLOCK_K, BLOCK_Q, (length, length), window)
        num_queries = self.queries.end
        blocks = -(-length // BLOCK_K)
        self.walk = Walk(blocks, num_queries, 0, BLOCK_Q, BLOCK_K, True, Integer)
        self.first = self.queries.begin
        if window == (None, None):
            self.first = block * num_queries // blocks
        self.q_ring, self.do_ring = Ring(2, 1, 2), Ring(2, 1, 2)
        self.ds_ring = Ring(2, 2, 1)
        self.turn_ring, self.added_ring = Ring(2, 1, 1), Ring(2, 1, 1)
        self.q: list[int | None] = [None, None]
        self.do: list[int | None] = [None, None]
        self.ds: list[list[int]] = [[], []]

    def steps(self) -> range:
        return range(self.queries.end - self.queries.begin)

    def tile(self, step: int) -> int:
        """The block of queries of a step; the walk wraps around."""
        tile = self.first + step
        return tile - len(self.steps()) if tile >= self.queries.end else tile

    def wanted(self, step: int) -> int:
        return turn(self.block, self.tile(step), self.walk, self.window)

    def load(self) -> Step:
        for step in self.steps():
            for ring, stages in ((self.q_ring, self.q), (self.do_ring, self.do)):
                yield ring.wait_empty(step)
                stages[step % 2] = step
                yield lambda: True
                ring.full[step % 2].arrive()

    def keys(self) -> Step:
        """One of two key warpgroups."""
        for step in self.steps():
            yield self.q_ring.wait_full(step)
            assert self.q[step % 2] == step
            yield self.do_ring.wait_full(step)
            yield self.ds_ring.wait_empty(step)
            assert self.do[step % 2] == step
            self.do_ring.empty[step % 2].arrive()
            self.ds[step % 2].append(step)
            self.ds_ring.full[step % 2].arrive()
            yield lambda: True
            assert self.q[step % 2] == step
            self.q_ring.empty[step % 2].arrive()

    def poll(self, counters: list[int]) -> Step:
        for step in self.steps():
            yield self.turn_ring.wait_empty(step)
            yield lambda step=step: counters[self.tile(step)] == self.wanted(step)
            self.turn_ring.full[step % 2].arrive()

    def add(self, added: dict[int, list[int]]) -> Step:
        for step in self.steps():
            yield self.ds_ring.wait_full(step)
            assert self.ds[step % 2] == [step, step]
            self.ds[step % 2] = []
            self.ds_ring.empty[step % 2].arrive()
            yield self.turn_ring.wait_full(step)
            added[self.tile(step)].append(self.block)
            yield self.added_ring.wait_empty(step)
            self.turn_ring.empty[step % 2].arrive()
            self.added_ring.full[step % 2].arrive()

    def hand_on(self, counters: list[int]) -> Step:
        for step in self.steps():
            yield self.added_ring.wait_full(step)
            yield lambda: True
            counters[self.tile(step)] += 1
            self.added_ring.empty[step % 2].arrive()


def simulate(length: int, window: tuple[int | None, int | None], places: int, seed: int) -> dict:
    """Blocks start in their order, as many at once as there are places."""
    chance = random.Random(seed)
    blocks = range(-(-length // BLOCK_K))
    waiting = [*blocks] if window != (None, None) else [*blocks][::-1]
    num_queries = -(-length // BLOCK_Q)
    counters, added = [0] * num_queries, {tile: [] for tile in range(num_queries)}
    running: dict[tuple[int, int], Step] = {}
    waits: dict[tuple[int, int], Callable[[], bool]] = {}
    while waiting or running:
        while waiting and len({block for block, _ in running}) < places:
            key_block = KeyBlock(waiting.pop(), length, window)
            roles = [key_block.load(), key_block.keys(), key_block.keys()]
            roles += [key_block.poll(counters), key_block.add(added), key_block.hand_on(counters)]
            for i, role in enumerate(roles):
                running[key_block.block, i] = role
                waits[key_block.block, i] = lambda: True
        ready = [name for name, condition in waits.items() if condition()]
        assert ready, f"locked up: {sorted(running)}"
        name = chance.choice(ready)
        try:
            waits[name] = next(running[name])
        except StopIteration:
            del running[name], waits[name]
    return added


CASES = [
    (640, (None, 0), 1),
    (640, (None, 0), 3),
    (700, (200, 0), 2),
    (520, (100, 30), 2),
    (512, (None, None), 4),
]


@pytest.mark.parametrize(("length", "window", "places"), CASES)
def test_additions_come_in_turn_and_nothing_locks_up(length, window, places) -> None:
    orders = {str(simulate(length, window, places, seed)) for seed in range(6)}
    assert len(orders) == 1
    for tile, found in simulate(length, window, places, 99).items():
        seen = {
            block
            for block in range(-(-length // BLOCK_K))
            if KeyBlock(block, length, window).queries.begin
            <= tile
            < KeyBlock(block, length, window).queries.end
        }
        assert set(found) == seen and len(found) == len(seen)
        if window != (None, None):
            assert found == sorted(found, reverse=True)


def test_the_model_notices_additions_out_of_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(self: KeyBlock, counters: list[int]) -> Step:
        for step in self.steps():
            yield self.turn_ring.wait_empty(step)
            self.turn_ring.full[step % 2].arrive()

    monkeypatch.setattr(KeyBlock, "poll", at_once)
    assert len({str(simulate(512, (None, None), 4, seed)) for seed in range(6)}) > 1


def test_the_model_notices_a_turn_never_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: KeyBlock, counters: list[int]) -> Step:
        for step in self.steps():
            yield self.added_ring.wait_full(step)
            self.added_ring.empty[step % 2].arrive()

    monkeypatch.setattr(KeyBlock, "hand_on", forget)
    with pytest.raises(AssertionError, match="locked up"):
        simulate(640, (None, 0), 3, 0)
