"""The engine behind its thread: streams, full queues, aborts in every state, failures, reloads."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

from ridgeline.engine.async_engine import AsyncEngine
from ridgeline.engine.errors import DrainingError, EngineDeadError, QueueFullError, ReloadError
from ridgeline.engine.limits import Limits
from ridgeline.engine.llm import LLM, EngineConfig
from ridgeline.engine.params import SamplingParams
from tests.engine.conftest import tiny_decoder, write_model

LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def run(test, config: EngineConfig | None = None, **options):
    """Run an async test on an engine and close it."""

    async def main():
        engine = AsyncEngine(LLM(tiny_decoder(), config), **options)
        try:
            await asyncio.wait_for(test(engine), 300)
        finally:
            await engine.close()
        engine.llm.core.scheduler.pool.check([])
        assert not engine._reserved and not engine._reserved_tokens

    asyncio.run(main())


async def collect(stream) -> tuple[list[int], str | None, object]:
    tokens, reason, last = [], None, None
    async for output in stream:
        last = output
        for delta in output.deltas:
            tokens += delta.token_ids
            reason = delta.finish_reason or reason
    return tokens, reason, last


def slow_down(engine) -> None:
    """A step takes a while: a long request is not over before the test's next line."""
    working = engine.llm.core.run

    def run(batch):
        time.sleep(0.02)
        return working(batch)

    engine.llm.core.run = run


async def idle(engine) -> None:
    while engine._reserved:
        await asyncio.sleep(0.005)


def test_streams_are_what_generate_gives():
    async def test(engine):
        prompts = [[i + 1] * (i + 1) for i in range(6)]
        found = await asyncio.gather(*(collect(engine.add_request(p, SHORT)) for p in prompts))
        want = LLM(tiny_decoder()).generate(prompts, SHORT)
        assert [tokens for tokens, _, _ in found] == [w.choices[0].token_ids for w in want]
        assert {reason for _, reason, _ in found} == {"length"}
        last = found[2][2]
        assert last.finished and last.usage.prompt_tokens == 3
        assert last.usage.completion_tokens == 8
        stats = engine.stats()
        assert stats.finished["length"] == 6 and stats.generation_tokens == 48
        assert stats.ttft_s.count == 6 and stats.inter_token_s.count == 42
        assert stats.queue_s.count == 6 and stats.prompt_tokens == 21
        assert stats.bytes_per_s > 0 and stats.bandwidth_share > 0 and stats.tokens_per_s > 0

    run(test)


def test_a_full_queue_says_so_at_the_call():
    limits = Limits(max_queue_requests=2, max_queue_tokens=150)

    async def test(engine):
        slow_down(engine)
        first = engine.add_request([1], LONG)
        with pytest.raises(QueueFullError) as full:  # by tokens: 101 + 101
            engine.add_request([1], LONG)
        assert 1 <= full.value.retry_after_s <= 60
        second = engine.add_request([1], SHORT)
        with pytest.raises(QueueFullError, match="the queue is full"):  # by requests
            engine.add_request([1], SHORT)
        with pytest.raises(QueueFullError):
            await engine.embed([[1]])
        assert engine.stats().rejected == 3
        await asyncio.gather(collect(first), collect(second))
        assert len(await engine.embed([[1]])) == 1

    run(test, EngineConfig(limits=limits))


def test_a_queue_that_outlasts_a_request_is_full_too():
    """Its deadline would come first: it is told so at once, and what is there goes on."""

    async def test(engine):
        slow_down(engine)
        streams = [engine.add_request([1], LONG, deadline_s=60.0) for _ in range(4)]
        while not (engine.llm.core.scheduler.waiting and engine.llm.counters.busy_rate()):
            await asyncio.sleep(0.005)
        with pytest.raises(
            QueueFullError, match=r"tokens are to come first, .* is 0\.01 s"
        ) as full:
            engine.add_request([1], SHORT, deadline_s=0.01)
        assert 1 <= full.value.retry_after_s <= 60 and engine.stats().rejected == 1
        patient = engine.add_request([1], SHORT, deadline_s=600.0)
        streams.append(engine.add_request([1], SHORT))  # without a deadline
        found = await asyncio.gather(*map(collect, [*streams, patient]))
        assert all(found)

    run(test, EngineConfig(max_num_seqs=2))


