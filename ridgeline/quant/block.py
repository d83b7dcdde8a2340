"""One block: fold scales, then solve its linears group by group on their real inputs."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ridgeline.core import progress
from ridgeline.core.errors import bad_type
from ridgeline.core.protocols import BlockwiseModel, FoldableModel, HeadedModel
from ridgeline.formats.base import QuantizedWeight
from ridgeline.formats.contract import WeightFormat
from ridgeline.formats.grid import GridSpec
from ridgeline.quant.awq import FoldReport, FoldSearch, apply_fold, take_sample
from ridgeline.quant.batches import Batch
from ridgeline.quant.gptq import (
    Hessian,
    LayerReport,
    check_finite,
    output_error,
    quantize_layers,
)
from ridgeline.quant.linear import concat_rows
from ridgeline.quant.ranks import Ranks
from ridgeline.quant.recipe import Recipe
from ridgeline.quant.report import BlockReport, ModuleReport, weight_bytes
from ridgeline.quant.rtn import quantize_layer_rtn, quantize_layers_clipped
from ridgeline.quant.staged import StagedBlock

HEAD = "lm_head"
_BF16_FRACTION_BITS = 7
_HEAD_ROWS = 16384
"""Outputs of the vocabulary projection that are solved at a time; bounds memory."""


@dataclass(slots=True, kw_only=True)
class BlockResult:
    """What working on one block gave."""

    index: int
    weights: dict[str, QuantizedWeight] = field(default_factory=dict)
    """By full name."""
    reports: list[ModuleReport] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    folds: list[FoldReport] = field(default_factory=list)
    block: BlockReport | None = None


class BlockWorker:
    """Works on the blocks of one model, one at a time; their weights are in memory then."""

    def __init__(
        self, model: BlockwiseModel, recipe: Recipe, ranks: Ranks, advance: progress.Advance
    ) -> None:
        self.model, self.recipe, self.ranks, self.advance = model, recipe, ranks, advance

    def names(self) -> Iterator[str]:
        """Linears of a block, in data-flow order, named inside it."""
        return (name for group in self.model.linear_groups() for name in group)

    def check_weights(self, index: int) -> None:
        """Refuse a weight that is not finite. Raises: UserError naming the layer."""
        for name in self.names():
            full = self.full(index, name)
            if self.recipe.layout_of(full) is not None:
                check_finite(self.model.blocks[index].get_submodule(name).weight.detach(), full)

    def round(self, index: int) -> BlockResult:
        """Plain rounding."""
        result = BlockResult(index=index)
        for name in self.names():
            full, start = self.full(index, name), time.perf_counter()
            layout = self.recipe.layout_of(full)
            if layout is None:
                self._skip(full, result)
                continue
            module = self.model.blocks[index].get_submodule(name)
            weight = quantize_layer_rtn(module.weight.detach(), layout)
            self._install(result, name, weight, None, time.perf_counter() - start)
        return result

    def calibrate(
        self, index: int, batches: list[Batch], *, last: bool = False
    ) -> tuple[BlockResult, list[Batch]]:
        """Fold, solve, and run on: the result and the batches after the quantized block; none after
        the last one, where nobody asks for them."""
        result = BlockResult(index=index)
        if self.recipe.folds:
            result.folds = self._fold(index, batches)
        with StagedBlock(self.model, index, batches) as staged:
            for group, inputs in staged.stages():
                self._solve_group(result, group, inputs)
            return result, [] if last else staged.finish()

    def solve_head(self, index: int, batches: list[Batch]) -> BlockResult:
        """The vocabulary projection, on what the quantized blocks put out; rows are independent, so
        they go in parts."""
        model, start = self._headed(), time.perf_counter()
        layout = self.recipe.layout_of(HEAD)
        result = BlockResult(index=index)
        if layout is None:
            self._skip(HEAD, result)
            return result
        linear = model.head_linear()
        check_finite(linear.weight.detach(), HEAD)
        parts = linear.weight.detach().split(_HEAD_ROWS)
        if self.recipe.method == "rtn":
            weight = concat_rows([quantize_layer_rtn(part, layout) for part in parts])
            self._install(result, HEAD, weight, None, time.perf_counter() - start)
            return result
        hessian = Hessian.zeros(linear.weight.shape[1], linear.weight.device)
        for batch in batches:
            hessian.add(model.head_input(batch.x))
        hessian.reduce(self.ranks)
        mean_KK = hessian.mean()
        solved = [self._solved([HEAD], [part.float()], mean_KK, layout, HEAD)[0] for part in parts]
        weight = concat_rows([weight for weight, _ in solved])
        loss, relative = output_error(linear.weight.detach().float(), weight.dequantize(), mean_KK)
        report = replace(solved[0][1], loss=loss, relative_error=relative)
        self._install(result, HEAD, weight, report, time.perf_counter() - start)
        return result

    def put_back(
        self, index: int, weights: dict[str, QuantizedWeight], plain: dict[str, torch.Tensor]
    ) -> None:
        """Layers and norms finished before, by full name, into the model."""
        for full, weight in weights.items():
            module = self._module(index, full)
            module.weight.copy_(weight.dequantize().to(module.weight.dtype))
            if module.bias is not None and weight.bias_N is not None:
                module.bias.copy_(weight.bias_N.to(module.bias.dtype))
        for full, tensor in plain.items():
            layer = self._module(index, full.rpartition(".")[0])
            layer.weight.copy_(tensor.to(layer.weight.dtype))

    def _module(self, index: int, full: str) -> Any:
        """A layer of a block, or the vocabulary projection, by full name."""
        if full == HEAD:
            return self._headed().head_linear()
        prefix = self.model.block_prefix(index) + "."
        return self.model.blocks[index].get_submodule(full.removeprefix(prefix))

    def _headed(self) -> HeadedModel:
        if not isinstance(self.model, HeadedModel):
            raise bad_type(
                "quantize",
                "model",
                "give its head (head_linear, head_input) for lm_head",
                type(self.model).__name__,
                "leave the head as it is",
            )
        return self.model

    # ---- folds -------------------------------------------------------------------------------

    def _fold(self, index: int, batches: list[Batch]) -> list[FoldReport]:
        """Choose on the run's first batch, then change the block alike on every rank."""
        if not isinstance(self.model, FoldableModel):
            raise bad_type(
                "quantize",
                "model",
                "say where scales fold (scale_folds) for awq",
                type(self.model).__name__,
                "use gptq or rtn",
            )
        folds = self.model.scale_folds()
        chosen: list[torch.Tensor | None] = [None] * len(folds)
        reports: list[FoldReport] = []
        block = self.model.blocks[index]
        if self.ranks.rank == 0:
            grid_of = functools.partial(self._grid_of, index)
            search = FoldSearch(self.model, index, grid_of, self.recipe.awq)
            found = search.choose(take_sample(batches[0], self.recipe.awq.search_tokens))
            chosen, reports = [scale_P for scale_P, _ in found], [report for _, report in found]
        for fold, scale_P in zip(folds, chosen, strict=True):
            weight = block.get_submodule(fold.producer).weight
            agreed = self.ranks.agree(scale_P, len(weight), weight.device)
            if agreed is not None:
                apply_fold(block, fold, agreed, self.recipe.norm_dtype())
        return reports

    def _grid_of(self, index: int, name: str) -> tuple[GridSpec, int] | None:
        """(grid, group size) of a linear; None: it stays plain."""
        layout = self.recipe.layout_of(self.full(index, name))
        if layout is None:
            return None
        K = self.model.blocks[index].get_submodule(name).weight.shape[1]
        return self.grid(layout), layout.group_of(K)

    # ---- layers ------------------------------------------------------------------------------

    def _solve_group(
        self, result: BlockResult, group: list[str], inputs: Iterator[torch.Tensor]
    ) -> None:
        """One Hessian, then the group's layers, those of one form solved together."""
        first = self.model.blocks[result.index].get_submodule(group[0])
        hessian = Hessian.zeros(first.weight.shape[1], first.weight.device)
        for x_BSK in inputs:
            hessian.add(x_BSK)
        hessian.reduce(self.ranks)
        mean_KK = hessian.mean()
        del hessian
        by_layout: dict[WeightFormat, list[str]] = {}
        for name in group:
            layout = self.recipe.layout_of(self.full(result.index, name))
            if layout is None:
                self._skip(self.full(result.index, name), result)
            else:
                by_layout.setdefault(layout, []).append(name)
        for layout, names in by_layout.items():
            self._solve(result, names, mean_KK, layout)

    def _solve(
        self, result: BlockResult, names: list[str], mean_KK: torch.Tensor, layout: WeightFormat
    ) -> None:
        start = time.perf_counter()
        modules = [self.model.blocks[result.index].get_submodule(name) for name in names]
        weights = [module.weight.detach() for module in modules]
        first = self.full(result.index, names[0])
        solved = self._solved(names, weights, mean_KK, layout, first)
        seconds = (time.perf_counter() - start) / len(names)
        for name, (weight, report) in zip(names, solved, strict=True):
            self._install(result, name, weight, report, seconds)

    def _solved(
        self,
        names: list[str],
        weights: list[torch.Tensor],
        mean_KK: torch.Tensor,
        layout: WeightFormat,
        first: str,
    ) -> list[tuple[QuantizedWeight, LayerReport]]:
        """Codes of layers on one input, as the recipe finds them."""
        grid, group = self.grid(layout), layout.group_of(mean_KK.shape[0])
        if self.recipe.solver == "gptq":
            return quantize_layers(weights, mean_KK, grid, group, self.recipe.gptq, name=first)
        bilinear = self.model.bilinear() if isinstance(self.model, FoldableModel) else ()
        clipped = [self.recipe.awq.clip and name not in bilinear for name in names]
        return quantize_layers_clipped(weights, mean_KK, grid, group, clipped, name=first)

    def grid(self, layout: WeightFormat) -> GridSpec:
        """The form's grid with scales as the recipe wants them."""
        fraction = _BF16_FRACTION_BITS if self.recipe.exact_bf16_scales else None
        return replace(layout.grid(), scale_mantissa_bits=fraction)

    def full(self, index: int, name: str) -> str:
        """Full name of a linear."""
        return f"{self.model.block_prefix(index)}.{name}"

    def _skip(self, full: str, result: BlockResult) -> None:
        result.skipped.append(full)
        self.advance(1)

    def _install(
        self,
        result: BlockResult,
        name: str,
        weight: QuantizedWeight,
        report: LayerReport | None,
        seconds: float,
    ) -> None:
        """Keep the result, put the dequantized weight into the model, say what happened."""
        full = HEAD if name == HEAD else self.full(result.index, name)
        module = self._module(result.index, full)
        if module.bias is not None:
            bias_N = module.bias.detach().to(weight.scale_NR.dtype)
            weight = replace(weight, bias_N=bias_N)
        original = module.weight.detach().float()
        wide = weight.dequantize()
        error = float((wide - original).norm() / original.norm().clamp(min=1e-30))
        with torch.no_grad():
            module.weight.copy_(wide.to(module.weight.dtype))
        result.weights[full] = weight
        if report is not None and report.damping_raises:
            progress.say(
                f"{full}: Hessian not positive definite, damping raised to {report.damping:g}"
            )
        n, k = weight.shape_nk
        result.reports.append(
            ModuleReport(
                name=full,
                n=n,
                k=k,
                method=self.recipe.method,
                bits=weight.bits,
                group_size=weight.group_size,
                loss=report.loss if report else None,
                relative_error=report.relative_error if report else None,
                weight_error=error,
                damping=report.damping if report else None,
                damping_raises=report.damping_raises if report else 0,
                dead_columns=report.dead_columns if report else 0,
                bytes=weight_bytes(weight),
                seconds=seconds,
            )
        )
        shown = report.relative_error if report else error
        self.advance(1, note=f"{full} error {shown:.3f}")


def block_indices(model: BlockwiseModel) -> list[int]:
    """Global indices of the blocks that a model holds."""
    return list(getattr(model.blocks, "indices", range(len(model.blocks))))
