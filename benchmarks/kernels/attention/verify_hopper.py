"""Hopper kernels that no GPU has run yet: are they right, repeatable, and which variant is fastest?

    RIDGELINE_UNVERIFIED=1 python benchmarks/kernels/attention/verify_hopper.py --group single

One group a process, so that one that hangs costs its own time limit only. Groups, least suspicious
first: narrow (what runs by default), helpers (with and without the fourth warpgroup, and turns of
several heads), single and pair (backward by roles: one block of threads, two), softcap,
deterministic, turned_windows (deterministic windows), windows (by persistent blocks that zero dQ
themselves) and window_repeats, quick_end (gradients of keys row by row), ahead (rows prepared
and finished by idle warps) and ahead_repeats, polynomials (of exponentials), packed_wide and
used_backward (sequences that end early), far (scores far below zero), repeats, tune (times
variants; prints, writes nothing). The forward's are in verify_hopper_cached.py (over caches) and
verify_hopper_tail.py (whose last tiles are cut). Every gradient is compared with the fp64
reference: error <= 2 x PyTorch's in the same dtype + one rounding. Lines begin with ok, BAD or
missing (a kernel that is not in the cache of a machine without the DSL); the last is JSON. What a
call costs the host: bench_host.py.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import bench_attention_hopper as bench
import torch
import verify_hopper_cached as cached
import verify_hopper_tail as tail

from ridgeline.core.errors import UserError
from ridgeline.kernels.attention import calls, cute_sm90, ref
from ridgeline.kernels.attention.cute_sm90_backward_config import (
    BackwardConfig,
    backward_config,
    backward_traits,
    prepared_ahead,
)
from ridgeline.kernels.attention.cute_sm90_backward_config import (
    heads_per_section as default_section,
)
from ridgeline.kernels.attention.cute_sm90_roles_config import RolesConfig, candidates
from ridgeline.kernels.attention.problem import AttentionExtras, AttentionOptions, AttentionProblem

SHAPES = [  # S, T, heads, kv heads
    (64, 64, 1, 1),
    (128, 128, 2, 2),
    (200, 300, 4, 2),
    (130, 65, 2, 1),
    (1, 77, 2, 2),
    (500, 129, 2, 1),
    (257, 1000, 3, 1),
]
WIDE = [(256, 256), (192, 128), (192, 192)]
counts = {"ok": 0, "BAD": 0, "missing": 0}


@dataclass(frozen=True)
class Variant:
    """A backward other than the default one: changed fields of its tile, heads of a section."""

    changes: tuple[tuple[str, object], ...] = ()
    section: int | None = None

    def config(self, problem: AttentionProblem, arch) -> BackwardConfig | RolesConfig:
        config = backward_config(problem, arch)
        if isinstance(config, RolesConfig) and ("pair", False) in self.changes:
            return next(c for c in candidates(backward_traits(problem)) if not c.pair)
        return replace(config, **dict(self.changes))

    def __str__(self) -> str:
        parts = [f"{name} {value}" for name, value in self.changes]
        return " ".join(parts + ([f"section {self.section}"] if self.section else [])) or "default"


HELPED = Variant((("helpers", True), ("other_registers", 72)))
PLAIN = Variant(
    (
        ("helpers", False), ("other_registers", 88), ("persistent", 0), ("overlapped", False),
        ("ordered", False), ("zeros_ahead", False),
    )
)  # fmt: skip
"""Three warpgroups, one block of keys a block of threads."""
ZEROED_BEFORE = Variant((("zeros_ahead", False),))
BARE = Variant((("zeros_ahead", False), ("ordered", False), ("overlapped", False)))
"""Persistent blocks and nothing more."""
QUICK = Variant((("quick_end", True),))
POLYNOMIALS = [Variant((("polynomial_every", n),)) for n in (2, 3, 4)]


@dataclass(frozen=True)
class Ahead(Variant):
    """Persistent blocks whose idle warps work for other blocks of keys; changes: of that."""

    def config(self, problem: AttentionProblem, arch) -> BackwardConfig | RolesConfig:
        config = backward_config(problem, arch)
        ahead = prepared_ahead(config, problem, arch) if type(config) is BackwardConfig else None
        if ahead is None:
            raise UserError("no rows are prepared ahead here")
        return replace(ahead, **dict(self.changes))

    def __str__(self) -> str:
        return f"ahead {super().__str__()}"


AHEAD = Ahead()
SHARES = [
    AHEAD,
    Ahead((("results_behind", False),)),
    Ahead((("statistics_ahead", False),)),
    Ahead((("statistics_ahead", False), ("results_behind", False), ("zeros_ahead", False))),
]
"""All; without a share; persistent blocks with a quick end and nothing more."""


@contextlib.contextmanager
def using(variant: Variant) -> Iterator[None]:
    """Plans made meanwhile take the variant."""
    cute_sm90._plans.clear()
    calls.forget()
    cute_sm90.backward_config = variant.config
    if variant.section is not None:
        cute_sm90.backward_section = lambda problem, arch: variant.section
    try:
        yield
    finally:
        cute_sm90.backward_config = backward_config
        cute_sm90.backward_section = default_section
        cute_sm90._plans.clear()
        calls.forget()


def say(state: str, text: str) -> None:
    counts[state] += 1
    print(state, text, flush=True)


def leaves(shape: tuple[int, ...], dims: tuple[int, int], batch: int = 2) -> list[torch.Tensor]:
    rows, keys, heads, kv_heads = shape
    sizes = (rows, heads, dims[0]), (keys, kv_heads, dims[0]), (keys, kv_heads, dims[1])
    return [torch.randn(batch, *size, device="cuda").bfloat16() for size in sizes]


def check(
    what: str,
    variant: Variant,
    qkv: list[torch.Tensor],
    options: AttentionOptions,
    tails: Tails | None = None,
) -> None:
    """Output and gradients, with and without a gradient of the LSE. Rows behind a sequence's end
    are NaN for the kernels and 0 for the reference; their gradients must be 0."""
    tails = tails or Tails()
    extras = tails.extras
    for with_dlse in (False, True):
        name = f"{what} {variant} dlse {with_dlse}"
        try:
            with using(variant):
                q, k, v = tails.poisoned(qkv)
                out, lse = cute_sm90.forward(q, k, v, options, extras)
                dout = torch.randn_like(out)
                dlse = torch.randn_like(lse) if with_dlse else None
                (given,) = tails.poisoned([dout])
                got = cute_sm90.backward(given, dlse, q, k, v, out, lse, options, extras)
                torch.cuda.synchronize()
        except UserError:
            say("missing", name)
            return
        results = []
        for dtype in (torch.float64, torch.bfloat16):
            named = {
                n: x.detach().to(dtype).requires_grad_() for n, x in zip("qkv", qkv, strict=True)
            }
            made = ref.attention_ref(*named.values(), options, extras, dtype)
            results.append({"out": made[0].detach(), **ref.gradients(made, named, dout, dlse)})
        exact, plain = results
        worst, good = [], True
        for key, value in zip(("out", *"qkv"), (out, got.dq, got.dk, got.dv), strict=True):
            error = (value.double() - exact[key]).abs().max().item()
            floor = (plain[key].double() - exact[key]).abs().max().item()
            limit = 2 * floor + 2**-8 * exact[key].abs().max().item() + 1e-6
            good &= error <= limit  # false for NaN
            worst.append(f"{key} {error:.1e}/{limit:.1e}")
        say("ok" if good else "BAD", f"{name} {' '.join(worst)}")


@dataclass(frozen=True)
class Tails:
    """Sequences that end before their tensor does; none by default."""

    extras: AttentionExtras = field(default_factory=AttentionExtras)
    unused_q: torch.Tensor | None = None
    """Rows of q behind a sequence's end: a mask of q's leading dims."""
    unused_k: torch.Tensor | None = None

    def poisoned(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """q, k, v or what is like q, with NaN in unused rows."""
        unused = (self.unused_q, self.unused_k, self.unused_k)
        return [
            x if rows is None else x.masked_fill(rows[..., None, None], torch.nan)
            for x, rows in zip(tensors, unused, strict=False)
        ]


LENGTHS_Q, LENGTHS_K = [130, 0, 64, 1, 257, 70], [130, 40, 200, 77, 257, 0]


def tailed(
    kind: str, dims: tuple[int, int], heads: tuple[int, int] = (4, 2)
) -> tuple[list[torch.Tensor], Tails]:
    """kind: packed, used (dense, both lengths), keys (dense, of keys), packed used."""
    if kind.startswith("packed"):
        rows, keys = (sum(x) + 5 for x in (LENGTHS_Q, LENGTHS_K))
        starts = [cached.starts(x) for x in (LENGTHS_Q, LENGTHS_K)]
        given: dict = dict(cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])
        given |= dict(max_seqlen_q=257, max_seqlen_k=257)
        ends = [[(x, x) for x in lengths] for lengths in (LENGTHS_Q, LENGTHS_K)]
        if kind == "packed used":
            ends = [[(x, max(x - 9, 0)) for x in lengths] for lengths in (LENGTHS_Q, LENGTHS_K)]
            given |= dict(seqused_q=cached.ints([used for _, used in ends[0]]))
            given |= dict(seqused_k=cached.ints([used for _, used in ends[1]]))
        unused = [
            torch.tensor([n >= used for stored, used in end for n in range(stored)] + [True] * 5)
            for end in ends
        ]
        lead = (), (rows,), (keys,)
    else:
        given = dict(seqused_k=cached.ints(LENGTHS_K))
        unused = [torch.zeros(6, 260, dtype=torch.bool), torch.zeros(6, 300, dtype=torch.bool)]
        for b, (used_q, used_k) in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
            unused[1][b, used_k:] = True
            if kind == "used":
                unused[0][b, used_q:] = True
        if kind == "used":
            given |= dict(seqused_q=cached.ints(LENGTHS_Q))
        lead = (6,), (260,), (300,)
    shapes = [
        (*lead[0], *lead[1], heads[0], dims[0]),
        (*lead[0], *lead[2], heads[1], dims[0]),
        (*lead[0], *lead[2], heads[1], dims[1]),
    ]
    device = cached.DEVICE
    masks_ = [mask.to(device) for mask in unused]
    tails = Tails(AttentionExtras(**given), *masks_)
    qkv = [torch.randn(*shape, device=device).bfloat16() for shape in shapes]
    rows_ = (masks_[0], masks_[1], masks_[1])
    clean = [x.masked_fill(m[..., None, None], 0) for x, m in zip(qkv, rows_, strict=True)]
    return clean, tails


def masks(dims: tuple[int, int], softcap: float = 0.0) -> list[AttentionOptions]:
    plain = AttentionOptions(softmax_scale=dims[0] ** -0.5, softcap=softcap)
    causal = replace(plain, causal=True)
    return [plain, causal, replace(causal, window_left=100)]


def grid(dims: list[tuple[int, int]], variants: list[Variant], deterministic: bool) -> None:
    for dim, variant, shape in itertools.product(dims, variants, SHAPES):
        for options in masks(dim):
            options = replace(options, deterministic=deterministic)
            if deterministic and options.window_left is not None:
                continue
            mask = "window" if options.window_left else "causal" if options.causal else "full"
            check(f"{dim} {shape} {mask}", variant, leaves(shape, dim), options)


def group_narrow() -> None:
    grid([(64, 64), (128, 128)], [Variant()], False)
    grid([(64, 64), (128, 128)], [Variant()], True)


def group_helpers() -> None:
    """The backward with and without the fourth warpgroup, and turns of several heads."""
    grid([(64, 64), (128, 128)], [HELPED], False)
    grid([(128, 128)], [PLAIN], False)
    grid([(64, 64), (128, 128)], [Variant(section=1), Variant(section=8)], True)
    for dim, shape in itertools.product([(64, 64), (128, 128)], SHAPES):
        options = replace(masks(dim)[2], deterministic=True)
        check(f"{dim} {shape} window deterministic", Variant(), leaves(shape, dim), options)


def group_single() -> None:
    grid(WIDE[:2], [Variant((("pair", False),))], False)


def group_pair() -> None:
    grid(WIDE, [Variant()], False)


def group_softcap() -> None:
    for dim in ((64, 64), (128, 128), (256, 256)):
        for shape in SHAPES:
            options = masks(dim, softcap=3.0)[1]
            check(f"{dim} {shape} causal softcap", Variant(), leaves(shape, dim), options)


def group_deterministic() -> None:
    grid(WIDE, [Variant()], True)


def group_turned_windows() -> None:
    """Deterministic windows, of two lengths, and that repeats are bitwise equal."""
    dims = [(64, 64), (96, 96), (32, 32), (96, 64), (128, 128)]
    for dim, shape, left in itertools.product(dims, SHAPES, (100, 17)):
        options = replace(masks(dim)[2], window_left=left, deterministic=True)
        check(f"{dim} {shape} window {left} deterministic", Variant(), leaves(shape, dim), options)
    for dim in dims:
        options = replace(masks(dim)[2], deterministic=True)
        bitwise(f"{dim} window deterministic", leaves((1100, 1100, 8, 8), dim), options, 200)


def group_windows() -> None:
    """Causal windows, dQ zeroed by the main kernel and before it, with more blocks of keys than a
    block is ahead of the one it zeroes for."""
    for dim, (shape, batch) in itertools.product([(64, 64), (128, 128)], SQUARES):
        for variant, left in itertools.product((Variant(), ZEROED_BEFORE, BARE), (100, 400)):
            options = replace(masks(dim)[2], window_left=left)
            what = f"{dim} {shape} x{batch} window {left}"
            if left < shape[0]:
                check(what, variant, leaves(shape, dim, batch), options)


SQUARES = [
    ((1100, 1100, 16, 16), 4), ((700, 700, 16, 4), 14), ((500, 500, 2, 1), 2),
    ((64, 64, 1, 1), 2), ((130, 130, 4, 2), 2), ((257, 257, 8, 8), 20), ((2048, 2048, 16, 16), 2),
]  # fmt: skip
"""Shape and batch: from a call of one block of keys to ten times as many as run at once."""


def group_ahead() -> None:
    """Rows prepared and finished by other blocks' idle warps, each share alone and all."""
    for dim, (shape, batch) in itertools.product([(64, 64), (128, 128)], SQUARES):
        for options, variant in itertools.product(masks(dim), SHARES):
            left = options.window_left
            mask = "window" if left else "causal" if options.causal else "full"
            if left is None or left < shape[0]:
                what = f"{dim} {shape} x{batch} {mask}"
                check(what, variant, leaves(shape, dim, batch), options)


