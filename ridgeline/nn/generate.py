"""Generation of one sequence: prefill, then token by token through the KV cache.

Each decode step reads every weight and the cached keys and values once; at one sequence it is bound
by those bytes, so its speed is told in tokens/s and in GB/s against the machine's read ceiling.
Greedy by default; temperature, top-k and nucleus sampling (Holtzman et al. 2019, arXiv 1904.09751)
draw from a generator of the given seed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ridgeline.core.errors import bad_value
from ridgeline.nn.cache import KVCache
from ridgeline.nn.decoder import Decoder
from ridgeline.nn.sampling import SamplingConfig
from ridgeline.nn.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True)
class GenerationStats:
    """Counts and times of one generation, filled while it runs."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    """Tokens chosen, a stop token included."""
    prefill_s: float = 0.0
    """Until the first token."""
    decode_s: float = 0.0
    """All steps after the first token."""
    decode_bytes: int = 0
    """Weights and cache that those steps read."""
    finish_reason: str = "length"
    """"stop" (a stop token) or "length"."""

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first over their time; 0 where there are none."""
        return (self.new_tokens - 1) / self.decode_s if self.decode_s else 0.0

    @property
    def decode_gbps(self) -> float:
        """Bytes read in decoding, GB/s."""
        return self.decode_bytes / self.decode_s / 1e9 if self.decode_s else 0.0


def choose_token(
    logits_V: torch.Tensor, sampling: SamplingConfig, generator: torch.Generator
) -> int:
    """The next token from logits of one position; on the CPU, fp32."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    scores = logits_V.float().cpu() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(scores):
        least = scores.topk(sampling.top_k).values[-1]
        scores = scores.masked_fill(scores < least, -torch.inf)
    probabilities = scores.softmax(-1)
    if sampling.top_p < 1:
        ordered, index = probabilities.sort(descending=True)
        before = ordered.cumsum(0) - ordered  # of the more likely ones: the first always stays
        probabilities = probabilities.index_fill(0, index[before >= sampling.top_p], 0.0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def generate_ids(
    model: Decoder,
    prompt_ids: Sequence[int],
    sampling: SamplingConfig,
    *,
    stop_ids: Sequence[int] | None = None,
    stats: GenerationStats | None = None,
) -> Iterator[int]:
    """Yield new token ids, a stop token last; stop_ids None: the model's eos tokens.

    Raises (at the call): ValueError for an empty prompt, a token outside the vocabulary, a prompt
    plus max_new_tokens beyond the model's context.
    """
    prompt = torch.as_tensor(list(prompt_ids), dtype=torch.int64)
    _check_prompt(model, prompt, sampling)
    stops = frozenset(model.config.eos_token_ids if stop_ids is None else stop_ids)
    return _generate(model, prompt, sampling, stops, stats or GenerationStats())


@torch.inference_mode()
def _generate(
    model: Decoder,
    prompt: torch.Tensor,
    sampling: SamplingConfig,
    stops: frozenset[int],
    stats: GenerationStats,
) -> Iterator[int]:
    assert model.model.norm is not None
    weight = model.model.norm.weight
    cache = KVCache(
        model.config,
        capacity=min(len(prompt) + sampling.max_new_tokens, model.config.max_seqlen),
        dtype=weight.dtype,
        device=weight.device,
    )
    generator = torch.Generator().manual_seed(sampling.seed)
    weight_bytes = 0
    kv_bytes = model.config.kv_bytes_per_token(weight.element_size())
    stats.prompt_tokens = len(prompt)
    start = time.perf_counter()
    ids = prompt[None].to(weight.device)
    for step in range(sampling.max_new_tokens):
        logits = model(ids, cache=cache, last_tokens=1)[0, -1]
        token = choose_token(logits, sampling, generator)
        now = time.perf_counter()
        stats.new_tokens += 1
        if step == 0:
            stats.prefill_s = now - start
            weight_bytes = model.weight_bytes()  # now that quantized linears chose what they read
        else:
            stats.decode_s += now - start
            stats.decode_bytes += weight_bytes + cache.length * kv_bytes
        if token in stops:
            stats.finish_reason = "stop"
            yield token
            return
        yield token
        start = time.perf_counter()  # the consumer's time is not ours
        ids = torch.tensor([[token]], device=weight.device)


def generate_text(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: SamplingConfig,
    *,
    add_special_tokens: bool = False,
    stats: GenerationStats | None = None,
) -> Iterator[str]:
    """Yield pieces of text as they are complete UTF-8; special tokens are left out.

    prompt: text as the model shall see it (Tokenizer.apply_chat_template makes it from a chat, with
    the special tokens in it); add_special_tokens: put around it what the tokenizer's post-processor
    says (a BOS, for many models), for a prompt that is plain text.
    Stops at the model's and the tokenizer's end tokens.
    Raises (at the call): ValueError as `generate_ids`.
    """
    stops = set(model.config.eos_token_ids)
    if (eos := tokenizer.role_id("eos_token")) is not None:
        stops.add(eos)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    ids = generate_ids(model, prompt_ids, sampling, stop_ids=sorted(stops), stats=stats)
    return _pieces(ids, tokenizer)


def _pieces(ids: Iterator[int], tokenizer: Tokenizer) -> Iterator[str]:
    stream = tokenizer.stream()
    for token_id in ids:
        if piece := stream.push(token_id):
            yield piece
    if piece := stream.flush():
        yield piece


def _check_prompt(model: Decoder, prompt: torch.Tensor, sampling: SamplingConfig) -> None:
    if not len(prompt):
        raise bad_value("generate", "prompt", "have at least one token", 0, "give some text")
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= model.config.vocab_size:
        raise bad_value(
            "generate",
            "prompt",
            f"hold tokens in 0 .. {model.config.vocab_size - 1}",
            low if low < 0 else high,
            "use the model's own tokenizer",
        )
    total = len(prompt) + sampling.max_new_tokens
    if total > model.config.max_seqlen:
        raise bad_value(
            "generate",
            "prompt and max_new_tokens",
            f"fit in the model's context of {model.config.max_seqlen} tokens",
            f"{len(prompt)} + {sampling.max_new_tokens}",
            "shorten the prompt or ask for fewer tokens",
        )
