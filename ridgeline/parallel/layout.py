"""How many ranks do what: one frozen config, checked before anything is built. Pure Python.

    world = pp x dp_replicate x dp_shard x cp x tp          rank = row-major index in that order

tp is innermost, so that its ranks, which talk most, sit on one node; pp is outermost, as it talks
least. dp_replicate copies the model, dp_shard shards what `zero` says, cp cuts sequences, tp cuts
matrices, pp cuts the stack of layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ridgeline.core.errors import bad_value

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, outermost first."""

Indices = TypeVar("Indices", bound=Sequence[Any])

_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
_STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "zbv": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a model, its optimizer and its batch are spread over ranks. Defaults: one rank."""

    dp_replicate: int = 1
    """Copies of the model, at least 1 (with zero = 0: DDP; with dp_shard > 1: HSDP)."""
    dp_shard: int = 1
    """Ranks that share one copy's state, at least 1."""
    tp: int = 1
    """Ranks that share every matrix, at least 1."""
    pp: int = 1
    """Ranks that share the stack of layers, at least 1."""
    cp: int = 1
    """Ranks that share every sequence, at least 1."""
    zero: Literal[0, 1, 2, 3] = 3
    """What dp_shard ranks share: 1 optimizer state, 2 and gradients, 3 and parameters; 0 (plain
    data parallel) needs dp_shard = 1."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"] = "1f1b"
    """Order of a pipeline's forward and backward passes; unused with pp = 1."""
    stages_per_rank: int | None = None
    """Stages a pipeline rank holds; none: 2 for interleaved, zero_bubble and zbv, else 1."""
    num_microbatches: int | None = None
    """Forward-backward passes of a step on each rank; none: what micro_batch_samples gives."""
    sequence_parallel: bool = False
    """Split the activations between tp's matrices along the sequence too (needs tp > 1)."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute in the backward pass: nothing; all but attention and projections to the model's
    width; or whole blocks."""
    reduce: Literal["auto", "step", "micro_batch"] = "auto"
    """When gradients are reduced over data ranks: once a step (least traffic, whole gradients stay
    in memory) or after each micro-batch (only shards stay); auto: step for zero 0 and 1 and in a
    pipeline, else micro_batch."""
    compile_blocks: bool = False
    """torch.compile each block (one compilation: all are alike)."""
    async_tp: bool = False
    """Let the compiler overlap tp's collectives with its matmuls by symmetric memory (CUDA with
    NVLink; needs sequence_parallel and compile_blocks)."""

    def __post_init__(self) -> None:
        for name in ("dp_replicate", "dp_shard", "tp", "pp", "cp"):
            _at_least_one(name, getattr(self, name))
        if self.schedule not in _SCHEDULES:
            raise _bad("schedule", f"be one of {', '.join(_SCHEDULES)}", self.schedule, "use one")
        if self.num_microbatches is not None:
            _at_least_one("num_microbatches", self.num_microbatches)
        if self.zero == 0 and self.dp_shard > 1:
            raise _bad(
                "dp_shard",
                "be 1 with zero = 0, which shards nothing",
                self.dp_shard,
                "use dp_replicate for plain data parallel, or zero = 1, 2 or 3",
            )
        if self.sequence_parallel and self.tp == 1:
            raise _bad("sequence_parallel", "be off with tp = 1", "on", "raise tp or leave it out")
        if self.async_tp and not (self.sequence_parallel and self.compile_blocks):
            raise _bad(
                "async_tp",
                "come with sequence_parallel and compile_blocks",
                f"{self.sequence_parallel} and {self.compile_blocks}",
                "switch all three on",
            )
        self._check_pipeline()
        self._check_reduce()

    def _check_pipeline(self) -> None:
        if self.stages_per_rank is not None:
            _at_least_one("stages_per_rank", self.stages_per_rank)
            fixed = _STAGES_PER_RANK.get(self.schedule)
            if fixed is not None and self.stages_per_rank != fixed:
                raise _bad(
                    "stages_per_rank",
                    f"be {fixed} with schedule {self.schedule}",
                    self.stages_per_rank,
                    "leave it out or use interleaved",
                )
            if fixed is None and self.stages_per_rank < 2:
                raise _bad(
                    "stages_per_rank",
                    f"be at least 2 with schedule {self.schedule}",
                    self.stages_per_rank,
                    "leave it out or use 1f1b",
                )
        if self.splits_backward and self.activation_checkpointing != "none":
            raise _bad(
                "activation_checkpointing",
                f"be none with schedule {self.schedule}, which runs a backward pass in two parts",
                self.activation_checkpointing,
                "use 1f1b or interleaved",
            )
        if self.splits_backward and self.compile_blocks:
            raise _bad(
                "compile_blocks",
                f"be off with schedule {self.schedule}, which runs a backward pass in two parts",
                "on",
                "use 1f1b or interleaved",
            )

    def _check_reduce(self) -> None:
        if self.reduce == "micro_batch" and self.splits_backward:
            raise _bad(
                "reduce",
                f"be step with schedule {self.schedule}, whose weight gradients come last",
                self.reduce,
                "leave it out",
            )
        if self.reduce == "micro_batch" and self.zero == 1 and self.dp_shard > 1:
            raise _bad(
                "reduce",
                "be step with zero = 1, which keeps whole gradients",
                self.reduce,
                "use zero = 2",
            )

    # ---- what follows from it ------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return math.prod(self.sizes.values())

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks of each axis."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def is_single(self) -> bool:
        """Whether it is one rank."""
        return self.world_size == 1

    @property
    def dp(self) -> int:
        """Ranks (or groups of ranks) that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed apart."""
        return self.pp > 1 and self.schedule in ("zero_bubble", "zbv")

    @property
    def stages_here(self) -> int:
        """Stages each pipeline rank holds."""
        if self.pp == 1:
            return 1
        return self.stages_per_rank or _STAGES_PER_RANK.get(self.schedule, 2)

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.pp * self.stages_here

    @property
    def reduces_each_micro_batch(self) -> bool:
        """`reduce` with auto resolved."""
        if self.reduce == "auto":
            return self.pp == 1 and self.zero >= 2
        return self.reduce == "micro_batch"

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Stages that a pipeline rank holds: round robin, or for zbv down and up again (a V)."""
        if self.pp > 1 and self.schedule == "zbv":
            return (pp_rank, 2 * self.pp - 1 - pp_rank)
        return tuple(pp_rank + turn * self.pp for turn in range(self.stages_here))

    def describe(self) -> str:
        """For people: "DP2 (ZeRO-3) x TP2+SP x PP2 (1f1b)"."""
        parts: list[str] = []
        if self.dp_shard > 1 and self.dp_replicate > 1:
            parts.append(f"HSDP {self.dp_replicate}x{self.dp_shard} (ZeRO-{self.zero})")
        elif self.dp_shard > 1:
            parts.append(f"DP{self.dp_shard} (ZeRO-{self.zero})")
        elif self.dp_replicate > 1:
            parts.append(f"DP{self.dp_replicate}")
        if self.cp > 1:
            parts.append(f"CP{self.cp}")
        if self.tp > 1:
            parts.append(f"TP{self.tp}{'+SP' if self.sequence_parallel else ''}")
        if self.pp > 1:
            parts.append(f"PP{self.pp} ({self.schedule})")
        return " x ".join(parts) or "one process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a layout is asked to hold: the sizes that it must divide."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    seqlen: int
    """Tokens of a sample."""
    num_microbatches: int
    """Micro-batches a rank and step."""
    windowed: bool = False
    """Whether a layer has a sliding window."""


def check_sizes(sizes: Mapping[str, int], world_size: int) -> None:
    """Refuse sizes of axes (1 where not given) that do not multiply to the number of ranks.

    Raises: ValueError.
    """
    product = math.prod(sizes.values())
    if product != world_size:
        told = " x ".join(f"{axis} {sizes.get(axis, 1)}" for axis in AXES)
        how = f"start {product} processes (torchrun --nproc-per-node {product})"
        raise _bad(
            "sizes",
            f"multiply to the number of ranks ({world_size})",
            f"{told} = {product}",
            f"{how if product > 1 else 'start one process'} or change a size",
        )


def check_layout(
    layout: Layout,
    work: Workload,
    *,
    world_size: int,
    local_world_size: int | None = None,
) -> list[str]:
    """Refuse what cannot run, before anything is built; return warnings for what runs badly.

    world_size: ranks that were started; local_world_size: those of one node.
    Raises: ValueError, one message for each kind of misfit.
    """
    check_sizes(layout.sizes, world_size)
    _check_tensor(layout, work)
    _check_stages(layout, work)
    _check_context(layout, work)
    warnings: list[str] = []
    if local_world_size is not None and layout.tp > 1 and local_world_size % layout.tp:
        warnings.append(
            f"layout: tp {layout.tp} does not divide the {local_world_size} ranks of a node, so tp "
            "groups cross nodes; each layer then waits for the slower network"
        )
    return warnings


def _check_tensor(layout: Layout, work: Workload) -> None:
    tp = layout.tp
    if work.num_heads % tp:
        raise _bad(
            "tp",
            f"divide the {work.num_heads} query heads",
            tp,
            f"use a divisor of {work.num_heads}",
        )
    small, large = sorted((work.num_kv_heads, tp))
    if large % small:
        raise _bad(
            "tp",
            f"divide the {work.num_kv_heads} key-value heads or be a multiple of them",
            tp,
            "choose tp so that each rank's query heads share whole key-value heads",
        )
    if work.intermediate_size % tp:
        raise _bad(
            "tp",
            f"divide the MLP's width {work.intermediate_size}",
            tp,
            f"use a divisor of {work.intermediate_size}",
        )
    if work.vocab_size < tp:
        raise _bad("tp", f"be at most the vocabulary's {work.vocab_size} tokens", tp, "lower tp")
    if layout.sequence_parallel and work.seqlen % (tp * layout.cp):
        raise _bad(
            "sequence_parallel",
            f"find samples that tp x cp = {tp * layout.cp} divides",
            f"{work.seqlen} tokens",
            "choose another data.seqlen",
        )


def _check_stages(layout: Layout, work: Workload) -> None:
    if layout.pp == 1:
        return
    if work.num_microbatches < layout.num_stages and layout.schedule != "gpipe":
        raise _bad(
            "num_microbatches",
            f"be at least the {layout.num_stages} stages of schedule {layout.schedule}",
            work.num_microbatches,
            "use more or smaller micro-batches",
        )
    if layout.schedule == "gpipe" and work.num_microbatches < layout.pp:
        raise _bad(
            "num_microbatches",
            f"be at least the {layout.pp} stages",
            work.num_microbatches,
            "use more or smaller micro-batches",
        )
    if work.num_layers < layout.num_stages:
        raise _bad(
            "pp",
            f"leave each of the {layout.num_stages} stages a layer",
            f"{work.num_layers} layers",
            "lower pp or stages_per_rank",
        )
    if layout.schedule == "interleaved" and work.num_microbatches % layout.pp:
        raise _bad(
            "num_microbatches",
            f"be a multiple of pp {layout.pp} with schedule interleaved",
            work.num_microbatches,
            "choose a multiple",
        )


def _check_context(layout: Layout, work: Workload) -> None:
    if layout.cp == 1:
        return
    if work.seqlen % (2 * layout.cp):
        raise _bad(
            "cp",
            f"cut samples of {work.seqlen} tokens into {2 * layout.cp} equal pieces",
            layout.cp,
            "choose another data.seqlen",
        )
    if work.windowed:
        raise _bad(
            "cp",
            "be 1 for a model with sliding windows (the ring knows whole attention only)",
            layout.cp,
            "use tp or dp instead",
        )


def samples_of_rank(
    indices: Indices, layout: Layout, dp_rank: int, num_microbatches: int
) -> list[Indices]:
    """The global batch's samples that one data rank reads, micro-batch by micro-batch.

    Micro-batch m of all data ranks is a contiguous piece of the batch, cut evenly among them: the
    batch, and so the order of samples, does not depend on how many ranks read it.
    Raises: ValueError where the batch cannot be cut evenly.
    """
    pieces = layout.dp * num_microbatches
    if len(indices) % pieces:
        raise _bad(
            "dp x num_microbatches",
            f"divide the batch of {len(indices)} samples",
            pieces,
            "change batch_samples, micro_batch_samples or dp",
        )
    size = len(indices) // pieces
    starts = [(m * layout.dp + dp_rank) * size for m in range(num_microbatches)]
    return [indices[start : start + size] for start in starts]  # type: ignore[misc]


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise _bad(name, "be at least 1", value, "give a positive whole number")


def _bad(arg: str, must: str, got: object, do: str) -> ValueError:
    return bad_value("layout", arg, must, got, do)
