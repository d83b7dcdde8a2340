"""Run by test_triton.py in a process of its own: the Triton interpreter is chosen before import.

    TRITON_INTERPRET=1 python -m tests.kernels.attention.interpreted

Prints a JSON line {"test", "error"} for each case, forward and backward, with small tiles so that
every loop and edge is met; error is None or the message. An interpreted tile takes milliseconds:
two heads, one sequence and some 40 tokens are what a test can bear.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

from ridgeline.kernels.attention import config
from ridgeline.kernels.attention import triton as kernels

from . import cases, mod_cases


def patch_bf16_dot() -> None:
    """Triton 3.6's interpreter holds bf16 as raw 16-bit words and multiplies those in tl.dot."""
    dot = interpreter.InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self, a, b, acc, precision, imprecise):
        return dot(self, widened(a), widened(b), acc, precision, imprecise)

    interpreter.InterpreterBuilder.create_dot = create_dot


def hardware_maximum() -> None:
    """The interpreter's maximum of a number and NaN is NaN, a GPU's is the number."""
    builder = interpreter.InterpreterBuilder
    builder.create_maxnumf = lambda self, one, other: self.binary_op(one, other, np.fmax)


def small_tiles(tma: bool, branch: bool, joined: bool = False) -> None:
    """Tiles of 16 x 32, so that 37 keys are two and a bit; joined: one launch for all gradients,
    and Q and dO as operands in registers."""
    one = partial(config.TileConfig, num_warps=1, num_stages=1, tma=tma, branch=branch)
    rows = one(block_m=16, block_n=32, held=joined)
    kernels.forward_tile = lambda problem, arch: rows
    keys = one(block_m=16, block_n=32) if joined else one(block_m=32, block_n=16)
    both = config.BackwardConfig(dkdv=keys, dq=rows, joined=joined)
    kernels.backward_config = lambda problem, arch: both


def without_decode(on: bool) -> None:
    """Few queries would otherwise all take the split-KV kernel."""
    kernels.takes_decode = (lambda problem: False) if on else config.takes_decode


def report(name: str, run) -> None:
    torch.manual_seed(0)
    try:
        run()
        error = None
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"[:2000]
    print(json.dumps({"test": name, "error": error}), flush=True)


def few(case, **more):
    """The case with two heads that share a key/value head, and one sequence where one will do."""
    batch = 1 if case.layout == "dense" and case.alibi != "batch" and not case.bias else 3
    kind = dict(heads=2, kv_heads=1, batch=min(batch, case.batch), dim=16, dim_v=24)
    return replace(case, **{**kind, **more})


def grid():
    """Each option on one ragged size, each layout with the most options, the sizes without any."""
    for name, options in cases.OPTIONS.items():
        yield few(cases.Case(name=name, seqlen_q=19, seqlen_k=37, **options))
    for layout in ("varlen", "seqused", "leftpad", "varlen_paged"):
        options = cases.OPTIONS["sinks-window" if layout == "varlen" else "causal"]
        case = cases.Case(name=layout, layout=layout, seqlen_q=19, seqlen_k=37, **options)
        yield few(case)
    for seqlen_q, seqlen_k in ((0, 5), (5, 0), (1, 1), (37, 19)):
        name = f"causal-{seqlen_q}x{seqlen_k}"
        yield few(cases.Case(name=name, causal=True, seqlen_q=seqlen_q, seqlen_k=seqlen_k))


def main() -> None:
    warnings.simplefilter("ignore")  # the interpreter's exp2 and log2 warn of infinities
    patch_bf16_dot()
    hardware_maximum()
    small_tiles(tma=False, branch=False)
    without_decode(True)
    for case in grid():
        both(case)
    both(few(cases.Case(name="bf16", causal=True, seqlen_q=33, seqlen_k=40, dtype="bfloat16")))
    even = dict(seqlen_q=32, seqlen_k=64, dim=32, dim_v=32, batch=1, dtype="float16")
    for name, branch, more in (
        ("full", False, {}),
        ("window", False, dict(causal=True, window=(20, None))),
        ("window", True, dict(causal=True, window=(20, None))),
        ("varlen", False, dict(causal=True, layout="varlen", batch=3, seqlen_q=20)),
        ("ragged", True, dict(causal=True, seqlen_q=37, seqlen_k=40)),
        ("transposed", True, dict(causal=True, strides="transposed")),
        ("padded", True, dict(causal=True, seqlen_q=20, seqlen_k=40, dim=40, dim_v=24)),
    ):
        small_tiles(tma=True, branch=branch)
        case = cases.Case(name=f"tma-{name}-{branch}", **{**even, **more})
        both(replace(case, heads=2, kv_heads=1))
    joined_gradients()
    bad_rows("forward")
    user_functions()
    without_decode(False)
    bad_rows("decode")
    both(cases.Case(name="no queries", causal=True, seqlen_q=0, seqlen_k=5))
    both(cases.Case(name="no sequences", causal=True, batch=0))
    decode = dict(seqlen_q=2, seqlen_k=67, causal=True)
    for layout in ("dense", "seqused", "leftpad", "batch_idx", "paged", "varlen_paged"):
        case = cases.Case(name=layout, layout=layout, sinks=True, **decode)
        report(f"decode {layout}", partial(split_case, few(case), 3))
    for name in ("plain", "window", "alibi-batch", "bias-batch", "softcap"):
        case = cases.Case(name=name, **{**decode, **cases.OPTIONS[name]})
        report(f"decode {name}", partial(split_case, few(case), 0))
    for queries, keys in ((2, 64), (3, 70), (17, 50)):  # the diagonal's tile exists or ends early
        case = cases.Case(name="", layout="paged", causal=True, seqlen_q=queries, seqlen_k=keys)
        run = partial(split_case, few(case), 2, branch=True)
        report(f"decode diagonal {queries}x{keys}", run)


