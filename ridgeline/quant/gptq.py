"""GPTQ: round a weight column by column, spreading each column's error over the columns to come.

Minimize tr (Q - W) H (Q - W)^T over codes, H = X^T X of the layer's inputs. With U the upper
Cholesky factor of H^-1 (columns in processing order), column k is rounded and its error e = (w_k -
q_k) / U_kk is taken from the later columns: w_j -= e U_kj. (Here U's rows are divided by U_kk
instead, so that e is the plain difference.) Columns go in blocks of 128, each one loop over its
steps (kernels/gptq_columns); later blocks take a block's errors as one matrix product.
Costs N K^2 multiply-adds a layer plus the Cholesky; the loop is bound by its K times some ten small
steps, so layers that share an input are stacked along N and solved together (rows are independent
given U).
Source: Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ", 2022, sections 3.2-3.3 (arXiv 2210.17323);
static groups and act-order: the same authors' public notes; scale refit and the second solve: ours,
docs/log.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from ridgeline.core.errors import UserError
from ridgeline.formats.base import QuantizedWeight
from ridgeline.formats.grid import GridSpec, group_view, range_params
from ridgeline.kernels.gptq_columns import op as columns_op
from ridgeline.quant.options import GPTQOptions
from ridgeline.quant.ranks import Ranks
from ridgeline.quant.scales import fit_group_params, refit_scales

_STRIPS, _LEAST_STRIP = 8, 192
"""Of a symmetric matrix: at most so many, at least so wide."""
_LEAST_INVERSE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """What happened to one layer."""

    loss: float
    """tr (Q - W) H (Q - W)^T over tokens and outputs: mean squared output error."""
    relative_error: float
    """sqrt of the loss over the mean squared output: norm(X (Q - W)^T) / norm(X W^T)."""
    damping: float | None
    """The fraction that was used, after any raises; None: nothing was damped (rounding)."""
    damping_raises: int
    dead_columns: int
    """Inputs that were always zero; their weights are set to zero."""


def strips(K: int) -> list[tuple[int, int]]:
    """Strips of columns of a symmetric matrix; each is computed from the diagonal down, so most of
    the half above is not computed at all. (Tall strips: a product is split over cores by rows.)"""
    width = max(-(-K // _STRIPS), _LEAST_STRIP)
    return [(start, min(start + width, K)) for start in range(0, K, width)]


@dataclass(slots=True, kw_only=True)
class Hessian:
    """X^T X of a layer's inputs, streamed, and the number of rows seen.

    Each batch's product is made in fp32 (16-bit inputs on a GPU: exact products, fp32 sums), and
    batches are summed in fp64, so that the result does not depend on who had which batch.
    """

    sum_KK: torch.Tensor
    """fp64; only blocks on and below the diagonal are filled until `mean`."""
    tokens: int = 0

    @classmethod
    def zeros(cls, k: int, device: torch.device | str = "cpu") -> Hessian:
        return cls(sum_KK=torch.zeros(k, k, dtype=torch.float64, device=device))

    def add(self, x_MK: torch.Tensor) -> None:
        """Take in more rows [..., K]."""
        x_MK = x_MK.detach().reshape(-1, x_MK.shape[-1])
        narrow = x_MK.is_cuda and x_MK.dtype in (torch.bfloat16, torch.float16)
        x_MK = x_MK if narrow else x_MK.float()
        for start, stop in strips(x_MK.shape[1]):
            left, right = x_MK[:, start:].T, x_MK[:, start:stop]
            product = torch.mm(left, right, out_dtype=torch.float32) if narrow else left @ right
            self.sum_KK[start:, start:stop].add_(product)
        self.tokens += x_MK.shape[0]

    def reduce(self, ranks: Ranks) -> None:
        """Add up what the ranks have seen."""
        ranks.sum_(self.sum_KK)
        tokens = torch.tensor(self.tokens, dtype=torch.int64, device=self.sum_KK.device)
        ranks.sum_(tokens)
        self.tokens = int(tokens)

    def mean(self) -> torch.Tensor:
        """X^T X / tokens, fp32."""
        mean_KK = (self.sum_KK / max(self.tokens, 1)).float()
        for start, stop in strips(len(mean_KK)):
            mean_KK[start:stop, stop:] = mean_KK[stop:, start:stop].T
        return mean_KK


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
    check_inputs(hessian_KK, name)
    diagonal = hessian_KK.diagonal()
    dead = diagonal <= 0
    if options.order == "natural":
        order = torch.arange(len(diagonal), device=diagonal.device)
    else:
        order = torch.argsort(diagonal, descending=True, stable=True)
    backwards = order.flip(0)
    H = hessian_KK[backwards][:, backwards]
    mean = float(diagonal.mean()) or 1.0
    undamped = torch.where(dead, 1.0, diagonal)[backwards]
    damping, raises = options.damping, 0
    while True:
        H.diagonal().copy_(undamped + damping * mean)
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


def _inverse_upper(reversed_KK: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Upper U with H^-1 = U^T U from H in reversed order, and whether it failed.

    With J the reversal of order and J H J = L L^T, U = J L^-1 J: one factorization and one
    triangular inverse instead of two factorizations around an inverse.
    """
    lower, info = torch.linalg.cholesky_ex(reversed_KK)
    if int(info):
        return lower, True
    inverse = lower.new_zeros(lower.shape)  # by rows, which the factor is not
    _invert_lower(lower, inverse)
    return inverse.flip(0, 1), not is_finite(inverse)


