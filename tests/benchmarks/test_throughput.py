"""The load of the throughput benchmark: drawn alike each time, answered to the last token."""

from __future__ import annotations

from benchmarks.engine.throughput import Load, ours
from ridgeline.engine.config import EngineConfig
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
