"""The hand-overs of the backward by roles, single and in pairs, simulated in random order.

Who waits for what, in the order of roles_keys.py and roles_queries.py, on barriers that count
arrivals and bytes as mbarriers do. Copies and products are processes of their own that end at any
time. It must never lock up; nothing may be written while it is read, nor read before it is there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

Step = Iterator[Callable[[], bool]]
WARPS = 4


@dataclass
class Barrier:
    """An mbarrier: a phase ends when its arrivals and its bytes are complete."""

    count: int
    pending: int = 0
    bytes: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        self.pending = self.count

    def arrive(self, count: int = 1) -> None:
        self.pending -= count
        assert self.pending >= 0, "more arrivals than a phase has"
        self.complete(0)

    def expect(self, num_bytes: int) -> None:
        self.bytes += num_bytes
        self.arrive()

    def complete(self, num_bytes: int) -> None:
        self.bytes -= num_bytes
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count

    def passed(self, parity: int) -> bool:
        """try_wait.parity: the phase of that parity is over."""
        return self.phase % 2 != parity


@dataclass
class Ring:
    stages: int
    producers: int
    consumers: int
    full: list[Barrier] = field(default_factory=list)
    empty: list[Barrier] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.full = [Barrier(self.producers) for _ in range(self.stages)]
        self.empty = [Barrier(self.consumers) for _ in range(self.stages)]

    def stage(self, position: int) -> int:
        return position % self.stages

    def wait_full(self, position: int) -> Callable[[], bool]:
        barrier, parity = self.full[self.stage(position)], position // self.stages % 2
        return lambda: barrier.passed(parity)

    def wait_empty(self, position: int) -> Callable[[], bool]:
        barrier, parity = self.empty[self.stage(position)], position // self.stages % 2 ^ 1
        return lambda: barrier.passed(parity)


@dataclass
class Memory:
    """A tile: what lies in it, and who reads it."""

    holds: list[object] = field(default_factory=lambda: [None, None])
    readers: int = 0
    cleared: bool = True
    """Rows behind the sequence's end are zero; tiles that TMA does not bring have none."""

    def write(self, what: object, halves: range = range(2), cleared: bool = True) -> None:
        assert self.readers == 0, f"written while read: {what} over {self.holds}"
        self.cleared = cleared
        for half in halves:
            self.holds[half] = what

    def clear(self, expect: object) -> None:
        """What every warpgroup does before it reads; zeros over zeros disturb nobody."""
        assert self.holds == [expect, expect], f"cleared {self.holds}, expected {expect}"
        assert self.cleared or not self.readers, "cleared while read"
        self.cleared = True

    def begin(self, expect: object) -> None:
        assert self.holds == [expect, expect], f"read {self.holds}, expected {expect}"
        assert self.cleared, f"{expect} read with rows behind the end"
        self.readers += 1

    def end(self) -> None:
        self.readers -= 1


class Block:
    """A block of threads: its memory and its barriers."""

    def __init__(self, ranks: int, stages: int, do_stages: int):
        self.q = [Memory() for _ in range(stages)]
        self.do = [Memory() for _ in range(do_stages)]
        self.statistics = [Memory() for _ in range(stages)]
        self.k = Memory(holds=["K", "K"], cleared=False)
        self.p, self.ds, self.out = Memory(), [Memory(), Memory()], Memory()
        self.q_ring = Ring(stages, 1, 2 * WARPS * ranks)
        self.do_ring = Ring(do_stages, 1, 2 * WARPS * ranks)
        self.p_ring = Ring(1, WARPS, WARPS)
        self.ds_ring = Ring(2, WARPS + ranks - 1, WARPS)
        self.added: list[int] = []


