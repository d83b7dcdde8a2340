"""What a quantization run says of each layer, and the sums over a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ridgeline.formats.base import QuantizedWeight
from ridgeline.quant.awq import FoldReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleReport:
    """One linear."""

    name: str
    n: int
    k: int
    method: str
    bits: int
    group_size: int
    loss: float | None
    """Mean squared output error a token on the calibration inputs; None without calibration."""
    relative_error: float | None
    """Norm of the output error over the norm of the output; None without calibration."""
    weight_error: float
    """Norm of the weight error over the norm of the weight (no measure of quality by itself)."""
    damping: float | None
    """Fraction of the mean diagonal that was added to H; None without calibration."""
    damping_raises: int
    dead_columns: int
    bytes: float
    """That a matmul must read."""
    seconds: float
    """Of the solve; layers that were solved together share it equally."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockReport:
    """One block."""

    name: str
    held_out_error: float | None
    """Norm of the difference of its output, all blocks so far quantized, from the unquantized
    model's, over the norm of the latter, on held-out tokens; None without an evaluation."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """The quantized model against the unquantized one on held-out tokens."""

    ppl_before: float
    ppl_after: float
    kl: float
    """Mean KL(unquantized || quantized) of next-token distributions, nats."""
    top1_agreement: float
    """Share of positions with the same most likely token, 0 .. 1."""
    tokens: int
    """Scored tokens."""
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedModel:
    """What a run returns."""

    weights: dict[str, QuantizedWeight]
    """By full module name; empty where a journal took them."""
    reports: list[ModuleReport]
    skipped: list[str]
    """Linears left as they were, by the recipe."""
    folds: list[FoldReport]
    blocks: list[BlockReport]
    evaluation: EvaluationReport | None
    calibration_tokens: int
    seconds: float

    def worst(self, count: int = 5) -> list[ModuleReport]:
        """The modules with the largest relative output error."""
        return sorted(self.reports, key=lambda report: -(report.relative_error or 0.0))[:count]

    def summary(self) -> dict[str, Any]:
        """One JSON object with every module's row."""
        return {
            "layers": len(self.reports),
            "skipped": self.skipped,
            "calibration_tokens": self.calibration_tokens,
            "seconds": round(self.seconds, 2),
            "bytes": sum(report.bytes for report in self.reports),
            "damping_raises": sum(report.damping_raises for report in self.reports),
            "dead_columns": sum(report.dead_columns for report in self.reports),
            "evaluation": None if self.evaluation is None else asdict(self.evaluation),
            "blocks": [asdict(block) for block in self.blocks],
            "folds": [asdict(fold) for fold in self.folds],
            "modules": [asdict(report) for report in self.reports],
        }


def weight_bytes(weight: QuantizedWeight) -> float:
    """Bytes a matmul must read of one weight: packed codes, scales, zero points, table."""
    n, k = weight.shape_nk
    groups = weight.scale_NR.shape[1]
    code = weight.bits / 8
    total = n * k * code + n * groups * weight.scale_NR.element_size()
    if weight.zero_NR is not None:
        total += n * groups * code
    if weight.group_of_K is not None:
        total += 4 * k
    return total


def packed_bytes(weights: Mapping[str, QuantizedWeight]) -> float:
    """Bytes read per token by all quantized linears together (each weight once)."""
    return sum(weight_bytes(weight) for weight in weights.values())