def joined_gradients() -> None:
    """One launch for dK, dV and dQ: shared key/value heads, more queries or keys, packed calls."""
    for name, branch, more in (
        ("plain", False, dict(seqlen_q=37, seqlen_k=20, batch=2, dim_v=16)),
        ("causal", True, dict(seqlen_q=20, seqlen_k=40, heads=4, kv_heads=2)),
        ("varlen", False, dict(layout="varlen", batch=3, causal=True, seqlen_q=20, seqlen_k=40)),
        ("varlen-full", True, dict(layout="varlen", batch=4, seqlen_q=40, heads=4)),
    ):
        small_tiles(tma=True, branch=branch, joined=True)
        kind = dict(heads=2, kv_heads=1, dim=32, dim_v=32, dtype="float16", batch=1)
        options = cases.OPTIONS.get(name, {})
        both(cases.Case(name=f"joined-{name}", **{**kind, **options, **more}))


def bad_rows(kind: str) -> None:
    """NaN and inf in one query row, of each loop: the row is not finite, the others as before."""
    for name in ("plain", "causal", "sinks"):
        for poison in (float("nan"), float("inf")):
            case = cases.Case(name=name, seqlen_q=7, seqlen_k=67, **cases.OPTIONS[name])
            report(f"bad row {kind} {name} {poison}", partial(bad_row, few(case), poison))


def bad_row(case, poison: float) -> None:
    a = cases.build(case).arguments
    clean, clean_lse = kernels.forward(a.q, a.k, a.v, a.options(), a.extras())
    q = a.q.clone()
    q[0, 4, 1, 3] = poison
    out, lse = kernels.forward(q, a.k, a.v, a.options(), a.extras())
    assert not out[0, 4, 1].isfinite().any(), "the row's result hides it"
    assert not lse[0, 1, 4].isfinite(), "the row's log-sum-exp hides it"
    for result, was, row in ((out, clean, out[0, 4, 1]), (lse, clean_lse, lse[0, 1, 4:5])):
        row.zero_()
        assert (result != was).sum() <= row.numel(), "other rows have changed"


def user_functions() -> None:
    """Each mod with small tiles; those with a block mask with tiles that fit its blocks."""
    for mod in mod_cases.MOD_CASES:
        small_tiles(tma=mod.name in ("packed", "blocks-documents"), branch=False)
        if mod.blocks:
            large = partial(config.TileConfig, block_n=64, num_warps=4, num_stages=1, tma=True)
            kernels.forward_tile = lambda problem, arch, tile=large: tile(block_m=128)
            both = config.BackwardConfig(dkdv=large(block_m=64), dq=large(block_m=64))
            kernels.backward_config = lambda problem, arch, tiles=both: tiles
        report(f"mods {mod.name}", partial(mod_cases.check, "triton", mod))


def both(case) -> None:
    report(f"fwd {case.name}", partial(cases.check_forward, "triton", case))
    if not case.forward_only:
        report(f"bwd {case.name}", partial(cases.check_backward, "triton", case))


def with_branch(branch: bool, *args) -> config.DecodeConfig:
    """The decode config with small tiles, the diagonal's in the unmasked loop or not."""
    found = config.decode_config(*args)
    small = {"block_n": 16, "branch": True} if branch else {}
    return replace(found, tile=replace(found.tile, **small))


def split_case(case, num_splits: int, branch: bool = False) -> None:
    """Decode with a number of splits (0: the kernel's own choice)."""
    kernels.decode_config = partial(with_branch, branch)
    a = replace(cases.build(case).arguments, num_splits=num_splits)
    out, lse = kernels.forward(a.q, a.k, a.v, a.options(), a.extras())
    exact, baseline = cases.expected(case, True), cases.expected(case, False)
    cases.assert_within_rule("out", out, exact["out"], baseline["out"], a.q.dtype)
    cases.assert_within_rule("lse", lse, exact["lse"], baseline["lse"], torch.float32)


if __name__ == "__main__":
    sys.exit(main())