def group_quick_end() -> None:
    """dK and dV row by row: every mask and length, packed, used, in turns."""
    grid([(64, 64), (128, 128), (96, 96), (32, 32)], [QUICK], False)
    grid([(64, 64), (128, 128)], [QUICK], True)
    for dim, kind in itertools.product([(64, 64), (128, 128)], ("packed", "used", "packed used")):
        for options in masks(dim):
            mask = "window" if options.window_left else "causal" if options.causal else "full"
            qkv, tails = tailed(kind, dim)
            check(f"{dim} {kind} {mask}", QUICK, qkv, options, tails)


def group_polynomials() -> None:
    """Some exponentials by polynomials, in both dtypes' degrees."""
    for variant in POLYNOMIALS:
        grid([(64, 64), (128, 128)], [variant], False)


def group_ahead_repeats() -> None:
    """At the sizes of the benchmark: dK and dV bitwise, dQ as without."""
    for dim, length in itertools.product((128, 64), (16384, 4096, 1024)):
        shape = (length, length, 2048 // dim, 2048 // dim)
        plain = masks((dim, dim))
        for options in (plain[0], plain[1], replace(plain[1], window_left=1023)):
            qkv = leaves(shape, (dim, dim), 16384 // length)
            what = f"{dim} {length} causal {options.causal} left {options.window_left}"
            repeated_sums(what, qkv, options, 100, AHEAD)


def group_window_repeats() -> None:
    for dim in (128, 64):
        for left, count in ((1023, 800), (3000, 100)):
            options = replace(masks((dim, dim))[2], window_left=left)
            shape = (16384, 16384, 2048 // dim, 2048 // dim)
            repeated_sums(f"{dim} window {left}", leaves(shape, (dim, dim), 1), options, count)


def repeated_sums(
    what: str,
    qkv: list[torch.Tensor],
    options: AttentionOptions,
    count: int,
    variant: Variant | None = None,
) -> None:
    """Repeats of a variant give the same bits of dK and dV, and of dQ what a kernel gives that
    zeroes all of it before, but for the order of additions."""
    name, extras = f"{count} repeats {what}", AttentionExtras()
    try:
        out, lse = cute_sm90.forward(*qkv, options, extras)
        tensors = (torch.randn_like(out), None, *qkv, out, lse, options, extras)
        with using(PLAIN if variant else ZEROED_BEFORE):
            plain = cute_sm90.backward(*tensors)
        differ = torch.zeros(2, dtype=torch.long, device="cuda")
        far = torch.zeros((), device="cuda")
        with using(variant or Variant()):
            first = cute_sm90.backward(*tensors)
            for _ in range(count):
                grads = cute_sm90.backward(*tensors)
                pairs = ((grads.dk, first.dk), (grads.dv, first.dv))
                differ += torch.stack([(a != b).any().long() for a, b in pairs])
                far = torch.maximum(far, (grads.dq.float() - plain.dq.float()).abs().max())
    except UserError:
        say("missing", name)
        return
    largest = plain.dq.float().abs().max().item()
    good = not any(differ.tolist()) and far.item() <= 2**-7 * largest
    found = f"calls that differ {differ.tolist()}, dQ {far.item():.1e} of {largest:.1e} away"
    say("ok" if good else "BAD", f"{name}: {found}")


def group_packed_wide() -> None:
    """The backward by roles of packed sequences."""
    for dim, deterministic in itertools.product(WIDE, (False, True)):
        for options in masks(dim):
            qkv, tails = tailed("packed", dim)
            options = replace(options, deterministic=deterministic)
            mask = "window" if options.window_left else "causal" if options.causal else "full"
            what = f"{dim} packed {mask} deterministic {deterministic}"
            check(what, Variant(), qkv, options, tails)
    for dim in ((64, 64), (128, 128), (256, 256)):
        qkv, tails = tailed("packed", dim, heads=(3, 3))
        check(f"{dim} packed softcap", Variant(), qkv, masks(dim, 3.0)[1], tails)


def group_used_backward() -> None:
    """Backward with used lengths, of dense and packed tensors."""
    dims = [(64, 64), (128, 128), (256, 256), (96, 96)]
    for dim, kind in itertools.product(dims, ("used", "keys", "packed used")):
        for options in masks(dim)[: 3 if dim[0] == 128 else 2]:
            mask = "window" if options.window_left else "causal" if options.causal else "full"
            for deterministic in (False, True) if dim[0] in (128, 256) else (False,):
                qkv, tails = tailed(kind, dim)
                what = f"{dim} {kind} {mask} deterministic {deterministic}"
                ordered = replace(options, deterministic=deterministic)
                check(what, Variant(), qkv, ordered, tails)


def group_far() -> None:
    """All scores near -200: P of keys behind the sequence must not overflow into dQ."""
    for dim in (256, 128):
        q = torch.full((1, 70, 1, dim), 3.5, device="cuda").bfloat16()
        qkv = [q, -q, torch.randn_like(q)]
        check(f"{dim} scores below -190", Variant(), qkv, masks((dim, dim))[0])


def group_repeats(dims: list[tuple[int, int]] | None = None, count: int = 1000) -> None:
    """O, dK, dV always; dQ in deterministic mode."""
    for dim in dims or [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128)]:
        for causal, deterministic in itertools.product((False, True), repeat=2):
            options = replace(masks(dim)[0], causal=causal, deterministic=deterministic)
            what = f"{dim} causal {causal} deterministic {deterministic}"
            bitwise(what, leaves((1100, 1100, 8, 8), dim), options, count)


def bitwise(what: str, qkv: list[torch.Tensor], options: AttentionOptions, count: int) -> None:
    """Repeats of one call give the same bits: O, dK, dV, and deterministic, dQ."""
    name = f"{count} repeats {what}"
    try:
        out, lse = cute_sm90.forward(*qkv, options, AttentionExtras())
        tensors = (torch.randn_like(out), None, *qkv, out, lse, options, AttentionExtras())
        first = cute_sm90.backward(*tensors)
    except UserError:
        say("missing", name)
        return
    differ = torch.zeros(4, dtype=torch.long, device="cuda")
    for _ in range(count):
        again, _ = cute_sm90.forward(*qkv, options, AttentionExtras())
        grads = cute_sm90.backward(*tensors)
        pairs = ((again, out), (grads.dk, first.dk), (grads.dv, first.dv))
        pairs = (*pairs, (grads.dq, first.dq if options.deterministic else grads.dq))
        differ += torch.stack([(a != b).any().long() for a, b in pairs])
    found = differ.tolist()
    say("ok" if not any(found) else "BAD", f"{name}: calls that differ {found}")


def group_tune() -> None:
    """TFLOP/s of variants, each the median of turns in one process."""
    for cell in [c for c in bench.cells() if c.direction == "bwd"]:
        variants = [Variant()]
        if max(cell.head_dim, cell.head_dim_v) <= 128:
            variants += [QUICK, *POLYNOMIALS]
            if not cell.deterministic and not cell.lengths:
                variants += SHARES
        if len(variants) == 1:
            continue
        times = in_turns(cell, variants)
        found = {name: round(cell.flops() / t[len(t) // 2] / 1e6) for name, t in times.items()}
        print(f"tune {cell.label()} {found}", flush=True)


def in_turns(cell: bench.Cell, variants: list[Variant]) -> dict[str, list]:
    """Microseconds of each variant that is there: each keeps the plans of its own."""
    runs = {}
    for variant in variants:
        try:
            plans: dict = {}
            with using(variant):
                cute_sm90._plans = plans
                call = bench.calls(cell, bench.Peers())["cute_sm90"]
                call()
                cute_sm90._plans = {}  # `using` clears what it finds at its end

            def run(call=call, plans=plans):
                cute_sm90._plans = plans
                return call()

            runs[str(variant)] = run
        except UserError:
            say("missing", f"{cell.label()} {variant}")
    times = bench.measure(runs, rounds=5, target_ms=6)
    cute_sm90._plans = {}
    return times


def main() -> None:
    groups = {name.removeprefix("group_"): f for name, f in globals().items() if "group_" in name}
    groups |= cached.groups(say) | tail.groups(say)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--group", choices=sorted(groups), required=True)
    parser.add_argument("--fa3", help="peer of tail_tune: library of vLLM's FlashAttention-3")
    parser.add_argument("--fa4", action="store_true", help="another: flash_attn.cute")
    args = parser.parse_args()
    if args.fa3:
        torch.ops.load_library(args.fa3)
    groups |= tail.groups(say, bench.Peers(fa3=args.fa3 is not None, fa4=args.fa4))
    torch.manual_seed(0)
    groups[args.group]()
    print(json.dumps({"op": "attention", "group": args.group, **counts}))


if __name__ == "__main__":
    main()
