"""Many requests at once: output tokens a second of the engine and of Transformers' continuous
batching, on the same requests (bench_engine.py runs both and writes the rows).

Requests come all at once, prompts and outputs of uniformly drawn lengths, greedy, ends of sequence
ignored: every output has exactly the length that was asked for. Time is from the first request to
the last token; tokens count when their step has ended.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ridgeline.core.arch import Ceilings
from ridgeline.engine.llm import LLM
from ridgeline.engine.params import SamplingParams
from ridgeline.nn.config import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Prompts and how many tokens each is to get."""

    prompts: list[list[int]]
    new_tokens: list[int]

    @staticmethod
    def drawn(count: int, shortest: int, longest: int, vocab_size: int, seed: int = 0) -> Load:
        """Uniform lengths of both, uniform token ids."""
        draw = random.Random(seed)
        sizes = [draw.randint(shortest, longest) for _ in range(count)]
        prompts = [[draw.randrange(1, vocab_size) for _ in range(size)] for size in sizes]
        return Load(
            prompts=prompts, new_tokens=[draw.randint(shortest, longest) for _ in range(count)]
        )

    @staticmethod
    def shrinking(count: int, longest: int, sizes: Sequence[int], step_tokens: int) -> Load:
        """A load that is over soon: at most `count` requests that end so that the batch stays at
        every size for a few steps, and all graphs are recorded; of the longest prompts there are
        more than fit in a step, so that some are computed beside tokens."""
        sizes = sorted({min(size, count) for size in sizes})
        draw = random.Random(1)
        many = min(count, 2 + step_tokens // longest)
        lengths = [longest] * many + [7] * (count - many)
        prompts = [[draw.randrange(1, 250) for _ in range(size)] for size in lengths]
        lives = [8 + 5 * sum(size > number for size in sizes) for number in range(count)]
        return Load(prompts=prompts, new_tokens=[min(life, longest) for life in lives])

    def floor_s(self, shape: DecoderConfig, weight_bytes: float, ceilings: Ceilings) -> float:
        """Seconds at the ceilings, one kind of work after the other, keys in 16 bits: prompts by
        their arithmetic; steps of all unfinished requests by the larger of weights and arithmetic;
        keys and values by their bytes. A batch cannot be faster without doing two kinds at once."""
        flops, bytes_s = 1e12 * ceilings.tflops("bfloat16"), 1e9 * ceilings.read_gbps
        token = 2.0 * shape.matmul_params()
        head = 2.0 * shape.vocab_size * shape.hidden_size  # of a prompt's last token alone
        keys = 4.0 * shape.num_layers * shape.num_heads * shape.head_dim
        kept = shape.kv_bytes_per_token(2)
        seconds = 0.0
        ends: Counter[int] = Counter(self.new_tokens)
        for prompt, count in zip(self.prompts, self.new_tokens, strict=True):
            size = len(prompt)
            seconds += ((token - head) * size + head + keys * size * size / 2) / flops
            after = count - 1  # the first token is the prompt's
            seconds += kept * (after * (size + 1) + after * (after - 1) / 2) / bytes_s
        rows = len(self.new_tokens) - ends[1]
        for step in range(2, max(self.new_tokens) + 1):
            seconds += max(weight_bytes / bytes_s, rows * token / flops)
            rows -= ends[step]
        return seconds

    def described(self) -> dict[str, Any]:
        """For a row."""
        sizes = [len(prompt) for prompt in self.prompts]
        return {
            "requests": len(sizes),
            "prompt_tokens": sum(sizes),
            "shortest": min(*sizes, *self.new_tokens),
            "longest": max(*sizes, *self.new_tokens),
        }


@dataclass(slots=True, kw_only=True)
class Run:
    """What came out of a load."""

    seconds: float
    tokens: int
    finished: int
    firsts_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    def values(self) -> dict[str, Any]:
        """For a row."""
        found: dict[str, Any] = {
            "tokens_per_s": round(self.tokens / self.seconds, 1),
            "output_tokens": self.tokens,
            "seconds": round(self.seconds, 2),
            "finished": self.finished,
        }
        if self.firsts_s:
            found["ttft_ms_p50"] = round(1e3 * statistics.median(self.firsts_s), 2)
            found["itl_ms_p50"] = round(1e3 * statistics.median(self.gaps_s), 3)
        return found


def ours(llm: LLM, load: Load) -> Run:
    """The load through an engine, all requests queued at once."""
    start_s = time.perf_counter()
    for prompt, count in zip(load.prompts, load.new_tokens, strict=True):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        llm.core.add(llm.request(prompt, params), count)
    last: dict[str, float] = {}
    run = Run(seconds=0.0, tokens=0, finished=0)
    while llm.core.has_work:
        outputs = llm.core.step()
        now_s = time.perf_counter()
        for output in outputs:
            run.tokens += sum(len(delta.token_ids) for delta in output.deltas)
            run.finished += output.finished
            before_s = last.get(output.request_id)
            if before_s is None:
                run.firsts_s.append(now_s - start_s)
            else:
                run.gaps_s.append(now_s - before_s)
            last[output.request_id] = now_s
    run.seconds = time.perf_counter() - start_s
    assert run.tokens == sum(load.new_tokens) and run.finished == len(load.prompts)
    return run


def transformers_model(
    shape: DecoderConfig, device: str, dtype: torch.dtype, attention: str = "sdpa"
) -> Any:
    """Transformers' Llama of a shape with random weights and an attention by its name."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_seqlen,
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=shape.tie_embeddings,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention
        )
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, shape.init_std)
        for module in model.modules():
            if hasattr(module, "rope_init_fn"):  # its buffers were made on meta
                frequency, _ = module.rope_init_fn(config, device)
                module.inv_freq = module.original_inv_freq = frequency
    return model.eval()


SETTINGS = ("use_cuda_graph", "use_async_batching", "block_size", "num_blocks", "max_batch_tokens")
SETTINGS += ("max_requests_per_batch", "max_blocks_per_request", "default_compile_level")


def theirs(model: Any, load: Load, limit_s: float) -> tuple[Run, dict[str, Any]]:
    """The load through Transformers' continuous batching, warmed up, with its attention and the
    settings that it chose for this load; stopped after limit_s, when what unfinished requests have
    so far counts too."""
    manager = _manager(model, load)
    manager.warmup()
    chosen = manager.continuous_batching_config
    used = {"attention": str(model.config._attn_implementation)}
    used["settings"] = {name: getattr(chosen, name, None) for name in SETTINGS}
    manager.start()
    run = Run(seconds=0.0, tokens=0, finished=0)
    try:
        manager.add_request([1, 2, 3], max_new_tokens=4)  # what is made once is not timed
        if _next(manager, time.perf_counter() + limit_s) is None:
            raise RuntimeError(f"transformers: no answer within {limit_s:g} s")
        start_s = time.perf_counter()
        asked = {
            manager.add_request(list(prompt), max_new_tokens=count): count
            for prompt, count in zip(load.prompts, load.new_tokens, strict=True)
        }
        while asked:
            result = _next(manager, start_s + limit_s)
            if result is None:
                run.tokens += _unfinished(manager)
                break
            if result.request_id not in asked:
                continue  # the one before the clock, once more
            count = len(result.generated_tokens)
            assert count == asked.pop(result.request_id), f"{count} tokens"
            run.finished += 1
            run.tokens += count
        run.seconds = time.perf_counter() - start_s
    finally:
        # A flush would compute what is left, with the attention that stop() puts back.
        manager.stop(block=True, timeout=10.0, hard_stop=True)
    return run, used


def _manager(model: Any, load: Load) -> Any:
    import transformers
    from transformers.generation.continuous_batching.utils import WorkloadHints

    settings = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=max(load.new_tokens), eos_token_id=-1, pad_token_id=0
    )
    hints = WorkloadHints(
        max_prompt_length=max(map(len, load.prompts)),
        max_generated_length=max(load.new_tokens),
        num_requests=len(load.prompts),
    )
    sizes: dict[str, int] = {}
    if model.device.type == "cpu":  # where it would take 90 % of the main memory
        sizes = {"num_blocks": 32, "max_batch_tokens": 64}
    return model.init_continuous_batching(
        generation_config=settings,
        continuous_batching_config=transformers.ContinuousBatchingConfig(**sizes),
        workload_hints=hints,
    )


def _next(manager: Any, end_s: float) -> Any:
    """The next finished request; None when the time is over or its thread ended."""
    while time.perf_counter() < end_s and manager.is_running():
        result = manager.get_result(timeout=0.2)
        if result is not None and result.is_finished():
            if result.error:
                raise RuntimeError(f"transformers: {result.error}")
            return result
    return None


def _unfinished(manager: Any) -> int:
    """Tokens of requests that are still running."""
    scheduler = manager.batch_processor.scheduler
    return sum(len(state.generated_tokens) for state in list(scheduler.active_requests.values()))
