"""What to do with a model: method, form, options, exceptions for some layers, calibration sizes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import torch

from ridgeline.core.dtypes import torch_dtype
from ridgeline.core.errors import UserError, bad_value
from ridgeline.formats.contract import WeightFormat
from ridgeline.formats.gptq import GPTQFormat
from ridgeline.quant.options import METHODS, AWQOptions, GPTQOptions, Override


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One quantization run."""

    method: str = "gptq"
    """rtn, gptq, awq (fold scales, then round with searched ranges) or awq+gptq (fold scales, then
    solve)."""
    layout: WeightFormat = field(default_factory=lambda: GPTQFormat(group_size=64))
    """Form of the result: width, group size, symmetry, storage dtype."""
    gptq: GPTQOptions = field(default_factory=GPTQOptions)
    """How gptq solves a layer."""
    awq: AWQOptions = field(default_factory=AWQOptions)
    """How awq searches scales."""
    plain_dtype: str | None = None
    """Dtype in which norms will be stored, to which a folded norm is rounded; None: the model's
    own."""
    overrides: tuple[Override, ...] = ()
    """The first whose pattern matches a layer counts."""
    lm_head: bool = False
    """Quantize the vocabulary projection too."""
    batch_sequences: int = 8
    """Sequences of a calibration forward; bounds memory."""
    exact_bf16_scales: bool = True
    """Keep 8 significant bits of a scale, so that bf16 kernels hold it exactly too."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise bad_value(
                "quantize",
                "method",
                f"be one of {', '.join(METHODS)}",
                repr(self.method),
                "choose one of these",
            )
        if self.batch_sequences < 1:
            raise bad_value(
                "quantize", "batch_sequences", "be at least 1", self.batch_sequences, "8 is usual"
            )
        if (self.gptq.order == "activation" and self.solver == "gptq") != self.layout.desc_act:
            raise bad_value(
                "quantize",
                "layout.desc_act",
                "be true exactly when gptq.order is activation",
                f"desc_act={self.layout.desc_act}, order={self.gptq.order}",
                "set both",
            )

    @property
    def folds(self) -> bool:
        """Whether scales are folded first."""
        return self.method.startswith("awq")

    @property
    def solver(self) -> str:
        """How a layer's codes are found: rtn, clip or gptq."""
        return {"rtn": "rtn", "awq": "clip"}.get(self.method, "gptq")

    def norm_dtype(self) -> torch.dtype | None:
        """plain_dtype as torch names it."""
        return None if self.plain_dtype is None else torch_dtype(self.plain_dtype)

    def layout_of(self, name: str) -> WeightFormat | None:
        """The form of one layer by its full name; None: leave it as it is."""
        for override in self.overrides:
            if re.search(override.pattern, name):
                if override.skip:
                    return None
                return replace(
                    self.layout,
                    bits=override.bits or self.layout.bits,
                    group_size=override.group_size or self.layout.group_size,
                )
        return self.layout


def calibration_blocks(
    token_ids: torch.Tensor, *, sequences: int, length: int, seed: int = 0
) -> torch.Tensor:
    """Random whole blocks of a token stream, none twice: int64 [sequences, length].

    The stream is cut into consecutive blocks of `length`; the rest at the end is not used.
    Raises: ValueError for sizes below 1 and 2; UserError when the text is too short.
    """
    if sequences < 1 or length < 2:
        raise bad_value(
            "quantize",
            "sequences and length",
            "be at least 1 and 2",
            (sequences, length),
            "32 x 512 is usual",
        )
    blocks = token_ids.numel() // length
    if blocks < sequences:
        raise UserError(
            f"quantize: the calibration text must hold {sequences} x {length} = "
            f"{sequences * length} tokens, got {token_ids.numel()}; give more text or ask for less"
        )
    pick = chosen_blocks(blocks, sequences, seed)
    return token_ids.reshape(-1)[: blocks * length].reshape(blocks, length)[pick].long()


def chosen_blocks(blocks: int, sequences: int, seed: int) -> torch.Tensor:
    """Which of so many blocks a seed takes: int64 [sequences], none twice."""
    return torch.randperm(blocks, generator=torch.Generator().manual_seed(seed))[:sequences]
