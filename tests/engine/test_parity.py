"""Engine and trainer say the same log-probabilities of the same tokens, on SmolLM2's real weights
and text: in fp32 within 1e-5 nats RMS, in bf16 within 0.01 where both compute the same rows at once
(the whole text; or token by token, the trainer through its cache): they round at the same places.

Rows computed in other company have sums in another order, and in bf16 that flips roundings; the
trainer differs from itself so, and the engine token by token from the whole text no more than that.
"""

from __future__ import annotations

import pytest
import torch

from ridgeline.cli.stages.weights import model_folder
from ridgeline.engine.llm import LLM, EngineConfig
from ridgeline.engine.paged import Span
from ridgeline.engine.runner import StepBatch
from ridgeline.nn.cache import KVCache
from ridgeline.nn.decoder import Decoder
from ridgeline.nn.hf import load_pretrained
from ridgeline.nn.tokenizer import Tokenizer
from ridgeline.parallel.loss import token_logprobs

TEXT = "The sky appears blue because molecules of air scatter short waves of light"
PAGES = list(range(4))


def trainers(model: Decoder, text: list[int], first: int = 1) -> torch.Tensor:
    """Log-probabilities of text[first:] as the trainer's loss has them."""
    ids = torch.tensor([text])
    with torch.no_grad():
        x_PC = model.head_input(model.hidden(ids))[0, first - 1 : -1]
    return token_logprobs(x_PC, model.head_linear().weight, ids[0, first:])


def engines(llm: LLM, text: list[int], *, chunk: int) -> torch.Tensor:
    """Log-probabilities of text[1:] from steps of so many tokens."""
    logits = []
    for start in range(0, len(text) - 1, chunk):
        ids = text[start : min(start + chunk, len(text) - 1)]
        rows = list(range(len(ids)))
        span = Span(0, len(ids), PAGES, start + len(ids))
        batch = StepBatch(ids, [span], int(len(ids) == 1), rows, wide_rows=rows)
        found = llm.runner.run(batch)
        assert isinstance(found, torch.Tensor) and found.dtype == torch.float32
        logits.append(found)
    wide = torch.cat(logits)
    logprobs = wide - wide.logsumexp(-1, keepdim=True)
    return logprobs.gather(-1, torch.tensor(text[1:])[:, None])[:, 0]


def trainers_cached(model: Decoder, text: list[int]) -> torch.Tensor:
    """Log-probabilities of text[1:] from the trainer's model, token by token through its cache."""
    cache = KVCache(model.config, capacity=len(text), dtype=model.head_linear().weight.dtype)
    ids = torch.tensor([text])
    with torch.no_grad():
        rows = [model.hidden(ids[:, k : k + 1], cache=cache)[0] for k in range(len(text) - 1)]
        x_PC = torch.cat([model.head_input(row) for row in rows])
    return torch.cat(
        [
            token_logprobs(x, model.head_linear().weight, ids[0, k + 1 : k + 2])
            for k, x in enumerate(x_PC.split(1))
        ]
    )


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


@pytest.mark.weights
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_smollm2(dtype):
    folder = model_folder()
    text = Tokenizer(folder).encode(TEXT)
    model = load_pretrained(folder, dtype=dtype).eval().requires_grad_(False)
    llm = LLM(model, EngineConfig(max_model_len=64, max_num_seqs=2))
    own = trainers(model, text)
    assert -8 < float(own.mean()) < -0.5  # it reads
    assert rms(engines(llm, text, chunk=len(text)) - own) <= 1e-5
    stepwise, cached = engines(llm, text, chunk=1), trainers_cached(model, text)
    assert rms(stepwise - cached) <= (0.01 if dtype == torch.bfloat16 else 1e-5)
    noise = rms(cached - own)
    assert rms(stepwise - own) <= max(1e-5, 1.5 * noise), (rms(stepwise - own), noise)
