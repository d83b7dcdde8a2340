"""What has not run on a Hopper GPU is refused, unless it is asked for by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.core.arch import KNOWN
from ridgeline.kernels.attention import cute_sm90_backward_config as bwd
from ridgeline.kernels.attention import cute_sm90_config as fwd
from ridgeline.kernels.attention import cute_sm90_verified as verified
from ridgeline.kernels.attention.problem import AttentionProblem

H200 = KNOWN["sm90"]
BASE = AttentionProblem(
    batch=2, seqlen_q=64, seqlen_k=128, heads=4, kv_heads=2, head_dim=128, head_dim_v=128
)
BACKWARD = replace(BASE, direction="bwd")
UNVERIFIED = [
    replace(BACKWARD, head_dim=256, head_dim_v=256),
    replace(BACKWARD, head_dim=192),
    replace(BACKWARD, softcap=30.0),
    replace(BACKWARD, head_dim=256, head_dim_v=256, deterministic=True),
    replace(BACKWARD, head_dim=64, head_dim_v=64, causal=True, window_left=9, deterministic=True),
    replace(BACKWARD, head_dim=256, head_dim_v=256, varlen=True),
    replace(BACKWARD, softcap=3.0, varlen=True, deterministic=True),
    replace(BACKWARD, seqused=True),
]


@pytest.mark.parametrize(
    "problem",
    [
        BASE,
        replace(BASE, head_dim=256, head_dim_v=256, softcap=5.0, varlen=True),
        BACKWARD,
        replace(BACKWARD, causal=True, deterministic=True),
        replace(BACKWARD, varlen=True, window_left=5),
        replace(BACKWARD, causal=True, window_left=5, deterministic=True),
        replace(BACKWARD, head_dim=64, head_dim_v=64, causal=True, deterministic=True),
    ],
)
def test_what_has_run_is_taken(problem: AttentionProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RIDGELINE_UNVERIFIED", raising=False)
    module = bwd if problem.direction == "bwd" else fwd
    assert module.refuses(problem, H200) is None


@pytest.mark.parametrize("problem", UNVERIFIED)
def test_what_has_not_run_is_taken_on_request(
    problem: AttentionProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = [f for f in verified.FEATURES if f.run is None and f.uses(problem)]
    monkeypatch.delenv("RIDGELINE_UNVERIFIED", raising=False)
    if waiting:  # shrinks as rows are confirmed
        assert "not verified on hardware yet" in (bwd.refuses(problem, H200) or "")
    monkeypatch.setenv("RIDGELINE_UNVERIFIED", "1")
    assert bwd.refuses(problem, H200) is None


@pytest.mark.parametrize(
    ("change", "inside"),
    [
        ({"seqlen_k": 64}, True),
        ({"seqlen_k": 300, "window_left": 9}, True),
        ({"seqlen_k": 300, "window_right": 1}, True),
        ({"seqlen_k": 300, "varlen": True}, True),
        ({"seqlen_k": 300, "causal": True}, False),
        ({"seqlen_k": 300, "window_right": 0}, False),
        ({"seqlen_k": 384}, False),
    ],
)
def test_which_calls_need_the_end_of_keys_hidden(change, inside, monkeypatch) -> None:
    monkeypatch.delenv("RIDGELINE_UNVERIFIED", raising=False)
    problem = replace(BACKWARD, **change)
    (row,) = [f for f in verified.FEATURES if f.what.endswith("no multiple of 128")]
    assert row.uses(problem) == inside
    assert bwd.refuses(problem, H200) is None


@pytest.mark.parametrize(
    ("dims", "forward", "backward"),
    [
        ((200, 136), True, True),
        ((256, 160), True, True),
        ((160, 48), True, True),
        ((192, 128), True, True),
        ((256, 128), False, True),
        ((192, 32), False, False),
    ],
)
def test_wide_heads_where_they_were_compared(
    dims: tuple, forward: bool, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RIDGELINE_UNVERIFIED", raising=False)
    for module, problem, taken in ((fwd, BASE, forward), (bwd, BACKWARD, backward)):
        asked = replace(problem, head_dim=dims[0], head_dim_v=dims[1])
        assert (module.refuses(asked, H200) is None) == taken


def test_tiles_are_as_wide_as_the_kernels_make_them() -> None:
    for dim in range(8, 257, 8):
        assert verified.tile_dim(dim) == fwd.padded(dim)


def test_every_problem_has_a_row() -> None:
    for problem in (BASE, BACKWARD, *UNVERIFIED):
        assert any(feature.uses(problem) for feature in verified.FEATURES)


def test_the_page_shows_the_table() -> None:
    page = Path(__file__).parents[3] / "docs/hopper.md"
    assert verified.table() in page.read_text(encoding="utf-8")
