"""Scale search and refit against exhaustive and direct computations."""

from __future__ import annotations

import pytest
import torch

from ridgeline.formats.grid import GridSpec, range_params, to_codes
from ridgeline.quant.scales import JointRanges, fit_group_params, refit_scales


def weighted_error(grouped, importance, scale, zero, spec) -> torch.Tensor:
    code = to_codes(grouped, scale[..., None], zero[..., None], spec.max_code)
    return ((scale[..., None] * (code - zero[..., None]) - grouped) ** 2 * importance).sum(-1)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4])
def test_never_worse_than_the_plain_range(symmetric: bool, bits: int) -> None:
    spec = GridSpec(bits=bits, symmetric=symmetric)
    grouped, importance = torch.randn(50, 4, 32), torch.rand(4, 32)
    plain = range_params(grouped.amin(-1), grouped.amax(-1), spec)
    fitted = fit_group_params(grouped, importance, spec)
    before = weighted_error(grouped, importance, *plain, spec)
    after = weighted_error(grouped, importance, *fitted, spec)
    assert (after <= before).all() and after.sum() < 0.9 * before.sum()


def test_the_extreme_goes_to_the_longer_side() -> None:
    """A group -1 .. 8 fits the codes exactly with a negative scale, and with no positive one."""
    grouped = torch.tensor([[-1.0, 8.0, 3.0, 0.0]])
    scale, zero = fit_group_params(grouped, torch.ones(4), GridSpec())
    assert scale.item() == -1.0 and zero.item() == 8.0
    assert weighted_error(grouped, torch.ones(4), scale, zero, GridSpec()).item() == 0.0


def test_importance_decides_what_is_clipped() -> None:
    """A lone outlier that does not matter is clipped; one that does is kept."""
    grouped = torch.cat([torch.linspace(-1, 1, 31), torch.tensor([3.0])])[None]
    light, heavy = torch.ones(32), torch.ones(32)
    light[-1], heavy[-1] = 0.0, 1000.0
    small = fit_group_params(grouped, light, GridSpec())[0].abs()
    large = fit_group_params(grouped, heavy, GridSpec())[0].abs()
    assert small < 0.8 * large
    assert (large * 8).item() == pytest.approx(3.0, rel=0.02)


def test_empty_groups_keep_scale_one() -> None:
    scale, _ = fit_group_params(torch.zeros(3, 8), torch.ones(8), GridSpec())
    assert torch.equal(scale, torch.ones(3))


@pytest.mark.parametrize("k", [32, 27])
def test_refit_solves_each_rows_least_squares(k: int) -> None:
    """Against lstsq on inputs X with H = X^T X: the design matrix has a column a group."""
    group, n = 8, 5
    R = -(-k // group)
    x = torch.randn(200, k, dtype=torch.float64)
    signed_KN = torch.randint(-8, 8, (k, n)).double()
    w_KN = 0.13 * signed_KN + 0.1 * torch.randn(k, n, dtype=torch.float64)
    old_RN = torch.full((R, n), 0.1, dtype=torch.float64)
    got = refit_scales(w_KN, signed_KN, x.T @ x, group, old_RN)
    for row in range(n):
        columns = [
            x[:, r * group : (r + 1) * group] @ signed_KN[r * group : (r + 1) * group, row]
            for r in range(R)
        ]
        expected = torch.linalg.lstsq(torch.stack(columns, 1), x @ w_KN[:, row]).solution
        # The refit adds 1e-4 to the diagonal.
        torch.testing.assert_close(got[:, row], expected, rtol=2e-3, atol=2e-4)


def test_refit_keeps_the_scale_of_a_group_without_codes() -> None:
    signed_KN = torch.randint(1, 8, (16, 3)).float()
    signed_KN[8:] = 0.0
    old_RN = torch.tensor([[0.5] * 3, [0.25] * 3])
    got = refit_scales(torch.randn(16, 3).abs(), signed_KN, torch.eye(16), 8, old_RN)
    assert torch.equal(got[1], old_RN[1]) and not torch.equal(got[0], old_RN[0])


def total_error(ranges: JointRanges, w_NK: torch.Tensor, H: torch.Tensor) -> torch.Tensor:
    """e H e^T of every row, from the ranges alone."""
    K = w_NK.shape[1]
    group = torch.arange(K) // ranges.group_size
    scale, zero = ranges.scale_RN.T[:, group], ranges.zero_RN.T[:, group]
    error = scale * (to_codes(w_NK, scale, zero, ranges.spec.max_code) - zero) - w_NK
    return ((error @ H) * error).sum(1)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("k", [48, 41])
def test_joint_ranges_lower_the_error_of_the_whole_row(symmetric: bool, k: int) -> None:
    """Sweep by sweep, and below what each group finds on its own; the kept error is the real
    one."""
    generator = torch.Generator().manual_seed(5)
    w_NK = torch.randn(20, k, generator=generator)
    x_MK = torch.randn(200, 6, generator=generator) @ torch.randn(6, k, generator=generator)
    H = (x_MK.T @ x_MK) / 200 + 0.01 * torch.eye(k)
    spec = GridSpec(symmetric=symmetric)
    ranges = JointRanges(w_NK, H, 16, spec)
    errors = [total_error(ranges, w_NK, H)]
    for sweep in range(3):
        ranges.sweep(neighbours=sweep > 0)
        errors.append(total_error(ranges, w_NK, H))
    for before, after in zip(errors, errors[1:], strict=False):
        assert (after <= before * (1 + 1e-3) + 1e-4).all()
    assert errors[-1].sum() < 0.5 * errors[0].sum()
    kept = ranges.error_KN[:k].T
    torch.testing.assert_close(((kept @ H) * kept).sum(1), errors[-1], rtol=1e-3, atol=1e-4)
    alone = torch.block_diag(*[H[i : i + 16, i : i + 16] for i in range(0, k, 16)])
    single = JointRanges(w_NK, alone, 16, spec)
    for sweep in range(3):
        single.sweep(neighbours=sweep > 0)
    assert errors[-1].sum() < 0.7 * total_error(single, w_NK, H).sum()


def test_ranges_that_must_not_clip_hold_every_value() -> None:
    """No value moves by more than half a step; with clipping allowed some do."""
    generator = torch.Generator().manual_seed(6)
    w_NK, x_MK = torch.randn(30, 32, generator=generator), torch.randn(90, 32, generator=generator)
    spec, H = GridSpec(bits=3, symmetric=False), x_MK.T @ x_MK
    worst = {}
    for clips in (False, True):
        ranges = JointRanges(w_NK, H, 16, spec, clips=clips)
        start = total_error(ranges, w_NK, H).sum()
        for sweep in range(3):
            ranges.sweep(neighbours=sweep > 0)
        assert total_error(ranges, w_NK, H).sum() < start
        steps = ranges.error_KN.T.reshape(30, 2, 16) / ranges.scale_RN.T[..., None]
        worst[clips] = float(steps.abs().max())
    assert worst[False] <= 0.5 + 1e-4 < worst[True]
