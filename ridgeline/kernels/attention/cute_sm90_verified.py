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
_PERSISTENT = "H200, 2026-11-30, run 06124d1a29b1"
_ROLES = "H200, 2026-11-30, run 927e30110540"
_SHORT = "H200, 2026-11-30, checks at commit 233f630"
_PACKED = "H200, 2026-11-30, checks at commit 02a74be"

_WIDE_HEADS = "H200, 2026-11-30, checks at commit 13b8ad8"

_WIDTHS = (
    (160, 64), (160, 128), (160, 160), (192, 96), (192, 128), (192, 160), (192, 192), (256, 64),
    (256, 160), (256, 192), (256, 256),
)  # fmt: skip
"""Tiles' head dims beyond 128 at which both directions were compared."""
_BACKWARD_WIDTHS = ((192, 64), (256, 128), (160, 192), (128, 192), (192, 256), (64, 256))
"""And those at which the backward alone was, with the reference's output and LSE."""


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


def tile_dim(head_dim: int) -> int:
    """The head dim of the tile that holds one, as `cute_sm90_config.padded`."""
    step = 32 if head_dim <= 192 else 64
    return -(-head_dim // step) * step


def _compared(problem: AttentionProblem) -> bool:
    """Whether tiles of these head dims were compared with the reference."""
    dims = tile_dim(problem.head_dim), tile_dim(problem.head_dim_v)
    return dims in _WIDTHS or (problem.direction == "bwd" and dims in _BACKWARD_WIDTHS)


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


def _short(problem: AttentionProblem) -> bool:
    """Those that `persists_when_short` may name."""
    plain = not (problem.deterministic or problem.varlen or problem.seqused)
    dims, longest = (problem.head_dim, problem.head_dim_v), max(problem.seqlen_q, problem.seqlen_k)
    plain = plain and problem.window_left is None and dims in ((64, 64), (128, 128))
    return _narrow_backward(problem) and plain and longest <= 4096


FEATURES = (
    Feature(
        what="forward, dense and packed: causal, windows, softcap, sinks, grouped heads",
        uses=lambda p: p.direction == "fwd",
        run=f"{_FIRST}; {_PUBLIC}",
    ),
    Feature(
        what="head dims beyond 128: 192, 256, (192, 128) and eight other pairs of tiles' widths",
        uses=lambda p: _wide(p) and _compared(p),
        run=_WIDE_HEADS,
    ),
    Feature(
        what="head dims beyond 128: other pairs",
        uses=lambda p: _wide(p) and not _compared(p),
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
        run=f"{_PUBLIC}; {_HELPERS}; {_PACKED}",
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
        what="backward of short dense sequences, head dims 64 and 128, by persistent blocks",
        uses=_short,
        run=_SHORT,
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
