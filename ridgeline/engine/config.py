"""How an engine runs: dtypes, sizes of a step, memory of the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ridgeline.core.errors import bad_value
from ridgeline.engine.limits import Limits

MAX_RANKS = 64
KVDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of LLM and AsyncEngine; every None is chosen by the machine and the model."""

    dtype: str = "auto"
    """Of activations and plain weights: auto, float32, bfloat16, float16."""
    device: str = "auto"
    """auto, cpu, cuda."""
    kv_dtype: KVDtype = "auto"
    """Of cached keys and values; auto: the activations', fp8: half of 16 bits, with scales."""
    tensor_parallel: int = 1
    """Processes that share the model, a GPU each (or CPU processes); the first starts the others.
    Under torchrun its processes, whatever this says, which then must be 1 or their number."""
    max_model_len: int | None = None
    """Tokens of prompt plus output; None: the model's context, or what fits in the cache."""
    max_num_seqs: int | None = None
    """Sequences that run at a time; None: 64, on a CPU 16."""
    max_step_tokens: int | None = None
    """Tokens computed a step, prompts and outputs together; None: 2048, on a CPU 512."""
    memory_gib: float | None = None
    """Memory of the device that the engine may take, weights included; None: 90 % of a GPU's, on a
    CPU half of the main memory and no more cache than max_num_seqs full contexts."""
    num_pages: int | None = None
    """Pages of the KV cache; None: what the memory gives."""
    whole_cache: bool = False
    """Take the cache's memory at the start on a CPU too, not page by page as it is first used: a
    server's memory then is what its plan says from its first seconds on. A GPU's always is."""
    page_tokens: int | None = None
    """Tokens of a page; None: what the attention implementation likes."""
    prefix_cache: bool = True
    """Keep computed pages for later prompts that start alike."""
    batch_invariant: bool = False
    """A request's tokens depend on nothing but itself, bit for bit; slower."""
    speculate_tokens: int = 0
    """Tokens drafted by prompt lookup a step, 0 .. 16; same outputs, but for the last bits of sums
    in 16 bits (bit for bit in batch-invariant mode)."""
    cuda_graphs: bool = True
    """Record decode steps and replay them (a GPU)."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_step_tokens", "num_pages"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise bad_value("engine", name, "be a whole number >= 1", value, "raise it")
        ranks = self.tensor_parallel
        if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= MAX_RANKS:
            rule = f"be a whole number in 1 .. {MAX_RANKS}"
            raise bad_value("engine", "tensor_parallel", rule, ranks, "change it")
        if self.page_tokens is not None and self.page_tokens not in (8, 16, 32, 64, 128, 256):
            raise bad_value(
                "engine", "page_tokens", "be 8, 16, 32, .. 256", self.page_tokens, "change it"
            )
        if self.memory_gib is not None and not self.memory_gib > 0:
            raise bad_value("engine", "memory_gib", "be above 0", self.memory_gib, "raise it")
        if not 0 <= self.speculate_tokens <= 16:
            raise bad_value(
                "engine", "speculate_tokens", "lie in 0 .. 16", self.speculate_tokens, "change it"
            )
        if self.kv_dtype not in ("auto", "float32", "bfloat16", "float16", "fp8"):
            raise bad_value(
                "engine",
                "kv_dtype",
                "be auto, float32, bfloat16, float16 or fp8",
                repr(self.kv_dtype),
                "change it",
            )

    def seqs(self, on_gpu: bool) -> int:
        """max_num_seqs on a device."""
        return self.max_num_seqs or (64 if on_gpu else 16)

    def step_tokens(self, on_gpu: bool) -> int:
        """max_step_tokens on a device."""
        return self.max_step_tokens or max(2048 if on_gpu else 512, self.seqs(on_gpu))
