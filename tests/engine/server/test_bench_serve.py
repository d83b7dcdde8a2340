"""The load generator of `ridgeline bench serve` against a server."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ridgeline.cli.bench import BenchServeConfig, bench
from ridgeline.core.errors import UserError

from .conftest import CONFIG, running
from .fake import FakeEngine

SMALL = {"requests": 6, "input_tokens": 8, "output_tokens": 5, "warmup": 1}


@pytest.mark.parametrize("load", [{"concurrency": 3}, {"rate": 200.0}])
def test_counts_and_times(server, engine, tmp_path, load):
    engine.tokens_per_s = 200
    config = BenchServeConfig(url=server.address, **SMALL, **load, out=tmp_path)
    result = bench(config)
    assert (result["answered"], result["requests"], result["failed"]) == (6, 6, {})
    assert result["output_tokens"] == 30 and result["prompt_tokens"] == 48
    assert 5 <= result["ttft_ms"]["p50"] <= result["latency_ms"]["max"]
    assert 4 <= result["inter_token_ms"]["p50"] < 2000
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert len(kept["requests"]) == 6 and kept["result"]["model"] == "echo"
    assert all(1 <= len(row["arrivals_s"]) <= 5 for row in kept["requests"])  # half characters wait
    drawing = (tmp_path / "bench.svg").read_text()
    assert drawing.startswith("<svg") and "time to the first token" in drawing
    assert len(engine.seen) == 7 and {len(ids) for ids, *_ in engine.seen} == {8}


def test_overload_is_counted(tokenizer_folder, monkeypatch):
    monkeypatch.setenv("RIDGELINE_API_KEY", "the-key-of-this-test")
    engine = FakeEngine(tokenizer_folder, tokens_per_s=3, capacity=2)
    config = replace(CONFIG, api_keys=("the-key-of-this-test",))
    with running(engine, config) as started:
        load = BenchServeConfig(url=started.address, **SMALL, concurrency=6)
        result = bench(load)
        assert result["answered"] >= 2 and result["refused"] == 6 - result["answered"] > 0
        monkeypatch.setenv("RIDGELINE_API_KEY", "another-key-here")
        with pytest.raises(UserError, match="answered 401"):
            bench(load)