class Simulation:
    def __init__(self, ranks: int, num_steps: int, stages: int = 2, do_stages: int = 1):
        self.ranks, self.num_steps = ranks, num_steps
        self.blocks = [Block(ranks, stages, do_stages) for _ in range(ranks)]
        self.waits: dict[str, Callable[[], bool]] = {}
        self.running: dict[str, Step] = {}
        self.count = 0

    # ---- pieces -------------------------------------------------------------------------------
    def spawn(self, name: str, process: Step) -> str:
        self.count += 1
        name = f"{name} {self.count}"
        self.running[name] = process
        self.advance(name)
        return name

    def advance(self, name: str) -> None:
        try:
            self.waits[name] = next(self.running[name])
        except StopIteration:
            del self.running[name]
            self.waits.pop(name, None)

    def done(self, name: str) -> Callable[[], bool]:
        return lambda: name not in self.running

    def product(self, *reads: tuple[Memory, object]) -> str:
        """An asynchronous product that reads tiles until some later time."""

        def process() -> Step:
            for memory, expect in reads:
                memory.begin(expect)
            yield lambda: True
            for memory, _ in reads:
                memory.end()

        return self.spawn("product", process())

    def release(self, name: str, position: int) -> None:
        for block in self.blocks:
            ring = getattr(block, name)
            ring.empty[ring.stage(position)].arrive(WARPS)

    # ---- warpgroups ---------------------------------------------------------------------------
    def load(self, rank: int) -> Step:
        block = self.blocks[rank]
        for step in range(self.num_steps):
            for name in ("q", "do"):
                ring = getattr(block, f"{name}_ring")
                yield ring.wait_empty(step)
                stage = ring.stage(step)
                ring.full[stage].expect(2 if name == "do" else 3)
                for there in self.blocks:
                    self.spawn("copy", self.copy(there, name, stage, step, rank))
                if name == "q":
                    self.spawn("statistics", self.copy_statistics(block, stage, step))

    def copy(self, there: Block, name: str, stage: int, step: int, rank: int) -> Step:
        """This rank's part of a tile into one block of the pair."""
        yield lambda: True
        halves = range(2) if self.ranks == 1 else range(rank, rank + 1)
        getattr(there, name)[stage].write(step, halves, cleared=False)
        getattr(there, f"{name}_ring").full[stage].complete(len(halves))

    def copy_statistics(self, block: Block, stage: int, step: int) -> Step:
        yield lambda: True
        block.statistics[stage].write(step)
        block.q_ring.full[stage].complete(1)

    def scores(self, rank: int) -> Step:
        block, n = self.blocks[rank], self.num_steps
        self.clear_keys(block)
        if n:
            yield block.q_ring.wait_full(0)
            block.q[0].clear(0)
            yield self.done(self.product((block.q[0], 0), (block.k, "K")))
        for step in range(n):
            stage = block.q_ring.stage(step)
            yield block.p_ring.wait_empty(step)
            block.statistics[stage].begin(step)
            yield lambda: True
            block.statistics[stage].end()
            block.p.write(step)
            block.p_ring.full[0].arrive(WARPS)
            self.release("q_ring", step)
            yield block.do_ring.wait_full(step)
            do = block.do[block.do_ring.stage(step)]
            do.clear(step)
            dv = self.product((do, step))
            score = None
            if step + 1 < n:
                yield block.q_ring.wait_full(step + 1)
                q = block.q[block.q_ring.stage(step + 1)]
                q.clear(step + 1)
                score = self.product((q, step + 1), (block.k, "K"))
            yield self.done(dv)
            self.release("do_ring", step)
            if score is not None:
                yield self.done(score)
        yield block.p_ring.wait_empty(n)
        block.do[0].write("dV")

    def gradients(self, rank: int) -> Step:
        block, n = self.blocks[rank], self.num_steps
        if n:
            yield block.do_ring.wait_full(0)
            block.do[0].clear(0)
            yield self.done(self.product((block.do[0], 0)))
            self.release("do_ring", 0)
        for step in range(n):
            yield block.p_ring.wait_full(step)
            block.p.begin(step)
            yield lambda: True
            block.p.end()
            block.p_ring.empty[0].arrive(WARPS)
            yield block.q_ring.wait_full(step)
            block.q[block.q_ring.stage(step)].clear(step)
            yield block.ds_ring.wait_empty(step)
            stage = block.q_ring.stage(step)
            block.statistics[stage].begin(step)
            yield lambda: True
            block.statistics[stage].end()
            self.share(rank, step)
            dk = self.product((block.q[stage], step))
            dp = None
            if step + 1 < n:
                yield block.do_ring.wait_full(step + 1)
                do = block.do[block.do_ring.stage(step + 1)]
                do.clear(step + 1)
                dp = self.product((do, step + 1))
            yield self.done(dk)
            self.release("q_ring", step)
            if dp is not None:
                yield self.done(dp)
                self.release("do_ring", step + 1)
        block.q[0].write("dK")

    def share(self, rank: int, step: int) -> None:
        block = self.blocks[rank]
        stage = block.ds_ring.stage(step)
        if self.ranks == 1:
            block.ds[stage].write(step)
            block.ds_ring.full[stage].arrive(WARPS)
        elif stage == rank:
            block.ds[rank].write(step)
            block.ds_ring.full[stage].arrive(WARPS)
        else:
            block.out.write(step)
            self.spawn("send", self.send(rank, step))

    def send(self, rank: int, step: int) -> Step:
        block, other = self.blocks[rank], self.blocks[1 - rank]
        block.out.begin(step)
        yield lambda: True
        block.out.end()
        other.ds[rank].write(step)
        yield lambda: True
        other.ds_ring.full[other.ds_ring.stage(step)].complete(1)

    def dq(self, rank: int) -> Step:
        block = self.blocks[rank]
        first = rank if self.ranks == 2 else 0
        self.accept(block, first)
        for step in range(first, self.num_steps, self.ranks):
            yield block.ds_ring.wait_full(step)
            stage = block.ds_ring.stage(step)
            tiles = block.ds if self.ranks == 2 else [block.ds[stage]]
            yield self.done(self.product((block.k, "K"), *((tile, step) for tile in tiles)))
            self.accept(block, step + 2)
            self.release("ds_ring", step)
            yield lambda: True
            block.added.append(step)

    def clear_keys(self, block: Block) -> None:
        """Those of the whole pair, which only dQ reads beside the scores."""
        block.k.clear("K")

    def accept(self, block: Block, step: int) -> None:
        if self.ranks == 2:
            block.ds_ring.full[block.ds_ring.stage(step)].expect(1)

    def run(self, seed: int) -> None:
        chance = random.Random(seed)
        for rank in range(self.ranks):
            for role in (self.load, self.scores, self.gradients, self.dq):
                self.spawn(f"{role.__name__} of block {rank}:", role(rank))
        while self.running:
            ready = [name for name, condition in self.waits.items() if condition()]
            assert ready, f"locked up: {sorted(self.running)} all wait"
            self.advance(chance.choice(ready))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("do_stages", [1, 2])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 7])
