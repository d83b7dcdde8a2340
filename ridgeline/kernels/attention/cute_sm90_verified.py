"""What of the Hopper kernels has run right on a Hopper GPU, and what has not yet.

A kernel that compiles and whose hand-overs pass a simulation may still be wrong. So a combination
that no GPU run has confirmed is refused by default, and the next implementation serves.
RIDGELINE_UNVERIFIED=1 (core/env.py) takes it all the same: the GPU tests and the benchmark set it.
After a run, write it into `run` of the feature's row below; docs/hopper.md shows this table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.core import env
from ridgeline.kernels.attention.problem import AttentionProblem

_FIRST = "H200, 2026-11-29, direct calls"
_PUBLIC = "H200, 2026-11-30, run 7e0c058fb338"
_HELPERS = "H200, 2026-11-30, run 3443fa890321"
_CACHES = "H200, 2026-11-30, checks at commit 561500f"
_WINDOWS = "H200, 2026-11-30, checks at commit 64af84a"
_TAILS = "H200, 2026-11-30, checks at commit 78bb2cb"
_PERSISTENT = "H200, 2026-11-30, run 430177abb566"
_ROLES = "H200, 2026-11-30, run 927e30110540"

_WIDTHS = ((192, 128), (192, 192), (256, 256))
"""Head dims beyond 128 that forwards were compared at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One row: a set of problems that stand or fall together."""

    what: str
    uses: Callable[[AttentionProblem], bool]
    """Whether a problem needs it."""
    run: str | None
    """The GPU run that confirmed it, or None."""
    packed: bool = False
    """Only where the heads of a group are packed into a tile of few queries."""


def _wide(problem: AttentionProblem) -> bool:
    return max(problem.head_dim, problem.head_dim_v) > 128


def _widths(problem: AttentionProblem) -> tuple[int, int]:
    return problem.head_dim, problem.head_dim_v


def _narrow_backward(problem: AttentionProblem) -> bool:
    return problem.direction == "bwd" and not _wide(problem) and not problem.softcap


def _roles(problem: AttentionProblem) -> bool:
    return problem.direction == "bwd" and not _narrow_backward(problem)


def _keys_end_inside(problem: AttentionProblem) -> bool:
    """Zeros that pad the last block of keys have score 0, so P = exp(0 - LSE) for them: infinite
    for a row whose LSE is below -88, and inf * 0 in dQ would be NaN. Causality hides them, or a
    window's right side; else the mask of the last block does."""
    right = problem.window_right
    masked = problem.causal or (right is not None and right <= 0)
    return _narrow_backward(problem) and not masked and problem.seqlen_k % 128 > 0


def _turns_in_a_window(problem: AttentionProblem) -> bool:
    if not _narrow_backward(problem) or not problem.deterministic:
        return False
    return problem.window_left is not None and max(problem.head_dim, problem.head_dim_v) <= 96


def _persistent(problem: AttentionProblem) -> bool:
    """Causal windows; in turns without one."""
    window = problem.window_left is not None
    return _narrow_backward(problem) and problem.causal and window != problem.deterministic


FEATURES = (
    Feature(
        what="forward, dense and packed: causal, windows, softcap, sinks, grouped heads",
        uses=lambda p: p.direction == "fwd",
        run=f"{_FIRST}; {_PUBLIC}",
    ),
    Feature(  # what test_wide_heads found at (200, 136) begins here: see log/attention_hopper.md
        what="forward of head dims beyond 128 other than 192, 256 and (192, 128)",
        uses=lambda p: p.direction == "fwd" and _wide(p) and _widths(p) not in _WIDTHS,
        run=None,
    ),
    Feature(
        what="forward with used lengths, left padding or rows of a cache by index",
        uses=lambda p: p.direction == "fwd" and (p.seqused or p.leftpad or p.kv_batch_idx),
        run=_CACHES,
    ),
    Feature(
        what="forward of a paged cache",
        uses=lambda p: p.direction == "fwd" and p.page_size is not None,
        run=_CACHES,
    ),
    Feature(
        what="forward of few queries: heads of a group packed into a tile, keys split",
        uses=lambda p: p.direction == "fwd",
        run=_CACHES,
        packed=True,
    ),
    Feature(
        what="backward to head dim 128, dense and packed: causal, windows, sinks, grouped heads",
        uses=lambda p: _narrow_backward(p) and not p.deterministic,
        run=f"{_PUBLIC}; {_HELPERS}",
    ),
    Feature(
        what="backward to head dim 128, deterministic",
        uses=lambda p: _narrow_backward(p) and p.deterministic,
        run=f"{_PUBLIC}; {_HELPERS}",
    ),
    Feature(
        what="backward of causal windows, or causal and deterministic, by persistent blocks",
        uses=_persistent,
        run=_PERSISTENT,
    ),
    Feature(
        what="backward to head dim 96, deterministic with a window",
        uses=_turns_in_a_window,
        run=_WINDOWS,
    ),
    Feature(
        what="backward to head dim 128, without causality, keys no multiple of 128",
        uses=_keys_end_inside,
        run=_HELPERS,
    ),
    Feature(
        what="backward of head dims beyond 128, dense",
        uses=lambda p: _roles(p) and _wide(p),
        run=_ROLES,
    ),
    Feature(  # dQ of (200, 136) was wrong on an H200, with out and LSE of this forward
        what="backward of head dims beyond 128 that are no multiples of 64",
        uses=lambda p: _roles(p) and _wide(p) and (p.head_dim % 64 or p.head_dim_v % 64) != 0,
        run=None,
    ),
    Feature(
        what="backward with softcap, dense",
        uses=lambda p: _roles(p) and p.softcap > 0,
        run=_ROLES,
    ),
    Feature(
        what="backward of head dims beyond 128 or with softcap, deterministic",
        uses=lambda p: _roles(p) and p.deterministic,
        run=_ROLES,
    ),
    Feature(
        what="backward of head dims beyond 128 or with softcap, packed",
        uses=lambda p: _roles(p) and p.varlen,
        run=_TAILS,
    ),
    Feature(
        what="backward with used lengths",
        uses=lambda p: p.direction == "bwd" and p.seqused,
        run=_TAILS,
    ),
)


def why_unverified(problem: AttentionProblem, packed: bool = False) -> str | None:
    """Why a problem is refused that the kernels could take, or None. packed: by the kernel that
    packs the heads of a group, of few queries."""
    if env.unverified():
        return None
    for feature in FEATURES:
        if feature.run is None and feature.uses(problem) and packed >= feature.packed:
            return f"{feature.what}: not verified on hardware yet (RIDGELINE_UNVERIFIED=1 takes it)"
    return None


def table() -> str:
    """The rows as Markdown, for docs/hopper.md."""
    lines = ["| what | confirmed on |", "|---|---|"]
    return "\n".join(lines + [f"| {row.what} | {row.run or 'not yet'} |" for row in FEATURES])
