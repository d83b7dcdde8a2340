"""Perplexity and model distance against the textbook formulas on whole logits."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from ridgeline.core.text import wiki_split
from ridgeline.nn import perplexity as module
from ridgeline.nn.decoder import Decoder
from ridgeline.nn.hf import load_pretrained
from ridgeline.nn.perplexity import compare, perplexity, windows_of
from ridgeline.nn.tokenizer import Tokenizer


@pytest.fixture
def model(config) -> Decoder:
    return Decoder(dataclasses.replace(config, init_std=0.2))


@pytest.fixture
def token_ids():
    return torch.randint(0, 101, (5 * 32 + 7,))


@pytest.mark.parametrize("slice_tokens", [256, 31, 10, 1])
def test_equals_cross_entropy_of_whole_windows(model, token_ids, slice_tokens, monkeypatch):
    monkeypatch.setattr(module, "SLICE_TOKENS", slice_tokens)
    rows = token_ids[:160].view(5, 32)
    with torch.no_grad():
        logits = model(rows)[:, :-1].double()
    expected = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    found = perplexity(model, token_ids, window=32)
    assert found.nll == pytest.approx(float(expected), abs=1e-6)
    assert found.ppl == pytest.approx(math.exp(float(expected)), rel=1e-6)
    assert (found.tokens, found.windows, found.window) == (155, 5, 32)
    assert found.seconds > 0
    assert perplexity(model, token_ids.tolist(), window=32).nll == found.nll


def test_max_windows_takes_the_first(model, token_ids):
    two = perplexity(model, token_ids, window=32, max_windows=2)
    assert two.nll == perplexity(model, token_ids[:64], window=32).nll
    assert (two.windows, two.tokens) == (2, 62)
    assert two.nll != perplexity(model, token_ids[64:128], window=32).nll


@pytest.mark.parametrize("slice_tokens", [256, 7])
def test_compare_equals_the_formulas(model, token_ids, slice_tokens, monkeypatch):
    monkeypatch.setattr(module, "SLICE_TOKENS", slice_tokens)
    other = Decoder(model.config)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
        rows = token_ids[:160].view(5, 32)
        p = model(rows)[:, :-1].double().log_softmax(-1).flatten(0, 1)
        q = other(rows)[:, :-1].double().log_softmax(-1).flatten(0, 1)
    found = compare(model, other, token_ids, window=32)
    expected = float(F.kl_div(q, p, reduction="batchmean", log_target=True))
    assert found.kl == pytest.approx(expected, rel=1e-4) and found.kl > 1e-3
    agreement = float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert found.top1_agreement == pytest.approx(agreement) and 0 < agreement < 1
    assert found.tokens == 155


def test_a_model_agrees_with_itself(model, token_ids):
    found = compare(model, model, token_ids, window=32, max_windows=1)
    assert (found.kl, found.top1_agreement, found.tokens) == (0.0, 1.0, 31)


def test_bad_windows(model):
    with pytest.raises(ValueError, match="text must have at least one window of 64.*got 63 tokens"):
        perplexity(model, [1] * 63, window=64)
    with pytest.raises(ValueError, match="window must be at least 2 tokens, got 1"):
        windows_of([1] * 63, 1)
    with pytest.raises(ValueError, match="sequence must be at most 96 tokens"):
        perplexity(model, [1] * 97, window=97)


@pytest.mark.weights
def test_real_perplexity_equals_transformers(smollm):
    """One window of the test part, fp32, against transformers' logits."""
    from transformers import LlamaForCausalLM

    ids = torch.tensor(Tokenizer(smollm).encode(wiki_split().test[:4000]))[None, :256]
    found = perplexity(load_pretrained(smollm, dtype=torch.float32), ids, window=256)
    with torch.no_grad():
        theirs = LlamaForCausalLM.from_pretrained(smollm, dtype=torch.float32)
        logits = theirs(ids).logits[0, :-1].double()  # their fp32 loss itself is off by 2e-5
    assert found.nll == pytest.approx(float(F.cross_entropy(logits, ids[0, 1:])), abs=1e-6)
    assert 5 < found.ppl < 40