def test_roles_never_lock_up(ranks: int, do_stages: int, num_steps: int) -> None:
    for seed in range(12):
        sim = Simulation(ranks, num_steps, do_stages=do_stages)
        sim.run(seed)
        for rank, block in enumerate(sim.blocks):
            assert block.added == list(range(rank, num_steps, ranks))
            assert block.do[0].holds == ["dV", "dV"] and block.q[0].holds == ["dK", "dK"]


def _fails(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[..., None]) -> None:
    monkeypatch.setattr(Simulation, name, change)
    with pytest.raises(AssertionError):
        for seed in range(20):
            Simulation(2, 7).run(seed)


def test_the_model_notices_a_release_that_stays_in_its_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def only_first(self: Simulation, name: str, position: int) -> None:
        ring = getattr(self.blocks[0], name)
        ring.empty[ring.stage(position)].arrive(WARPS)

    _fails(monkeypatch, "release", only_first)


def test_the_model_notices_keys_nobody_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    _fails(monkeypatch, "clear_keys", lambda self, block: None)


def test_the_model_notices_bytes_nobody_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    _fails(monkeypatch, "accept", lambda self, block, step: None)


def test_the_model_notices_a_pair_that_counts_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Block.__init__

    def fewer(self: Block, ranks: int, stages: int, do_stages: int) -> None:
        real(self, ranks, stages, do_stages)
        self.q_ring = Ring(stages, 1, 2 * WARPS)

    monkeypatch.setattr(Block, "__init__", fewer)
    with pytest.raises(AssertionError):
        for seed in range(20):
            Simulation(2, 7).run(seed)
