"""The engine proper, one step at a time and free of threads: requests in, deltas out.

    step = schedule -> run -> sample -> check what ended -> keep the books

Large steps and sampled ones overlap: where the runner can start a step without its tokens
(flight.py), the next one is planned and started before the tokens of this one are read, and all of
the above but "run" happens while the device works. A row whose sequence had ended meanwhile is
dropped.

Whatever is wrong with one request (a grammar that raises, a deadline) ends that request; the others
of its step do not notice. What ends a choice: an end-of-sequence or stop token, a stop string, its
length, an abort, a deadline.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ridgeline.engine.counters import Counters
from ridgeline.engine.detokenize import TextStream
from ridgeline.engine.draw import Draws
from ridgeline.engine.flight import Flight
from ridgeline.engine.outputs import Delta, FinishReason, RequestOutput, TokenLogprob, Usage
from ridgeline.engine.params import Request
from ridgeline.engine.runner import StepBatch
from ridgeline.engine.sampler import Row, Sampled, SamplingState, draws_of, sample
from ridgeline.engine.scheduler import Plan, Scheduler, Work
from ridgeline.engine.sequence import Sequence as Choice
from ridgeline.engine.sequence import Status, sequences_of
from ridgeline.engine.speculate import Lookup

Run = Callable[[StepBatch], torch.Tensor | list[int]]
"""Logits of a step's rows, or their likeliest tokens where the batch says `greedy`."""
Start = Callable[[StepBatch, Sequence[int] | None, Draws | None], Flight | None]
"""Starts a step (flight.py), or None where it is to be run."""


@dataclass(slots=True, eq=False)
class _Live:
    """A choice with what the engine keeps beside the scheduler."""

    sequence: Choice
    state: SamplingState
    text: TextStream
    lookup: Lookup | None = None
    last_token_s: float | None = None
    is_plain: bool = True
    """Neither a mask nor log-probabilities."""


@dataclass(slots=True, eq=False)
class _Step:
    """A step that was started, and what it is for."""

    plan: Plan
    batch: StepBatch
    flight: Flight | None
    start_s: float


@dataclass(slots=True, eq=False)
class _Open:
    """A request that has not ended."""

    request: Request
    choices: list[_Live]
    arrival_s: float
    started: bool = False
    error: str | None = None

    @property
    def finished(self) -> bool:
        if len(self.choices) == 1:
            return self.choices[0].sequence.status is Status.FINISHED
        return all(live.sequence.status is Status.FINISHED for live in self.choices)

    def usage(self) -> Usage:
        first = self.choices[0].sequence
        count = first.num_output
        if len(self.choices) > 1:
            count = sum(live.sequence.num_output for live in self.choices)
        return Usage(
            prompt_tokens=first.num_prompt,
            completion_tokens=count,
            cached_tokens=first.cached_tokens,
        )


