"""Groups of verify_hopper.py for the forward over caches: lengths, padding, packed heads, pages.

used (lengths, left padding, rows by index), packed (few queries, one part), parts (split keys),
pages, public (flash_attn_with_kvcache), capture (that function inside a CUDA graph, replayed with
other lengths and pages), again (repeats, bitwise); and what is only timed: decode
(a table beside Triton), after warm_* have compiled Triton's kernels. Output and LSE are compared
with the fp64 reference; keys that do not exist hold NaN, pages that nobody has are NaN or do not
exist, rows that are not used must be 0 and -inf.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import bench_attention_hopper as bench
import torch

from ridgeline.core.errors import UserError
from ridgeline.kernels.attention import (
    cute_sm90,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    ref,
    triton,
)
from ridgeline.kernels.attention.problem import AttentionExtras, AttentionOptions

Say = Callable[[str, str], None]
DEVICE = "cuda"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call by its numbers; `build` makes the tensors."""

    seqlen_q: int
    seqlen_k: int
    heads: int = 8
    kv_heads: int = 2
    dims: tuple[int, int] = (128, 128)
    batch: int = 4
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    sinks: bool = False
    softcap: float = 0.0
    used_q: bool = False
    used_k: bool = False
    leftpad: bool = False
    rows: bool = False
    """Rows of a cache with more of them, by index."""
    page: int | None = None
    packed: bool = False
    splits: int = 0
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        default = Case(seqlen_q=0, seqlen_k=0)
        changed = {
            n: v for n, v in self.__dict__.items() if v != getattr(default, n) and n != "dtype"
        }
        return " ".join(f"{n} {v}" for n, v in changed.items()) + f" {self.dtype}"[7:]

    def options(self) -> AttentionOptions:
        return AttentionOptions(
            softmax_scale=self.dims[0] ** -0.5,
            causal=self.causal,
            window_left=self.window[0],
            window_right=self.window[1],
            softcap=self.softcap,
            num_splits=self.splits,
        )

    def lengths(self, longest: int, used: bool) -> list[int]:
        """Of the sequences: all of them, or a mix with the extremes."""
        if not used:
            return [longest] * self.batch
        mixed = [longest, max(longest - 3, 0), longest // 2 + 1, 0, 1, longest // 3]
        return [mixed[b % len(mixed)] for b in range(self.batch)]


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def starts(lengths: list[int]) -> torch.Tensor:
    return ints([0, *torch.tensor(lengths).cumsum(0).tolist()])


def build(case: Case) -> tuple[list[torch.Tensor], AttentionExtras]:
    """q, k, v and what goes with them; NaN where no key exists."""
    dim, dim_v = case.dims
    used_k = case.lengths(case.seqlen_k, case.used_k)
    used_q = case.lengths(case.seqlen_q, case.used_q or case.packed)[::-1]
    pads = [min(used, 7 * b % 90) for b, used in enumerate(used_k)] if case.leftpad else None
    given: dict = {}
    if case.packed:
        q = torch.randn(sum(used_q) + 5, case.heads, dim, device=DEVICE)
        given |= dict(cu_seqlens_q=starts(used_q), cu_seqlens_k=starts(used_k))
        given |= dict(max_seqlen_q=max(used_q), max_seqlen_k=max(used_k))
        if case.used_q:
            given["seqused_q"] = ints([max(used - 2, 0) for used in used_q])
    else:
        q = torch.randn(case.batch, case.seqlen_q, case.heads, dim, device=DEVICE)
        if case.used_q:
            given["seqused_q"] = ints(used_q)
    shape = (case.batch, case.seqlen_k)
    if case.packed and case.page is None:
        k, v = (torch.randn(sum(used_k) + 9, case.kv_heads, d, device=DEVICE) for d in case.dims)
        for x in (k, v):
            x[sum(used_k) :] = torch.nan
    elif case.page is not None:
        k, v, table = pages(case, used_k)
        given["page_ids_BU"] = table
    else:
        rows = case.batch + 3 if case.rows else case.batch
        index = torch.randperm(rows)[: case.batch].tolist() if case.rows else range(case.batch)
        k, v = (torch.full((rows, shape[1], case.kv_heads, d), torch.nan, device=DEVICE)
                for d in (dim, dim_v))  # fmt: skip
        for b, row in enumerate(index):
            first = 0 if pads is None else pads[b]
            for x in (k, v):
                x[row, first : used_k[b]] = torch.randn_like(x[row, first : used_k[b]])
        if case.rows:
            given["kv_batch_idx"] = ints(list(index))
    if case.used_k and (not case.packed or case.page is not None):
        given["seqused_k"] = ints(used_k)
    if pads is not None:
        given["leftpad_k"] = ints(pads)
    if case.sinks:
        given["sinks_H"] = torch.randn(case.heads, device=DEVICE)
    return [x.to(case.dtype) for x in (q, k, v)], AttentionExtras(**given)


def pages(case: Case, used: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A shuffled pool of pages, NaN where no key is, and a table that ends in nonsense."""
    page = case.page or 1
    per_sequence = -(-case.seqlen_k // page)
    pool = torch.randperm(case.batch * per_sequence + 2)
    k, v = (torch.full((len(pool), page, case.kv_heads, d), torch.nan, device=DEVICE)
            for d in case.dims)  # fmt: skip
    table = torch.full((case.batch, per_sequence), -7, dtype=torch.int32)
    for b, length in enumerate(used):
        for n in range(-(-length // page)):
            table[b, n] = pool[b * per_sequence + n]
            here = min(page, length - n * page)
            for x in (k, v):
                x[int(table[b, n]), :here] = torch.randn_like(x[0, :here])
    return k, v, table.to(DEVICE)


def check(case: Case, say: Say) -> None:
    """One call against the reference."""
    qkv, extras = build(case)
    options = case.options()
    try:
        out, lse = cute_sm90.forward(*qkv, options, extras)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    except UserError:
        say("missing", str(case))
        return
    wanted = replace(options, num_splits=0)
    exact, exact_lse = ref.attention_ref(*qkv, wanted, extras, torch.float64)
    plain, _ = ref.attention_ref(*qkv, wanted, extras, case.dtype)
    error = (out.double() - exact).abs().max().item()
    limit = 2 * (plain.double() - exact).abs().max().item()
    limit += 2**-8 * exact.abs().max().item() + 1e-6
    empty = exact_lse == float("-inf")
    off = torch.where(empty, 0.0, lse.double() - exact_lse).abs().max().item()
    good = error <= limit and off <= 2e-3 and bool((lse[empty] == float("-inf")).all())
    say("ok" if good else "BAD", f"{case} out {error:.1e}/{limit:.1e} lse {off:.1e}")


def used_cases() -> list[Case]:
    base = Case(seqlen_q=150, seqlen_k=333, used_k=True)
    many = [
        base,
        replace(base, causal=True),
        replace(base, causal=True, used_q=True, used_k=False),
        replace(base, causal=True, window=(40, 0), sinks=True, leftpad=True, used_q=True),
        replace(base, rows=True, softcap=3.0, dims=(64, 64)),
        replace(base, leftpad=True, used_k=False, dims=(64, 64)),
        replace(base, causal=True, dims=(256, 256)),
        replace(base, causal=True, dims=(96, 72)),
        replace(base, causal=True, dims=(128, 128), dtype=torch.float16),
        replace(base, used_q=True, packed=True, causal=True),
    ]
    sizes = [(150, 333, 8, 2), (70, 64, 2, 1), (300, 129, 4, 4), (65, 1000, 3, 1)]
    return [
        replace(c, seqlen_q=s, seqlen_k=t, heads=h, kv_heads=g, batch=6)
        for c in many
        for s, t, h, g in sizes
    ]


def packed_cases(splits: int) -> list[Case]:
    base = Case(seqlen_q=1, seqlen_k=300, used_k=True, splits=splits)
    few = [
        base,
        replace(base, causal=True),
        replace(base, causal=True, sinks=True, used_k=False, dims=(64, 64)),
        replace(base, causal=True, window=(50, 0), leftpad=True),
        replace(base, dims=(256, 256), rows=True),
        replace(base, dims=(192, 128), used_q=True, causal=True),
        replace(base, packed=True, causal=True, softcap=5.0),
    ]
    sizes = [(1, 300, 8, 2), (8, 77, 8, 1), (3, 1025, 6, 2), (64, 200, 2, 2), (5, 5, 5, 1)]
    return [
        replace(c, seqlen_q=s, seqlen_k=t, heads=h, kv_heads=g, batch=5)
        for c in few
        for s, t, h, g in sizes
    ]


def page_cases() -> list[Case]:
    few = Case(seqlen_q=1, seqlen_k=700, used_k=True, page=16, splits=1)
    many = Case(seqlen_q=200, seqlen_k=700, used_k=True, page=16, causal=True)
    kinds = [
        few,
        replace(few, splits=4),
        replace(few, page=64, causal=True),
        replace(few, page=256, causal=True, seqlen_q=8, splits=3),
        replace(few, dims=(64, 64), page=32, leftpad=True),
        replace(few, dims=(256, 256)),
        replace(few, packed=True, seqlen_q=4, causal=True),
        many,
        replace(many, page=64, dims=(64, 64)),
        replace(many, page=256),
        replace(many, page=16, packed=True),
        replace(many, page=128, packed=True, window=(100, 0)),
        replace(many, dims=(256, 256), page=32),
    ]
    return [
        replace(c, seqlen_k=t, heads=h, batch=5) for c in kinds for t, h in ((700, 8), (256, 2))
    ]


def public_calls(say: Say) -> None:
    """Through the public functions: append, rotary, int lengths, pages; against impl='ref'."""
    shape = (3, 5, 8, 128)
    for page in (None, 16, 256):
        length = 40 if page is None else 0
        q = torch.randn(*shape, device=DEVICE).bfloat16()
        new = [torch.randn(3, 5, 2, 128, device=DEVICE).bfloat16() for _ in "kv"]
        sizes = (3, 512, 2, 128) if page is None else (1536 // page, page, 2, 128)
        caches = [torch.randn(*sizes, device=DEVICE).bfloat16() for _ in "kv"]
        table = None
        if page is not None:
            table = torch.randperm(1536 // page, device=DEVICE).int().view(3, -1)
        angles = torch.rand(600, 32, device=DEVICE)
        turned = (angles.cos().bfloat16(), angles.sin().bfloat16())
        lengths = 100 if length else ints([100, 507, 0])

        def call(impl, q=q, caches=caches, new=new, turned=turned, lengths=lengths, table=table):
            return flash_attn_with_kvcache(
                q, *[x.clone() for x in caches], *new, *turned, cache_seqlens=lengths, causal=True,
                block_table=table, return_softmax_lse=True, impl=impl,
            )  # fmt: skip

        compare(f"kvcache page {page}", call, say)
    starts_q, starts_k = ints([0, 70, 75]), ints([0, 300, 420])
    q = torch.randn(75, 8, 128, device=DEVICE).bfloat16()
    k, v = (torch.randn(40, 16, 2, 128, device=DEVICE).bfloat16() for _ in "kv")
    table = torch.randperm(40, device=DEVICE)[:38].int().view(2, 19)
    compare(
        "varlen with pages",
        lambda impl: flash_attn_varlen_func(
            q, k, v, starts_q, starts_k, 70, 300, causal=True, block_table=table,
            return_lse=True, impl=impl,
        ),
        say,
    )  # fmt: skip


def compare(what: str, call: Callable[[str], tuple[torch.Tensor, ...]], say: Say) -> None:
    """The results of the reference and of the Hopper kernels."""
    try:
        found = call("ref"), call("cute_sm90")
    except (UserError, NotImplementedError) as error:
        say("missing", f"{what}: {error}")
        return
    off = [(a.float() - b.float()).abs().max().item() for a, b in zip(*found, strict=True)]
    say("ok" if max(off) < 2e-2 else "BAD", f"{what}: differs by {off}")


def captured_cases() -> list[Case]:
    """One query, some, and so many that heads are not packed; keys split and not."""
    base = Case(seqlen_q=1, seqlen_k=4096, causal=True, used_k=True)
    return [
        replace(base, seqlen_q=queries, page=page)
        for page in (None, 16, 64, 256)
        for queries in (1, 8, 200)
    ]


def captured(say: Say) -> None:
    """An append and attention in a CUDA graph: after each replay what the reference says of the
    same cache, and bitwise what a call outside a graph gives."""
    for case in captured_cases():
        rows, sizes = case.seqlen_q, decode_sizes(case)
        q, k, v = (torch.randn(*size, device=DEVICE).bfloat16() for size in sizes)
        new = [
            torch.randn(case.batch, rows, case.kv_heads, 128, device=DEVICE).bfloat16()
            for _ in "kv"
        ]
        lengths, table = ints([0] * case.batch), None
        if case.page is not None:
            table = torch.randperm(k.shape[0], device=DEVICE).int().view(case.batch, -1)

        def call(impl="cute_sm90", q=q, k=k, v=v, new=new, lengths=lengths, table=table):
            return flash_attn_with_kvcache(
                q, k, v, *new, cache_seqlens=lengths, block_table=table, causal=True,
                return_softmax_lse=True, impl=impl,
            )  # fmt: skip

        try:
            call()
        except (UserError, NotImplementedError) as error:
            say("missing", f"graph {case}: {error}")
            continue
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = call()
        full = case.seqlen_k - rows
        kinds = ([0, 1, 63, 64], [full] * 4, [full, 0, 777, 2048], [5, 4, 3, 2], [1500, full, 1, 0])
        worst, same = 0.0, True
        for kind in kinds:
            lengths.copy_(ints(kind))
            if table is not None:
                table.copy_(table[torch.randperm(case.batch, device=DEVICE)])
            for x in new:
                x.normal_()
            junk = [torch.full((1 << n,), torch.nan, device=DEVICE) for n in range(8, 25)]
            graph.replay()
            del junk
            again = call()
            exact = call("ref")
            same &= torch.equal(out, again[0]) and torch.equal(lse, again[1])
            for got, wanted in zip((out, lse), exact, strict=True):
                worst = max(worst, (got.float() - wanted.float()).abs().max().item())
        state = "ok" if same and worst < 2e-2 else "BAD"
        say(state, f"graph {case}: bitwise {same}, off by {worst:.1e}")


def again(say: Say, count: int = 200) -> None:
    """Bitwise equal calls, parts included."""
    cases = [page_cases()[2], page_cases()[14], packed_cases(5)[0], used_cases()[4]]
    for case in cases:
        qkv, extras = build(case)
        try:
            first, first_lse = cute_sm90.forward(*qkv, case.options(), extras)
        except UserError:
            say("missing", f"repeats {case}")
            continue
        differ = torch.zeros(2, dtype=torch.long, device=DEVICE)
        for _ in range(count):
            out, lse = cute_sm90.forward(*qkv, case.options(), extras)
            differ += torch.stack([(out != first).any(), (lse != first_lse).any()]).long()
        found = differ.tolist()
        say("ok" if not any(found) else "BAD", f"{count} repeats {case}: differ {found}")


def decode_cells(page: int | None) -> list[Case]:
    """32 query heads over 8, head dim 128: the shapes of the decode rows."""
    shapes = ((32, 8192), (128, 2048), (1, 131072), (8, 8192))
    base = Case(seqlen_q=1, seqlen_k=1, heads=32, causal=True, used_k=True, page=page)
    return [
        replace(base, seqlen_q=s, seqlen_k=t, kv_heads=8, batch=b)
        for b, t in shapes
        for s in (1, 8)
    ]


def decode_calls(case: Case) -> dict[str, Callable[[], object]]:
    """A call of each implementation, on full caches."""
    full = replace(case, used_k=False)
    q, k, v = (
        torch.randn(*size, device=DEVICE, dtype=torch.bfloat16) for size in decode_sizes(full)
    )
    given: dict = {"seqused_k": ints([case.seqlen_k] * case.batch)}
    if case.page is not None:
        table = torch.randperm(k.shape[0], device=DEVICE).int().view(case.batch, -1)
        given["page_ids_BU"] = table
    extras, options = AttentionExtras(**given), case.options()
    return {
        "cute_sm90": lambda: cute_sm90.forward(q, k, v, options, extras),
        "triton": lambda: triton.forward(q, k, v, options, extras),
    }


def decode_sizes(case: Case) -> list[tuple[int, ...]]:
    keys = (case.batch, case.seqlen_k, case.kv_heads)
    if case.page is not None:
        keys = (case.batch * case.seqlen_k // case.page, case.page, case.kv_heads)
    q = (case.batch, case.seqlen_q, case.heads)
    return [(*size, dim) for size, dim in zip((q, keys, keys), (*case.dims, 128), strict=True)]


def decode(say: Say) -> None:
    """Microseconds and TB/s of both implementations, in turns; prints, decides nothing."""
    for page in (None, 16, 256):
        for case in decode_cells(page):
            runs = decode_calls(case)
            found = {name: run() for name, run in runs.items()}
            off = (found["cute_sm90"][0].float() - found["triton"][0].float()).abs().max().item()
            say("ok" if off < 1e-2 else "BAD", f"decode {case}: differ by {off:.1e}")
            times = bench.measure(runs, rounds=5, target_ms=2)
            us = {name: times[name][len(times[name]) // 2] for name in runs}
            moved = 2 * case.batch * case.seqlen_k * case.kv_heads * 128 * 2
            row = {name: f"{t:.1f} us {moved / t / 1e6:.2f} TB/s" for name, t in us.items()}
            print(
                f"decode {case.batch}x{case.seqlen_k} q{case.seqlen_q} page {page}: {row}",
                flush=True,
            )
            shape = {n: getattr(case, n) for n in ("batch", "seqlen_q", "seqlen_k", "page")}
            print(json.dumps({"decode": shape, "us": us}), flush=True)


def warm(page: int | None) -> None:
    """Compile Triton's kernels of the table, beside other work."""
    for case in decode_cells(page):
        decode_calls(case)["triton"]()
    torch.cuda.synchronize()


def groups(say: Say) -> dict[str, Callable[[], None]]:
    """By name, for verify_hopper.py."""

    def checks(cases: list[Case]) -> Callable[[], None]:
        def run() -> None:
            for case in cases:
                check(case, say)

        return run

    return {
        "used": checks(used_cases()),
        "packed": checks(packed_cases(1)),
        "parts": checks([*packed_cases(2), *packed_cases(40)]),
        "pages": checks(page_cases()),
        "public": lambda: public_calls(say),
        "capture": lambda: captured(say),
        "again": lambda: again(say),
        "decode": lambda: decode(say),
        "warm_contiguous": lambda: warm(None),
        "warm_16": lambda: warm(16),
        "warm_256": lambda: warm(256),
    }
