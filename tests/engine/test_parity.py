"""Engine and trainer say the same log-probabilities of the same tokens (issue: within 0.01 nats RMS
in bf16, 1e-5 in fp32), on SmolLM2's real weights and text."""

from __future__ import annotations

import pytest
import torch

from ridgeline.cli.stages.weights import model_folder
from ridgeline.engine.llm import LLM, EngineConfig
from ridgeline.engine.params import SamplingParams
from ridgeline.nn.decoder import Decoder
from ridgeline.nn.hf import load_pretrained
from ridgeline.nn.tokenizer import Tokenizer
from ridgeline.parallel.loss import token_logprobs

TEXTS = (
    "The sky appears blue because molecules of air scatter short waves of light",
    "To bake bread, mix flour, water, salt and yeast, knead the dough and let it",
)
NEW = 12


def trainers(model: Decoder, text: list[int], first: int) -> torch.Tensor:
    """Log-probabilities of text[first:] as the trainer's loss has them."""
    ids = torch.tensor([text])
    with torch.no_grad():
        x_PC = model.head_input(model.hidden(ids))[0, first - 1 : -1]
    return token_logprobs(x_PC, model.head_linear().weight, ids[0, first:])


def gaps(model: Decoder, prompts: list[list[int]]) -> torch.Tensor:
    """Engine's minus trainer's, of what the engine generates in a batch."""
    llm = LLM(model, EngineConfig(max_model_len=128, max_num_seqs=4))
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=NEW, logprobs=0, ignore_eos=True)
    found = []
    for made in llm.generate(prompts, params):
        choice = made.choices[0]
        told = torch.tensor([each.logprob for each in choice.logprobs or []])
        own = trainers(model, made.prompt_ids + choice.token_ids, len(made.prompt_ids))
        found.append(told - own)
    return torch.cat(found)


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


@pytest.mark.weights
@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)], ids=["fp32", "bf16"]
)
def test_smollm2(dtype, most):
    folder = model_folder()
    prompts = [Tokenizer(folder).encode(text) for text in TEXTS]
    model = load_pretrained(folder, dtype=dtype).eval().requires_grad_(False)
    assert rms(gaps(model, prompts)) < most
