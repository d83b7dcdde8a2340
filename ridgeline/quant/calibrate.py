"""Quantize a whole model block by block, on any model that is a BlockwiseModel.

Only one block's activations and Hessians are alive at a time. Inside a block the groups of linears
are taken in data-flow order, each on the outputs of its quantized predecessors (staged.py); the
block's outputs through its quantized layers are the next block's inputs. Two runs give the same
bits. Cost: one forward of the calibration tokens, 2 T K^2 FLOPs of Hessian a distinct input, and
the solve.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from ridgeline.core import progress
from ridgeline.core.errors import bad_type, bad_value
from ridgeline.core.protocols import BlockwiseModel
from ridgeline.formats.base import QuantizedWeight
from ridgeline.formats.contract import WeightFormat
from ridgeline.formats.grid import GridSpec
from ridgeline.quant.gptq import Hessian, LayerReport, check_finite, quantize_layers
from ridgeline.quant.recipe import Recipe
from ridgeline.quant.report import ModuleReport, QuantizedModel
from ridgeline.quant.rtn import quantize_layer_rtn
from ridgeline.quant.staged import StagedBlock

OnBlock = Callable[[int, dict[str, QuantizedWeight]], None]
_BF16_FRACTION_BITS = 7
_TOKENS_PER_INPUT = 4
"""Below so many tokens an input, H is dominated by the sample (docs/log/quantize.md)."""


def quantize_model(
    model: BlockwiseModel,
    token_ids_BS: torch.Tensor | None,
    recipe: Recipe,
    *,
    on_block: OnBlock | None = None,
) -> QuantizedModel:
    """Quantize every linear of every block as the recipe says.

    The model's own weights are replaced by the dequantized ones as the run goes on (that is what
    the later blocks are calibrated on); after an exception they are partly replaced: load the model
    again.
    Shapes: token_ids int64 [B, S], whole sequences without padding; not needed (None) for rtn.
    on_block(index, {full name: weight}) is called as each block is done, to stream it out.
    Raises: TypeError for a model that is no BlockwiseModel; ValueError for missing token ids;
    UserError for weights or activations that are not finite or a Hessian that cannot be factorized.
    """
    if not isinstance(model, BlockwiseModel):
        raise bad_type(
            "quantize", "model", "be a BlockwiseModel", type(model).__name__, "wrap it in one"
        )
    _check_weights(model, recipe)
    start = time.perf_counter()
    run = _Run(model, recipe, on_block)
    layers = len(model.blocks) * sum(len(group) for group in model.linear_groups())
    with progress.task(f"quantize ({recipe.method})", layers, "layers") as advance:
        run.advance = advance
        if recipe.method == "rtn":
            for index in range(len(model.blocks)):
                run.round_block(index)
            tokens = 0
        else:
            tokens = run.calibrate(_checked(token_ids_BS))
    return QuantizedModel(
        weights=run.weights,
        reports=run.reports,
        skipped=run.skipped,
        calibration_tokens=tokens,
        seconds=time.perf_counter() - start,
    )


def _check_weights(model: BlockwiseModel, recipe: Recipe) -> None:
    """Before any work, whether every weight to be quantized is finite."""
    for index in range(len(model.blocks)):
        for name in (name for group in model.linear_groups() for name in group):
            full = f"{model.block_prefix(index)}.{name}"
            if recipe.layout_of(full) is not None:
                check_finite(model.blocks[index].get_submodule(name).weight.detach(), full)


def _checked(token_ids_BS: torch.Tensor | None) -> torch.Tensor:
    if token_ids_BS is None or token_ids_BS.dim() != 2 or token_ids_BS.numel() == 0:
        got = None if token_ids_BS is None else list(token_ids_BS.shape)
        raise bad_value(
            "quantize",
            "token_ids_BS",
            "hold calibration sequences [B, S]",
            got,
            "give text, or use method rtn",
        )
    return token_ids_BS


class _Run:
    """State of one run over the blocks."""

    def __init__(self, model: BlockwiseModel, recipe: Recipe, on_block: OnBlock | None) -> None:
        self.model, self.recipe, self.on_block = model, recipe, on_block
        self.weights: dict[str, QuantizedWeight] = {}
        self.reports: list[ModuleReport] = []
        self.skipped: list[str] = []
        self.advance: progress.Advance = lambda amount=1, *, note="": None

    def calibrate(self, token_ids_BS: torch.Tensor) -> int:
        """GPTQ over all blocks; returns the tokens used."""
        self._warn_of_little_text(token_ids_BS.numel())
        with torch.no_grad():
            batches = [
                self.model.embed(part) for part in token_ids_BS.split(self.recipe.batch_sequences)
            ]
            for index in range(len(self.model.blocks)):
                with StagedBlock(self.model, index, batches) as staged:
                    batches = []
                    for group, inputs in staged.stages():
                        self.quantize_group(index, group, inputs)
                    batches = staged.finish()
                self._block_done(index)
        return token_ids_BS.numel()

    def _warn_of_little_text(self, tokens: int) -> None:
        first = self.model.blocks[0]
        names = [name for group in self.model.linear_groups() for name in group]
        widest = max(first.get_submodule(name).weight.shape[1] for name in names)
        if tokens < _TOKENS_PER_INPUT * widest:
            progress.say(
                f"quantize: {tokens} calibration tokens are few for layers of {widest} inputs; "
                f"{_TOKENS_PER_INPUT * widest} or more generalize better"
            )

    def quantize_group(self, index: int, group: list[str], inputs) -> None:
        """One Hessian, then the group's layers, those of one form solved together."""
        first = self.model.blocks[index].get_submodule(group[0])
        hessian = Hessian.zeros(first.weight.shape[1], first.weight.device)
        for x_BSK in inputs:
            hessian.add(x_BSK)
        mean_KK = hessian.mean()
        by_layout: dict[WeightFormat, list[str]] = {}
        for name in group:
            layout = self.recipe.layout_of(self._full(index, name))
            if layout is None:
                self.skipped.append(self._full(index, name))
                self.advance(1)
            else:
                by_layout.setdefault(layout, []).append(name)
        for layout, names in by_layout.items():
            self._solve(index, names, mean_KK, layout)

    def _solve(
        self, index: int, names: list[str], mean_KK: torch.Tensor, layout: WeightFormat
    ) -> None:
        start = time.perf_counter()
        modules = [self.model.blocks[index].get_submodule(name) for name in names]
        results = quantize_layers(
            [module.weight.detach() for module in modules],
            mean_KK,
            self._grid(layout),
            layout.group_of(mean_KK.shape[0]),
            self.recipe.gptq,
            name=self._full(index, names[0]),
        )
        seconds = (time.perf_counter() - start) / len(names)
        for name, (weight, report) in zip(names, results, strict=True):
            self._install(index, name, weight, report, seconds)

    def round_block(self, index: int) -> None:
        """RTN on a block."""
        for name in (name for group in self.model.linear_groups() for name in group):
            full, start = self._full(index, name), time.perf_counter()
            layout = self.recipe.layout_of(full)
            if layout is None:
                self.skipped.append(full)
                self.advance(1)
                continue
            module = self.model.blocks[index].get_submodule(name)
            weight = quantize_layer_rtn(module.weight.detach(), layout)
            self._install(index, name, weight, None, time.perf_counter() - start)
        self._block_done(index)

    def _grid(self, layout: WeightFormat) -> GridSpec:
        fraction = _BF16_FRACTION_BITS if self.recipe.exact_bf16_scales else None
        return replace(layout.grid(), scale_mantissa_bits=fraction)

    def _full(self, index: int, name: str) -> str:
        return f"{self.model.block_prefix(index)}.{name}"

    def _install(
        self,
        index: int,
        name: str,
        weight: QuantizedWeight,
        report: LayerReport | None,
        seconds: float,
    ) -> None:
        """Keep the result, put the dequantized weight into the model, say what happened."""
        module = self.model.blocks[index].get_submodule(name)
        full = self._full(index, name)
        if module.bias is not None:
            bias_N = module.bias.detach().to(weight.scale_NR.dtype)
            weight = replace(weight, bias_N=bias_N)
        original = module.weight.detach().float()
        wide = weight.dequantize()
        error = float((wide - original).norm() / original.norm().clamp(min=1e-30))
        with torch.no_grad():
            module.weight.copy_(wide.to(module.weight.dtype))
        self.weights[full] = weight
        if report is not None and report.damping_raises:
            progress.say(
                f"{full}: Hessian not positive definite, damping raised to {report.damping:g}"
            )
        n, k = weight.shape_nk
        self.reports.append(
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
                seconds=seconds,
            )
        )
        shown = report.relative_error if report else error
        self.advance(1, note=f"{full} error {shown:.3f}")

    def _block_done(self, index: int) -> None:
        if self.on_block is not None:
            prefix = self.model.block_prefix(index) + "."
            done = {name: w for name, w in self.weights.items() if name.startswith(prefix)}
            self.on_block(index, done)
