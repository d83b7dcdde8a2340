"""Large greedy steps that are started before the tokens of the step before are read: the tokens of
an engine that waits, across pages, ends, stops, aborts, arrivals, preemption and new weights; and
the numbers of a step against ones that are written anew."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.device_forward import DeviceForward
from ridgeline.engine.graphs import AHEAD_SIZE, DecodeGraphs
from ridgeline.engine.llm import LLM
from ridgeline.engine.numbers import FRONT, StepNumbers
from ridgeline.engine.paged import Span, positions_of, slots_of
from ridgeline.engine.params import SamplingParams
from ridgeline.engine.runner import StepBatch
from ridgeline.engine.weights import weights_of
from tests.engine.conftest import tiny_decoder

COUNT = AHEAD_SIZE + 4


def prompt(number: int) -> list[int]:
    return [(7 * i * i + 3 * number) % 250 for i in range(3 + 2 * number)]


def greedy(count: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **more)


def llm_of(model, *, ahead: bool = True, **config) -> LLM:
    """An engine on this CPU whose large decode steps are recorded and started ahead, or none is."""
    sizes = {"max_num_seqs": 16, "page_tokens": 8, "num_pages": 120} | config
    llm = LLM(model, EngineConfig(**sizes))
    llm.runner.host_decoder = None
    if ahead:
        use_graphs(llm)
    return llm


def use_graphs(llm: LLM) -> None:
    runner = llm.runner
    runner.forward = DeviceForward(runner.weights, runner.max_model_len)
    runner.graphs = DecodeGraphs(runner)


@pytest.fixture(scope="module")
def model():
    return tiny_decoder()


def run(llm: LLM, script) -> tuple[dict[str, list[int]], dict[str, str | None]]:
    """Tokens and reasons by request; script(step, llm) before each step."""
    found: dict[str, list[int]] = {}
    reasons: dict[str, str | None] = {}
    for step in range(300):
        for output in script(step, llm) or []:
            reasons[output.request_id] = output.deltas[0].finish_reason
        if step > 90 and not llm.core.has_work:
            break
        for output in llm.core.step():
            for delta in output.deltas:
                found.setdefault(output.request_id, []).extend(delta.token_ids)
                reasons[output.request_id] = delta.finish_reason
        llm.core.scheduler.pool.check([s.pages for s in llm.core.scheduler.unfinished()])
    assert not llm.core.requests
    return found, reasons


def add(llm: LLM, number: int, params: SamplingParams) -> None:
    request = llm.request(prompt(number % 12), params, request_id=f"r{number}")
    llm.core.add(request, params.max_tokens)


def test_tokens_are_those_of_steps_that_wait(model):
    """Lengths differ, so rows end one after the other; every row crosses pages of 8."""

    def script(step, llm):
        for number in range(COUNT) if step == 0 else ():
            add(llm, number, greedy(30 + 2 * number))

    llm = llm_of(model)
    got = run(llm, script)
    assert got == run(llm_of(model, ahead=False), script)
    assert llm.core.used_ahead > 25
    assert llm.core.used_ahead <= llm.runner.flights.started


def test_stops_aborts_and_arrivals(model):
    """A stop token is seen one step late and its next token dropped; an abort falls between a
    step's start and its end; who comes starts after the step that runs."""
    plain = run(llm_of(model, ahead=False), lambda step, llm: _load(step, llm, {}))
    stops = {number: tokens[10 + number] for number, tokens in _by_number(plain[0]).items()}

    def script(step, llm):
        _load(step, llm, stops)
        if step == 12:
            return [llm.core.abort("r2")]
        if step in (20, 21):
            add(llm, 20 + step, greedy(15))
        return []

    llm = llm_of(model)
    (got, reasons), (want, wanted) = run(llm, script), run(llm_of(model, ahead=False), script)
    cut = len(got.pop("r2")), len(want.pop("r2"))
    assert 0 < cut[0] <= cut[1]
    assert got == want and reasons == wanted
    assert reasons["r2"] == "abort" and "stop" in reasons.values()
    assert llm.core.used_ahead > 10


