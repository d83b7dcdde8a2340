"""AWQ: scale the input channels that matter up before rounding, and fold the inverse away.

    Q(W s) (x / s) instead of Q(W) x,    s = mean|x|^r  or  mean|x|^r / mean|w|^(1-r)

A channel with large inputs gets a large s, so its weights lose less to the group's step. 1 / s goes
into whatever makes the channel: the norm before q, k, v or gate, up; the rows of up_proj before
down_proj; the rows of v_proj before o_proj, where query heads that share a value head must share
its scale. Unquantized, the function stays the same. r is searched on a grid, both forms of s,
identity included, by the squared error of the module that uses the linears (attention, MLP, or the
linear itself) on a sample of calibration tokens, every other point of the grid first and then the
neighbours of each form's best; the winner is folded only where it also beats identity on tokens
that it was not chosen on.
Cost a block: grid + 5 forwards of each parent on the sample at most.
Source: Lin, Tang, Tang, Yang, Dang, Han, "AWQ", 2023, section 3.2 (arXiv 2306.00978); scales under
grouped queries and the second set of tokens: ours.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ridgeline.core.protocols import FoldableModel, ScaleFold
from ridgeline.formats.grid import GridSpec, group_view
from ridgeline.quant.batches import Batch, run_batch
from ridgeline.quant.options import AWQOptions
from ridgeline.quant.together import run_together

_SMALLEST, _LEAST_STEP = 1e-4, 1e-30
_JUDGED_RANGE = 0.9
"""Of the plain range, in which candidates are rounded: near what the search for ranges takes."""

_CHECKED = 2
"""Tokens that the winner is checked on, to those of the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldReport:
    """What was decided at one place."""

    producer: str
    """Full name."""
    consumers: tuple[str, ...]
    """Full names."""
    accepted: bool
    reason: str
    ratio: float | None = None
    """r of the best candidate."""
    over_weights: bool | None = None
    """Whether its form divides by the weights' means."""
    error_plain: float | None = None
    """Relative output error on the check tokens without a scale."""
    error_scaled: float | None = None
    """The same with it."""


