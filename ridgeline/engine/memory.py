"""Where the memory of an engine goes, before anything is loaded.

    weights + activations of the largest step + recorded graphs + pages of the cache <= memory

Everything but the cache is estimated from shapes; what is left becomes pages, and their number says
how many requests fit at a time. A model that does not fit is refused with what would make it fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from ridgeline.core.arch import Arch, detect
from ridgeline.core.dtypes import dtype_name, torch_dtype
from ridgeline.core.errors import UserError, bad_value
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.host_products import head_in_bags
from ridgeline.engine.load import choose_device, is_quantized, run_dtype
from ridgeline.engine.paged import FP8
from ridgeline.engine.weights import Shard
from ridgeline.kernels.w4a16.cpu import has_fast_bf16
from ridgeline.kernels.w4a16.cpu_bags import has_bags
from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.hf import load_config
from ridgeline.nn.invariant import page_tokens_of
from ridgeline.nn.tensorfile import TensorFolder
from ridgeline.quant.checkpoint import packed_layers, read_quantization

GIB = 2**30
GPU_SHARE = 0.9
CPU_SHARE = 0.5
GRAPH_BYTES = 96 * 2**20
"""Of the driver and the kernels' workspaces, beside each graph's own tensors."""
NUM_GRAPHS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The bytes of an engine and what they allow."""

    device: str
    dtype: str
    kv_dtype: str
    memory_bytes: int
    """That the engine may take."""
    weights_bytes: int
    activation_bytes: int
    """Of the largest step, logits included."""
    graph_bytes: int
    kv_bytes_per_token: int
    page_tokens: int
    num_pages: int
    max_model_len: int
    max_num_seqs: int
    max_step_tokens: int
    ranks: int = 1
    shares: tuple[str, ...] = ()
    """What each rank has of the model, in words."""

    @property
    def kv_bytes(self) -> int:
        return self.num_pages * self.page_tokens * self.kv_bytes_per_token

    def concurrency(self, tokens: int | None = None) -> int:
        """Requests of so many tokens (default: the longest) that fit in the cache and the batch."""
        pages = math.ceil((tokens or self.max_model_len) / self.page_tokens)
        return min(self.max_num_seqs, self.num_pages // max(1, pages))

    def lines(self) -> list[str]:
        """The plan in words."""
        tokens = self.num_pages * self.page_tokens
        each = "" if self.ranks == 1 else " on each rank"
        short = min(1024, self.max_model_len)
        return [
            *self.shares,
            f"device       {self.device}, {_gib(self.memory_bytes)} for the engine{each}",
            f"weights      {_gib(self.weights_bytes)}{each} ({self.dtype} activations)",
            f"activations  {_gib(self.activation_bytes)} for {self.max_step_tokens} tokens a step",
            f"graphs       {_gib(self.graph_bytes)}",
            f"KV cache     {_gib(self.kv_bytes)}: {self.num_pages:,} pages of {self.page_tokens} "
            f"tokens = {tokens:,} tokens at {self.kv_bytes_per_token / 1024:.1f} KiB "
            f"({self.kv_dtype})",
            f"requests     {self.concurrency()} of {self.max_model_len:,} tokens at a time, "
            f"{self.concurrency(short)} of {short:,} (at most {self.max_num_seqs})",
        ]


def plan(folder: Path | str, config: EngineConfig, ranks: int = 1) -> MemoryPlan:
    """The plan for a folder, from its config and file headers alone.

    Raises: UserError for a folder that is not a model, or a model that does not fit.
    """
    shape = load_config(folder)
    device = choose_device(config.device)
    dtype = torch_dtype(run_dtype(folder, config.dtype, device))
    if ranks > 1:
        check_ranks(folder, ranks, device)
    # The table of the embedding is whole on every rank, all else is split.
    table = shape.vocab_size * shape.hidden_size * dtype.itemsize
    whole = _weights_bytes(Path(folder), dtype, device) - (0 if shape.tie_embeddings else table)
    total = whole if ranks == 1 and shape.tie_embeddings else whole + ranks * table
    return plan_sizes(shape, total, dtype, device, config, ranks, packed=is_quantized(folder))


def check_ranks(folder: Path | str, ranks: int, device: torch.device) -> None:
    """Refuse what cannot be split before anything is loaded.

    Raises: ValueError where heads do not divide, UserError for more ranks than GPUs here.
    """
    shape = load_config(folder)
    for name in ("num_heads", "num_kv_heads", "intermediate_size"):
        Shard(ranks=ranks).split(name, getattr(shape, name))
    if device.type == "cuda" and ranks > torch.cuda.device_count():
        raise UserError(
            f"engine: tensor_parallel must be at most the {torch.cuda.device_count()} GPUs here, "
            f"got {ranks}; lower it, or quantize the model to 4 bits"
        )


def plan_sizes(
    shape: DecoderConfig,
    weights_bytes: int,
    dtype: torch.dtype,
    device: torch.device,
    config: EngineConfig,
    ranks: int = 1,
    *,
    packed: bool = False,
) -> MemoryPlan:
    """The plan for a model of known size; packed: it has 4-bit weights already.

    Raises: UserError where it does not fit.
    """
    arch, on_gpu = detect(device), device.type == "cuda"
    weights_bytes = math.ceil(weights_bytes / ranks)
    kv_dtype = kv_dtype_of(config, dtype, device)
    page_tokens = config.page_tokens or page_tokens_of(shape, dtype, device)
    kv_bytes = _kv_bytes_per_token(shape, kv_dtype) // ranks
    seqs, step_tokens = config.seqs(on_gpu), config.step_tokens(on_gpu)
    activations = _activation_bytes(shape, dtype, step_tokens, seqs)
    graphs = _graph_bytes(shape, dtype, seqs) if on_gpu and config.cuda_graphs else 0
    budget = _budget(arch, config, ranks)
    longest = min(config.max_model_len or shape.max_seqlen, shape.max_seqlen)
    wanted = seqs * math.ceil(longest / page_tokens)
    if config.num_pages is not None:
        num_pages = config.num_pages
    else:
        left = budget - weights_bytes - activations - graphs
        num_pages = max(0, left // (page_tokens * kv_bytes))
        if not on_gpu:
            num_pages = min(num_pages, wanted)
    fits = num_pages * page_tokens
    needed = config.max_model_len or min(longest, 512)
    if config.num_pages is not None and fits < (config.max_model_len or 0):
        raise bad_value(
            "engine",
            "num_pages",
            f"hold {needed} tokens in pages of {page_tokens}",
            num_pages,
            "raise it or lower max_model_len",
        )
    if config.num_pages is None and fits < min(needed, longest):
        sizes = (weights_bytes, activations + graphs, needed * kv_bytes)
        hints = _hints(budget, sizes, config, on_gpu=on_gpu, packed=packed)
        raise UserError(_does_not_fit(budget, sizes, hints))
    return MemoryPlan(
        device=f"{device.type} ({arch.device})",
        dtype=dtype_name(dtype),
        kv_dtype="fp8 with scales" if kv_dtype == FP8 else dtype_name(kv_dtype),
        memory_bytes=budget,
        weights_bytes=weights_bytes,
        activation_bytes=activations,
        graph_bytes=graphs,
        kv_bytes_per_token=kv_bytes,
        page_tokens=page_tokens,
        num_pages=num_pages,
        max_model_len=min(longest, fits),
        max_num_seqs=seqs,
        max_step_tokens=step_tokens,
        ranks=ranks,
        shares=_shares(shape, ranks),
    )


def kv_dtype_of(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The cache's dtype: the activations' own, or FP8, or fp32 on a CPU, which is taken by itself
    where that CPU attends for one sequence faster than in bf16.

    Raises: UserError for a cache in another dtype than these, and for FP8 where it cannot be
    batch-invariant.
    """
    if config.kv_dtype == "auto":
        emulated = dtype == torch.bfloat16 and device.type == "cpu" and not has_fast_bf16()
        return torch.float32 if emulated and not config.batch_invariant else dtype
    if config.kv_dtype == "fp8":
        if config.batch_invariant and device.type == "cuda":
            raise UserError(
                "engine: kv_dtype must not be fp8 with batch_invariant on a GPU, got both; "
                "choose one"
            )
        return FP8
    wanted = torch_dtype(config.kv_dtype)
    widened = wanted == torch.float32 and device.type == "cpu"
    if wanted != dtype and not widened:
        raise UserError(
            f"engine: kv_dtype must be fp8 or the activations' {dtype_name(dtype)}, got "
            f"{config.kv_dtype}; set dtype too"
        )
    return wanted


def _kv_bytes_per_token(shape: DecoderConfig, kv_dtype: torch.dtype) -> int:
    scales = 4 * 2 * shape.num_layers * shape.num_kv_heads if kv_dtype == FP8 else 0
    return shape.kv_bytes_per_token(kv_dtype.itemsize) + scales


def _activation_bytes(shape: DecoderConfig, dtype: torch.dtype, tokens: int, seqs: int) -> int:
    """The widest moment: residual, the MLP's joined product and its input; fp32 logits thrice."""
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    row = 3 * shape.hidden_size + 3 * shape.intermediate_size + 3 * heads
    return tokens * row * dtype.itemsize + 3 * seqs * shape.vocab_size * 4


def _graph_bytes(shape: DecoderConfig, dtype: torch.dtype, seqs: int) -> int:
    """Graphs share one pool: about the largest one's tensors, and a little for each."""
    return GRAPH_BYTES + NUM_GRAPHS * 8 * 2**20 + _activation_bytes(shape, dtype, seqs, seqs)


def _shares(shape: DecoderConfig, ranks: int) -> tuple[str, ...]:
    if ranks == 1:
        return ()
    heads, kv_heads = shape.num_heads // ranks, shape.num_kv_heads // ranks
    rows = math.ceil(shape.vocab_size / ranks)
    return (
        f"ranks        {ranks}: each has {heads} of {shape.num_heads} heads, {kv_heads} of "
        f"{shape.num_kv_heads} key-value heads, {shape.intermediate_size // ranks:,} of "
        f"{shape.intermediate_size:,} feed-forward columns,",
        f"             {rows:,} of {shape.vocab_size:,} rows of the head and the whole embedding",
    )


def _budget(arch: Arch, config: EngineConfig, ranks: int) -> int:
    """Of one rank: ranks on a CPU share its memory, on GPUs each has its own."""
    if config.memory_gib is not None:
        return int(config.memory_gib * GIB)
    if arch.is_gpu:
        # Others may have the rest; what they have beyond it is not there.
        spare = arch.memory_bytes * (1 - GPU_SHARE)
        return int(arch.memory_bytes * GPU_SHARE - max(0.0, _of_others(arch) - spare))
    return int(arch.memory_bytes * CPU_SHARE) // ranks


def _of_others(arch: Arch) -> int:
    """Bytes of the current GPU that this process's tensors do not hold and that are not free; 0
    where the machine is pretended."""
    if arch.pretended or not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return max(0, total - free - torch.cuda.memory_reserved())


def _weights_bytes(folder: Path, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes of the loaded weights: plain ones in the run's dtype; packed ones as their kernel keeps
    them (on a CPU widened, as bags of bytes, and packed again where its int4 kernel takes them)."""
    tensors = TensorFolder(folder)
    quantized = read_quantization(folder)[1] is not None
    layers = packed_layers(tensors.names) if quantized else {}
    packed = 0
    for name, parts in layers.items():
        sizes = {part: math.prod(tensors.shape(f"{name}.{part}")) for part in parts}
        packed += sum(4 * size for size in sizes.values())
    copied = _head_copy_bytes(folder, dtype) if device.type == "cpu" else 0
    if not layers:
        shape = load_config(folder)
        return shape.num_params() * dtype.itemsize + copied
    plain = sum(
        math.prod(tensors.shape(name)) * dtype.itemsize
        for name in tensors
        if name.rpartition(".")[0] not in layers
    )
    if device.type == "cpu":
        narrow = dtype == torch.bfloat16 and has_fast_bf16()
        bags = 1.2 if has_bags() else 0.0
        wide = _linear_params(load_config(folder)) * ((2 if narrow else 4) + bags)
        return plain + packed + int(wide) + copied
    return plain + packed


def _head_copy_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Of the head's second layout for one row (host_decode)."""
    shape = load_config(folder)
    return shape.vocab_size * shape.hidden_size * dtype.itemsize if head_in_bags(dtype) else 0


def _linear_params(shape: DecoderConfig) -> int:
    return shape.matmul_params() - shape.vocab_size * shape.hidden_size


def _does_not_fit(budget: int, sizes: tuple[int, int, int], hints: list[str]) -> str:
    weights, other, cache = sizes
    advice = " or ".join([", ".join(hints[:-1]), hints[-1]] if len(hints) > 1 else hints)
    return (
        f"engine: the model must fit in {_gib(budget)}, got {_gib(weights + other + cache)} "
        f"(weights {_gib(weights)}, activations and graphs {_gib(other)}, a cache of the least "
        f"length {_gib(cache)}); {advice}"
    )


def _hints(
    budget: int, sizes: tuple[int, int, int], config: EngineConfig, *, on_gpu: bool, packed: bool
) -> list[str]:
    """What would make a model fit: only what can, given what takes the memory."""
    weights, other, _ = sizes
    hints = ["use dtype bfloat16"] if config.dtype == "float32" else []
    if not packed:
        hints.append("quantize it to 4 bits")
    if weights < budget:
        hints.append("lower max_step_tokens or max_num_seqs")
    if weights + other < budget:
        hints.append("lower max_model_len")
    elif packed:
        hints.append("take a smaller model")
    if not on_gpu or config.memory_gib is not None:
        hints.append("raise memory_gib (--memory-gib)")
    return [*hints, "use more GPUs" if on_gpu else "use a GPU"]


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.1f} MiB"
