"""Generation: equal to the cache-free loop, sampling as stated, stops, limits, counts."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ridgeline.nn.decoder import Decoder
from ridgeline.nn.generate import (
    GenerationStats,
    SamplingConfig,
    choose_token,
    generate_ids,
    generate_text,
)
from ridgeline.nn.hf import load_pretrained
from ridgeline.nn.tokenizer import Tokenizer

PROMPT = [5, 17, 99, 3]


@pytest.fixture
def model(config) -> Decoder:
    """Large weights: logits far apart, text that is not one token for ever."""
    return Decoder(dataclasses.replace(config, init_std=0.3, eos_token_ids=()))


def without_cache(model, prompt, count):
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_greedy_equals_the_cache_free_loop(model):
    expected = without_cache(model, PROMPT, 20)
    assert list(generate_ids(model, PROMPT, SamplingConfig(max_new_tokens=20))) == expected
    assert len(set(expected)) > 3


def test_stop_token_is_last_and_counted(model):
    expected = without_cache(model, PROMPT, 20)
    stop = expected[6]
    stats = GenerationStats()
    ids = list(
        generate_ids(model, PROMPT, SamplingConfig(max_new_tokens=20), stop_ids=[stop], stats=stats)
    )
    assert ids == expected[: expected.index(stop) + 1]
    assert (stats.finish_reason, stats.new_tokens) == ("stop", len(ids))
    eos_model = Decoder(dataclasses.replace(model.config, eos_token_ids=(stop,)))
    assert list(generate_ids(eos_model, PROMPT, SamplingConfig(max_new_tokens=20))) == ids


def test_stats_count_tokens_and_bytes(model):
    stats = GenerationStats()
    list(generate_ids(model, PROMPT, SamplingConfig(max_new_tokens=5), stats=stats))
    assert (stats.prompt_tokens, stats.new_tokens, stats.finish_reason) == (4, 5, "length")
    # four decode steps, which attend to 5, 6, 7 and 8 tokens
    assert stats.decode_bytes == sum(model.bytes_per_token(tokens) for tokens in (5, 6, 7, 8))
    assert stats.prefill_s > 0 and stats.decode_s > 0
    assert stats.decode_tokens_per_s == pytest.approx(4 / stats.decode_s)
    assert stats.decode_gbps == pytest.approx(stats.decode_bytes / stats.decode_s / 1e9)
    assert GenerationStats().decode_tokens_per_s == 0 == GenerationStats().decode_gbps


def frequencies(logits, sampling, draws=1500):
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(len(logits))
    for _ in range(draws):
        counts[choose_token(logits, sampling, generator)] += 1
    return counts / draws


LOGITS = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (dict(temperature=1.0), [0.5, 0.2, 0.15, 0.1, 0.05]),
        (dict(temperature=0.5), [0.25, 0.04, 0.0225, 0.01, 0.0025]),
        (dict(temperature=1.0, top_k=2), [0.5, 0.2, 0, 0, 0]),
        (dict(temperature=1.0, top_k=9), [0.5, 0.2, 0.15, 0.1, 0.05]),
        (dict(temperature=1.0, top_p=0.6), [0.5, 0.2, 0, 0, 0]),
        (dict(temperature=1.0, top_p=0.1), [1, 0, 0, 0, 0]),
        (dict(temperature=1.0, top_k=3, top_p=0.8), [0.5, 0.2, 0, 0, 0]),
        (dict(), [1, 0, 0, 0, 0]),
    ],
)
def test_sampling_frequencies(sampling, expected):
    expected = torch.tensor(expected, dtype=torch.float32)
    found = frequencies(LOGITS, SamplingConfig(**sampling))
    assert (found - expected / expected.sum()).abs().max() < 0.045
    assert ((found > 0) <= (expected > 0)).all()


def test_a_seed_repeats_a_text(model):
    def run(seed):
        sampling = SamplingConfig(max_new_tokens=12, temperature=1.5, seed=seed)
        return list(generate_ids(model, PROMPT, sampling))

    assert run(1) == run(1) != run(2)


def test_text_pieces_join_to_the_decoded_tokens(config, tokenizer_folder):
    tokenizer = Tokenizer(tokenizer_folder)
    model = Decoder(dataclasses.replace(config, vocab_size=360, init_std=0.3, eos_token_ids=()))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Grüße"}])
    sampling = SamplingConfig(max_new_tokens=16, temperature=1.0, seed=3)
    stop = [tokenizer.role_id("eos_token")]
    ids = list(generate_ids(model, tokenizer.encode(prompt), sampling, stop_ids=stop))
    text = "".join(generate_text(model, tokenizer, prompt, sampling))
    assert text == tokenizer.decode(ids) and text


def test_the_tokenizers_end_token_stops_too(config, tokenizer_folder):
    tokenizer = Tokenizer(tokenizer_folder)
    model = Decoder(dataclasses.replace(config, vocab_size=360, eos_token_ids=()))
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(0.01)
        model.model.embed_tokens.weight[tokenizer.role_id("eos_token")] = 1.0
    stats = GenerationStats()
    sampling = SamplingConfig(max_new_tokens=16)
    assert "".join(generate_text(model, tokenizer, "a", sampling, stats=stats)) == ""
    assert (stats.finish_reason, stats.new_tokens) == ("stop", 1)


@pytest.mark.parametrize(
    ("prompt", "count", "match"),
    [
        ([], 1, "generate: prompt must have at least one token, got 0"),
        ([101], 1, "hold tokens in 0 .. 100, got 101"),
        ([-1], 1, "hold tokens in 0 .. 100, got -1"),
        ([1] * 90, 7, r"fit in the model's context of 96 tokens, got 90 \+ 7"),
    ],
)
def test_bad_prompts_are_refused_at_the_call(model, prompt, count, match):
    with pytest.raises(ValueError, match=match):
        generate_ids(model, prompt, SamplingConfig(max_new_tokens=count))


def test_the_whole_context_can_be_filled(model):
    assert len(list(generate_ids(model, [1] * 90, SamplingConfig(max_new_tokens=6)))) == 6


@pytest.mark.parametrize(
    "options", [dict(max_new_tokens=0), dict(temperature=-1.0), dict(top_k=0), dict(top_p=0.0)]
)
def test_bad_sampling(options):
    with pytest.raises(ValueError, match=f"generate: {next(iter(options))} must"):
        SamplingConfig(**options)


@pytest.mark.weights
def test_real_answer(smollm):
    model = load_pretrained(smollm, dtype=torch.float32)
    tokenizer = Tokenizer(smollm)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}]
    )
    stats = GenerationStats()
    text = "".join(
        generate_text(model, tokenizer, prompt, SamplingConfig(max_new_tokens=20), stats=stats)
    )
    assert text == "The capital of France is Paris."
    assert stats.finish_reason == "stop"
