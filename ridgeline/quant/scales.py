"""Group scales better than the extremes: a search over shrunk ranges, and least squares given
codes."""

from __future__ import annotations

import torch

from ridgeline.formats.grid import GridSpec, group_view, range_params

_RATIOS = tuple(1.12 - 0.04 * step for step in range(14))
"""Of the plain range; above 1 the extreme moves off the last code, below it is clipped."""
_COARSE = (1.05, 0.95, 0.9, 0.85, 0.8, 0.74)
"""Of the plain range, in the first sweep of `JointRanges`."""
_NEARBY = (0.97, 1.0, 1.03)
"""Of a scale, in its later sweeps."""


def fit_group_params(
    grouped: torch.Tensor,
    importance: torch.Tensor,
    spec: GridSpec,
    *,
    ratios: tuple[float, ...] = _RATIOS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, zero) of each group that round it with least importance-weighted squared error.

    Shapes: grouped [N, ..., g] (rows first), importance [..., g], results [N, ...]. Worked on as
    [..., g, N]: what differs by group is then one value a long run of memory.
    The candidates are the plain range and it stretched or shrunk by `ratios`. Symmetric codes reach
    -2^(bits-1) but only 2^(bits-1) - 1, so a symmetric group takes the scale's sign that lays its
    extreme on the longer side: scales may be negative, which the stored form and every reader
    allow.
    """
    w_GN, cost_G = grouped.movedim(0, -1).contiguous(), importance.unsqueeze(-2)
    low, high = w_GN.amin(-2), w_GN.amax(-2)
    extreme = torch.where(high > -low, high, low)
    middle = torch.full_like(low, float(spec.middle))
    wrong = torch.empty_like(w_GN)  # of all candidates: the passes are bound by memory

    def error(scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        scale, zero = scale.unsqueeze(-2), zero.unsqueeze(-2)
        torch.div(w_GN, scale, out=wrong).round_()
        if spec.symmetric:
            wrong.clamp_(-spec.middle, spec.max_code - spec.middle)
        else:
            torch.clamp(wrong, -zero, spec.max_code - zero, out=wrong)
        torch.addcmul(w_GN, wrong, scale, value=-1.0, out=wrong)
        return (cost_G @ wrong.square_()).squeeze(-2)

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
    return best_scale.movedim(-1, 0), best_zero.movedim(-1, 0)


def rounding_error(
    w: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, max_code: int
) -> torch.Tensor:
    """Rounded minus exact; scale and zero broadcast (the codes are those of `to_codes`)."""
    code = (w / scale).round_()
    torch.clamp(code, -zero, max_code - zero, out=code)
    return code.mul_(scale).sub_(w)


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


class JointRanges:
    """Ranges of all groups of a layer, chosen together: minimize tr E H E^T over them.

    An error inside one group can cancel that of another, so the groups take turns: with the others
    fixed, group r costs e_r H_rr e_r^T + 2 e_r p_r^T with p_r = sum over the other groups of
    e_s H_sr, and takes the candidate that makes this least. The first sweep tries the plain range
    stretched and shrunk, later ones the neighbours of what a group has. The error never grows.
    Cost a sweep: N K^2 multiply-adds for p and 2 N K g a candidate.
    Layout: [K, N], so that a group is a run of memory and rows are independent along it.
    """

    def __init__(
        self, w_NK: torch.Tensor, hessian_KK: torch.Tensor, group_size: int, spec: GridSpec, *,
        clips: bool = True,
    ) -> None:  # fmt: skip
        """clips: whether a value may be moved by more than half a step to fit a narrower range."""
        self.spec, self.group_size, self.clips = spec, group_size, clips
        short = -w_NK.shape[1] % group_size
        self.H = torch.nn.functional.pad(hessian_KK, (0, short, 0, short))
        grouped = group_view(w_NK, group_size)
        self.w_KN = grouped.flatten(1).T.contiguous()
        self.low_RN, self.high_RN = grouped.amin(-1).T.contiguous(), grouped.amax(-1).T.contiguous()
        self.scale_RN, self.zero_RN = range_params(self.low_RN, self.high_RN, spec)
        self.error_KN = torch.cat(
            [self._error(r, self.scale_RN[r], self.zero_RN[r]) for r in range(len(self.low_RN))]
        )
        self.pull_KN = self.H @ self.error_KN

    def sweep(self, neighbours: bool) -> None:
        """Every group once."""
        for r in range(len(self.low_RN)):
            self._take_turn(r, neighbours)

    def _rows(self, r: int) -> slice:
        return slice(r * self.group_size, (r + 1) * self.group_size)

    def _take_turn(self, r: int, neighbours: bool) -> None:
        rows = self._rows(r)
        H_GG, old_GN = self.H[rows, rows], self.error_KN[rows]
        own_GN = H_GG @ old_GN
        outside_GN = (self.pull_KN[rows] - own_GN).mul_(2.0)
        least_N = own_GN.add_(outside_GN).mul_(old_GN).sum(0)
        scale_CN, zero_CN = self._candidates(r, neighbours)
        error_GCN = rounding_error(
            self.w_KN[rows].unsqueeze(1), scale_CN, zero_CN, self.spec.max_code
        )
        cost_GCN = (H_GG @ error_GCN.flatten(1)).view_as(error_GCN)
        total_CN = cost_GCN.add_(outside_GN.unsqueeze(1)).mul_(error_GCN).sum(0)
        if not self.clips:
            total_CN.masked_fill_(~self._holds(r, scale_CN, zero_CN), float("inf"))
        total_N, chosen_N = total_CN.min(0)
        better_N = total_N < least_N
        chosen_1N = chosen_N.unsqueeze(0)
        for held_RN, offered_CN in ((self.scale_RN, scale_CN), (self.zero_RN, zero_CN)):
            new_N = offered_CN.gather(0, chosen_1N).squeeze(0)
            held_RN[r] = torch.where(better_N, new_N, held_RN[r])
        index_GCN = chosen_1N.expand(self.group_size, -1).unsqueeze(1)
        new_GN = error_GCN.gather(1, index_GCN).squeeze(1)
        change_GN = torch.where(better_N, new_GN.sub_(old_GN), 0.0)
        old_GN.add_(change_GN)
        self.pull_KN.addmm_(self.H[:, rows], change_GN)

    def _candidates(self, r: int, neighbours: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(scale, zero), [C, N] each."""
        spec, low_N, high_N = self.spec, self.low_RN[r], self.high_RN[r]
        scale_N, zero_N = self.scale_RN[r], self.zero_RN[r]
        if neighbours:
            moves = (0.0,) if spec.symmetric else (-1.0, 0.0, 1.0)
            tried = [(f, m) for f in _NEARBY for m in moves if f != 1.0 or m]
            factor_C1, move_C1 = low_N.new_tensor(tried).T.unsqueeze(-1)
            return spec.store(scale_N * factor_C1), (zero_N + move_C1).clamp_(0, spec.max_code)
        ratio_C1 = low_N.new_tensor(_COARSE).unsqueeze(-1)
        if not spec.symmetric:
            return range_params(low_N * ratio_C1, high_N * ratio_C1, spec)
        extreme_N = torch.where(high_N > -low_N, high_N, low_N)
        new_CN = extreme_N * (-ratio_C1 / spec.middle)
        scale_CN = spec.store(torch.where(extreme_N == 0, 1.0, new_CN))
        return scale_CN, zero_N.expand_as(scale_CN)

    def _error(self, r: int, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """Rounded minus exact of one group, [g, N]."""
        return rounding_error(self.w_KN[self._rows(r)], scale, zero, self.spec.max_code)

    def _holds(self, r: int, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """Whether a row has no value more than half a step outside, by candidate."""
        first, last = -(zero + 0.5) * scale, (self.spec.max_code + 0.5 - zero) * scale
        least, most = torch.minimum(first, last), torch.maximum(first, last)
        return (least <= self.low_RN[r]) & (most >= self.high_RN[r])
