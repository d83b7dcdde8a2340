"""Property tests of pages and scheduler under a model that reads its keys through the pages.

The model's next token is a function of what the pages of a sequence hold, so a page that is shared,
freed or rolled back wrongly changes the tokens; they must be those of a sequence alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.engine.blocks import BlockPool, next_digest, root_digest
from ridgeline.engine.params import Request, SamplingParams
from ridgeline.engine.scheduler import MAX_BYPASSED, Plan, Scheduler, SchedulerConfig
from ridgeline.engine.sequence import Sequence, Status, sequences_of
from ridgeline.engine.speculate import Lookup

VOCAB = 5


def next_token(prefix: tuple[int, ...]) -> int:
    """A small vocabulary, so that prefixes and n-grams repeat."""
    return hashlib.sha256(bytes(prefix[-4:])).digest()[0] % VOCAB


def alone(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tuple(tokens)))
    return tokens[len(prompt) :]


@dataclass
class Machine:
    """Scheduler, pool and the fake model's memory."""

    num_pages: int = 12
    page_tokens: int = 4
    max_num_seqs: int = 4
    max_step_tokens: int = 8
    speculate: int = 0
    runs: bool = False
    prefix_cache: bool = True
    order: int = 0
    sequences: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(
            self.num_pages, self.page_tokens, prefix_cache=self.prefix_cache, runs=self.runs
        )
        config = SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_step_tokens=self.max_step_tokens,
            speculate_tokens=self.speculate,
        )
        lookups: dict[int, Lookup] = {}

        def drafter(sequence: Sequence, most: int) -> list[int]:
            return lookups.setdefault(sequence.order, Lookup()).propose(sequence.token_ids, most)

        self.scheduler = Scheduler(config, self.pool, drafter)
        self.memory = [[-1] * self.page_tokens for _ in range(self.num_pages)]

    @property
    def capacity(self) -> int:
        return self.num_pages * self.page_tokens

    def add(self, prompt: list[int], max_tokens: int, n: int = 1, salt: str = "") -> list[Sequence]:
        prompt = prompt[: self.capacity - 1]
        max_tokens = min(max_tokens, self.capacity - len(prompt))
        request = Request(
            request_id=f"r{self.order}",
            prompt_ids=tuple(prompt),
            params=SamplingParams(max_tokens=max_tokens, n=n),
            salt=salt,
        )
        made = sequences_of(request, self.order, max_tokens)
        self.order += n
        self.sequences += made
        self.scheduler.add(made)
        return made

    def step(self) -> Plan:
        plan = self.scheduler.schedule()
        assert plan.num_tokens <= self.max_step_tokens
        assert len({id(work.sequence) for work in plan.works}) == len(plan.works)
        for work in plan.works:
            self._compute(work)
        self.check()
        return plan

    def _compute(self, work) -> None:
        s = work.sequence
        assert s.status is Status.RUNNING and work.start == s.num_computed
        tokens = s.token_ids[work.start : work.start + work.count] + list(work.draft)
        for position, token in enumerate(tokens, start=work.start):
            page, slot = divmod(position, self.page_tokens)
            assert self.pool.references[s.pages[page]] == 1, "writing to a shared page"
            self.memory[s.pages[page]][slot] = token
        chosen: list[int] = []
        if work.samples:
            for extra in range(len(work.draft) + 1):
                seen = self.read(s, work.start + work.count + extra)
                chosen.append(next_token(tuple(seen)))
                if extra < len(work.draft) and work.draft[extra] != chosen[-1]:
                    break
            chosen = chosen[: s.max_tokens - s.num_output]
        self.scheduler.commit(work, chosen)
        if chosen and s.num_output >= s.max_tokens:
            self.scheduler.finish(s, "length")

    def read(self, s: Sequence, count: int) -> list[int]:
        where = (divmod(position, self.page_tokens) for position in range(count))
        return [self.memory[s.pages[page]][slot] for page, slot in where]

    def check(self) -> None:
        live = [s for s in self.sequences if not s.finished]
        self.pool.check([s.pages for s in live])
        assert all(not s.pages for s in self.sequences if s.finished)
        assert all(not s.pages for s in live if s.status is not Status.RUNNING)
        orders = [s.order for s in self.scheduler.running]
        assert orders == sorted(orders) and len(orders) <= self.max_num_seqs
        unfinished = self.scheduler.unfinished()
        assert len(unfinished) == len(live) and {id(s) for s in unfinished} == {id(s) for s in live}

    def finish_all(self, most_steps: int = 5000) -> None:
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                break
            assert self.step().works, "there is work and nothing was planned"
        assert all(s.finished for s in self.sequences)
        self.pool.check([])


tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)
requests = st.tuples(tokens, st.integers(1, 20), st.integers(1, 3), st.sampled_from(["", "a", "b"]))
machines = st.builds(
    Machine,
    num_pages=st.integers(3, 16),
    page_tokens=st.sampled_from([1, 2, 4]),
    max_num_seqs=st.integers(1, 5),
    max_step_tokens=st.integers(5, 16),
    speculate=st.sampled_from([0, 3]),
    runs=st.booleans(),
    prefix_cache=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(machines, st.lists(requests, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_every_request_ends_with_its_own_tokens(machine, asked, random):
    """Whatever the sizes, the order and the moments at which requests come."""
    random.shuffle(asked)
    made = []
    for prompt, max_tokens, n, salt in asked:
        made += machine.add(prompt, max_tokens, n, salt)
        for _ in range(random.randrange(3)):
            machine.step()
    machine.finish_all()
    for s in made:
        prompt = s.token_ids[: s.num_prompt]
        assert s.output_ids == alone(prompt, s.max_tokens)


@settings(max_examples=100, deadline=None)
@given(machines, st.lists(st.one_of(requests, st.integers(0, 9)), max_size=25), st.integers(0, 3))
def test_aborts_in_every_state_lose_no_page(machine, actions, between):
    """A number aborts that request wherever it is; a preempt_all (new weights) comes midway."""
    for place, action in enumerate(actions):
        if isinstance(action, int):
            machine.scheduler.abort(f"r{action}")
            machine.check()
        else:
            machine.add(*action)
        if place == len(actions) // 2:
            machine.scheduler.preempt_all()
            machine.memory = [[-1] * machine.page_tokens for _ in machine.memory]
            machine.check()
        for _ in range(between):
            machine.step()
    machine.finish_all()
    for s in machine.sequences:
        if s.finish_reason == "length":
            assert s.output_ids == alone(s.token_ids[: s.num_prompt], s.max_tokens)


def test_prefix_hits_need_equal_salts():
    machine = Machine(num_pages=32)
    prompt = [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0]
    for salt in ("a", "b", "a"):
        machine.add(prompt, 1, salt=salt)
        machine.finish_all()
    assert [s.cached_tokens for s in machine.sequences] == [0, 0, 8]
    assert machine.scheduler.prefix_hit_tokens == 8


def test_a_digest_alone_is_no_hit(monkeypatch):
    """Equal digests of different tokens (a collision) are told apart by the tokens."""
    pool = BlockPool(4, 2)
    page = pool.allocate(1)
    pool.remember(page[0], root_digest(""), [1, 2])
    assert pool.match([1, 2, 3], "", 1)[0] == page
    name = next_digest(root_digest(""), (1, 2))
    monkeypatch.setattr("ridgeline.engine.blocks.next_digest", lambda parent, ids: name)
    assert pool.match([7, 8, 9], "", 1)[0] == []


def test_the_oldest_is_never_preempted():
    machine = Machine(num_pages=6, page_tokens=2, max_num_seqs=3, prefix_cache=False)
    made = [machine.add([1, 2], 9)[0] for _ in range(3)]
    machine.finish_all()
    assert made[0].preemptions == 0 and machine.scheduler.preemptions > 0
    assert [s.output_ids for s in made] == [alone([1, 2], 9)] * 3


def test_prompts_and_decodes_share_a_step():
    machine = Machine(num_pages=32, max_step_tokens=8)
    machine.add([1], 5)
    machine.step()
    machine.add([0] * 20, 1)
    plan = machine.step()
    assert [(work.count, work.samples) for work in plan.works] == [(1, True), (7, False)]


def test_a_client_with_many_requests_does_not_hold_up_another_nor_starve():
    machine = Machine(num_pages=40, max_num_seqs=2, max_step_tokens=8)
    for _ in range(6):
        machine.add([1, 2, 3], 2, salt="many")
    late = machine.add([1, 2, 3], 2, salt="one")[0]
    machine.step()
    assert late.status is Status.RUNNING  # beside one of the many
    crowd = [machine.add([1, 2, 3], 1, salt=f"new {i}")[0] for i in range(40)]
    machine.finish_all()
    assert all(s.finished for s in crowd)
    assert max(s.bypassed for s in machine.sequences) <= MAX_BYPASSED


def test_choices_of_one_prompt_compute_it_once():
    machine = Machine(num_pages=32, max_step_tokens=16)
    made = machine.add([0, 1, 2, 3, 4, 0, 1, 2, 3], 2, n=3)
    machine.step()
    assert [s.status for s in made] == [Status.RUNNING, Status.WAITING, Status.WAITING]
    machine.finish_all()
    assert [s.cached_tokens for s in made] == [0, 8, 8]


def test_runs_of_pages_where_there_is_room():
    machine = Machine(num_pages=32, runs=True)
    made = [machine.add([1, 2, 3, i], 12)[0] for i in range(2)]
    for _ in range(10):
        machine.step()
    for s in made:
        assert s.pages == list(range(s.pages[0], s.pages[0] + len(s.pages)))


@pytest.mark.parametrize("sizes", [{"max_num_seqs": 0}, {"max_num_seqs": 9}, {"speculate": 17}])
def test_sizes_that_cannot_be(sizes):
    with pytest.raises(ValueError, match="engine: "):
        Machine(max_step_tokens=8, **sizes)
