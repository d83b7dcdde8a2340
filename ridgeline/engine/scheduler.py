"""What the next step computes: decode tokens and chunks of prompts in one batch under a budget.

Each step gives every running sequence that decodes its one token (and drafted ones), then fills the
token budget with chunks of prompts, oldest first, then admits waiting ones. When pages run out the
youngest running sequence gives its pages back and is computed again later (its full pages may still
be in the prefix cache). The oldest sequence is never preempted by another and always fits alone, so
every request ends. Among waiting ones those of the salt (client) with the fewest running sequences
come first, but nobody is passed over more than MAX_BYPASSED times. Plain Python, no torch.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from ridgeline.core.errors import bad_value
from ridgeline.engine.blocks import BlockPool, root_digest
from ridgeline.engine.outputs import FinishReason
from ridgeline.engine.sequence import Sequence, Status

MAX_BYPASSED = 8

Drafter = Callable[[Sequence, int], list[int]]
"""(sequence, at most) -> guessed next tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes of a step."""

    max_num_seqs: int = 64
    """Sequences that run at a time."""
    max_step_tokens: int = 2048
    """Tokens that one step computes, at least max_num_seqs."""
    speculate_tokens: int = 0
    """Tokens drafted a step and sequence; 0: none."""

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise bad_value("engine", "max_num_seqs", "be at least 1", self.max_num_seqs, "raise")
        if self.max_step_tokens < self.max_num_seqs:
            raise bad_value(
                "engine",
                "max_step_tokens",
                f"be at least max_num_seqs {self.max_num_seqs}",
                self.max_step_tokens,
                "raise it",
            )
        if not 0 <= self.speculate_tokens <= 16:
            raise bad_value(
                "engine", "speculate_tokens", "lie in 0 .. 16", self.speculate_tokens, "change it"
            )


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens [start, start + count) of a sequence, then its draft, in one step."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
    """Whether it reaches the sequence's end, so that a token is chosen."""
    draft: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.count + len(self.draft)


@dataclass(slots=True)
class Plan:
    """One step: decoding sequences first."""

    works: list[Work] = field(default_factory=list)
    budget: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(work.num_tokens for work in self.works)

    @property
    def is_single(self) -> bool:
        """Whether every sequence has one token in it, and samples."""
        return all(work.count == 1 and not work.draft and work.samples for work in self.works)


