"""Groups of verify_hopper.py for the forward whose last tiles are cut along their keys.

tail (output and LSE against the fp64 reference, and against the shipped kernel's), tail_repeats
(bitwise: in a row, on two streams, with launches of other shapes between, in a CUDA graph), and
what is only timed: tail_tune, shipped and cut in turns with the peers of the cell. Shapes are made
for the number of multiprocessors that is there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import bench_attention_hopper as bench
import torch

from ridgeline.core.arch import Arch, detect
from ridgeline.core.errors import UserError
from ridgeline.kernels.attention import calls, cute_sm90, ref
from ridgeline.kernels.attention.cute.tail import Tail, tail
from ridgeline.kernels.attention.cute_sm90_choice import forward_kernel
from ridgeline.kernels.attention.cute_sm90_config import (
    ForwardConfig,
    forward_config,
    forward_traits,
    rows_per_block,
)
from ridgeline.kernels.attention.cute_sm90_tail_config import settled, tail_of
from ridgeline.kernels.attention.problem import AttentionExtras, AttentionOptions, AttentionProblem

Say = Callable[[str, str], None]
DEVICE = "cuda"
DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How the last tiles are treated."""

    split: bool = True
    by_rule: bool = False
    """Cut only where the rule says that it pays."""
    ranges: int | None = None
    """Instead of as many as take least time by the rule."""

    def kernel(self, problem: AttentionProblem, arch: Arch):
        if not self.split:
            return forward_kernel(problem, arch)
        config = replace(forward_config(problem, arch), split_tail=True)
        return forward_traits(problem), settled(problem, config, arch) if self.by_rule else config

    def tail(self, problem: AttentionProblem, config: ForwardConfig, arch: Arch) -> Tail:
        cut = tail_of(problem, config, arch)
        if self.ranges is None:
            return cut
        return tail(cut.whole + cut.left, arch.num_units, cut.blocks, self.ranges)

    def __str__(self) -> str:
        if not self.split:
            return "shipped"
        count = "" if self.ranges is None else f" {self.ranges} ranges"
        return "cut" + (" by rule" if self.by_rule else "") + count


SHIPPED, BY_RULE, CUT = Variant(split=False), Variant(by_rule=True), Variant()


