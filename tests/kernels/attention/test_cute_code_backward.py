"""Machine code of the Hopper backwards, compiled without a GPU: as test_cute_code.py."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (pip install ridgeline[hopper]) is not here")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi (pip install ridgeline[hopper]) is not here")

from ridgeline.kernels.attention import cute_sm90_backward_config as bwd
from ridgeline.kernels.attention.problem import AttentionProblem

from .test_cute_code import DIMS, H200, MASKS, check, check_key, problem, some

CAUSAL = dict(causal=True, direction="bwd")
BACKWARD = {
    "64-causal": problem(64, **CAUSAL),
    "128-causal-deterministic": problem(128, **CAUSAL, deterministic=True),
    "128-window": problem(128, **CAUSAL, window_left=128),
    "128-packed": problem(128, varlen=True, direction="bwd"),
    "256-causal": problem(256, **CAUSAL),
    "192-128-causal-packed-deterministic": problem(
        (192, 128), **CAUSAL, varlen=True, deterministic=True
    ),
}
LAYOUTS = {"dense": {}, "packed": dict(varlen=True), "used": dict(seqused=True)}
MANY = [
    asked
    for dims, mask, layout, turns, softcap in itertools.product(
        DIMS, MASKS, LAYOUTS, (False, True), (0.0, 30.0)
    )
    for asked in [
        problem(
            dims, direction="bwd", **MASKS[mask], **LAYOUTS[layout], deterministic=turns,
            softcap=softcap,
        )
    ]
    if bwd.refuses(asked, H200) is None
]  # fmt: skip


@pytest.mark.parametrize("asked", some(BACKWARD, MANY))
def test_backward(asked: AttentionProblem, cache: Path) -> None:
    assert bwd.refuses(asked, H200) is None
    check(asked)


VARIANTS = {
    "64-causal": problem(64, **CAUSAL),
    "128-full": problem(128, direction="bwd"),
    "128-window": problem(128, **CAUSAL, window_left=128),
}
QUICK = {
    "128-causal": problem(128, **CAUSAL),
    "128-packed": problem(128, varlen=True, direction="bwd"),
    "128-causal-deterministic": problem(128, **CAUSAL, deterministic=True),
}


@pytest.mark.parametrize("asked", VARIANTS.values(), ids=VARIANTS)
def test_backward_that_prepares_and_finishes_rows(asked: AttentionProblem, cache: Path) -> None:
    config = bwd.backward_config(asked, H200)
    assert isinstance(config, bwd.BackwardConfig)
    ahead = bwd.prepared_ahead(config, asked, H200)
    assert ahead is not None
    check_key(bwd.backward_traits(asked), ahead)


@pytest.mark.parametrize("asked", QUICK.values(), ids=QUICK)
def test_backward_whose_gradients_leave_row_by_row(asked: AttentionProblem, cache: Path) -> None:
    config = bwd.backward_config(asked, H200)
    assert isinstance(config, bwd.BackwardConfig)
    check_key(bwd.backward_traits(asked), replace(config, quick_end=True))