class EngineCore:
    """Requests, scheduler and sampling around a function that computes logits."""

    def __init__(
        self,
        run: Run,
        scheduler: Scheduler,
        *,
        eos_token_ids: Sequence[int],
        tokenizer: object | None = None,
        counters: Counters | None = None,
        start: Start | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self.scheduler, self.tokenizer = run, scheduler, tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self.counters = counters or Counters()
        self.clock = clock
        self.requests: dict[str, _Open] = {}
        self.ahead: _Step | None = None
        """Started before it was asked for."""
        self.used_ahead = 0
        self._order = 0
        self._last_end_s = 0.0
        drafts = scheduler.config.speculate_tokens > 0
        scheduler.drafter = self._draft if drafts else None
        self.start = None if drafts else start

    # ---- requests ----------------------------------------------------------------------------

    def add(self, request: Request, max_tokens: int, arrival_s: float | None = None) -> None:
        """Queue a checked request. A mask factory that raises ends it at its first step."""
        choices = sequences_of(request, self._order, max_tokens)
        self._order += len(choices)
        arrival_s = self.clock() if arrival_s is None else arrival_s
        opened = _Open(request, [self._live(each) for each in choices], arrival_s)
        self.scheduler.add(choices)
        self.requests[request.request_id] = opened

    def _live(self, sequence: Choice) -> _Live:
        params = sequence.params
        seed = secrets.randbits(62) if params.seed is None else params.seed
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= self.eos_token_ids
        state = SamplingState(
            params=params,
            seed=seed,
            choice=sequence.index,
            prompt_ids=sequence.request.prompt_ids,
            stop_ids=tuple(sorted(stops)),
        )
        if sequence.request.mask is not None:
            try:
                state.mask = sequence.request.mask()
            except Exception as error:  # of the caller's grammar: it ends this request alone
                state.mask = _Refusing(f"{type(error).__name__}: {error}")
        text = TextStream(
            self.tokenizer,
            params.stop,
            skip_special_tokens=params.skip_special_tokens,
            include_stop=params.include_stop,
        )
        drafts = self.scheduler.drafter is not None and state.stateless
        plain = state.mask is None and params.logprobs is None
        return _Live(sequence, state, text, Lookup() if drafts else None, is_plain=plain)

    def abort(
        self, request_id: str, reason: FinishReason = "abort", error: str | None = None
    ) -> RequestOutput | None:
        """End a request in whatever state; None where there is none."""
        opened = self.requests.get(request_id)
        if opened is None:
            return None
        opened.error = error
        ended = self.scheduler.abort(request_id, reason)
        deltas = [self._closing(self._of(opened, sequence)) for sequence in ended]
        return self._output(opened, sorted(deltas, key=lambda delta: delta.index))

    def abort_all(self, reason: FinishReason, error: str | None = None) -> list[RequestOutput]:
        """End everything."""
        return self._abort_each(list(self.requests), reason, error)

    def abort_running(self, reason: FinishReason, error: str | None = None) -> list[RequestOutput]:
        """End what has begun to be computed; everything, where nothing has."""
        begun = {sequence.request.request_id for sequence in self.scheduler.running}
        return self._abort_each(sorted(begun) or list(self.requests), reason, error)

    def _abort_each(
        self, names: Sequence[str], reason: FinishReason, error: str | None
    ) -> list[RequestOutput]:
        ended = [self.abort(name, reason, error) for name in names]
        return [output for output in ended if output is not None]

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def oldest_arrival_s(self) -> float | None:
        """When the oldest unfinished request came."""
        return min((opened.arrival_s for opened in self.requests.values()), default=None)

    def next_deadline_s(self) -> float | None:
        """When the next request runs out of time."""
        limits = [
            opened.arrival_s + opened.request.deadline_s
            for opened in self.requests.values()
            if opened.request.deadline_s is not None
        ]
        return min(limits, default=None)

    # ---- a step ------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Compute one step; what it brought each request."""
        outputs = self._expire()
        step, self.ahead = self.ahead, None
        if step is None:
            plan = self.scheduler.schedule()
            if not plan.works:
                return outputs
            start_s = self.clock()
            self._count_started(plan.works, start_s)
            step = self._blind(plan, None, start_s)
            if step is None:
                rows = [row for work in plan.works if work.samples for row in self._rows(work)]
                batch = StepBatch.of(plan, greedy=all(row.takes_likeliest for row in rows))
                step = _Step(plan, batch, None, start_s)
                return outputs + self._finish(step, self._sampled(batch, rows))
        else:
            self.used_ahead += 1
        assert step.flight is not None
        self.ahead = self._start_next(step)
        return outputs + self._finish(step, Sampled(step.flight.tokens()))

    def _sampled(self, batch: StepBatch, rows: Sequence[Row]) -> Sampled:
        found = self.run(batch)
        if isinstance(found, list):
            return Sampled(found)
        return sample(found, rows) if rows else Sampled([])

    def _blind(self, plan: Plan, sources: Sequence[int] | None, start_s: float) -> _Step | None:
        """A step that is started and not waited for; None where it is to be run."""
        if self.start is None or not plan.is_single:
            return None
        states = [self._live_of(work.sequence).state for work in plan.works]
        if not all(state.is_blind for state in states):
            return None
        greedy = all(state.plain for state in states)
        draws = None
        if not greedy:
            places = [work.start + 1 - work.sequence.num_prompt for work in plan.works]
            draws = draws_of(states, places)
        batch = StepBatch.singles(plan, greedy=greedy)
        flight = self.start(batch, sources, draws)
        return None if flight is None else _Step(plan, batch, flight, start_s)

    def _start_next(self, step: _Step) -> _Step | None:
        """The step after one that runs, started; None where its tokens are to be seen first."""
        plan = self.scheduler.ahead(step.plan)
        if plan is None:
            return None
        row_of = {work.sequence.order: row for row, work in enumerate(step.plan.works)}
        sources = [row_of[work.sequence.order] for work in plan.works]
        return self._blind(plan, sources, self.clock())

    def _finish(self, step: _Step, sampled: Sampled) -> list[RequestOutput]:
        """Take a step's tokens, where their sequences still want them."""
        now_s = self.clock()
        deltas: dict[str, list[Delta]] = {}
        place = new_tokens = 0
        for work in step.plan.works:
            if not work.samples:
                self.scheduler.commit(work, [])
                continue
            if step.flight is None or self.scheduler.is_due(work):
                chosen, delta = self._advance(work, sampled, place, now_s)
                deltas.setdefault(work.sequence.request.request_id, []).append(delta)
                new_tokens += len(chosen)
            place += 1 + len(work.draft)
        outputs = [self._output(self.requests[name], found) for name, found in deltas.items()]
        # Steps overlap: each counts from the end of the one before.
        seconds = now_s - max(step.start_s, self._last_end_s)
        self._last_end_s = now_s
        self.counters.step(step.batch, new_tokens, now_s, seconds)
        return outputs

    def _rows(self, work: Work) -> list[Row]:
        state = self._live_of(work.sequence).state
        if not work.draft and state.plain and state.params.logprobs is None:
            return [Row(state, ())]
        output = work.sequence.output_ids
        return [Row(state, output + list(work.draft[:n])) for n in range(len(work.draft) + 1)]

    def _advance(
        self, work: Work, sampled: Sampled, place: int, now_s: float
    ) -> tuple[list[int], Delta]:
        """Take a sequence's chosen tokens: those of the draft that hold, and one more."""
        live = self._live_of(work.sequence)
        sequence = work.sequence
        if live.is_plain and not work.draft:
            token_id = sampled.token_ids[place]
            piece, reason = self._ends(live, token_id, sequence.num_output + 1)
            return [token_id], self._taken(work, live, [token_id], piece, reason, now_s)
        chosen: list[int] = []
        text: list[str] = []
        told: list[TokenLogprob] = []
        reason: FinishReason | None = None
        for number in range(1 + len(work.draft)):
            error = sampled.errors.get(place + number)
            token_id = sampled.token_ids[place + number]
            error = error or self._accept(live, token_id)
            if error is not None:
                self.requests[sequence.request.request_id].error = error
                reason = "error"
                break
            chosen.append(token_id)
            logprob = sampled.logprobs[place + number] if sampled.logprobs else None
            if logprob is not None:
                told.append(logprob)
            piece, reason = self._ends(live, token_id, sequence.num_output + len(chosen))
            text.append(piece)
            if reason is not None or work.draft[number : number + 1] != (token_id,):
                break
        if work.draft:
            self.counters.drafted(len(work.draft), max(0, len(chosen) - 1))
        delta = self._taken(work, live, chosen, "".join(text), reason, now_s)
        return chosen, delta if sequence.params.logprobs is None else replace(
            delta, logprobs=tuple(told)
        )

    def _taken(
        self,
        work: Work,
        live: _Live,
        chosen: list[int],
        text: str,
        reason: FinishReason | None,
        now_s: float,
    ) -> Delta:
        """Give a sequence its tokens, and end it where there is a reason."""
        sequence = live.sequence
        self.scheduler.commit(work, chosen)
        self._count_tokens(live, len(chosen), now_s)
        if reason is not None:
            stop_reason = sequence.stop_reason
            self.scheduler.finish(sequence, reason)
            self._count_finished(live, reason, now_s)
            if stop_reason is None:
                text += live.text.flush()
        return Delta(
            index=sequence.index,
            token_ids=tuple(chosen),
            text=text,
            finish_reason=reason,
            stop_reason=sequence.stop_reason,
        )

    @staticmethod
    def _accept(live: _Live, token_id: int) -> str | None:
        """Tell the grammar; why it failed, or None."""
        if live.state.mask is None:
            return None
        try:
            if live.state.mask.accept(token_id):
                return None
        except Exception as error:  # of the caller's grammar: it ends this request alone
            return f"{type(error).__name__}: {error}"
        return f"the grammar refuses token {token_id}"

    def _ends(self, live: _Live, token_id: int, count: int) -> tuple[str, FinishReason | None]:
        """(text of a new token, why the choice ends with it or None)."""
        sequence, params = live.sequence, live.sequence.params
        if token_id in live.state.stop_ids and count > params.min_tokens:
            sequence.stop_reason = token_id
            piece = live.text.push(token_id)[0] if params.include_stop else ""
            return piece + live.text.flush(), "stop"
        piece, stop = live.text.push(token_id, may_stop=count >= params.min_tokens)
        if stop is not None:
            sequence.stop_reason = stop
            return piece, "stop"
        return piece, "length" if count >= sequence.max_tokens else None

    def _expire(self) -> list[RequestOutput]:
        now_s = self.clock()
        late = [
            name
            for name, opened in self.requests.items()
            if opened.request.deadline_s is not None
            and now_s - opened.arrival_s >= opened.request.deadline_s
        ]
        return self._abort_each(late, "deadline", None)

    # ---- books -------------------------------------------------------------------------------

    def _live_of(self, sequence: Choice) -> _Live:
        return self.requests[sequence.request.request_id].choices[sequence.index]

    @staticmethod
    def _of(opened: _Open, sequence: Choice) -> _Live:
        return opened.choices[sequence.index]

    def _closing(self, live: _Live) -> Delta:
        """The last delta of a choice that was ended from outside."""
        reason = live.sequence.finish_reason
        assert reason is not None
        self._count_finished(live, reason, self.clock())
        return Delta(index=live.sequence.index, text=live.text.flush(), finish_reason=reason)

    def _output(self, opened: _Open, deltas: list[Delta]) -> RequestOutput:
        finished = opened.finished
        if finished:
            del self.requests[opened.request.request_id]
        return RequestOutput(
            request_id=opened.request.request_id,
            deltas=tuple(deltas),
            finished=finished,
            usage=opened.usage(),
            error=opened.error,
        )

    def _draft(self, sequence: Choice, most: int) -> list[int]:
        lookup = self._live_of(sequence).lookup
        return [] if lookup is None else lookup.propose(sequence.token_ids, most)

    def _count_started(self, works: Sequence[Work], now_s: float) -> None:
        for work in works:
            opened = self.requests[work.sequence.request.request_id]
            if not opened.started:
                opened.started = True
                self.counters.started(now_s - opened.arrival_s, len(opened.request.prompt_ids))

    def _count_tokens(self, live: _Live, count: int, now_s: float) -> None:
        if not count:
            return
        if live.last_token_s is None:
            opened = self.requests[live.sequence.request.request_id]
            self.counters.first_token(now_s - opened.arrival_s)
            count -= 1
        if count:
            since = now_s - (now_s if live.last_token_s is None else live.last_token_s)
            self.counters.tokens_after(since / count, count)
        live.last_token_s = now_s

    def _count_finished(self, live: _Live, reason: FinishReason, now_s: float) -> None:
        arrival_s = self.requests[live.sequence.request.request_id].arrival_s
        self.counters.finished(reason, now_s - arrival_s)


class _Refusing:
    """In the place of a grammar that could not be made."""

    def __init__(self, why: str) -> None:
        self.why = why

    def allowed(self, bitmask: object) -> bool:
        raise ValueError(self.why)

    def accept(self, token_id: int) -> bool:
        raise ValueError(self.why)
