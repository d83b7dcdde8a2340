"""Hand-overs of the persistent backward, simulated in random order, over several blocks of keys.

Who waits for what, in the order of backward_persistent.py, backward_keys.py and backward_queries.py
(`serve`): records, K and V in two stages, Q, dO and dS in rings whose positions go on from block to
block; rows that are prepared for later blocks and finished for earlier ones. It must never lock up,
no stage may be overwritten before its use, every block of keys must be worked on once, with its own
Q, dO, K and V, nobody may add to rows before they are prepared, and none may be finished before all
have added.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import pytest

from ridgeline.kernels.attention.cute import blocks

from .test_cute_roles_protocol import Ring

Step = Iterator[Callable[[], bool]]
NONE = -1
PREPARING = 2
"""Warps that prepare rows, each a share."""


class Launch:
    """What all blocks of threads share: the counter, how long each walk is, and what the main
    kernel does for rows of other blocks: prepares them with an order, finishes them if `finishes`.
    quick: dK and dV leave row by row. unsafe: nobody waits for rows."""

    def __init__(
        self,
        walks: list[int],
        order: blocks.KeyOrder | None = None,
        unsafe: bool = False,
        quick: bool = False,
        finishes: bool = False,
    ):
        self.walks, self.order, self.unsafe, self.drawn = walks, order, unsafe, 0
        self.quick, self.finishes = quick, finishes
        self.done: list[tuple[int, int]] = []
        self.prepared = [0] * (len(walks) // blocks.CLUSTER + 1)
        self.ended = [0] * (len(walks) // blocks.CLUSTER + 1)
        self.added: set[tuple[int, int, int]] = set()
        self.finished: list[tuple[int, int, int]] = []
        self.ready: dict[tuple[int, int, int], int] = {}
        if order is not None:
            places = {order.coordinates(n) for n in range(len(walks))}
            self.ready = {p: PREPARING for p in places if order.prepared_before(*p)}

    def draw(self) -> int:
        self.drawn += 1
        return self.drawn - 1

    def are_prepared(self, number: int) -> Callable[[], bool]:
        if self.order is None or self.unsafe:
            return lambda: True
        begin, end = self.order.preparing(number)
        whole = blocks.CLUSTER * PREPARING
        return lambda: all(self.prepared[c] == whole for c in range(begin, end))

    def have_ended(self, number: int) -> Callable[[], bool]:
        assert self.order is not None
        if self.unsafe:
            return lambda: True
        begin, end = self.order.adding(number)
        return lambda: all(self.ended[c] == blocks.CLUSTER for c in range(begin, end))

    def met(self, block: int, backwards: bool) -> range:
        """Blocks whose rows a block adds to; backwards: those that add to its rows."""
        assert self.order is not None
        span, lead = self.order.span, self.order.lead
        before, after = (span, lead) if backwards else (lead, span)
        return range(max(block - before, 0), min(block + after + 1, self.order.num_key_blocks))

    def check_added(self, number: int) -> None:
        """A block adds to the rows of its own keys and of those that its keys are seen by."""
        if self.order is not None:
            block, head, batch = self.order.coordinates(number)
            for at in self.met(block, backwards=False):
                assert self.ready.get((at, head, batch)) == PREPARING

    def finish(self, number: int) -> None:
        assert self.order is not None
        block, head, batch = self.order.coordinates(number)
        for at in self.met(block, backwards=True):
            assert (at, head, batch) in self.added
        self.finished.append((block, head, batch))


class Threads:
    """A block of threads. unsafe: K and V of the next block do not wait for those of the last."""

    def __init__(self, launch: Launch, unsafe: bool = False):
        self.launch, self.unsafe = launch, unsafe
        self.q_ring, self.do_ring, self.ds_ring = Ring(2, 1, 2), Ring(2, 1, 2), Ring(2, 2, 1)
        takers = 3 + (0 if launch.order is None else PREPARING) + launch.finishes
        self.stages = 4 if launch.quick else 2
        self.kv_ring = Ring(2, 1, 3 if launch.quick else 2)
        self.record_ring = Ring(self.stages, 1, takers)
        self.records = [NONE] * self.stages
        empty: tuple[int, int] = (NONE, NONE)
        self.q, self.do, self.kv = [empty] * 2, [empty] * 2, [NONE] * 2
        self.ds: list[list[tuple[int, int]]] = [[], []]

    def roles(self) -> list[Step]:
        ahead = [] if self.launch.order is None else [self.prepare() for _ in range(PREPARING)]
        behind = [self.finish()] if self.launch.finishes else []
        return [self.load(), self.keys(0), self.keys(1), self.serve(), *ahead, *behind]

    def announce(self, position: int, number: int) -> Step:
        yield self.record_ring.wait_empty(position)
        self.records[position % self.stages] = number
        self.record_ring.full[position % self.stages].arrive()

    def load(self) -> Step:
        before = steps = 0
        number = self.launch.draw()
        while number < len(self.launch.walks):
            yield from self.announce(before, number)
            yield self.launch.are_prepared(number)  # statistics are loaded with Q
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
        into[:] = [self.records[position % self.stages]]
        self.record_ring.empty[position % self.stages].arrive()

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
            if walk and not self.launch.quick:  # dK goes out through K, which dQ must have used
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
            yield self.launch.are_prepared(number)
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
            if self.launch.quick:
                self.kv_ring.empty[before % 2].arrive()
            yield lambda: True
            if self.launch.order is not None:
                self.launch.added.add(self.launch.order.coordinates(number))
                self.launch.ended[number // blocks.CLUSTER] += 1
            steps += self.launch.walks[number]
            before += 1
            yield from self.take(before, taken)

    def prepare(self) -> Step:
        """A warp that does its share of a later block's rows."""
        launch, before = self.launch, 0
        taken = [NONE]
        yield from self.take(before, taken)
        while (number := taken[0]) != NONE:
            assert launch.order is not None
            target = number + launch.order.lag()
            yield lambda: True
            if target < launch.order.num_long():
                place = launch.order.coordinates(target)
                launch.ready[place] = launch.ready.get(place, 0) + 1
            launch.prepared[number // blocks.CLUSTER] += 1
            before += 1
            yield from self.take(before, taken)

    def finish(self) -> Step:
        """A warp that finishes an earlier block's rows."""
        launch, before = self.launch, 0
        taken = [NONE]
        yield from self.take(before, taken)
        while (number := taken[0]) != NONE:
            assert launch.order is not None
            target = number - launch.order.delay()
            if 0 <= target < launch.order.num_long():
                yield launch.have_ended(target)
                launch.finish(target)
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


def test_a_quick_end_waits_for_neither_dq_nor_copies() -> None:
    for seed, (walks, places) in itertools.product(range(12), WALKS):
        done = run(Launch(walks, quick=True), places, seed)
        assert sorted(done) == [(number, wg) for number in range(len(walks)) for wg in (0, 1)]


ORDERS = [
    (21, 3, 2, 2, (3, True)), (40, 2, 1, 1, (8, True)), (9, 4, 3, 8, (1, True)),
    (5, 2, 2, 2, (9, True)), (30, 1, 3, 4, (0, True)), (12, 3, 2, 2, (None, True)),
    (16, 2, 2, 1, (None, True)), (12, 3, 2, 2, (None, False)), (33, 2, 1, 1, (None, False)),
]  # fmt: skip
"""Blocks of a head, heads, batches, heads of a section, bounds of the mask."""


def order_of(sizes: tuple) -> tuple[blocks.KeyOrder, int]:
    num_blocks, heads, batches, section, bounds = sizes
    order = blocks.key_order((num_blocks, heads, batches), section, bounds)
    return order, num_blocks * heads * batches


@pytest.mark.parametrize("sizes", ORDERS)
def test_an_order_has_every_block_once_and_short_walks_last(sizes: tuple) -> None:
    num_blocks, heads, batches, _, (span, _) = sizes
    order, total = order_of(sizes)
    found = [order.coordinates(number) for number in range(total)]
    assert sorted(found) == [
        (b, h, n) for b in range(num_blocks) for h in range(heads) for n in range(batches)
    ]
    short = [span is not None and block >= num_blocks - span for block, _, _ in found]
    assert short == sorted(short)
    assert sum(short) == min(span or 0, num_blocks) * heads * batches
    for place, late in zip(found, short, strict=True):
        if late:
            assert order.prepared_before(*place) and order.finished_after(*place)


@pytest.mark.parametrize("sizes", ORDERS)
@pytest.mark.parametrize("ahead", [16, 20])
@pytest.mark.parametrize("finishes", [False, True])
def test_nobody_adds_to_rows_too_early_or_finishes_them_too_early(
    sizes: tuple, ahead: int, finishes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few blocks of keys between one and the one that works for it. Rows are prepared and
    finished once, in the main kernel or beside it."""
    monkeypatch.setattr(blocks, "AHEAD", ahead)
    order, total = order_of(sizes)
    for seed in range(4):
        walks = [1 + number % 2 for number in range(total)]
        launch = Launch(walks, order, quick=finishes, finishes=finishes)
        done = run(launch, 7, seed)
        assert sorted(done) == [(number, wg) for number in range(total) for wg in (0, 1)]
        assert set(launch.ready.values()) == {PREPARING} and len(launch.ready) == total
        if finishes:
            places = map(order.coordinates, range(total))
            rest = [place for place in places if order.finished_after(*place)]
            assert len(launch.finished) + len(rest) == total
            assert len({*launch.finished, *rest}) == total


@pytest.mark.parametrize("finishes", [False, True])
def test_who_does_not_wait_meets_rows_that_are_not_ready(
    finishes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation can fail."""
    monkeypatch.setattr(blocks, "AHEAD", 16)
    order = blocks.key_order((40, 2, 1), 1, (2, True))
    with pytest.raises(AssertionError):
        for seed in range(10):
            run(Launch([1] * 80, order, True, finishes=finishes), 30, seed)


def test_counters_have_room() -> None:
    """Clusters prepared and ended, beside the queue's word: a word a tile of queries and head, and
    a row of heads more."""
    for block_q, rows, heads, group in itertools.product((64, 128), (1, 64, 200), (1, 3), (1, 4)):
        order = blocks.key_order((-(-rows // 128), heads, 1), 1, (None, True))
        words = (-(-rows // block_q) + 1) * heads * group
        assert 2 * order.num_clusters() <= words
