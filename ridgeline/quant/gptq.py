"""GPTQ: round a weight column by column, spreading each column's error over the columns to come.

Minimize tr (Q - W) H (Q - W)^T over codes, H = X^T X of the layer's inputs. With U the upper
Cholesky factor of H^-1 (columns in processing order), column k is rounded and its error e = (w_k -
q_k) / U_kk is taken from the later columns: w_j -= e U_kj. Columns go in blocks of 128: inside a
block each column first collects the block's earlier errors (one matrix-vector product), later
blocks are updated once a block (one matrix product).
Costs N K^2 multiply-adds a layer plus the Cholesky; the loop is bound by the launch of K small
steps, so layers that share an input are stacked along N and solved together (rows are independent
given U).
Source: Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ", 2022, sections 3.2-3.3 (arXiv 2210.17323);
static groups and act-order: the same authors' public notes; scale refit and the second solve: ours,
docs/log.
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
    """natural: columns as stored; static: by descending diagonal of H with groups kept as stored
    (no cost at run time); activation: by descending diagonal with groups along that order (g_idx in
    the file, "desc_act")."""
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
    """Times that scales are fitted to the codes in the metric H and the columns solved again
    (static and natural order only)."""

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

    def add(self, x_MK: torch.Tensor) -> None:
        """Take in more rows [..., K]."""
        x_MK = x_MK.detach().reshape(-1, x_MK.shape[-1]).float()
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
            f"gptq: the inputs of {name} must be finite, got NaN or infinity; the model overflows "
            "in this dtype (calibrate in float32 or bfloat16) or its weights are damaged"
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

    With J the reversal of order and J H J = L L^T, U = J L^-1 J: one factorization and one
    triangular inverse instead of two factorizations around an inverse.
    """
    lower, info = torch.linalg.cholesky_ex(H.flip(0, 1))
    if int(info):
        return H, True
    eye = torch.eye(len(H), dtype=H.dtype, device=H.device)
    upper = torch.linalg.solve_triangular(lower, eye, upper=False).flip(0, 1).contiguous()
    return upper, not bool(torch.isfinite(upper).all())


@dataclass(slots=True, kw_only=True)
class _Groups:
    """Scales and zero points of the layers being solved, and each step's group."""

    scale_RN: torch.Tensor
    zero_RN: torch.Tensor
    step_group_K: list[int]
    known: bool
    """Set before the solve; otherwise each group is set from the updated weights when it starts."""


def quantize_layers(
    weights: list[torch.Tensor],
    hessian_KK: torch.Tensor,
    spec: GridSpec,
    group_size: int,
    options: GPTQOptions,
    *,
    name: str = "layer",
) -> list[tuple[QuantizedWeight, LayerReport]]:
    """Quantize layers that share one input (and so one H), solved together.

    Shapes: weights [N_i, K] each; hessian [K, K], mean over tokens of x x^T, fp32 (fp64 stays).
    Raises: UserError when H cannot be factorized.
    """
    H = hessian_KK if hessian_KK.dtype == torch.float64 else hessian_KK.float()
    rows = [len(w_NK) for w_NK in weights]
    factor = factorize(H, options, name)
    original_KN = torch.cat([w_NK.to(H.dtype) for w_NK in weights]).T
    target_KN = original_KN.masked_fill(factor.dead_K[:, None], 0.0)
    groups = _start_groups(target_KN, H, factor, spec, group_size, options)
    code_KN = _solve(target_KN[factor.order_K], factor, groups, spec, group_size, options)
    for _ in range(options.refits):
        _refit(target_KN, code_KN, H, factor, groups, spec, group_size, options)
        code_KN = _solve(target_KN[factor.order_K], factor, groups, spec, group_size, options)
    return _results(original_KN, code_KN, H, factor, groups, spec, group_size, options, rows)