@contextlib.contextmanager
def using(variant: Variant) -> Iterator[None]:
    """Plans made meanwhile take the variant."""
    cute_sm90._plans.clear()
    calls.forget()
    cute_sm90.forward_kernel, cute_sm90.tail_of = variant.kernel, variant.tail
    try:
        yield
    finally:
        cute_sm90.forward_kernel, cute_sm90.tail_of = forward_kernel, tail_of
        cute_sm90._plans.clear()
        calls.forget()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call by its numbers."""

    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    dims: tuple[int, int] = (128, 128)
    batch: int = 1
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        options = f"{' softcap' * (self.softcap > 0)}{' sinks' * self.sinks}"
        heads = f"{self.heads}/{self.kv_heads}"
        sizes = f"{self.batch}x{self.seqlen_q}x{self.seqlen_k} {heads} {self.dims}"
        return f"{sizes}{options} {self.dtype}".replace("torch.", "")

    def build(self) -> tuple[list[torch.Tensor], AttentionOptions, AttentionExtras]:
        sizes = (
            (self.seqlen_q, self.heads, self.dims[0]),
            (self.seqlen_k, self.kv_heads, self.dims[0]),
            (self.seqlen_k, self.kv_heads, self.dims[1]),
        )
        qkv = [torch.randn(self.batch, *size, device=DEVICE).to(self.dtype) for size in sizes]
        options = AttentionOptions(softmax_scale=self.dims[0] ** -0.5, softcap=self.softcap)
        sinks = torch.randn(self.heads, device=DEVICE) if self.sinks else None
        return qkv, options, AttentionExtras(sinks_H=sinks)


def left_over(count: int, dims: tuple[int, int], seqlen_k: int, **more) -> Case:
    """A call of one more round than its `count` last tiles need; those of one head are few, and
    its last one is not full."""
    units = detect(DEVICE).num_units
    wanted = units + count
    tiles = next(n for n in (3, 2, 1) if wanted % n == 0)
    problem = AttentionProblem(
        batch=1, seqlen_q=1 << 14, seqlen_k=seqlen_k, heads=1, kv_heads=1,
        head_dim=dims[0], head_dim_v=dims[1], softcap=more.get("softcap", 0.0),
        sinks=more.get("sinks", False),
    )  # fmt: skip
    rows = rows_per_block(forward_config(problem, detect(DEVICE)))
    heads = wanted // tiles
    return Case(
        seqlen_q=tiles * rows - 57,
        seqlen_k=seqlen_k,
        heads=heads,
        kv_heads=heads // 2 if heads % 2 == 0 else heads,
        dims=dims,
        **more,
    )


def cases() -> list[tuple[Case, Variant]]:
    """1, half of all and all but one multiprocessors' tiles left; one key block and many; ends
    inside a block; no whole round; softcap, sinks, fp16."""
    units = detect(DEVICE).num_units
    most = Variant(ranges=units)
    found = []
    for dims, count in itertools.product(DIMS, (1, 68 % units, units - 1)):
        for keys in (100, 1000, 1025):
            found += [(left_over(count, dims, keys), variant) for variant in (CUT, most)]
    for dims in DIMS:
        found.append((left_over(44 % units, dims, 3000), most))
        found.append((left_over(68 % units, dims, 700, softcap=9.0), most))
        found.append((left_over(68 % units, dims, 700, sinks=True), most))
        found.append((left_over(68 % units, dims, 700, dtype=torch.float16), most))
        few = Case(seqlen_q=500, seqlen_k=2100, heads=4, kv_heads=2, dims=dims, batch=2)
        found += [(few, CUT), (few, most), (few, Variant(ranges=units // 2))]
    long = Case(seqlen_q=900, seqlen_k=20000, heads=17, kv_heads=17)
    return [*found, (long, CUT), (long, most)]


def check(case: Case, variant: Variant, say: Say) -> None:
    """Output: error <= 2 x PyTorch's in the same dtype + one rounding. LSE: 1e-3, and the shipped
    kernel's within 1e-4. Keys behind the sequence's end do not exist for TMA."""
    qkv, options, extras = case.build()
    name = f"{case} {variant}"
    try:
        with using(variant):
            out, lse = cute_sm90.forward(*qkv, options, extras)
            torch.cuda.synchronize()
        with using(SHIPPED):
            plain, plain_lse = cute_sm90.forward(*qkv, options, extras)
    except UserError:
        say("missing", name)
        return
    exact, exact_lse = ref.attention_ref(*qkv, options, extras, torch.float64)
    floor = (ref.attention_ref(*qkv, options, extras, case.dtype)[0].double() - exact).abs().max()
    error = (out.double() - exact).abs().max().item()
    limit = 2 * floor.item() + 2**-8 * exact.abs().max().item() + 1e-6
    off = (lse.double() - exact_lse).abs().max().item()
    other = (out.double() - plain.double()).abs().max().item()
    other_lse = (lse - plain_lse).abs().max().item()
    good = error <= limit and off <= 1e-3 and other <= limit and other_lse <= 1e-4
    words = f"out {error:.1e}/{limit:.1e} lse {off:.1e} from shipped {other:.1e}, {other_lse:.1e}"
    say("ok" if good else "BAD", f"{name} {words}")


def group_tail(say: Say) -> None:
    for case, variant in cases():
        check(case, variant, say)


def repeated() -> list[Case]:
    units = detect(DEVICE).num_units
    shapes = [left_over(68 % units, dims, 2000) for dims in DIMS]
    return [*shapes, left_over(1, (128, 128), 5000), left_over(units - 1, (64, 64), 1000)]


def group_tail_repeats(say: Say, count: int = 300) -> None:
    """Whoever comes last, the bits are the same; and counters are zero behind every launch."""
    for case in repeated():
        try:
            with using(CUT):
                differ = _repeats(case, count)
        except UserError:
            say("missing", f"{count} repeats {case}")
            continue
        say("ok" if not any(differ.values()) else "BAD", f"{count} repeats {case} differ {differ}")


def _repeats(case: Case, count: int) -> dict[str, int]:
    """How many calls of each kind differ from the first one, O or LSE."""
    qkv, options, extras = case.build()
    other, other_options, other_extras = replace(case, heads=2, kv_heads=2, seqlen_k=777).build()
    first = cute_sm90.forward(*qkv, options, extras)
    same = torch.zeros(4, dtype=torch.long, device=DEVICE)

    def compare(kind: int, got: tuple[torch.Tensor, torch.Tensor]) -> None:
        pairs = zip(got, first, strict=True)
        same[kind] += torch.stack([(a != b).any() for a, b in pairs]).any().long()

    for _ in range(count):
        compare(0, cute_sm90.forward(*qkv, options, extras))
    for _ in range(count // 4):
        cute_sm90.forward(*other, other_options, other_extras)
        compare(1, cute_sm90.forward(*qkv, options, extras))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    made = []
    for _ in range(count // 20):
        for stream in streams:
            with torch.cuda.stream(stream):
                made.append(cute_sm90.forward(*qkv, options, extras))
    torch.cuda.synchronize()
    for got in made:
        compare(2, got)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cute_sm90.forward(*qkv, options, extras)
    for _ in range(count // 4):
        for x in captured:
            x.zero_()
        graph.replay()
        cute_sm90.forward(*other, other_options, other_extras)
        compare(3, captured)
    found = same.tolist()
    return dict(zip(("in a row", "between others", "on two streams", "graph"), found, strict=True))


def group_tail_tune(peers: bench.Peers) -> None:
    """TFLOP/s of cells without a mask: shipped, cut by the rule, cut into one range a
    multiprocessor, and the peers; rounds begin with another one each time."""
    units = detect(DEVICE).num_units
    for cell in bench.cells():
        if cell.direction != "fwd" or cell.causal:
            continue
        found = in_turns(cell, [SHIPPED, BY_RULE, Variant(ranges=units)], peers)
        rates = {name: cell.flops() / t[len(t) // 2] / 1e6 for name, t in found.items()}
        spread = {name: f"{t[0]:.0f} to {t[-1]:.0f} us" for name, t in found.items()}
        problem = replace(cell.problem(), direction="fwd")
        kernel = BY_RULE.kernel(problem, detect(DEVICE))
        cut = BY_RULE.tail(problem, kernel[1], detect(DEVICE))
        row = {name: round(rate, 1) for name, rate in rates.items()}
        print(f"tune {cell.label()} {row} {spread}", flush=True)
        shape = {"shape": cell.shape(), "pays": kernel[1].split_tail, "ranges": cut.ranges}
        print(json.dumps({"tail": shape, "tflops": row}), flush=True)


def in_turns(cell: bench.Cell, variants: list[Variant], peers: bench.Peers) -> dict[str, list]:
    """Sorted microseconds of each variant and peer that is there; each keeps plans of its own."""
    runs: dict[str, Callable[[], torch.Tensor]] = {}
    for variant in variants:
        plans: dict = {}
        try:
            with using(variant):
                cute_sm90._plans = plans
                found = bench.calls(cell, peers)
                found["cute_sm90"]()
                cute_sm90._plans = {}  # `using` clears what it finds at its end
        except UserError:
            print(f"missing {cell.label()} {variant}", flush=True)
            continue

        own = found.pop("cute_sm90")

        def run(call=own, plans=plans):
            cute_sm90._plans = plans
            return call()

        runs[str(variant)] = run
        if variant is variants[0]:
            runs |= found
    times: dict[str, list] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(6):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for name, us in bench.measure({n: runs[n] for n in order}, rounds=2).items():
            times[name] += us
    cute_sm90._plans = {}
    return {name: sorted(us) for name, us in times.items() if us}


def groups(say: Say, peers: bench.Peers | None = None) -> dict[str, Callable[[], None]]:
    """By name, for verify_hopper.py."""
    return {
        "tail": lambda: group_tail(say),
        "tail_repeats": lambda: group_tail_repeats(say),
        "tail_tune": lambda: group_tail_tune(peers or bench.Peers()),
    }