def test_aborts_closed_cancelled_and_dropped_streams():
    async def test(engine):
        slow_down(engine)
        kept = asyncio.create_task(collect(engine.add_request([5], SHORT)))
        by_name = engine.add_request([1], LONG, request_id="mine")
        with pytest.raises(ValueError, match="request_id must be new"):
            engine.add_request([1], LONG, request_id="mine")
        assert engine.abort("mine") and not engine.abort("other")
        assert (await collect(by_name))[1] == "abort"
        closed = engine.add_request([2], LONG)
        async for _ in closed:
            await closed.aclose()
        waiting = asyncio.create_task(collect(engine.add_request([3], LONG)))
        await asyncio.sleep(0)
        waiting.cancel()
        dropped = engine.add_request([4], LONG)
        del dropped
        gc.collect()
        await idle(engine)
        stats = engine.stats()
        assert stats.finished["abort"] == 4 and stats.kv_pages_used == 0
        assert len((await kept)[0]) == 8

    run(test)


def test_a_deadline_ends_a_request():
    async def test(engine):
        _, reason, _ = await collect(engine.add_request([1], LONG, deadline_s=1e-6))
        assert reason == "deadline" and engine.stats().finished["deadline"] == 1
        with pytest.raises(ValueError, match="deadline_s must be above 0"):
            engine.add_request([1], LONG, deadline_s=0)

    run(test)


def test_drain_waits_then_aborts():
    async def test(engine):
        stream = engine.add_request([1], SHORT)
        task = asyncio.create_task(collect(stream))
        assert await engine.drain(30) and (await task)[1] == "length"
        with pytest.raises(DrainingError):
            engine.add_request([1], SHORT)
        assert engine.health().state == "draining" and not engine.health().ok

    run(test)

    async def late(engine):
        slow_down(engine)
        task = asyncio.create_task(collect(engine.add_request([1], LONG)))
        await asyncio.sleep(0)
        assert not await engine.drain(0.0) and (await task)[1] == "abort"

    run(late)


class Broken:
    def __init__(self, where):
        self.where = where

    def allowed(self, bitmask):
        if self.where == "allowed":
            raise RuntimeError("broken")
        return False

    def accept(self, token_id):
        return self.where != "accept"


def test_a_broken_grammar_ends_its_request_alone():
    async def test(engine):
        def refuse():
            raise RuntimeError("no grammar")

        bad = [refuse, lambda: Broken("allowed"), lambda: Broken("accept")]
        streams = [engine.add_request([1], SHORT, mask=mask) for mask in bad]
        good = engine.add_request([1], SHORT, mask=lambda: Broken("nowhere"))
        for stream, words in zip(streams, ("no grammar", "broken", "refuses"), strict=True):
            tokens, reason, last = await collect(stream)
            assert (tokens, reason) == ([], "error") and words in last.error
        assert (await collect(good))[1] == "length"

    run(test)


def test_a_failing_step_ends_its_requests_then_the_engine():
    async def test(engine):
        working = engine.llm.core.run
        engine.llm.core.run = lambda batch: 1 / 0
        _, reason, last = await collect(engine.add_request([1], SHORT))
        assert reason == "error" and "ZeroDivisionError" in last.error
        engine.llm.core.run = working
        assert (await collect(engine.add_request([1], SHORT)))[1] == "length"
        assert engine.health().state == "ready"
        engine.llm.core.run = lambda batch: 1 / 0
        for _ in range(3):
            assert (await collect(engine.add_request([1], SHORT)))[1] == "error"
        while engine.health().state != "dead":
            await asyncio.sleep(0.005)
        assert "ZeroDivisionError" in engine.health().reason
        with pytest.raises(EngineDeadError):
            engine.add_request([1], SHORT)

    run(test)