def _start_groups(target_KN, H, factor, spec, group_size, options) -> _Groups:
    K, N = target_KN.shape
    R = -(-K // group_size)
    if options.order != "static":
        empty = torch.zeros(R, N, dtype=H.dtype, device=H.device)
        steps = [step // group_size for step in range(K)]
        return _Groups(scale_RN=empty, zero_RN=empty.clone(), step_group_K=steps, known=False)
    importance = _importance(_pivot_weight(factor), group_size)
    scale_NR, zero_NR = _params(group_view(target_KN.T, group_size), importance, spec, options)
    return _Groups(
        scale_RN=scale_NR.T.contiguous(),
        zero_RN=zero_NR.T.contiguous(),
        step_group_K=(factor.order_K // group_size).tolist(),
        known=True,
    )


def _pivot_weight(factor: Factor) -> torch.Tensor:
    """1 / U_kk^2 in stored order: what a squared rounding error in column k finally costs, once the
    later columns have taken what they can of it."""
    weight_K = torch.empty_like(factor.upper_KK.diagonal())
    weight_K[factor.order_K] = factor.upper_KK.diagonal().square().reciprocal()
    return weight_K


def _importance(diagonal_K: torch.Tensor, group_size: int) -> torch.Tensor:
    """A weight of each column by group [R, g]; 0 in the padding of a short last group."""
    pad = -len(diagonal_K) % group_size
    return torch.nn.functional.pad(diagonal_K, (0, pad)).reshape(-1, group_size)


def _params(grouped, importance, spec, options) -> tuple[torch.Tensor, torch.Tensor]:
    if options.clip_search:
        return fit_group_params(grouped, importance, spec)
    return range_params(grouped.amin(-1), grouped.amax(-1), spec)


def _solve(work_KN, factor, groups, spec, group_size, options) -> torch.Tensor:
    """The column loop on a copy [K, N] in processing order; signed codes [K, N] in that order."""
    K, N = work_KN.shape
    signed_KN = torch.empty_like(work_KN)
    importance_K = factor.upper_KK.diagonal().square().reciprocal()
    for start in range(0, K, options.block):
        stop = min(start + options.block, K)
        error_BN = torch.empty(stop - start, N, dtype=work_KN.dtype, device=work_KN.device)
        # Row j holds U[start + i, start + j] for i < j: what column j takes of earlier errors.
        taken_BB = factor.upper_KK[start:stop, start:stop].T.contiguous()
        pivots = taken_BB.diagonal().tolist()
        for step in range(start, stop):
            j = step - start
            if not groups.known and step % group_size == 0:
                end = min(step + group_size, K)
                spread = factor.upper_KK[start:step, step:end]
                current = work_KN[step:end] - spread.T @ error_BN[:j]
                _set_group(groups, step, current, importance_K[step:end], spec, options)
            w_N = work_KN[step]
            if j:
                w_N = torch.addmv(w_N, error_BN[:j].T, taken_BB[j, :j], alpha=-1)
            group = groups.step_group_K[step]
            scale_N, zero_N = groups.scale_RN[group], groups.zero_RN[group]
            signed_N = signed_KN[step]
            torch.div(w_N, scale_N, out=signed_N)
            signed_N.round_().add_(zero_N).clamp_(0, spec.max_code).sub_(zero_N)
            torch.addcmul(w_N, signed_N, scale_N, value=-1, out=error_BN[j])
            error_BN[j].div_(pivots[j])
        if stop < K:
            work_KN[stop:].addmm_(factor.upper_KK[start:stop, stop:].T, error_BN, alpha=-1)
    return signed_KN


def _set_group(groups, step, current_gN, importance_g, spec, options) -> None:
    """Group parameters from the weights as they stand when the group starts."""
    scale_N, zero_N = _params(current_gN.T, importance_g, spec, options)
    group = groups.step_group_K[step]
    groups.scale_RN[group], groups.zero_RN[group] = scale_N, zero_N


def _refit(target_KN, signed_KN, H, factor, groups, spec, group_size, options) -> None:
    """Scales by least squares for the codes at hand; they stay fixed in the next solve.

    Groups must be contiguous: in stored order for static groups, else in processing order.
    """
    order = factor.order_K
    damped_KK = H.clone()
    damped_KK.diagonal().add_(factor.damping * H.diagonal().mean())
    if options.order == "static":
        codes_KN = torch.empty_like(signed_KN)
        codes_KN[order] = signed_KN
    else:
        codes_KN, target_KN = signed_KN, target_KN[order]
        damped_KK = damped_KK[order][:, order]
    scale_RN = refit_scales(target_KN, codes_KN, damped_KK, group_size, groups.scale_RN)
    groups.scale_RN = spec.store(scale_RN)
    groups.known = True


def _results(
    original_KN, signed_KN, H, factor, groups, spec, group_size, options, rows
) -> list[tuple[QuantizedWeight, LayerReport]]:
    """Undo the order, split the stack, measure."""
    order = factor.order_K
    step_group = torch.tensor(groups.step_group_K, device=order.device)
    K = len(order)
    code_KN = torch.empty(original_KN.shape, dtype=torch.uint8, device=order.device)
    code_KN[order] = (signed_KN + groups.zero_RN[step_group]).to(torch.uint8)
    group_of_K = torch.empty(K, dtype=torch.int32, device=order.device)
    group_of_K[order] = step_group.to(torch.int32)
    keep_table = options.order == "activation"
    results, first = [], 0
    for count in rows:
        part = slice(first, first + count)
        first += count
        weight = QuantizedWeight(
            code_NK=code_KN[:, part].T.contiguous(),
            scale_NR=groups.scale_RN[:, part].T.to(spec.scale_dtype).contiguous(),
            zero_NR=None
            if spec.symmetric
            else groups.zero_RN[:, part].T.to(torch.uint8).contiguous(),
            bits=spec.bits,
            group_size=group_size,
            group_of_K=group_of_K if keep_table else None,
        )
        w_NK = original_KN[:, part].T
        loss, relative = output_error(w_NK, weight.dequantize().to(H.dtype), H)
        report = LayerReport(
            loss=loss,
            relative_error=relative,
            damping=factor.damping,
            damping_raises=factor.raises,
            dead_columns=int(factor.dead_K.sum()),
        )
        results.append((weight, report))
    return results


def output_error(
    w_NK: torch.Tensor, q_NK: torch.Tensor, hessian_KK: torch.Tensor
) -> tuple[float, float]:
    """(mean squared error a token, relative error) of a layer's output for inputs with this H."""

    def energy(x_NK: torch.Tensor) -> float:
        return float(((x_NK @ hessian_KK) * x_NK).sum())

    loss = max(energy(q_NK - w_NK), 0.0)
    total = energy(w_NK)
    return loss, (loss / total) ** 0.5 if total > 0 else 0.0