class Scheduler:
    """Queues, and the pool that they share."""

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, drafter: Drafter | None = None
    ) -> None:
        self.config, self.pool = config, pool
        self.drafter = drafter if config.speculate_tokens else None
        self.waiting: list[Sequence] = []
        """By age."""
        self.running: list[Sequence] = []
        """By age."""
        self.held: dict[str, list[Sequence]] = {}
        """By request: choices that wait for the first one's prompt."""
        self.preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0

    # ---- in and out --------------------------------------------------------------------------

    def add(self, choices: list[Sequence]) -> None:
        """Queue the choices of one request."""
        first, *others = choices
        most = first.num_prompt + first.max_tokens
        assert self.pool.pages_for(most) <= self.pool.num_pages, "a request larger than the cache"
        insort(self.waiting, first, key=_order)
        if others:
            self.held[first.request.request_id] = others

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence in whatever state it is."""
        if sequence.finished:
            return
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        else:
            self._held_of(sequence).remove(sequence)
        self._let_go(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        self._release_held(sequence)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> list[Sequence]:
        """End every choice of a request; those that had not ended."""
        mine = [s for s in self.unfinished() if s.request.request_id == request_id]
        for sequence in sorted(mine, key=_order, reverse=True):  # held ones before their first
            self.finish(sequence, reason)
        return mine

    def unfinished(self) -> list[Sequence]:
        """Every sequence that has not ended."""
        held = [sequence for group in self.held.values() for sequence in group]
        return [*self.running, *self.waiting, *held]

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def preempt_all(self) -> None:
        """Give every page back and forget the cache: the weights changed."""
        for sequence in list(self.running):
            self._preempt(sequence)
        self.pool.forget_all()

    # ---- a step ------------------------------------------------------------------------------

    def schedule(self) -> Plan:
        """The next step. Pages of its tokens are allocated."""
        plan = Plan(budget=self.config.max_step_tokens)
        before = self.preemptions
        decoding = [s for s in self.running if s.decoding]
        for sequence in decoding:
            self._plan_decode(sequence, plan, len(decoding))
        for sequence in [s for s in self.running if not s.decoding]:
            if sequence.status is Status.RUNNING and plan.budget > 0:
                self._plan_chunk(sequence, plan)
        if self.preemptions == before:
            self._admit(plan)
        return plan

    def ahead(self, plan: Plan) -> Plan | None:
        """The step after one of single tokens that is not computed yet: every sequence that does
        not end for its length goes on by one. None where another step may be due: a sequence
        waits and could start, or pages lack. Pages of its tokens are allocated."""
        works = [work for work in plan.works if self.is_due(work)]
        going = [work for work in works if not work.sequence.is_last]
        if not going or len(works) != len(self.running):
            return None
        if self.waiting and len(going) < self.config.max_num_seqs:
            return None
        size, needed = self.pool.page_tokens, 0
        lacking: list[Sequence] = []
        for work in going:
            if work.start + 2 > len(work.sequence.pages) * size:
                lacking.append(work.sequence)
                needed += 1
        if needed > self.pool.num_free:
            return None
        for sequence in lacking:
            self._extend(sequence, 1)
        return Plan([Work(work.sequence, work.start + 1, 1, True) for work in going])

    @staticmethod
    def is_due(work: Work) -> bool:
        """Whether a step that was started computes what its sequence still lacks: it may have been
        ended, or have lost its pages, since."""
        sequence = work.sequence
        running = sequence.status is Status.RUNNING
        return running and sequence.num_computed == work.start and sequence.num_missing == 1

    def commit(self, work: Work, new_tokens: list[int]) -> None:
        """A work was computed: its tokens are in the cache, `new_tokens` were chosen (the accepted
        draft and one more, or none)."""
        sequence = work.sequence
        sequence.token_ids.extend(new_tokens)
        accepted = max(0, len(new_tokens) - 1)
        sequence.num_computed = work.start + work.count + accepted
        self._remember_full_pages(sequence)
        if sequence.num_computed >= sequence.num_prompt:
            self._release_held(sequence)

    # ---- details -----------------------------------------------------------------------------

    def _plan_decode(self, sequence: Sequence, plan: Plan, num_decoding: int) -> None:
        if sequence.status is not Status.RUNNING:
            return  # preempted by an older one
        planned = len(plan.works)
        draft: list[int] = []
        if self.drafter is not None:
            spare = plan.budget - (num_decoding - planned)
            if len(self.running) > num_decoding or self.waiting:
                spare -= self.config.max_step_tokens // 2  # prompts go on too
            left = sequence.max_tokens - sequence.num_output - 1
            most = min(self.config.speculate_tokens, spare, left)
            draft = self.drafter(sequence, most) if most > 0 else []
        if draft and not self._room(sequence, 1 + len(draft), None):
            draft = []
        if self._room(sequence, 1 + len(draft), plan):
            plan.works.append(Work(sequence, sequence.num_computed, 1, True, tuple(draft)))
            plan.budget -= 1 + len(draft)

    def _plan_chunk(self, sequence: Sequence, plan: Plan) -> None:
        count = min(sequence.num_missing, plan.budget)
        if self._room(sequence, count, plan):
            samples = count == sequence.num_missing
            plan.works.append(Work(sequence, sequence.num_computed, count, samples))
            plan.budget -= count

    def _room(self, sequence: Sequence, count: int, plan: Plan | None) -> bool:
        """Pages for the next tokens; with a plan, younger sequences are preempted for them."""
        pool = self.pool
        needed = pool.pages_for(sequence.num_computed + count) - len(sequence.pages)
        while needed > pool.num_free:
            if plan is None:
                return False
            victim = self.running[-1]
            self._preempt(victim)
            for work in [work for work in plan.works if work.sequence is victim]:
                plan.works.remove(work)
                plan.budget += work.num_tokens
            if victim is sequence:
                return False
        if needed > 0:
            self._extend(sequence, needed)
        return True

    def _extend(self, sequence: Sequence, needed: int) -> None:
        last = sequence.pages[-1] if sequence.pages else None
        expected = self.pool.pages_for(sequence.num_prompt + sequence.max_tokens)
        sequence.pages += self.pool.allocate(needed, after=last, expected=expected)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._let_go(sequence)
        sequence.status = Status.WAITING
        sequence.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, sequence, key=_order)

    def _let_go(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages, sequence.digests, sequence.num_computed = [], [], 0

    def _admit(self, plan: Plan) -> None:
        while self.waiting and plan.budget > 0 and len(self.running) < self.config.max_num_seqs:
            sequence = self._pick()
            if not self._start(sequence, plan):
                return
            if sequence is not self.waiting[0]:
                self.waiting[0].bypassed += 1
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=_order)

    def _pick(self) -> Sequence:
        head = self.waiting[0]
        if head.bypassed >= MAX_BYPASSED or head.preemptions:
            return head
        running: dict[str, int] = {}
        for sequence in self.running:
            running[sequence.request.salt] = running.get(sequence.request.salt, 0) + 1
        return min(self.waiting, key=lambda s: (running.get(s.request.salt, 0), s.order))

    def _start(self, sequence: Sequence, plan: Plan) -> bool:
        """Begin a waiting sequence at the end of its known prefix; False where pages lack."""
        pool = self.pool
        length = len(sequence.token_ids)
        most = (length - 1) // pool.page_tokens  # one token at least is computed: it has the logits
        pages, digests = pool.match(sequence.token_ids, sequence.request.salt, most)
        known = len(pages) * pool.page_tokens
        count = min(length - known, plan.budget)
        needed = pool.pages_for(known + count) - len(pages)
        spare = len(self.running)  # a page each for those that decode
        if needed + pool.free_of(pages) + spare > pool.num_free and self.running:
            return False
        if needed + pool.free_of(pages) > pool.num_free:
            return False
        pool.share(pages)
        sequence.pages, sequence.digests, sequence.num_computed = pages, digests, known
        if not sequence.preemptions:
            sequence.cached_tokens = min(known, sequence.num_prompt)
            self.prefix_query_tokens += sequence.num_prompt
            self.prefix_hit_tokens += sequence.cached_tokens
        if needed:
            self._extend(sequence, needed)
        sequence.status = Status.RUNNING
        plan.works.append(Work(sequence, known, count, known + count == length))
        plan.budget -= count
        return True

    def _remember_full_pages(self, sequence: Sequence) -> None:
        pool = self.pool
        if not pool.prefix_cache:
            return
        size = pool.page_tokens
        parent = sequence.digests[-1] if sequence.digests else root_digest(sequence.request.salt)
        for number in range(len(sequence.digests), sequence.num_computed // size):
            tokens = sequence.token_ids[number * size : (number + 1) * size]
            parent = pool.remember(sequence.pages[number], parent, tokens)
            sequence.digests.append(parent)

    def _held_of(self, sequence: Sequence) -> list[Sequence]:
        return self.held.get(sequence.request.request_id, [])

    def _release_held(self, sequence: Sequence) -> None:
        """The first choice's prompt is computed, or it ended: the others may start."""
        if sequence.index == 0 and self.held:
            for other in self.held.pop(sequence.request.request_id, []):
                other.status = Status.WAITING
                insort(self.waiting, other, key=_order)


def _order(sequence: Sequence) -> int:
    return sequence.order