@dataclass(slots=True)
class Seen:
    """What a forward showed of one fold: the consumers' input and the parent's other arguments."""

    x: torch.Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Three sets of sequences, apart where there are enough: candidates are measured on `first`
    (whole sequences) or on rows of `first` and `more`, the winner on `check`."""

    first: Batch
    more: Batch | None
    check: Batch


def take_sample(batch: Batch, search_tokens: int) -> Sample:
    """Sequences of a batch for the three purposes; one sequence serves all of them."""
    count = batch.count
    least = _sequences_for(batch, 0, search_tokens)
    half = max(least, count // 2)
    more = batch.sequences(least, half) if half > least else None
    first = _cut(batch.sequences(0, least), search_tokens)
    if half == count:
        return Sample(first=first, more=more, check=batch)
    enough = half + _sequences_for(batch, half, _CHECKED * search_tokens)
    check = _cut(batch.sequences(half, enough), _CHECKED * search_tokens)
    return Sample(first=first, more=more, check=check)


def _cut(batch: Batch, tokens: int) -> Batch:
    """The first tokens of a single sequence: what follows has no part in what is before it."""
    alone = batch.cu_seqlens is None and batch.count == 1
    return Batch(x=batch.x[:, :tokens]) if alone else batch


def _sequences_for(batch: Batch, start: int, tokens: int) -> int:
    """How many sequences from one on hold so many tokens (all that are left if none do)."""
    left = range(1, batch.count - start + 1)
    enough = (n for n in left if batch.sequences(start, start + n).tokens >= tokens)
    return next(enough, len(left))


class FoldSearch:
    """The folds of one block."""

    def __init__(
        self,
        model: FoldableModel,
        index: int,
        grid_of: Callable[[str], tuple[GridSpec, int] | None],
        options: AWQOptions,
    ) -> None:
        """grid_of: (grid, group size) of a linear by its name in the block; None: plain."""
        self.model, self.index, self.options = model, index, options
        self.block: nn.Module = model.blocks[index]
        self.prefix = model.block_prefix(index) + "."
        self.grid_of = grid_of

    @torch.no_grad()
    def choose(self, sample: Sample) -> list[tuple[torch.Tensor | None, FoldReport]]:
        """(scale of the producer's channels or None, report) for every place; the block is left as
        it was."""
        folds = self.model.scale_folds()
        first, check = self._watch(folds, sample.first), self._watch(folds, sample.check)
        more = [None] * len(folds) if sample.more is None else self._watch(folds, sample.more)
        pieces = [
            functools.partial(self._search, fold, *seen)
            for fold, seen in zip(folds, zip(first, more, check, strict=True), strict=True)
        ]
        if not _apart(folds):
            return [piece() for piece in pieces]
        return run_together(pieces, sample.first.x.device)

    def _watch(self, folds: list[ScaleFold], batch: Batch) -> list[Seen]:
        """Run the block and note what each fold's consumers and parent were called with."""
        inputs: dict[str, torch.Tensor] = {}
        calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

        def note_input(name: str):
            return lambda module, args: inputs.__setitem__(name, args[0].detach())

        def note_call(name: str):
            return lambda module, args, kwargs: calls.__setitem__(name, (args[1:], kwargs))

        hooks = []
        try:
            for fold in folds:
                name = fold.consumers[0]
                module = self.block.get_submodule(name)
                hooks.append(module.register_forward_pre_hook(note_input(name)))
                if fold.parent is not None:
                    parent = self.block.get_submodule(fold.parent)
                    hook = note_call(fold.parent)
                    hooks.append(parent.register_forward_pre_hook(hook, with_kwargs=True))
            run_batch(self.model, self.index, batch)
        finally:
            for hook in hooks:
                hook.remove()
        return [
            Seen(inputs[fold.consumers[0]], *calls.get(fold.parent or "", ((), {})))
            for fold in folds
        ]

    def _search(
        self, fold: ScaleFold, first: Seen, more: Seen | None, check: Seen
    ) -> tuple[torch.Tensor | None, FoldReport]:
        names = {
            "producer": self.prefix + fold.producer,
            "consumers": tuple(self.prefix + name for name in fold.consumers),
        }
        if reason := self._refusal(fold):
            return None, FoldReport(**names, accepted=False, reason=reason)
        rows = first if more is None else Seen(_joined(first.x, more.x), first.args, first.kwargs)
        trial = _Trial(fold, self.block, [self._grid(name) for name in fold.consumers])
        means = trial.means(rows.x)
        at = first if fold.mixes_positions else _strided(rows, self.options.search_tokens)
        best = best_point(
            lambda r, over: trial.error(candidate(*means, r, over), at), self.options.grid
        )
        scale_P = candidate(*means, *best)
        plain, scaled = trial.error(None, check), trial.error(scale_P, check)
        gain = scaled < plain and best != (0.0, False)
        reason = "lower error" if gain else "no candidate lowers the error"
        report = FoldReport(
            **names, accepted=gain, reason=reason, ratio=best[0], over_weights=best[1],
            error_plain=plain**0.5, error_scaled=scaled**0.5,
        )  # fmt: skip
        return (scale_P if gain else None), report

    def _grid(self, name: str) -> tuple[GridSpec, int]:
        found = self.grid_of(name)
        assert found is not None, "plain consumers were refused"
        return found

    def _refusal(self, fold: ScaleFold) -> str | None:
        """Why a fold is not tried: a plain linear would have to be rounded to its dtype."""
        linears = fold.consumers if fold.norm else (fold.producer, *fold.consumers)
        plain = [name for name in linears if self.grid_of(name) is None]
        return f"{plain[0]} is not quantized" if plain else None


class _Trial:
    """The linears of a fold, rounded under one scale after another and put back at the end.

    They are stacked as [R, g, N], so that scales of input channels and of groups run along memory.
    """

    def __init__(
        self, fold: ScaleFold, block: nn.Module, grids: list[tuple[GridSpec, int]]
    ) -> None:
        self.fold, self.grids = fold, grids
        self.linears: list[Any] = [block.get_submodule(name) for name in fold.consumers]
        self.parent = None if fold.parent is None else block.get_submodule(fold.parent)
        self.exact = [linear.weight.detach() for linear in self.linears]
        self.w_RGN = [
            group_view(w_NK.float(), group).permute(1, 2, 0).contiguous()
            for w_NK, (_, group) in zip(self.exact, grids, strict=True)
        ]
        self._want: tuple[Seen, torch.Tensor, float] | None = None

    def means(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean size of inputs, and of weights within their group, by the producer's channels."""
        x_K = x.reshape(-1, x.shape[-1]).float().abs().mean(0)
        sizes = []
        for w_RGN in self.w_RGN:
            size = w_RGN.abs()
            part = size / size.amax(1, keepdim=True).clamp(min=1e-30)
            sizes.append(part.flatten(0, 1)[: len(x_K)])
        return _reduced(self.fold, x_K), _reduced(self.fold, torch.cat(sizes, 1).mean(1))

    def error(self, scale_P: torch.Tensor | None, seen: Seen) -> float:
        """Squared error over squared output of the parent with its linears rounded.

        1 / s is taken from the input, not from the weights: the same product, and less to do.
        """
        scale_K = None if scale_P is None else expanded(self.fold, scale_P)
        K = self.exact[0].shape[1]
        rounded = [
            _rounded(w_RGN, scale_K, spec).flatten(0, 1)[:K].T.to(w_NK.dtype)
            for w_RGN, (spec, _), w_NK in zip(self.w_RGN, self.grids, self.exact, strict=True)
        ]
        size = self._size(seen)
        wrong = self._output(seen, scale_K, rounded).sub_(self._wanted()).square_().sum()
        return float(wrong) / size

    def _size(self, seen: Seen) -> float:
        """Squared norm of the exact output, kept while the tokens stay the same."""
        if self._want is None or self._want[0] is not seen:
            want = self._output(seen, None, self.exact)
            self._want = (seen, want, max(float(want.square().sum()), 1e-30))
        return self._want[2]

    def _wanted(self) -> torch.Tensor:
        assert self._want is not None
        return self._want[1]

    def _output(
        self, seen: Seen, scale_K: torch.Tensor | None, weights: list[torch.Tensor]
    ) -> torch.Tensor:
        """Of the parent with these weights in its linears, or of one linear alone (its bias left
        out, the module untouched); fp32 and its own."""
        x = seen.x if scale_K is None else (seen.x / scale_K).to(seen.x.dtype)
        if self.parent is None:
            return nn.functional.linear(x, weights[0]).float()
        try:
            for linear, w_NK in zip(self.linears, weights, strict=True):
                linear.weight.data = w_NK
            out = self.parent(x, *seen.args, **seen.kwargs)
        finally:
            for linear, w_NK in zip(self.linears, self.exact, strict=True):
                linear.weight.data = w_NK
        return (out[0] if isinstance(out, tuple) else out).float()


def _apart(folds: list[ScaleFold]) -> bool:
    """Whether trials of all folds can run beside each other: none runs a module that another
    changes. Without a parent nothing is changed."""
    parents = [fold.parent + "." for fold in folds if fold.parent is not None]
    pairs = itertools.permutations(parents, 2)
    return not any(one.startswith(other) for one, other in pairs)


def best_point(error: Callable[[float, bool], float], grid: int) -> tuple[float, bool]:
    """(r, whether divided by the weights' means) of least error: every other point of the grid
    from identity on, then what lies beside the best of either form; a tie goes to the first form
    and the smaller r."""
    errors: dict[tuple[bool, int], float] = {}

    def measure(step: int, over: bool) -> None:
        found = error(step / grid, over)
        errors[over, step] = math.inf if math.isnan(found) else found

    for over in (False, True):
        for step in range(0, grid, 2):
            measure(step, over)
        best = min(range(0, grid, 2), key=lambda step: errors[over, step])
        for step in (best - 1, best + 1):
            if 0 <= step < grid:
                measure(step, over)
    over, step = min(errors, key=lambda point: (errors[point], point))
    return step / grid, over


def candidate(
    x_mean_P: torch.Tensor, w_mean_P: torch.Tensor, ratio: float, over_weights: bool
) -> torch.Tensor | None:
    """The scale of one grid point, largest times smallest 1; None for identity."""
    if ratio == 0.0 and not over_weights:
        return None
    scale_P = x_mean_P.clamp(min=_SMALLEST) ** ratio
    if over_weights:
        scale_P = scale_P / w_mean_P.clamp(min=_SMALLEST) ** (1.0 - ratio)
    scale_P = scale_P.clamp(min=_SMALLEST)
    scale_P = scale_P / (scale_P.max() * scale_P.min()).sqrt()
    return torch.where(torch.isfinite(scale_P), scale_P, 1.0)


@torch.no_grad()
def apply_fold(
    block: nn.Module, fold: ScaleFold, scale_P: torch.Tensor, dtype: torch.dtype | None
) -> None:
    """Divide the producer, multiply the consumers.

    A norm's weight is rounded to `dtype`, in which it will be stored; the consumers take the scale
    that it then really has, so the function changes by fp32 rounding only.
    """
    producer: Any = block.get_submodule(fold.producer)
    if fold.norm:
        offset = 1.0 if fold.norm == "1+w" else 0.0
        old = producer.weight.detach().float() + offset
        new = old / scale_P - offset
        new = new.to(dtype or producer.weight.dtype).to(producer.weight.dtype)
        factor = new.float() + offset
        usable = (factor != 0) & torch.isfinite(factor) & (old != 0)
        scale_P = torch.where(usable, old / factor, 1.0)
        producer.weight.copy_(torch.where(usable, new, producer.weight))
    else:
        producer.weight.div_(scale_P[:, None].to(producer.weight.dtype))
        if producer.bias is not None:
            producer.bias.div_(scale_P.to(producer.bias.dtype))
    scale_K = expanded(fold, scale_P)
    for name in fold.consumers:
        weight = block.get_parameter(f"{name}.weight")
        weight.mul_(scale_K.to(weight.dtype))


def expanded(fold: ScaleFold, scale_P: torch.Tensor) -> torch.Tensor:
    """The producer's channels as the consumers see them."""
    runs = scale_P.reshape(-1, 1, fold.run)
    return runs.expand(-1, fold.repeats, fold.run).reshape(-1)


def _reduced(fold: ScaleFold, x_K: torch.Tensor) -> torch.Tensor:
    return x_K.reshape(-1, fold.repeats, fold.run).mean(1).reshape(-1)


def _rounded(w_RGN: torch.Tensor, scale_K: torch.Tensor | None, spec: GridSpec) -> torch.Tensor:
    """Q(W s) in ranges _JUDGED_RANGE times the plain ones, fp32; scales are not rounded to their
    storage dtype, which is the same for every s."""
    R, G, _ = w_RGN.shape
    wide = w_RGN
    if scale_K is not None:
        short = R * G - len(scale_K)
        by_K = torch.cat([scale_K, scale_K[-1:].expand(short)]) if short else scale_K
        wide = w_RGN * by_K.view(R, G, 1)
    low, high = wide.amin(1, keepdim=True), wide.amax(1, keepdim=True)
    if spec.symmetric:
        step = torch.maximum(-low, high) * (_JUDGED_RANGE / (spec.middle - 0.5))
        first, last = -float(spec.middle), float(spec.max_code - spec.middle)
    else:
        low, high = low.clamp_(max=0.0), high.clamp_(min=0.0)
        step = (high - low) * (_JUDGED_RANGE / spec.max_code)
    step.clamp_(min=_LEAST_STEP)
    code = (wide / step).round_()
    if spec.symmetric:
        code.clamp_(first, last)
    else:
        zero = (low * -_JUDGED_RANGE / step).round_()
        torch.clamp(code, -zero, spec.max_code - zero, out=code)
    return code.mul_(step)


def _joined(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])[None]


def _strided(seen: Seen, tokens: int) -> Seen:
    """About so many rows, spread evenly over all."""
    rows = seen.x.reshape(-1, seen.x.shape[-1])
    step = max(1, len(rows) // tokens)
    return Seen(rows[::step][None], seen.args, seen.kwargs)
