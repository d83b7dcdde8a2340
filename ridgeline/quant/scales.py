"""Group scales better than the extremes: a search over shrunk ranges, and least squares given
codes."""

from __future__ import annotations

import torch

from ridgeline.formats.grid import GridSpec, range_params, to_codes

_RATIOS = tuple(1.12 - 0.04 * step for step in range(14))
"""Of the plain range; above 1 the extreme moves off the last code, below it is clipped."""


def fit_group_params(
    grouped: torch.Tensor,
    importance: torch.Tensor,
    spec: GridSpec,
    *,
    ratios: tuple[float, ...] = _RATIOS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, zero) of each group that round it with least importance-weighted squared error.

    Shapes: grouped [..., g]; importance broadcasts against it; results [...].
    The candidates are the plain range and it stretched or shrunk by `ratios`. Symmetric codes reach
    -2^(bits-1) but only 2^(bits-1) - 1, so a symmetric group takes the scale's sign that lays its
    extreme on the longer side: scales may be negative, which the stored form and every reader
    allow.
    """
    low, high = grouped.amin(-1), grouped.amax(-1)
    extreme = torch.where(high > -low, high, low)
    middle = torch.full_like(low, float(spec.middle))
    best_scale, best_zero = range_params(low, high, spec)
    least = _weighted_error(grouped, importance, best_scale, best_zero, spec.max_code)
    for ratio in ratios:
        if spec.symmetric:
            scale = extreme * (-ratio / spec.middle)
            scale, zero = spec.store(torch.where(extreme == 0, 1.0, scale)), middle
        else:
            scale, zero = range_params(low * ratio, high * ratio, spec)
        total = _weighted_error(grouped, importance, scale, zero, spec.max_code)
        better = total < least
        least = torch.where(better, total, least)
        best_scale = torch.where(better, scale, best_scale)
        best_zero = torch.where(better, zero, best_zero)
    return best_scale, best_zero


def _weighted_error(
    grouped: torch.Tensor,
    importance: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    max_code: int,
) -> torch.Tensor:
    code = to_codes(grouped, scale[..., None], zero[..., None], max_code)
    error = code.sub_(zero[..., None]).mul_(scale[..., None]).sub_(grouped).square_()
    return error.mul_(importance).sum(-1)


def refit_scales(
    target_KN: torch.Tensor,
    signed_KN: torch.Tensor,
    hessian_KK: torch.Tensor,
    group_size: int,
    old_RN: torch.Tensor,
) -> torch.Tensor:
    """Scales that minimize tr (Q - W) H (Q - W)^T for fixed codes, Q = scale * (code - zero).

    Each output row is its own least-squares problem in R unknowns: A s = b with
    A[r, r'] = c_r^T H c_r', b[r] = c_r^T H w, c_r the row's signed codes inside group r.
    Shapes: target, signed [K, N]; hessian [K, K], damped; old_RN [R, N] is kept for a group whose
    codes are all zero or whose solution is not finite or has shrunk to nothing.
    """
    K, N = target_KN.shape
    R = old_RN.shape[0]
    pad = R * group_size - K
    padded = torch.nn.functional.pad(signed_KN, (0, 0, 0, pad))

    def group_sum(x_KN: torch.Tensor) -> torch.Tensor:
        x_KN = torch.nn.functional.pad(x_KN, (0, 0, 0, pad)) * padded
        return x_KN.reshape(R, group_size, N).sum(1)

    b_RN = group_sum(hessian_KK @ target_KN)
    A_NRR = torch.empty(N, R, R, dtype=target_KN.dtype, device=target_KN.device)
    for r in range(R):
        inside = slice(r * group_size, min((r + 1) * group_size, K))
        A_NRR[:, :, r] = group_sum(hessian_KK[:, inside] @ signed_KN[inside]).T
    diagonal = A_NRR.diagonal(dim1=1, dim2=2)
    # A group of zero codes has a zero row: give it a unit pivot, its scale is kept below.
    empty = diagonal <= 0
    diagonal.mul_(1.0 + 1e-4).add_(empty.to(diagonal.dtype))
    scale_RN = torch.linalg.solve(A_NRR, b_RN.T.unsqueeze(-1)).squeeze(-1).T
    usable = torch.isfinite(scale_RN) & (scale_RN.abs() > 0.1 * old_RN.abs()) & ~empty.T
    return torch.where(usable, scale_RN, old_RN)


def fit_clipped_params(
    grouped: torch.Tensor,
    hessian_RGG: torch.Tensor,
    spec: GridSpec,
    *,
    ratios: tuple[float, ...] = _RATIOS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, zero) [N, R] that round groups with the least squared error of their own share of the
    output: e H_r e^T, H_r the group's block of H. Candidates as `fit_group_params`.

    Shapes: grouped [N, R, g], hessian [R, g, g].
    """
    low, high = grouped.amin(-1), grouped.amax(-1)
    extreme = torch.where(high > -low, high, low)
    middle = torch.full_like(low, float(spec.middle))

    def error(scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        code = to_codes(grouped, scale[..., None], zero[..., None], spec.max_code)
        wrong_RNG = code.sub_(zero[..., None]).mul_(scale[..., None]).sub_(grouped).transpose(0, 1)
        return torch.bmm(wrong_RNG, hessian_RGG).mul_(wrong_RNG).sum(-1).T

    best_scale, best_zero = range_params(low, high, spec)
    least = error(best_scale, best_zero)
    for ratio in ratios:
        if spec.symmetric:
            scale = extreme * (-ratio / spec.middle)
            scale, zero = spec.store(torch.where(extreme == 0, 1.0, scale)), middle
        else:
            scale, zero = range_params(low * ratio, high * ratio, spec)
        total = error(scale, zero)
        better = total < least
        least = torch.where(better, total, least)
        best_scale = torch.where(better, scale, best_scale)
        best_zero = torch.where(better, zero, best_zero)
    return best_scale, best_zero
