"""Machine code of the Hopper forwards, compiled without a GPU: hopper_code.py says what it must
hold. A tile of each kind by default; every head dim with every mask and layout: `-m slow`."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (pip install ridgeline[hopper]) is not here")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi (pip install ridgeline[hopper]) is not here")

from ridgeline.core.arch import KNOWN
from ridgeline.kernels.attention import cute_sm90_backward_config as bwd
from ridgeline.kernels.attention import cute_sm90_cached_config as cached
from ridgeline.kernels.attention import cute_sm90_config as cfg
from ridgeline.kernels.attention.cute import cache as cache_
from ridgeline.kernels.attention.cute import library
from ridgeline.kernels.attention.problem import AttentionProblem
from tests import hopper_code

H200 = KNOWN["sm90"]
DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, window_left=128),
    "both-sides": dict(window_left=128, window_right=64),
}


def problem(dims: int | tuple[int, int], **changes: Any) -> AttentionProblem:
    dim, dim_v = (dims, dims) if isinstance(dims, int) else dims
    fields = dict(batch=1, seqlen_q=4096, seqlen_k=4096, heads=8, kv_heads=2) | changes
    return AttentionProblem(head_dim=dim, head_dim_v=dim_v, **fields)


FORWARD = {
    "64-causal": problem(64, causal=True),
    "128": problem(128),
    "128-window-softcap-sinks-fp16": problem(
        128, causal=True, window_left=128, softcap=30.0, sinks=True, dtype="float16"
    ),
    "256-causal-packed": problem(256, causal=True, varlen=True),
}
TAILS = {
    "64": problem(64),
    "128": problem(128),
    "192-128-softcap-sinks-fp16": problem((192, 128), softcap=30.0, sinks=True, dtype="float16"),
    "256": problem(256),
}
FEW = dict(seqlen_q=1, seqused=True)
CACHED = {
    "128-decode-split-pages-of-16": problem(128, **FEW, page_size=16),
    "64-leftpad-rows": problem(64, causal=True, leftpad=True, kv_batch_idx=True),
    "256-few-sinks": problem(256, seqlen_q=2, sinks=True, seqused=True, batch=64),
    "128-packed-pages-of-256": problem(128, causal=True, varlen=True, page_size=256),
}
MANY = [
    *(
        problem(dims, **MASKS[mask], varlen=packed, **options)
        for dims, mask, packed, options in itertools.product(
            DIMS, MASKS, (False, True), ({}, dict(softcap=30.0, sinks=True), dict(seqlen_q=512))
        )
    ),
    *(
        problem(dims, **MASKS[mask], seqused=True, seqlen_q=rows, page_size=page, batch=batch)
        for dims, mask, (rows, batch), page in itertools.product(
            DIMS, ("full", "causal", "window"), ((1, 1), (1, 256), (300, 1)), (None, 8, 64, 256)
        )
    ),
]


def key_of(asked: AttentionProblem) -> tuple[Any, Any]:
    if asked.direction == "fwd":
        return cached.forward_key(asked, H200)
    return bwd.backward_traits(asked), bwd.backward_config(asked, H200)


def some(fast: dict[str, AttentionProblem], many: list[AttentionProblem]) -> list[Any]:
    """Parameters: the kernels of `many`, each once, are slow."""
    kernels = {cache_.kernel_name(*key_of(asked)): asked for asked in many}
    few = [pytest.param(asked, id=name) for name, asked in fast.items()]
    rest = [pytest.param(v, id=n, marks=pytest.mark.slow) for n, v in kernels.items()]
    return few + rest


def check(asked: AttentionProblem) -> None:
    """Compile and look."""
    check_key(*key_of(asked))


def check_key(traits: Any, config: Any) -> None:
    """The same, by the compile key."""
    if not any(map(shutil.which, ("cc", "gcc", "g++", "clang"))):
        pytest.skip("no linker here")
    code = hopper_code.code_of(library.compile_kernel(traits, config))
    hopper_code.check(code, traits, config)


@pytest.mark.parametrize("asked", some(FORWARD | CACHED, MANY))
def test_forward(asked: AttentionProblem, cache: Path) -> None:
    assert cached.forward_refuses(asked, H200) is None
    check(asked)


def tail_key(asked: AttentionProblem) -> tuple[Any, Any]:
    """A forward whose last tiles are cut, whether that pays or not."""
    traits, config = cfg.forward_traits(asked), cfg.forward_config(asked, H200)
    config = replace(config, split_tail=True)
    assert cfg.why_invalid(config, traits) is None
    return traits, config


@pytest.mark.parametrize("name", TAILS)
def test_cut_tails(name: str, cache: Path) -> None:
    check_key(*tail_key(TAILS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("dims", [*DIMS, (32, 32), (160, 160), (256, 64), (192, 96)], ids=str)
@pytest.mark.parametrize("options", [{}, dict(softcap=30.0, sinks=True), dict(seqlen_q=512)])
def test_cut_tails_of_every_head_dim(dims: tuple, options: dict[str, Any], cache: Path) -> None:
    check_key(*tail_key(problem(dims, **options)))


@pytest.mark.parametrize("dim", [128, 256])
def test_cut_tails_leave_the_walk_as_long_as_it_was(dim: int, cache: Path) -> None:
    asked = problem(dim)
    cut, plain = (
        hopper_code.code_of(library.compile_kernel(*key)).shortest_step()
        for key in (tail_key(asked), key_of(asked))
    )
    assert cut <= plain
