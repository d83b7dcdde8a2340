"""What a run will take, before it starts: peak memory, time and disk, from shapes and rates.

Memory is counted at the two places where most is held: while the widest layer's inputs of all
batches wait for its solve, and inside that solve (H in fp64 and fp32, its factor, the stacked
weights in work). Time is FLOPs over a rate measured on this device now, plus elementwise work over
a second rate, plus a fixed cost a column. docs/log/quantize.md holds predictions against runs.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from ridgeline.core.protocols import BlockwiseModel
from ridgeline.formats.contract import WeightFormat
from ridgeline.quant.recipe import Recipe

_HESSIAN_SHARE = 0.57
"""Of the full product that Hessian.add computes in eight strips."""
_SOLVE_FLOPS = 3.3
"""A weight and input of a layer: the columns' updates 1, the two energies of the report 2.3."""
_CANDIDATES, _PASSES = {"gptq": 15, "clip": 20}, 6
"""Ranges tried for a group, and elementwise passes over the weight each."""
_COLUMN_S = {"cpu": 4e-5, "cuda": 2e-6}
_HEAD_BYTES, _HEAD_ROWS = 9, 16384
"""The head's own copy, its rounded values and its codes, a parameter; rows solved at a time."""
_PROCESS_BYTES = 450e6
"""Of Python, PyTorch and the tokenizer before any tensor."""
_HEAP_SHARE = 1.5
"""Of a CPU's working tensors, what the heap grows to: freed memory stays, and the holes between
tensors of many sizes do not fit the next ones. Which holes there are depends on how the threads of
suspended forwards take turns: 242 to 314 MB for the same 200 MB of tensors, with AMX and with every
library held to AVX2 (glibc 2.36, PyTorch 2.13, Xeon, 2026-11-30)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device does."""

    flops: float
    """fp32 (CPU) or 16-bit (GPU) matrix products, FLOP/s."""
    elements: float
    """Elementwise passes, elements a second."""

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype) -> Rates:
        """Half a second of a matmul and of an elementwise pass."""

        def rate(work: float, run) -> float:
            run()
            _wait(device)
            start, count = time.perf_counter(), 0
            while time.perf_counter() - start < 0.2:
                run()
                _wait(device)
                count += 1
            return work * count / (time.perf_counter() - start)

        size = 1024 if device.type == "cpu" else 8192
        a = torch.ones(size, size, dtype=dtype, device=device)
        flat = torch.ones(2**20, device=device)
        return cls(
            flops=rate(2.0 * size**3, lambda: a @ a), elements=rate(2.0**20, lambda: flat.mul_(1.0))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What a run writes: exceptions, mixed widths and the head in it."""

    packed_bytes: float
    """Of quantized layers."""
    plain_parameters: int
    """Of everything else that the folder holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """Sizes that a prediction needs."""

    groups: tuple[tuple[tuple[int, int], ...], ...]
    """(N, K) of every linear of a block, by group of one input."""
    blocks: int
    width: int
    """C, of hidden states."""
    outer_parameters: int
    """Outside the blocks; they stay on the device."""
    head_parameters: int
    block_parameters: int
    tokens: int
    """Of calibration, on one rank."""
    sequence_tokens: int
    batch_tokens: int
    held_out_tokens: int
    itemsize: int
    """Bytes of a weight and of an activation while it runs."""
    stored_itemsize: int = 2
    """Bytes of a parameter outside the blocks in the source's files; the folder takes it over."""
    stored: Stored | None = None
    """What the layers come to on disk; None: all of them in the recipe's own form."""
    widths: int = 0
    """Widths that each layer is measured at in a pass before the run (mixed widths)."""
    finished: int = 0
    """Blocks that an earlier run has finished (a quantized head counts as one): no time is left."""
    held_blocks: int = 1
    """Blocks whose weights are in memory at once: one where they are streamed, all of a model in
    memory."""


def shape_in_memory(
    model: BlockwiseModel, *, tokens: int, sequence_tokens: int, batch_tokens: int,
    held_out_tokens: int = 0,
) -> RunShape:  # fmt: skip
    """Sizes of a run on a model that is held in memory whole."""
    blocks = list(model.blocks)
    first = blocks[0]
    inside = {id(p) for block in blocks for p in block.parameters()}
    outside = [p for p in model.parameters() if id(p) not in inside]  # pyright: ignore
    groups = tuple(
        tuple(tuple(first.get_submodule(name).weight.shape) for name in group)
        for group in model.linear_groups()
    )
    held = sum(p.numel() for block in blocks for p in block.parameters())
    return RunShape(
        groups=groups,
        blocks=len(blocks),
        width=groups[0][0][1],
        outer_parameters=sum(p.numel() for p in outside),
        head_parameters=max((p.numel() for p in outside), default=0),
        block_parameters=held // len(blocks),
        tokens=tokens,
        sequence_tokens=sequence_tokens,
        batch_tokens=batch_tokens,
        held_out_tokens=held_out_tokens,
        itemsize=first.get_submodule(model.linear_groups()[0][0]).weight.element_size(),
        held_blocks=len(blocks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a run will take."""

    device_bytes: float
    """Peak on the device; on a CPU of the process."""
    seconds: float
    work_bytes: float
    """Peak on disk of unfinished work."""
    out_bytes: float
    """Of the finished folder."""


def predict(shape: RunShape, recipe: Recipe, device: str, rates: Rates) -> Prediction:
    """Memory, time and disk of a run."""
    stored = shape.stored or _stored(shape, recipe)
    hidden = shape.width * shape.itemsize * (shape.tokens + 2 * shape.held_out_tokens)
    fixed, share = (_PROCESS_BYTES, _HEAP_SHARE) if device == "cpu" else (0.0, 1.0)
    held_parameters = shape.outer_parameters + shape.held_blocks * shape.block_parameters
    fixed += shape.itemsize * held_parameters
    held = shape.itemsize * shape.width * 2 * shape.held_out_tokens
    vocabulary = shape.head_parameters // max(shape.width, 1)
    scoring = 256 * vocabulary * 4 * 5 if shape.held_out_tokens else 0
    head = hidden + _HEAD_BYTES * shape.head_parameters if recipe.lm_head else 0
    working = max(_calibration_bytes(shape, recipe), scoring, head)
    return Prediction(
        device_bytes=fixed + held + share * working,
        seconds=_seconds(shape, recipe, device, rates),
        work_bytes=stored.packed_bytes + 2 * hidden,
        out_bytes=stored.packed_bytes + shape.stored_itemsize * stored.plain_parameters,
    )


def _stored(shape: RunShape, recipe: Recipe) -> Stored:
    """Every layer of every block in the recipe's own form."""
    packed = sum(packed_bytes(n, k, recipe.layout) for group in shape.groups for n, k in group)
    return Stored(packed_bytes=shape.blocks * packed, plain_parameters=shape.outer_parameters)


def packed_bytes(n: int, k: int, layout: WeightFormat) -> float:
    """Of a layer [N, K] in a form's files, without its bias."""
    specs = layout.tensor_specs(n, k).values()
    return float(sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs))


def _calibration_bytes(shape: RunShape, recipe: Recipe) -> float:
    """Batches suspended before the widest group, and the larger of a batch's forward and the
    solve."""
    if recipe.method == "rtn":
        return 4.0 * 4 * max(n * k for group in shape.groups for n, k in group)
    waiting = solving = 0.0
    for group in shape.groups:
        k, n = group[0][1], sum(n for n, _ in group)
        # Held for every batch: the block's inputs, its residual stream, what the attention or the
        # MLP was called with, and the layer's input.
        waiting = max(waiting, shape.itemsize * shape.tokens * (3 * shape.width + k))
        solving = max(solving, 8 * k * k + 6 * 4 * k * k + 8 * 4 * n * k)
    widest = max(k for group in shape.groups for _, k in group)
    forward = shape.itemsize * shape.batch_tokens * (4 * shape.width + 3 * widest)
    return waiting + max(solving, forward)


def _seconds(shape: RunShape, recipe: Recipe, device: str, rates: Rates) -> float:
    weights = sum(n * k for group in shape.groups for n, k in group)
    forward = 2.0 * weights + 2.0 * shape.sequence_tokens * shape.width
    blocks = max(shape.blocks - shape.finished, 0)
    flops = 2 * forward * shape.held_out_tokens * blocks
    flops += 2 * 2.0 * shape.head_parameters * shape.held_out_tokens
    elements = columns = 0.0
    if recipe.method == "rtn":
        elements = _PASSES * weights * blocks
        return flops / rates.flops + elements / rates.elements
    squares = sum(group[0][1] ** 2 for group in shape.groups)
    flops += blocks * shape.tokens * (forward + 2.0 * squares * _HESSIAN_SHARE)
    elements += blocks * weights * _CANDIDATES[recipe.solver] * _PASSES
    stacked = sum(sum(n for n, _ in g) * g[0][1] ** 2 for g in shape.groups)
    if recipe.solver == "gptq":
        cubes = sum(group[0][1] ** 3 for group in shape.groups)
        flops += blocks * (4.0 * cubes + _SOLVE_FLOPS * stacked)
        columns = blocks * sum(group[0][1] for group in shape.groups)
    if recipe.lm_head and shape.finished <= shape.blocks:
        width, head = shape.width, shape.head_parameters
        flops += 2.0 * shape.tokens * width**2 * _HESSIAN_SHARE + _SOLVE_FLOPS * head * width
        elements += head * _CANDIDATES[recipe.solver] * _PASSES
        columns += width * (head // width / _HEAD_ROWS) if recipe.solver == "gptq" else 0
    if shape.widths:
        per_token = forward + 2.0 * squares * _HESSIAN_SHARE
        flops += shape.blocks * (shape.tokens * per_token + 2.3 * shape.widths * stacked)
        elements += shape.blocks * weights * shape.widths * _PASSES
    if recipe.folds:
        trials = 2 * recipe.awq.grid + 2
        flops += blocks * trials * forward * (2 * recipe.awq.search_tokens)
        elements += blocks * weights * trials * _PASSES
    return flops / rates.flops + elements / rates.elements + columns * _COLUMN_S.get(device, 2e-6)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