def _invert_lower(lower_KK: torch.Tensor, out_KK: torch.Tensor) -> None:
    """L^-1 of a lower triangle by halves, so that nearly all of it is matrix products:
    [[A, 0], [B, C]]^-1 = [[A^-1, 0], [-C^-1 B A^-1, C^-1]]. out: zero above the diagonal."""
    K = len(lower_KK)
    if K <= _LEAST_INVERSE:
        eye = torch.eye(K, dtype=lower_KK.dtype, device=lower_KK.device)
        out_KK.copy_(torch.linalg.solve_triangular(lower_KK, eye, upper=False))
        return
    half = K // 2
    first, second = out_KK[:half, :half], out_KK[half:, half:]
    _invert_lower(lower_KK[:half, :half], first)
    _invert_lower(lower_KK[half:, half:], second)
    out_KK[half:, :half] = (second @ (lower_KK[half:, :half] @ first)).neg_()


def is_finite(x: torch.Tensor) -> bool:
    """Whether all values are: one pass, since extremes pass NaN on."""
    return bool(torch.isfinite(torch.stack(x.aminmax())).all())


def check_inputs(hessian_KK: torch.Tensor, name: str) -> None:
    """Refuse inputs that were NaN or infinite somewhere. Raises: UserError naming the layer."""
    if not is_finite(hessian_KK):
        raise UserError(
            f"quantize: the inputs of {name} must be finite, got NaN or infinity; the model "
            "overflows in this dtype (calibrate in float32 or bfloat16) or its weights are damaged"
        )


def check_weights(weights: list[torch.Tensor], name: str) -> None:
    """check_finite of several. Raises: UserError naming the first layer of the group."""
    for w_NK in weights:
        check_finite(w_NK, name)


