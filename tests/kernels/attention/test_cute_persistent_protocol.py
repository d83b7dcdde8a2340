"""Hand-overs of the persistent backward, simulated in random order, over several blocks of keys.

Who waits for what, in the order of backward_persistent.py, backward_keys.py and backward_queries.py
(`serve`): records, K and V in two stages, Q, dO and dS in rings whose positions go on from block to
block; in windows, zeros in dQ for later blocks. It must never lock up, no stage may be overwritten
before its use, every block of keys must be worked on once, with its own Q, dO, K and V, and nobody
may add to dQ before it is zero.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from ridgeline.kernels.attention.cute import blocks

from .test_cute_roles_protocol import Ring

Step = Iterator[Callable[[], bool]]
NONE = -1


class Launch:
    """What all blocks of threads share: the counter, how long each walk is, and the zeros in dQ
    where the main kernel makes them. unsafe: nobody waits for zeros."""

    def __init__(
        self, walks: list[int], order: blocks.KeyOrder | None = None, unsafe: bool = False
    ):
        self.walks, self.order, self.unsafe, self.drawn = walks, order, unsafe, 0
        self.done: list[tuple[int, int]] = []
        self.clusters = [0] * (len(walks) // blocks.ZEROS_CLUSTER + 1)
        self.zero: set[tuple[int, int, int]] = set()
        if order is not None:
            places = {order.coordinates(n) for n in range(len(walks))}
            self.zero = {place for place in places if order.zeroed_before(*place)}

    def draw(self) -> int:
        self.drawn += 1
        return self.drawn - 1

    def zeroed(self, number: int) -> Callable[[], bool]:
        if self.order is None or self.unsafe:
            return lambda: True
        begin, end = self.order.zeroed(number)
        return lambda: all(self.clusters[c] == blocks.ZEROS_CLUSTER for c in range(begin, end))

    def check_added(self, number: int) -> None:
        """A block adds to the rows of its own keys and of those behind."""
        if self.order is not None:
            block, head, batch = self.order.coordinates(number)
            last = min(block + self.order.span, self.order.num_key_blocks - 1)
            assert all((at, head, batch) in self.zero for at in range(block, last + 1))


class Threads:
    """A block of threads. unsafe: K and V of the next block do not wait for those of the last."""

    def __init__(self, launch: Launch, unsafe: bool = False):
        self.launch, self.unsafe = launch, unsafe
        self.q_ring, self.do_ring, self.ds_ring = Ring(2, 1, 2), Ring(2, 1, 2), Ring(2, 2, 1)
        takers = 3 if launch.order is None else 4
        self.kv_ring, self.record_ring = Ring(2, 1, 2), Ring(2, 1, takers)
        self.records = [NONE, NONE]
        empty: tuple[int, int] = (NONE, NONE)
        self.q, self.do, self.kv = [empty] * 2, [empty] * 2, [NONE] * 2
        self.ds: list[list[tuple[int, int]]] = [[], []]

    def roles(self) -> list[Step]:
        zeros = [] if self.launch.order is None else [self.zeros()]
        return [self.load(), self.keys(0), self.keys(1), self.serve(), *zeros]

    def announce(self, position: int, number: int) -> Step:
        yield self.record_ring.wait_empty(position)
        self.records[position % 2] = number
        self.record_ring.full[position % 2].arrive()

    def load(self) -> Step:
        before = steps = 0
        number = self.launch.draw()
        while number < len(self.launch.walks):
            yield from self.announce(before, number)
            if not self.unsafe:
                yield self.kv_ring.wait_empty(before)
            self.kv[before % 2] = number
            yield lambda: True
            self.kv_ring.full[before % 2].arrive()
            for step in range(self.launch.walks[number]):
                position = steps + step
                for ring, stages in ((self.q_ring, self.q), (self.do_ring, self.do)):
                    yield ring.wait_empty(position)
                    stages[position % 2] = (number, step)
                    yield lambda: True
                    ring.full[position % 2].arrive()
            steps += self.launch.walks[number]
            before += 1
            yield lambda: True
            number = self.launch.draw()
        yield from self.announce(before, NONE)

    def take(self, position: int, into: list[int]) -> Step:
        yield self.record_ring.wait_full(position)
        into[:] = [self.records[position % 2]]
        self.record_ring.empty[position % 2].arrive()

    def keys(self, wg: int) -> Step:
        """One of two key warpgroups."""
        before = steps = 0
        taken = [NONE]
        yield from self.take(before, taken)
        while (number := taken[0]) != NONE:
            walk = self.launch.walks[number]
            yield self.kv_ring.wait_full(before)
            for step in range(walk):
                position = steps + step
                yield self.q_ring.wait_full(position)
                assert self.q[position % 2] == (number, step)
                assert self.kv[before % 2] == number
                yield self.do_ring.wait_full(position)
                yield self.ds_ring.wait_empty(position)
                assert self.do[position % 2] == (number, step)
                self.do_ring.empty[position % 2].arrive()
                self.ds[position % 2].append((number, step))
                self.ds_ring.full[position % 2].arrive()
                yield lambda: True
                assert self.q[position % 2] == (number, step)
                self.q_ring.empty[position % 2].arrive()
            if walk:  # dK goes out through K, which dQ must have used
                yield self.ds_ring.wait_empty(steps + walk - 1 + 2)
            assert self.kv[before % 2] == number
            yield lambda: True
            assert self.kv[before % 2] == number
            self.kv_ring.empty[before % 2].arrive()
            self.launch.done.append((number, wg))
            steps += walk
            before += 1
            yield from self.take(before, taken)

    def serve(self) -> Step:
        before = steps = 0
        taken = [NONE]
        yield from self.take(before, taken)
        while (number := taken[0]) != NONE:
            yield self.launch.zeroed(number)
            for step in range(self.launch.walks[number]):
                position = steps + step
                yield self.ds_ring.wait_full(position)
                self.launch.check_added(number)
                assert self.ds[position % 2] == [(number, step)] * 2
                assert self.kv[before % 2] == number
                yield lambda: True
                assert self.kv[before % 2] == number
                self.ds[position % 2] = []
                self.ds_ring.empty[position % 2].arrive()
            steps += self.launch.walks[number]
            before += 1
            yield from self.take(before, taken)

    def zeros(self) -> Step:
        """The warp that zeroes rows of dQ for a later block."""
        launch, before = self.launch, 0
        taken = [NONE]
        yield from self.take(before, taken)
        while (number := taken[0]) != NONE:
            assert launch.order is not None
            target = number + launch.order.lag()
            yield lambda: True
            if target < launch.order.num_long():
                launch.zero.add(launch.order.coordinates(target))
            launch.clusters[number // blocks.ZEROS_CLUSTER] += 1
            before += 1
            yield from self.take(before, taken)


def simulate(walks: list[int], places: int, seed: int, unsafe: bool = False) -> list:
    return run(Launch(walks), places, seed, unsafe)


def run(launch: Launch, places: int, seed: int, unsafe: bool = False) -> list:
    """All roles of all blocks of threads, in random order; a block starts any time."""
    chance = random.Random(seed)
    running = dict(
        enumerate(role for _ in range(places) for role in Threads(launch, unsafe).roles())
    )
    waits: dict[int, Callable[[], bool]] = dict.fromkeys(running, lambda: True)
    while running:
        ready = [name for name, condition in waits.items() if condition()]
        assert ready, f"locked up: {sorted(running)}"
        name = chance.choice(ready)
        try:
            waits[name] = next(running[name])
        except StopIteration:
            del running[name], waits[name]
    return launch.done


WALKS = [
    ([3, 2, 1, 4, 5, 2, 2], 2),
    ([1] * 9, 3),
    ([0, 2, 0, 0, 3, 1, 0], 2),
    ([4, 4, 4], 5),
    ([7, 1, 6, 0, 5], 1),
]


@pytest.mark.parametrize(("walks", "places"), WALKS)
def test_every_block_of_keys_is_worked_on_once(walks: list[int], places: int) -> None:
    for seed in range(12):
        done = simulate(walks, places, seed)
        assert sorted(done) == [(number, wg) for number in range(len(walks)) for wg in (0, 1)]


def test_keys_that_do_not_wait_are_overwritten() -> None:
    """The simulation can fail: two stages do not suffice for three blocks."""
    with pytest.raises(AssertionError):
        for seed in range(40):
            simulate([1] * 9, 1, seed, unsafe=True)


ORDERS = [(21, 3, 2, 2, 3), (40, 2, 1, 1, 8), (9, 4, 3, 8, 1), (5, 2, 2, 2, 9), (30, 1, 3, 4, 0)]


@pytest.mark.parametrize("sizes", ORDERS)
def test_a_window_s_order_has_every_block_once_and_short_walks_last(sizes: tuple) -> None:
    num_blocks, heads, batches, section, span = sizes
    order = blocks.key_order((num_blocks, heads, batches), section, span)
    total = num_blocks * heads * batches
    found = [order.coordinates(number) for number in range(total)]
    assert sorted(found) == [
        (b, h, n) for b in range(num_blocks) for h in range(heads) for n in range(batches)
    ]
    short = [block >= num_blocks - span for block, _, _ in found]
    assert short == sorted(short) and sum(short) == min(span, num_blocks) * heads * batches
    assert all(
        order.zeroed_before(*place) for place, late in zip(found, short, strict=True) if late
    )


@pytest.mark.parametrize("sizes", ORDERS)
@pytest.mark.parametrize("ahead", [16, 20])
def test_nobody_adds_to_dq_before_it_is_zero(
    sizes: tuple, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few blocks of keys between one and the one that zeroes for it."""
    monkeypatch.setattr(blocks, "ZEROS_AHEAD", ahead)
    num_blocks, heads, batches, section, span = sizes
    order = blocks.key_order((num_blocks, heads, batches), section, span)
    for seed in range(4):
        walks = [1 + number % 2 for number in range(num_blocks * heads * batches)]
        done = run(Launch(walks, order), 7, seed)
        assert sorted(done) == [(number, wg) for number in range(len(walks)) for wg in (0, 1)]


def test_who_does_not_wait_for_zeros_adds_to_what_is_not_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The simulation can fail."""
    monkeypatch.setattr(blocks, "ZEROS_AHEAD", 16)
    order = blocks.key_order((40, 2, 1), 1, 2)
    with pytest.raises(AssertionError):
        for seed in range(10):
            run(Launch([1] * 80, order, unsafe=True), 30, seed)