def test_health_tells_a_stall():
    async def test(engine):
        assert engine.health().ok and engine.health().oldest_request_age_s == 0
        working, gate = engine.llm.core.run, asyncio.Event()

        def slow(batch):
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
            return working(batch)

        loop = asyncio.get_running_loop()
        engine.llm.core.run = slow
        task = asyncio.create_task(collect(engine.add_request([1], SHORT)))
        while engine.health().state != "stalled":
            await asyncio.sleep(0.01)
        assert engine.health().oldest_request_age_s > 0.05 and not engine.health().ok
        gate.set()
        assert (await task)[1] == "length" and engine.health().state == "ready"

    run(test, stall_after_s=0.05)


def test_reload_keeps_requests(tmp_path):
    new, other = write_model(tmp_path / "new", 2), write_model(tmp_path / "x", num_layers=3)

    async def test(engine):
        task = asyncio.create_task(collect(engine.add_request([1, 2, 3], LONG)))
        await engine.reload(new)
        tokens, reason, _ = await task
        assert (len(tokens), reason) == (100, "length") and engine.stats().reloads == 1
        after = (await collect(engine.add_request([1, 2, 3], SHORT)))[0]
        assert after == LLM(new).generate([[1, 2, 3]], SHORT)[0].choices[0].token_ids
        with pytest.raises(ReloadError, match="another num_layers"):
            await engine.reload(other)
        assert engine.health().state == "ready"

    run(test)


def test_steps_go_on_between_an_embeddings_batches():
    """A large embedding request stops nobody, and ends where nobody waits for it."""

    async def test(engine):
        done: list[str] = []
        working, embed = engine.llm.core.run, engine.llm.embed

        def run(batch):
            done.append("step")
            time.sleep(0.01)  # the long request is not over before the embedding begins
            return working(batch)

        def embedded(prompts, pooling):
            done.append("embed")
            return embed(prompts, pooling)

        engine.llm.core.run, engine.llm.embed = run, embedded
        prompts = [[i + 1] * 16 for i in range(12)]
        stream = asyncio.create_task(collect(engine.add_request([1], LONG)))
        found = await engine.embed(prompts)
        assert found == embed(prompts) and (await stream)[1] == "length"
        first, last = done.index("embed"), len(done) - 1 - done[::-1].index("embed")
        assert done.count("embed") == 6 and done[first:last].count("step") >= 5
        done.clear()
        left = asyncio.create_task(engine.embed(prompts))
        while "embed" not in done:
            await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert not engine._reserved and done.count("embed") < 6

    run(test, EngineConfig(max_step_tokens=32))


def test_a_failing_step_ends_what_it_held_alone():
    async def test(engine):
        working, calls = engine.llm.core.run, []

        def run(batch):
            calls.append(batch)
            return 1 / 0 if len(calls) == 1 else working(batch)

        engine.llm.core.run = run
        held, waiting = (engine.add_request([1 + i], SHORT) for i in range(2))
        assert (await collect(held))[1] == "error"
        assert (await collect(waiting))[1] == "length" and engine.health().state == "ready"

    run(test, EngineConfig(max_num_seqs=1))


def test_a_request_that_cannot_be_queued_is_told_alone():
    async def test(engine):
        add = engine.llm.core.add

        def refused(request, *more):
            if request.request_id == "bad":
                raise RuntimeError("no room in the books")
            add(request, *more)

        engine.llm.core.add = refused
        streams = [engine.add_request([1], SHORT, request_id=name) for name in ("a", "bad", "b")]
        with pytest.raises(RuntimeError, match="no room"):
            await collect(streams[1])
        assert [(await collect(streams[i]))[1] for i in (0, 2)] == ["length"] * 2

    run(test)