def _load(step: int, llm: LLM, stops: dict[int, int]) -> None:
    for number in range(COUNT) if step == 0 else ():
        stop = (stops[number],) if number in stops and number % 3 == 0 else ()
        add(llm, number, greedy(40, stop_token_ids=stop))


def _by_number(found: dict[str, list[int]]) -> dict[int, list[int]]:
    return {int(name[1:]): tokens for name, tokens in found.items()}


def test_preemption_waits_for_the_step_that_runs(model):
    """Pages for about half of the load: sequences give theirs back and come again."""

    def script(step, llm):
        for number in range(COUNT) if step == 0 else ():
            add(llm, number, greedy(45))

    llm = llm_of(model, num_pages=70)
    got = run(llm, script)
    assert got == run(llm_of(model, ahead=False), script)
    assert llm.core.scheduler.preemptions > 0 and llm.core.used_ahead > 0


@pytest.mark.parametrize("seed", range(2))
def test_random_loads(model, seed):
    """Arrivals at random steps, some sampled, some aborted before they end."""

    def script(step, llm):
        draw = random.Random(1000 * seed + step)
        if step == 0 or (step < 60 and draw.random() < 0.2):
            for number in range(COUNT if step == 0 else 2):
                params = greedy(draw.randint(*((20, 40) if step == 0 else (2, 30))))
                if step and draw.random() < 0.3:
                    params = SamplingParams(seed=1, max_tokens=9, ignore_eos=True)
                add(llm, 100 * step + number, params)
        return []

    llm = llm_of(model)
    assert run(llm, script) == run(llm_of(model, ahead=False), script)
    assert llm.core.used_ahead > 5


def test_new_weights_drop_the_step_that_runs(model):
    llm, other = llm_of(model), weights_of(tiny_decoder(seed=5))
    names = [f"r{number}" for number in range(COUNT)]
    for number in range(COUNT):
        add(llm, number, greedy(30))
    got: dict[str, list[int]] = {name: [] for name in names}
    swapped: dict[str, int] = {}
    while llm.core.has_work:
        for output in llm.core.step():
            got[output.request_id] += [t for d in output.deltas for t in d.token_ids]
        if not swapped and len(got["r0"]) == 12:
            assert llm.core.ahead is not None
            swapped = {name: len(tokens) for name, tokens in got.items()}
            llm.swap(other)
            use_graphs(llm)
    assert all(len(tokens) == 30 for tokens in got.values())
    fresh = llm_of(tiny_decoder(seed=5), ahead=False)
    for name in names[:3]:
        cut = swapped[name]
        start = prompt(int(name[1:])) + got[name][:cut]
        made = fresh.generate([start], greedy(30 - cut))[0]
        assert made.choices[0].token_ids == got[name][cut:]


BLIND = {
    "temperature": {},
    "top_k": {"top_k": 5, "top_p": 0.7},
    "min_p with top_k": {"top_k": 512, "min_p": 0.01},
}


@pytest.mark.parametrize("count", [1, COUNT])
def test_sampled_rows_are_those_of_steps_that_wait(model, count):
    """Every kind of draw and greedy rows in one batch; of one sequence, one kind alone."""
    kinds = [*BLIND.values(), {"temperature": 0}]
    params = [
        SamplingParams(**{"seed": 3 + n, "max_tokens": 15 + n, "ignore_eos": True} | kinds[n % 4])
        for n in range(count)
    ]
    prompts = [prompt(number) for number in range(count)]
    llm, plain = llm_of(model), llm_of(model, ahead=False)
    want = [made.choices[0].token_ids for made in plain.generate(prompts, params)]
    assert [made.choices[0].token_ids for made in llm.generate(prompts, params)] == want
    assert llm.core.used_ahead > 8


