"""The load of the throughput benchmark: drawn alike each time, answered to the last token."""

from __future__ import annotations

import pytest

from benchmarks.engine.throughput import Load, ours
from ridgeline.core.arch import Ceilings
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.graphs import EAGER_STEPS
from ridgeline.engine.llm import LLM
from tests.engine.conftest import tiny_decoder


def test_a_load_is_answered_whole():
    load = Load.drawn(9, 3, 20, 250)
    assert load == Load.drawn(9, 3, 20, 250) != Load.drawn(9, 3, 20, 250, seed=1)
    told = load.described()
    assert told["requests"] == 9 and 3 <= told["shortest"] < told["longest"] <= 20
    run = ours(LLM(tiny_decoder(), EngineConfig(max_num_seqs=4)), load)
    assert (run.finished, run.tokens) == (9, sum(load.new_tokens))
    assert len(run.firsts_s) == 9 and len(run.gaps_s) == run.tokens - 9
    assert run.values()["tokens_per_s"] > 0 and run.seconds >= max(run.firsts_s)


def test_the_warm_up_stays_at_every_size():
    """Three steps at least of each size (the third is recorded), though not all start at once, as
    their prompts do not fit in one step."""
    sizes = (1, 2, 4, 8)
    load = Load.shrinking(8, 40, sizes, 80)
    lengths = [len(prompt) for prompt in load.prompts]
    assert lengths.count(40) == 4 and sum(lengths) > 80
    llm = LLM(tiny_decoder(), EngineConfig(max_num_seqs=8, max_step_tokens=80))
    seen: list[tuple[int, bool]] = []
    run = llm.core.run

    def watched(batch):
        seen.append((len(batch.spans), batch.decodes_only))
        return run(batch)

    llm.core.run = watched
    ours(llm, load)
    assert all(seen.count((size, True)) > EAGER_STEPS for size in sizes)
    assert any(not decodes and count > 1 for count, decodes in seen[1:])


def test_the_floor_of_a_load():
    """By hand: two requests, of which one ends with the prompt's own token."""
    shape = tiny_decoder().config
    rates = {"read_gbps": 1e-9, "copy_gbps": 1e-9, "matmul_tflops": {"bfloat16": 1e-12}}
    unit = Ceilings(**rates, source="a byte and an operation a second")
    load = Load(prompts=[[1] * 10, [1] * 4], new_tokens=[3, 1])
    token, kept = 2 * shape.matmul_params(), shape.kv_bytes_per_token(2)
    head = 2 * shape.vocab_size * shape.hidden_size
    pairs = 4 * shape.num_layers * shape.num_heads * shape.head_dim * (100 + 16) / 2
    prompts = (token - head) * 14 + 2 * head + pairs
    keys = kept * (11 + 12)
    for weights in (0, 10 * token):
        steps = 2 * max(weights, token)
        assert load.floor_s(shape, weights, unit) == pytest.approx(prompts + keys + steps)
