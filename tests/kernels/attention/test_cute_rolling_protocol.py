"""fp32 dQ in a ring of places, simulated in random order: who adds, who rounds, who waits for whom.

In the order of backward_queries.py and backward_rolling.py: blocks of keys start in order, wait for
those that must have ended, add to the tiles of their walk, and round the block that lies `lag`
behind a part at a time; others of their warps make statistics of the rows of the block lag + span
on. Nothing may be added to a tile that another owner's sums are in, nothing may be rounded before
its last addition, no statistics may be read before they are there, and every tile must be rounded
once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from ridgeline.kernels.attention.cute.blocks import query_range, rolling_of, rolling_span

Step = Iterator[Callable[[], bool]]
BLOCK_K = 128


@dataclass
class Call:
    """A launch of the three kernels."""

    length: int
    left: int
    heads: int
    group: int
    lag: int
    cluster: int
    block_q: int
    wait: bool = True
    sums: dict[int, set] = field(default_factory=dict)
    """(owner, block of keys) that were added to a place since it was zeroed."""
    owners: dict[int, int] = field(default_factory=dict)
    rounded: dict[tuple[int, int, int], set] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    made: set[int] = field(default_factory=set)
    """Blocks whose rows have statistics."""

    def __post_init__(self) -> None:
        self.blocks = -(-self.length // BLOCK_K)
        span = rolling_span(self.left, BLOCK_K)
        lengths, heads = (self.blocks, 1), (self.heads, self.group)
        self.ring = rolling_of(lengths, heads, self.lag, span)
        self.total = self.blocks * self.heads
        self.parts = BLOCK_K // self.block_q
        self.ended = [0] * (self.total // self.cluster + 1)
        # The kernel `first`; what else lies in the ring is of an earlier call.
        for place in range(self.ring.owners()):
            number = self.ring.owner(place)
            assert self.ring.place(number) == place
            if number < self.lag + span or number >= self.ring.num_long():
                self.made.add(number)
            for member in range(self.group):
                for part in range(self.parts):
                    self.sums[self.ring.tile(place, member, part, self.parts)] = set()

    def walk(self, block: int) -> range:
        """Blocks of queries."""
        lengths = (self.length, self.length)
        seen = query_range(block * BLOCK_K, BLOCK_K, self.block_q, lengths, (self.left, 0))
        return range(seen.begin, seen.end)

    def run(self, number: int) -> Step:
        """A block of keys, its warpgroup of dQ."""
        block, head, _ = self.ring.coordinates(number)
        if self.wait:
            begin, end = self.ring.ended(number, self.lag, self.cluster)
            for cluster in range(begin, end):
                yield lambda cluster=cluster: self.ended[cluster] == self.cluster
        rounds = [(m, p) for m in range(self.group) for p in range(self.parts)]
        if not self.ring.rounds(number, self.lag):
            rounds = []
        for member in range(self.group):
            for query in self.walk(block):
                yield lambda: True
                owner, part = query // self.parts, query % self.parts
                owner = self.ring.number(owner, head, 0)
                assert owner in self.made, "no statistics"
                self.add(owner, member, part, number)
                if rounds:
                    yield lambda: True
                    self.round(number - self.lag, *rounds.pop(0))
        for member, part in rounds:
            yield lambda: True
            self.round(number - self.lag, member, part)
        yield lambda: True
        if number + self.lag + self.ring.span < self.ring.num_long():
            self.made.add(number + self.lag + self.ring.span)
        yield lambda: True
        self.ended[number // self.cluster] += 1

    def add(self, owner: int, member: int, part: int, number: int) -> None:
        tile = self.ring.tile(self.ring.place(owner), member, part, self.parts)
        assert tile in self.sums, "added to what nobody zeroed"
        assert all(found == owner for found, _ in self.sums[tile]), "another owner's sums"
        assert (owner, number) not in self.sums[tile]
        self.sums[tile].add((owner, number))

    def round(self, number: int, member: int, part: int) -> None:
        block, head, _ = self.ring.coordinates(number)
        tile = self.ring.tile(self.ring.place(number), member, part, self.parts)
        query = block * self.parts + part
        if query * self.block_q < self.length:
            seen = [b for b in range(self.blocks) if query in self.walk(b)]
            seen = {self.ring.number(b, head, 0) for b in seen}
            assert {n for _, n in self.sums[tile]} == seen, "rounded before its last addition"
            assert (number, member, part) not in self.rounded
            self.rounded[number, member, part] = seen
        self.sums[tile] = set()

    def simulate(self, places: int, seed: int) -> int:
        """Returns the most blocks that were there at once."""
        chance, waiting, most = random.Random(seed), iter(range(self.total)), 0
        running: dict[int, Step] = {}
        waits: dict[int, Callable[[], bool]] = {}
        following = next(waiting, None)
        while running or following is not None:
            while following is not None and len(running) < places:
                running[following], waits[following] = self.run(following), lambda: True
                following = next(waiting, None)
            most = max(most, len(running))
            ready = [name for name, condition in waits.items() if condition()]
            assert ready, f"locked up: {sorted(running)}"
            name = chance.choice(ready)
            try:
                waits[name] = next(running[name])
            except StopIteration:
                del running[name], waits[name]
        for number in range(self.ring.first_left(self.lag), self.total):  # the kernel `last`
            for member in range(self.group):
                for part in range(self.parts):
                    self.round(number, member, part)
        return most


CASES = [  # length, left, heads, group, lag, cluster, block_q, places
    (1500, 300, 3, 1, 4, 2, 64, 3),
    (1500, 300, 3, 1, 4, 4, 128, 6),
    (700, 0, 5, 2, 3, 3, 64, 4),
    (129, 64, 9, 1, 2, 2, 128, 5),
    (1000, 5000, 3, 1, 5, 2, 64, 4),
    (260, 100, 2, 3, 40, 16, 64, 8),
]


@pytest.mark.parametrize("case", CASES)
def test_every_tile_is_rounded_once_when_it_is_whole(case: tuple[int, ...]) -> None:
    *shape, places = case
    for seed in range(5):
        call = Call(*shape)
        assert call.simulate(places, seed) == min(places, call.total)
        tiles = -(-call.length // call.block_q)
        assert len(call.rounded) == tiles * call.heads * call.group


def test_without_waiting_it_goes_wrong() -> None:
    """The simulation can fail."""
    found = 0
    for seed in range(5):
        call = Call(1500, 300, 3, 1, 4, 2, 64, wait=False)
        try:
            call.simulate(12, seed)
        except AssertionError:
            found += 1
    assert found == 5


@pytest.mark.parametrize(("blocks", "span"), [(7, 2), (7, 0), (3, 5), (1, 0)])
def test_numbers_are_those_of_all_blocks(blocks: int, span: int) -> None:
    ring = rolling_of((blocks, 3), (2, 1), 4, span)
    found = [ring.coordinates(number) for number in range(ring.total())]
    assert len(set(found)) == len(found) == blocks * 6
    assert [ring.number(*where) for where in found] == [*range(len(found))]
    # Blocks with shorter walks come last.
    short = [block >= blocks - span for block, _, _ in found]
    assert short == sorted(short)


@pytest.mark.parametrize("left", [0, 1, 63, 64, 127, 128, 129, 300, 1023])
def test_span_is_how_far_behind_its_own_a_block_adds(left: int) -> None:
    length = 3000
    lengths = (length, length)
    seen = query_range(256, BLOCK_K, 64, lengths, (left, 0))
    last_row = min(seen.end * 64, length) - 1
    last_seeing = 256 + BLOCK_K - 1 + left
    assert 2 + rolling_span(left, BLOCK_K) == last_seeing // BLOCK_K
    assert last_row // BLOCK_K <= 2 + rolling_span(left, BLOCK_K)
