"""GPTQ: round a weight column by column, spreading each column's error over the columns to come.

Minimize tr (Q - W) H (Q - W)^T over codes, H = X^T X of the layer's inputs. With U the upper Cholesky
factor of H^-1 (columns in processing order), column k is rounded and its error e = (w_k - q_k) / U_kk
is taken from the later columns: w_j -= e U_kj. Columns go in blocks of 128: inside a block each column
first collects the block's earlier errors (one matrix-vector product), later blocks are updated once a
block (one matrix product).
Costs N K^2 multiply-adds a layer plus the Cholesky; the loop is bound by the launch of K small steps,
so layers that share an input are stacked along N and solved together (rows are independent given U).
Source: Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ", 2022, sections 3.2-3.3 (arXiv 2210.17323); static
groups and act-order: the same authors' public notes; scale refit and the second solve: ours, docs/log.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ridgeline.core.errors import UserError, bad_value
from ridgeline.formats.base import QuantizedWeight
from ridgeline.formats.grid import GridSpec, group_view, range_params
from ridgeline.quant.scales import fit_group_params, refit_scales


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTQOptions:
    """How one layer is solved."""

    order: str = "static"
    """natural: columns as stored; static: by descending diagonal of H with groups kept as stored (no
    cost at run time); activation: by descending diagonal with groups along that order (g_idx in the
    file, "desc_act")."""
    damping: float = 0.01
    """Added to the diagonal of H, as a fraction of its mean. Range (0, 1]."""
    damping_step: float = 0.01
    """Added to the fraction whenever the factorization fails; each raise is reported."""
    damping_limit: float = 1.0
    """Where raising stops and the layer is refused."""
    block: int = 128
    """Columns between two updates of the rest."""
    clip_search: bool = True
    """Choose each group's scale for least weighted rounding error instead of its extremes."""
    refits: int = 1
    """Times that scales are fitted to the codes in the metric H and the columns solved again (static
    and natural order only)."""

    def __post_init__(self) -> None:
        if self.order not in ("natural", "static", "activation"):
            raise bad_value(
                "gptq",
                "order",
                "be natural, static or activation",
                repr(self.order),
                "choose one of these",
            )
        if not 0.0 < self.damping <= 1.0:
            raise bad_value("gptq", "damping", "lie in (0, 1]", self.damping, "0.01 is usual")
        if self.damping_step <= 0.0 or self.damping_limit < self.damping:
            raise bad_value(
                "gptq",
                "damping_limit",
                "be at least damping, with a positive step",
                (self.damping_limit, self.damping_step),
                "keep the defaults",
            )
        if self.block < 1:
            raise bad_value("gptq", "block", "be at least 1", self.block, "128 is usual")
        if self.refits < 0:
            raise bad_value("gptq", "refits", "be 0 or more", self.refits, "1 is usual")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """What happened to one layer."""

    loss: float
    """tr (Q - W) H (Q - W)^T over tokens and outputs: mean squared output error."""
    relative_error: float
    """sqrt of the loss over the mean squared output: norm(X (Q - W)^T) / norm(X W^T)."""
    damping: float
    """The fraction that was used, after any raises."""
    damping_raises: int
    dead_columns: int
    """Inputs that were always zero; their weights are set to zero."""


@dataclass(slots=True, kw_only=True)
class Hessian:
    """X^T X of a layer's inputs, streamed in fp32, and the number of rows seen."""

    sum_KK: torch.Tensor
    tokens: int = 0

    @classmethod
    def zeros(cls, k: int, device: torch.device | str = "cpu") -> Hessian:
        return cls(sum_KK=torch.zeros(k, k, dtype=torch.float32, device=device))

    def add(self, x_MK: torch.Tensor, name: str = "layer") -> None:
        """Take in more rows. Raises: UserError when they hold NaN or infinity."""
        x_MK = x_MK.detach().reshape(-1, x_MK.shape[-1]).float()
        if not bool(torch.isfinite(x_MK).all()):
            raise UserError(
                f"gptq: the inputs of {name} must be finite, got NaN or infinity; the model overflows "
                "in this dtype: calibrate in float32 or bfloat16"
            )
        self.sum_KK.addmm_(x_MK.T, x_MK)
        self.tokens += x_MK.shape[0]

    def mean(self) -> torch.Tensor:
        """X^T X / tokens."""
        return self.sum_KK / max(self.tokens, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """What the solver needs of H, in processing order."""

    order_K: torch.Tensor
    """int64 [K], column taken at each step."""
    upper_KK: torch.Tensor
    """Upper Cholesky factor of the inverse of the damped H."""
    damping: float
    raises: int
    dead_K: torch.Tensor = field(repr=False)
    """bool [K] in stored order."""


def factorize(hessian_KK: torch.Tensor, options: GPTQOptions, name: str = "layer") -> Factor:
    """Order, damp and factorize; more damping on failure, an error when that does not help.

    Raises: UserError when H stays indefinite at damping_limit or is not finite.
    """
    if not bool(torch.isfinite(hessian_KK).all()):
        raise UserError(
            f"gptq: the Hessian of {name} must be finite, got NaN or infinity; calibrate in float32"
        )
    diagonal = hessian_KK.diagonal()
    dead = diagonal <= 0
    H = hessian_KK.clone()
    H.diagonal()[dead] = 1.0
    if options.order == "natural":
        order = torch.arange(len(diagonal), device=H.device)
    else:
        order = torch.argsort(diagonal, descending=True, stable=True)
    H = H[order][:, order]
    mean = float(diagonal.mean()) or 1.0
    eye = H.diagonal().clone()
    damping, raises = options.damping, 0
    while True:
        H.diagonal().copy_(eye + damping * mean)
        upper, failed = _inverse_upper(H)
        if not failed:
            return Factor(
                order_K=order, upper_KK=upper, damping=damping, raises=raises, dead_K=dead
            )
        damping, raises = damping + options.damping_step, raises + 1
        if damping > options.damping_limit:
            raise UserError(
                f"gptq: the Hessian of {name} must be positive definite, got one that is not at "
                f"damping {options.damping_limit:g}; give more calibration text"
            )


def _inverse_upper(H: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Upper U with H^-1 = U^T U, and whether it failed.

    With J the reversal of order and J H J = L L^T, U = J L^-1 J: one factorization and one triangular
    inverse instead of two factorizations around an inverse.
    """
    lower, info = torch.linalg.cholesky_ex(H.flip(0, 1))
    if int(info):
        return H, True
    eye = torch.eye(len(H), dtype=H.dtype, device=H.device)
    upper = torch.linalg.solve_triangular(lower, eye, upper=False).flip(0, 1).contiguous()
    return upper, not bool(torch.isfinite(upper).all())
