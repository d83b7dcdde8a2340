"""`ridgeline bench serve`: bodies, percentiles, and its errors; the rest is tested at the server
(tests/engine/server/test_bench_serve.py)."""

from __future__ import annotations

import pytest

from ridgeline.cli import main as cli
from ridgeline.cli.bench import BenchServeConfig, gaps_ms, make_bodies, percentiles, show, summarize
from ridgeline.cli.bench_client import Answer
from ridgeline.core.errors import UserError


def _bodies(**options):
    return make_bodies(BenchServeConfig(**options), "m", 1000)


def test_prompts_have_their_lengths_and_share_prefixes():
    bodies = _bodies(requests=6, warmup=0, input_tokens=10, prefix_tokens=5, prefix_groups=2)
    prompts = [body["prompt"] for body in bodies]
    assert {len(prompt) for prompt in prompts} == {15}
    assert prompts[0][:5] == prompts[2][:5] == prompts[4][:5] != prompts[1][:5] == prompts[3][:5]
    assert len({tuple(prompt) for prompt in prompts}) == 6
    assert all(100 <= token < 1000 for prompt in prompts for token in prompt)
    assert all(body["ignore_eos"] and body["max_tokens"] == 64 for body in bodies)
    assert bodies == _bodies(
        requests=6, warmup=0, input_tokens=10, prefix_tokens=5, prefix_groups=2
    )
    assert bodies != _bodies(requests=6, warmup=0, input_tokens=10, prefix_tokens=5, seed=1)


@pytest.mark.parametrize(("lengths", "low", "high"), [("uniform", 50, 150), ("lognormal", 1, 2000)])
def test_length_distributions(lengths, low, high):
    bodies = _bodies(requests=400, warmup=0, input_tokens=100, output_tokens=20, lengths=lengths)
    sizes = [len(body["prompt"]) for body in bodies]
    assert low <= min(sizes) and max(sizes) <= high and len(set(sizes)) > 30
    assert 90 < sum(sizes) / len(sizes) < 110


def test_percentiles_are_nearest_ranks():
    found = percentiles([float(i) for i in range(1, 101)])
    assert (found["p50"], found["p90"], found["p99"], found["max"]) == (50.0, 90.0, 99.0, 100.0)
    assert found["mean"] == 50.5
    assert percentiles([7.0])["p99"] == 7.0 and percentiles([])["max"] == 0.0


def test_a_summary():
    fine = Answer(
        status=200, finish_reason="length", first_s=0.1, end_s=0.5, arrivals_s=[0.1, 0.3, 0.5],
        prompt_tokens=10, output_tokens=3, cached_tokens=4,
    )  # fmt: skip
    refused = Answer(status=429, error="full", retry_after="1")
    assert [round(gap) for gap in gaps_ms(fine)] == [200, 200]
    result = summarize([fine, fine, refused, Answer()], 2.0)
    assert (result["answered"], result["refused"], result["failed"]) == (2, 1, {"no answer": 1})
    assert result["ttft_ms"]["p50"] == pytest.approx(100)
    assert result["time_per_output_token_ms"]["mean"] == pytest.approx(200)
    assert (result["output_tokens_per_s"], result["requests_per_s"]) == (3.0, 1.0)
    text = show(result)
    assert "2 of 4 requests answered in 2.0 s (1 refused with 429, 1 failed)" in text
    assert "8 of 20 prompt tokens from the prefix cache" in text


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"requests": 0}, "requests must be at least 1, got 0"),
        ({"rate": 0.0}, "rate must be above 0"),
        ({"spread": 2.0}, r"spread must lie in \[0, 1\]"),
        ({"url": "localhost:8000"}, "url must start with http"),
    ],
)
def test_bad_input(options, part):
    with pytest.raises(ValueError, match=part):
        BenchServeConfig(**options)


def test_an_unknown_vocabulary():
    with pytest.raises(UserError, match="does not say its vocab_size; give --vocab-size"):
        make_bodies(BenchServeConfig(), "m", None)


def test_no_server(capsys):
    assert cli.main(["bench", "serve", "--url", "http://127.0.0.1:9"]) == 1
    assert "a server must listen at http://127.0.0.1:9, got" in capsys.readouterr().err
    assert cli.main(["bench"]) == 2
