"""Widths by layer from measured error, under a budget of stored bits a weight.

Before the run, one pass of the unquantized model: each layer is rounded at every width and its
relative squared output error tr(D H D^T) / tr(W H W^T) is noted, D the rounding error, H of its own
inputs. Every layer starts at the least width; then, while the budget holds, the layer whose next
width takes away most error a byte gets it.
Cost: one forward and the Hessians, and N K^2 a layer and width.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ridgeline.core import progress
from ridgeline.core.errors import bad_value
from ridgeline.core.protocols import BlockwiseModel, StreamedModel
from ridgeline.formats.contract import WeightFormat
from ridgeline.quant.batches import token_batches
from ridgeline.quant.block import block_indices
from ridgeline.quant.gptq import Hessian, check_inputs, output_error
from ridgeline.quant.ranks import Ranks
from ridgeline.quant.recipe import Override, Recipe
from ridgeline.quant.report import weight_bytes
from ridgeline.quant.staged import StagedBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One layer at one width."""

    bits: int
    error: float
    """Relative squared output error."""
    num_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One layer at every width, ascending."""

    name: str
    weights: int
    choices: tuple[Choice, ...]


@torch.no_grad()
def measure_widths(
    model: BlockwiseModel,
    token_ids_BS: torch.Tensor,
    recipe: Recipe,
    widths: Sequence[int],
    *,
    lengths_B: torch.Tensor | None = None,
    ranks: Ranks | None = None,
) -> list[Measured]:
    """Every layer that the recipe quantizes, at every width; the model is left as it was.

    Raises: UserError for inputs that are not finite.
    """
    ranks = ranks or Ranks()
    batches = ranks.share(token_batches(token_ids_BS, lengths_B, recipe.batch_sequences))
    batches = [batch.carrying(model.embed(batch.x)) for batch in batches]
    found: list[Measured] = []
    indices = block_indices(model)
    with progress.task("measure widths", len(indices), "blocks") as advance:
        for index in indices:
            if isinstance(model, StreamedModel):
                model.acquire_block(index)
            with StagedBlock(model, index, batches) as staged:
                for group, inputs in staged.stages():
                    k = model.blocks[index].get_submodule(group[0]).weight.shape[1]
                    device = model.blocks[index].get_submodule(group[0]).weight.device
                    hessian = Hessian.zeros(k, device)
                    for x_BSK in inputs:
                        hessian.add(x_BSK)
                    hessian.reduce(ranks)
                    mean_KK = hessian.mean()
                    for name in group:
                        full = f"{model.block_prefix(index)}.{name}"
                        layout = recipe.layout_of(full)
                        if layout is not None:
                            w_NK = model.blocks[index].get_submodule(name).weight.float()
                            found.append(_measure(full, w_NK, mean_KK, layout, widths))
                batches = staged.finish()
            if isinstance(model, StreamedModel):
                model.release_block(index)
            advance(1)
    return found


def _measure(
    name: str, w_NK: torch.Tensor, H_KK: torch.Tensor, layout: WeightFormat, widths: Sequence[int]
) -> Measured:
    check_inputs(H_KK, name)
    choices = []
    for bits in sorted(widths):
        rounded = replace(layout, bits=bits).quantize_ref(w_NK)
        _, relative = output_error(w_NK, rounded.dequantize(), H_KK)
        choices.append(Choice(bits=bits, error=relative**2, num_bytes=weight_bytes(rounded)))
    return Measured(name=name, weights=w_NK.numel(), choices=tuple(choices))


def choose_widths(measured: Sequence[Measured], bits_a_weight: float) -> dict[str, int]:
    """Width of each layer, with at most so many stored bits a weight in the mean (codes, scales and
    zero points).

    Raises: ValueError for a budget that the least width exceeds.
    """
    at = dict.fromkeys((layer.name for layer in measured), 0)
    layers = {layer.name: layer for layer in measured}
    left = bits_a_weight * sum(layer.weights for layer in measured) / 8
    left -= sum(layer.choices[0].num_bytes for layer in measured)
    if left < 0:
        least = sum(layer.choices[0].num_bytes for layer in measured)
        need = 8 * least / sum(layer.weights for layer in measured)
        raise bad_value(
            "quantize", "target_bits", f"be at least {need:.2f}, the least width's", bits_a_weight,
            "raise it, allow a smaller width, or make groups larger",
        )  # fmt: skip

    def gain(name: str) -> tuple[float, float]:
        """(error taken away a byte, bytes) of the next width that lowers the error."""
        choices, now = layers[name].choices, at[name]
        if now + 1 >= len(choices):
            return 0.0, 0.0
        extra = choices[now + 1].num_bytes - choices[now].num_bytes
        return (choices[now].error - choices[now + 1].error) / extra, extra

    while True:
        fitting = [(gain(name), name) for name in at]
        fitting = [(got, name) for got, name in fitting if got[0] > 0 and got[1] <= left]
        if not fitting:
            break
        (_, extra), name = max(fitting, key=lambda each: (each[0][0], each[1]))
        at[name] += 1
        left -= extra
    return {name: layers[name].choices[place].bits for name, place in at.items()}


def with_widths(recipe: Recipe, widths: dict[str, int]) -> Recipe:
    """The recipe with the chosen widths as exceptions by full name, before its own."""
    changed = []
    for name, bits in widths.items():
        layout = recipe.layout_of(name)
        assert layout is not None, "only quantized layers were measured"
        if bits != recipe.layout.bits or layout.bits != recipe.layout.bits:
            pattern = re.escape(name) + "$"
            changed.append(Override(pattern=pattern, bits=bits, group_size=layout.group_size))
    return replace(recipe, overrides=(*changed, *recipe.overrides))