@pytest.mark.parametrize(
    "more", [{"top_p": 0.9}, {"logprobs": 1}, {"presence_penalty": 0.5}, {"min_tokens": 9}]
)
def test_what_needs_the_host_waits(model, more):
    """Log-probabilities, tokens that are penalized or forbidden, top-p without top-k."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, **more)
    prompts = [prompt(number) for number in range(COUNT)]
    llm = llm_of(model)
    want = [
        made.choices[0].token_ids for made in llm_of(model, ahead=False).generate(prompts, params)
    ]
    assert [made.choices[0].token_ids for made in llm.generate(prompts, params)] == want
    assert llm.core.used_ahead == 0


def test_what_is_not_plain_waits(model):
    """Drafts and small greedy batches."""
    prompts = [prompt(number) for number in range(COUNT)]
    llm, plain = llm_of(model), llm_of(model, ahead=False)
    llm.generate(prompts[:AHEAD_SIZE], greedy(20))
    drafting = llm_of(model, speculate_tokens=2)
    texts = [made.choices[0].token_ids for made in drafting.generate(prompts, greedy(20))]
    assert texts == [made.choices[0].token_ids for made in plain.generate(prompts, greedy(20))]
    assert llm.core.used_ahead == drafting.core.used_ahead == 0


class _Cache:
    page_tokens, num_pages = 8, 50


def test_numbers_are_those_written_anew():
    """Rows that advance, take pages, change their sequence, or become padding."""
    draw, size, width = random.Random(0), 8, 6
    kept = StepNumbers(size, width, _Cache(), pinned=False)
    live: list[list] = []
    written = 0
    for _ in range(120):
        live = [each for each in live if draw.random() > 0.05]
        while len(live) < draw.randint(3, size):
            live.append([[draw.randrange(50)], draw.randint(1, 8)])
        for each in live:
            each[1] += 1
            if each[1] > 8 * len(each[0]):
                each[0] += [draw.randrange(50)]
        live = [each for each in live if len(each[0]) < width]
        spans = [Span(row, 1, pages, keys) for row, (pages, keys) in enumerate(live)]
        ids = [draw.randrange(99) for _ in spans]
        kept.fill(spans, ids, size)
        for row, (span, token_id) in enumerate(zip(spans, ids, strict=True)):
            position = span.num_keys - 1
            slot = span.pages[position // 8] * 8 + position % 8
            assert kept.numpy[row, :5].tolist() == [token_id, position, slot, span.num_keys, 1]
            pages = kept.numpy[row, FRONT : FRONT + len(span.pages)]
            assert pages.tolist() == span.pages
        for row in range(len(spans), size):
            assert kept.numpy[row, :5].tolist() == [0, 0, 400, 1, 0]
            assert kept.numpy[row, FRONT] == 50
        written += len(spans)
    assert kept.pages_written < written / 2


def test_slots_and_positions():
    spans = [Span(0, 1, [4], 3), Span(1, 5, [2, 9], 12), Span(6, 1, [0, 1], 9), Span(7, 0, [7], 1)]
    want = [
        (p, span.pages[p // 8] * 8 + p % 8)
        for span in spans
        for p in range(span.num_keys - span.rows, span.num_keys)
    ]
    assert positions_of(spans).tolist() == [p for p, _ in want]
    assert slots_of(spans, 8).tolist() == [slot for _, slot in want]
    assert positions_of([]).dtype == slots_of([], 8).dtype == np.int64


def test_eager_device_steps_are_the_hosts(model):
    """The batches that a GPU gets (padded rows, padded chunks), computed here."""
    prompts = [prompt(number) for number in range(COUNT)]
    llm = llm_of(model, ahead=False, max_step_tokens=40)
    want = [m.choices[0].token_ids for m in llm.generate(prompts, greedy(6))]
    device = llm_of(model, ahead=False, max_step_tokens=40)
    device.runner.on_gpu = True
    device.runner.forward = DeviceForward(device.runner.weights, device.runner.max_model_len)
    assert [m.choices[0].token_ids for m in device.generate(prompts, greedy(6))] == want
    spans = [Span(0, 1, [3], 5), Span(1, 4, [1, 2], 9)]
    batch = device.runner._device_batch(StepBatch([1, 2, 3, 4, 5], spans, 1, [0, 4]))
    assert batch.chunk_seqlens.shape[0] % 16 == 0 and batch.max_rows % 16 == 0
    assert batch.decode_table_BU.stride() == device.runner.numbers.host[:, FRONT:].stride()