def check_finite(w_NK: torch.Tensor, name: str) -> None:
    """Refuse a weight that no code stands for. Raises: UserError naming the layer."""
    if not is_finite(w_NK):
        raise UserError(
            f"quantize: the weights of {name} must be finite, got NaN or infinity; fetch the "
            "checkpoint again, or skip the layer"
        )


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
    Raises: UserError when H cannot be factorized or a weight is not finite.
    """
    check_weights(weights, name)
    H = hessian_KK if hessian_KK.dtype == torch.float64 else hessian_KK.float()
    solver = _Solver(weights, H, factorize(H, options, name), spec, group_size, options)
    signed_KN = solver.solve()
    for _ in range(options.refits):
        solver.refit(signed_KN)
        signed_KN = solver.solve()
    return solver.results(signed_KN)


class _Solver:
    """The stacked layers, transposed to [K, N] so that a column is one run of memory."""

    def __init__(
        self,
        weights: list[torch.Tensor],
        H: torch.Tensor,
        factor: Factor,
        spec: GridSpec,
        group_size: int,
        options: GPTQOptions,
    ) -> None:
        self.H, self.factor, self.spec = H, factor, spec
        self.group_size, self.options = group_size, options
        self.rows = [len(w_NK) for w_NK in weights]
        self.weight_NK = torch.cat([w_NK.to(H.dtype) for w_NK in weights])
        self.target_KN = self.weight_NK.T.contiguous()
        self.num_dead = int(factor.dead_K.sum())
        if self.num_dead:
            self.target_KN.masked_fill_(factor.dead_K[:, None], 0.0)
        # What a squared rounding error in a column finally costs, once the later columns have taken
        # what they can of it; in processing order.
        pivot_K = factor.upper_KK.diagonal()
        self.cost_K = pivot_K.square().reciprocal()
        self.unit_KK = factor.upper_KK / pivot_K[:, None]
        K, N = self.target_KN.shape
        steps = torch.arange(K, device=H.device)
        self.static = options.order == "static"
        self.step_group_K = (factor.order_K if self.static else steps) // group_size
        self.scale_RN = torch.zeros(-(-K // group_size), N, dtype=H.dtype, device=H.device)
        self.zero_RN = torch.zeros_like(self.scale_RN)
        # Static groups are set here; others from the updated weights when each group starts.
        self.known = self.static
        if self.static:
            cost_K = torch.empty_like(self.cost_K)
            cost_K[factor.order_K] = self.cost_K
            padded = torch.nn.functional.pad(cost_K, (0, -K % group_size))
            grouped = group_view(self.target_KN.T, group_size)
            scale_NR, zero_NR = self._params(grouped, padded.reshape(-1, group_size))
            self.scale_RN, self.zero_RN = scale_NR.T.contiguous(), zero_NR.T.contiguous()

    def _params(
        self, grouped: torch.Tensor, importance: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.options.clip_search:
            return fit_group_params(grouped, importance, self.spec)
        return range_params(grouped.amin(-1), grouped.amax(-1), self.spec)

    def solve(self) -> torch.Tensor:
        """All columns, block by block: signed codes (code - zero) [K, N] in processing order."""
        work_KN = self.target_KN[self.factor.order_K]
        K = len(work_KN)
        signed_KN = torch.empty_like(work_KN)
        fused = columns_op.fused(work_KN.device, work_KN.dtype)
        start = 0
        while start < K:
            stop = self._block_end(start)
            if not self.known and start % self.group_size == 0:
                self._set_group(work_KN, start)
            block = slice(start, stop)
            if fused is None:
                error_BN = self._solve_block(work_KN[block], signed_KN[block], start)
            else:
                error_BN = self._solve_fused(fused, work_KN[block], signed_KN[block], start)
            if stop < K:
                work_KN[stop:].addmm_(self.unit_KK[block, stop:].T, error_BN, alpha=-1)
            start = stop
        self.known = True
        return signed_KN

    def _block_end(self, start: int) -> int:
        """Where the block from a step on ends: not past a group whose parameters are still to be
        set."""
        stop = min(start + min(self.options.block, columns_op.MAX_STEPS), len(self.target_KN))
        if not self.known:
            stop = min(stop, (start // self.group_size + 1) * self.group_size)
        return stop

    def _solve_fused(
        self, fused: columns_op.Solve, work_BN: torch.Tensor, signed_BN: torch.Tensor, start: int
    ) -> torch.Tensor:
        """The columns of one block in one launch; their errors."""
        block = slice(start, start + len(work_BN))
        error_BN = torch.empty_like(signed_BN)
        columns = columns_op.Columns(
            work_BN=work_BN,
            unit_BB=self.unit_KK[block, block],
            scale_RN=self.scale_RN,
            zero_RN=self.zero_RN,
            group_B=self.step_group_K[block].to(torch.int32),
            max_code=self.spec.max_code,
        )
        fused(columns, signed_BN, error_BN)
        return error_BN

    def _solve_block(
        self, work_BN: torch.Tensor, signed_BN: torch.Tensor, start: int
    ) -> torch.Tensor:
        """The columns of one block one by one, where there is no loop for the device; their
        errors."""
        error_BN = torch.empty_like(work_BN)
        unit_BB = self.unit_KK[start : start + len(work_BN), start : start + len(work_BN)]
        groups = self.step_group_K[start : start + len(work_BN)].tolist()
        for step, group in enumerate(groups):
            scale_N, low_N = self.scale_RN[group], -self.zero_RN[group]
            code_N = torch.round(work_BN[step] / scale_N)
            signed_BN[step] = torch.clamp(code_N, low_N, low_N + self.spec.max_code)
            error_BN[step] = work_BN[step] - signed_BN[step] * scale_N
            work_BN[step + 1 :].addr_(unit_BB[step, step + 1 :], error_BN[step], alpha=-1)
        return error_BN

    def _set_group(self, work_KN: torch.Tensor, start: int) -> None:
        """Group parameters from the weights as they stand when the group starts."""
        steps = slice(start, start + self.group_size)
        scale_N, zero_N = self._params(work_KN[steps].T, self.cost_K[steps])
        group = start // self.group_size
        self.scale_RN[group], self.zero_RN[group] = scale_N, zero_N

    def refit(self, signed_KN: torch.Tensor) -> None:
        """Scales by least squares for the codes at hand; they stay fixed in the next solve.

        Groups are contiguous in stored order when static, else in processing order.
        """
        order = self.factor.order_K
        damped_KK = self.H.clone()
        damped_KK.diagonal().add_(self.factor.damping * self.H.diagonal().mean())
        target_KN = self.target_KN
        if self.static:
            codes_KN = torch.empty_like(signed_KN)
            codes_KN[order] = signed_KN
        else:
            codes_KN, target_KN = signed_KN, target_KN[order]
            damped_KK = damped_KK[order][:, order]
        scale_RN = refit_scales(target_KN, codes_KN, damped_KK, self.group_size, self.scale_RN)
        self.scale_RN = self.spec.store(scale_RN)

    def results(self, signed_KN: torch.Tensor) -> list[tuple[QuantizedWeight, LayerReport]]:
        """Undo the order, measure, split the stack."""
        order, spec = self.factor.order_K, self.spec
        place_K = torch.argsort(order)  # the step at which a column was taken
        zero = spec.middle if spec.symmetric else self.zero_RN[self.step_group_K]
        code_KN = (signed_KN + zero).to(torch.uint8).index_select(0, place_K)
        scale_NR = self.scale_RN.T.to(spec.scale_dtype).contiguous()
        zero_NR = None if spec.symmetric else self.zero_RN.T.to(torch.uint8).contiguous()
        whole = QuantizedWeight(
            code_NK=code_KN.T.contiguous(),
            scale_NR=scale_NR,
            zero_NR=zero_NR,
            bits=spec.bits,
            group_size=self.group_size,
            group_of_K=self.step_group_K[place_K].to(torch.int32)
            if self.options.order == "activation"
            else None,
        )
        wrong_NK = whole.dequantize().to(self.weight_NK.dtype).sub_(self.weight_NK)
        lost, held = row_energies(wrong_NK, self.H), row_energies(self.weight_NK, self.H)
        results, first = [], 0
        for rows in self.rows:
            part = slice(first, first + rows)
            first += rows
            weight = replace(
                whole,
                code_NK=whole.code_NK[part],
                scale_NR=scale_NR[part],
                zero_NR=None if zero_NR is None else zero_NR[part],
            )
            loss, relative = _errors(lost[part], held[part])
            report = LayerReport(
                loss=loss,
                relative_error=relative,
                damping=self.factor.damping,
                damping_raises=self.factor.raises,
                dead_columns=self.num_dead,
            )
            results.append((weight, report))
        return results


def output_error(
    w_NK: torch.Tensor, q_NK: torch.Tensor, hessian_KK: torch.Tensor
) -> tuple[float, float]:
    """(mean squared error a token, relative error) of a layer's output for inputs with this H."""
    return _errors(row_energies(q_NK - w_NK, hessian_KK), row_energies(w_NK, hessian_KK))


def row_energies(x_NK: torch.Tensor, hessian_KK: torch.Tensor) -> torch.Tensor:
    """x H x^T of every row, fp64 [N]; H symmetric, of which the half below the diagonal is read."""
    total_N = torch.zeros(len(x_NK), dtype=torch.float64, device=x_NK.device)
    for start, stop in strips(x_NK.shape[1]):  # what is below a strip's own block counts twice
        inside = slice(start, stop)
        part = x_NK[:, inside] @ hessian_KK[inside, inside]
        if stop < x_NK.shape[1]:
            part.addmm_(x_NK[:, stop:], hessian_KK[stop:, inside], alpha=2.0)
        total_N += part.mul_(x_NK[:, inside]).sum(1)
    return total_N


def _errors(lost_N: torch.Tensor, held_N: torch.Tensor) -> tuple[float, float]:
    """(loss, relative error) of the rows of a layer."""
    loss, total = max(float(lost_N.sum()), 0.0), float(held_N.sum())
    return loss, (loss / total) ** 0.5 if total > 0 else 0.0
