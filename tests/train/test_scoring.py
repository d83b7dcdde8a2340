"""Scores of a text: the loss's own, and in batch-invariant mode the engine's to the last bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ridgeline.engine.llm import LLM, EngineConfig
from ridgeline.engine.paged import Span
from ridgeline.engine.runner import StepBatch
from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.decoder import Decoder
from ridgeline.train.scoring import log_probabilities

SHAPE = DecoderConfig(
    vocab_size=211,
    hidden_size=64,
    intermediate_size=160,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_seqlen=64,
    init_std=0.2,
)
TEXT = [(31 * i * i + 7 * i) % 211 for i in range(41)]


@pytest.fixture
def model():
    return made(SHAPE, "cpu")


def made(shape: DecoderConfig, device: str) -> Decoder:
    model = Decoder(shape, seed=1, dtype=torch.bfloat16, device=device)
    return model.eval().requires_grad_(False)


def engines(llm: LLM, chunk: int) -> torch.Tensor:
    """Scores of TEXT[1:] from steps of so many tokens."""
    logits = []
    for start in range(0, len(TEXT) - 1, chunk):
        ids = TEXT[start : min(start + chunk, len(TEXT) - 1)]
        rows = list(range(len(ids)))
        pages = list(range(-(-64 // llm.runner.cache.page_tokens)))
        span = Span(0, len(ids), pages, start + len(ids))
        found = llm.runner.run(StepBatch(ids, [span], int(len(ids) == 1), rows, wide_rows=rows))
        assert isinstance(found, torch.Tensor) and found.dtype == torch.float32
        logits.append(found)
    wide = torch.cat(logits)
    wanted = torch.tensor(TEXT[1:], device=wide.device)[:, None]
    return (wide - wide.logsumexp(-1, keepdim=True)).gather(-1, wanted)[:, 0]


@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_the_engine_says_the_same_however_it_came_by_its_tokens(model, chunk):
    own = log_probabilities(model, TEXT, batch_invariant=True, max_len=64)
    llm = LLM(model, EngineConfig(max_model_len=64, max_num_seqs=2, batch_invariant=True))
    torch.testing.assert_close(engines(llm, chunk), own, rtol=0, atol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_so_it_is_on_a_gpu(chunk):
    wide = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 640, "init_std": 0.1}
    model = made(replace(SHAPE, **wide), "cuda")
    own = log_probabilities(model, TEXT, batch_invariant=True, max_len=64)
    llm = LLM(
        model, EngineConfig(max_model_len=64, max_num_seqs=2, num_pages=8, batch_invariant=True)
    )
    torch.testing.assert_close(engines(llm, chunk), own, rtol=0, atol=1e-5)
    half = log_probabilities(model, TEXT[:20], batch_invariant=True, max_len=64)
    torch.testing.assert_close(half, own[:19], rtol=0, atol=0)


def test_company_changes_nothing(model):
    whole = log_probabilities(model, TEXT, batch_invariant=True)
    for end in (2, 17, 40):
        part = log_probabilities(model, TEXT[:end], batch_invariant=True)
        assert torch.equal(part, whole[: end - 1])
    plain = log_probabilities(model, TEXT)
    assert 1e-4 < (plain - whole).square().mean().sqrt() < 0.1  # the same but for roundings


def test_scores_are_those_of_the_logits(model):
    wide = Decoder(SHAPE, seed=1)
    logits = wide(torch.tensor([TEXT]))[0, :-1].log_softmax(-1)
    wanted = logits.gather(-1, torch.tensor(TEXT[1:])[:, None])[:, 0]
    for invariant in (False, True):
        found = log_probabilities(wide, TEXT, batch_invariant=invariant)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("tokens", [[], [3], [1] * 65])
def test_refusals(model, tokens):
    with pytest.raises(ValueError, match="scoring: token_ids must be 2 to 64 tokens, got"):
        log_probabilities(model, tokens)
