"""The grid every attention implementation is tested on, and the numerics rule.

An implementation registered for the machine at hand is tested by existing: `accepted("forward")`
pairs each with the cases that it does not refuse. A test of one implementation can take CASES too.

Rule: max|k - exact| <= 2 max|same-dtype PyTorch - exact| + floor, and the same of the mean; exact
is the reference one width up (fp32 for 16-bit, fp64 for fp32), the floor one rounding of the
result.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType

import pytest
import torch

from ridgeline.core import arch as arches
from ridgeline.core import registry
from ridgeline.core.dtypes import dtype_name, torch_dtype
from ridgeline.kernels.attention.arguments import Arguments, check
from ridgeline.kernels.attention.problem import AttentionGrads
from ridgeline.kernels.attention.ref import attention_ref, gradients


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem by its numbers; `build` makes the tensors."""

    name: str
    batch: int = 2
    seqlen_q: int = 17
    seqlen_k: int = 17
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    dim_v: int = 32
    dtype: str = "float32"
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    alibi: str = ""
    """heads: [H]; batch: [B, H]."""
    sinks: bool = False
    bias: str = ""
    """full: [B, H, S, T]; or which of batch, head are 1: "batch", "head", "both"."""
    dropout: float = 0.0
    dlse: bool = False
    layout: str = "dense"
    """dense, varlen, seqused, leftpad, batch_idx, paged, varlen_paged."""
    page: int = 16
    """Tokens of a page."""
    strides: str = "contiguous"
    """contiguous, transposed (heads before tokens in memory), sliced, broadcast (stride 0)."""

    @property
    def forward_only(self) -> bool:
        return "paged" in self.layout

    @property
    def size(self) -> int:
        return max(self.seqlen_q, self.seqlen_k)


OPTIONS: dict[str, dict] = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window=(5, 3)),
    "causal-window": dict(causal=True, window=(9, None)),
    "window-0-0": dict(window=(0, 0)),
    "right-only": dict(window=(None, 2)),
    "softcap": dict(softcap=3.0, causal=True),
    "alibi": dict(alibi="heads", causal=True),
    "alibi-batch": dict(alibi="batch"),
    "sinks": dict(sinks=True, causal=True, dlse=True),
    "sinks-window": dict(sinks=True, window=(4, 0)),
    "bias": dict(bias="full"),
    "bias-batch": dict(bias="batch", causal=True),
    "bias-both": dict(bias="both", softcap=2.0),
    "dropout": dict(dropout=0.3, causal=True),
    "dlse": dict(dlse=True, causal=True),
    "everything": dict(
        causal=True, window=(20, None), softcap=4.0, alibi="batch", sinks=True, bias="head",
        dropout=0.2, dlse=True,
    ),
}  # fmt: skip
SIZES = [
    (1, 1),
    (0, 5),
    (5, 0),
    (17, 17),
    (1, 67),
    (67, 1),
    (63, 65),
    (64, 64),
    (128, 129),
    (131, 97),
]
HEADS = [(4, 2), (3, 3), (6, 1)]
DIMS = [(32, 32), (16, 16), (64, 64), (40, 24), (24, 40)]
DTYPES = ["float32", "bfloat16", "float16"]
LAYOUTS = ["varlen", "seqused", "leftpad", "batch_idx", "paged", "varlen_paged"]
STRIDES = ["transposed", "sliced", "broadcast"]


def _grid() -> list[Case]:
    cases = []
    for n, (name, options) in enumerate(OPTIONS.items()):
        for m, (seqlen_q, seqlen_k) in enumerate(SIZES):
            (heads, kv_heads), (dim, dim_v) = HEADS[(n + m) % 3], DIMS[(2 * n + m) % 5]
            dtype = DTYPES[(n + 2 * m) % 3]
            cases.append(
                Case(
                    name=f"{name}-{seqlen_q}x{seqlen_k}-{heads}of{kv_heads}-{dim}-{dim_v}-{dtype}",
                    seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads=heads, kv_heads=kv_heads, dim=dim,
                    dim_v=dim_v, dtype=dtype, **options,
                )
            )  # fmt: skip
    for n, layout in enumerate(LAYOUTS):
        for m, option in enumerate(("plain", "causal-window", "sinks", "bias-batch", "everything")):
            dtype = DTYPES[(n + m) % 3]
            sizes = dict(seqlen_q=37, seqlen_k=70, batch=4)
            name = f"{layout}-{option}-{dtype}"
            cases.append(Case(name=name, layout=layout, dtype=dtype, **sizes, **OPTIONS[option]))
    for strides in STRIDES:
        for option in ("causal", "bias"):
            name = f"{strides}-{option}"
            cases.append(
                Case(name=name, strides=strides, seqlen_q=33, seqlen_k=40, **OPTIONS[option])
            )
    cases.append(Case(name="empty-batch", batch=0, causal=True))
    cases.append(
        Case(name="large", batch=1, seqlen_q=300, seqlen_k=517, causal=True, dtype="bfloat16")
    )
    return cases


CASES = _grid()
"""Everything; `case.size` up to 67 is what an interpreter can bear."""


@dataclass(frozen=True)
class Built:
    """A case's tensors: the call's arguments and the gradients that come back into it."""

    arguments: Arguments
    dout: torch.Tensor
    dlse: torch.Tensor | None


def build(case: Case, device: str = "cpu", seed: int = 0) -> Built:
    """The tensors of a case, the same at every call."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch_dtype(case.dtype)

    def randn(*shape: int, to: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, to)

    B, S, T = case.batch, case.seqlen_q, case.seqlen_k
    used_q, used_k = (_lengths(B, length) for length in (S, T))
    starts = {}
    q_shape, kv_shape = (B, S), (B, T)
    if case.layout.startswith("varlen"):
        starts["cu_seqlens_q"], starts["max_seqlen_q"] = _starts(used_q), S
        q_shape = (sum(used_q) + 3,)
        kv_shape = (sum(used_k) + 2,)
        starts["cu_seqlens_k"], starts["max_seqlen_k"] = _starts(used_k), T
    elif case.layout in ("seqused", "leftpad", "batch_idx", "paged"):
        starts["seqused_k"] = torch.tensor(used_k, dtype=torch.int32)
        if case.layout == "seqused":
            starts["seqused_q"] = torch.tensor(used_q, dtype=torch.int32)
    if case.layout == "leftpad":
        starts["leftpad_k"] = torch.tensor([n // 3 for n in used_k], dtype=torch.int32)
    if case.layout == "batch_idx":
        kv_shape = (B + 3, T)
        starts["kv_batch_idx"] = torch.arange(B, dtype=torch.int32).flip(0) + 2
    if "paged" in case.layout:
        pages = -(-T // case.page)
        table = torch.randperm(B * pages + 5, generator=generator)[: B * pages].view(B, pages)
        for row, used in zip(table, used_k, strict=True):
            row[-(-used // case.page) :] = -1  # pages past a sequence's length are never looked at
        starts["block_table"] = table.to(torch.int32)
        kv_shape = (B * pages + 5, case.page)
    q = randn(*q_shape, case.heads, case.dim)
    k = randn(*kv_shape, case.kv_heads, case.dim)
    v = randn(*kv_shape, case.kv_heads, case.dim_v)
    q, k, v = (_restride(x, case.strides) for x in (q, k, v))
    bias_keys = -(-T // case.page) * case.page if "paged" in case.layout else T
    bias_shape = (1 if case.bias in ("batch", "both") else B, *_bias_heads(case), S, bias_keys)
    slopes = (B, case.heads) if case.alibi == "batch" else (case.heads,)
    a = Arguments(
        q=q, k=k, v=v,
        sinks=randn(case.heads, to=torch.float32) if case.sinks else None,
        bias=randn(*bias_shape) if case.bias else None,
        alibi_slopes=randn(*slopes, to=torch.float32).abs() / 4 if case.alibi else None,
        seed_offset=torch.tensor([2**40 + 17, 3]) if case.dropout else None,
        softmax_scale=case.dim**-0.5,
        causal=case.causal, window_left=case.window[0], window_right=case.window[1],
        softcap=case.softcap, dropout_p=case.dropout,
        **{n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in starts.items()},
    )  # fmt: skip
    check(a)
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    dout = randn(*q.shape[:-1], case.dim_v)
    return Built(a, dout, randn(*lse_shape, to=torch.float32) if case.dlse else None)


def _bias_heads(case: Case) -> tuple[int]:
    return (1 if case.bias in ("head", "both") else case.heads,)


def _lengths(batch: int, longest: int) -> list[int]:
    """The longest, none, one, then a mixture."""
    return ([longest, 0, 1] + [longest // n for n in range(2, 9)])[:batch]


def _starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _restride(x: torch.Tensor, strides: str) -> torch.Tensor:
    if strides == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if strides == "sliced":
        return torch.cat((x, x, x), dim=-1)[..., x.shape[-1] : 2 * x.shape[-1]]
    if strides == "broadcast":
        return x[:1].expand_as(x)
    return x


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def impls_here(device: str = "cpu") -> list[registry.Impl]:
    """Implementations that run on this machine."""
    arch = arches.detect(device)
    return [
        impl
        for impl in registry.impls("attention")
        if registry.runs_on(impl, arch)
        and all(importlib.util.find_spec(package) for package in impl.needs)
        and importlib.util.find_spec(impl.module)
    ]


def accepted(direction: str, device: str = "cpu", largest: int = 10**9) -> list[tuple[str, Case]]:
    """Pairs of implementation and case that it does not refuse, for parametrize.

    The reference is compared with itself in a wider dtype: a sixth of the grid is enough for it.
    """
    arch = arches.detect(device)
    pairs = []
    for index, case in enumerate(CASES):
        if case.size > largest or (direction == "bwd" and case.forward_only):
            continue
        problem = build(case).arguments.problem(direction)
        for impl in impls_here(device):
            if impl.name == "ref" and index % 6:
                continue
            if registry.refusal(impl, problem, arch) is None:
                pairs.append((impl.name, case))
    return pairs


def module_of(name: str) -> ModuleType:
    """The module of an implementation by name."""
    return registry.load(next(i for i in registry.impls("attention") if i.name == name))


def wider(dtype: torch.dtype) -> torch.dtype:
    """What counts as exact beside a dtype."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


@cache
def expected(case: Case, exact: bool) -> dict[str, torch.Tensor]:
    """Results and gradients of the reference, one width up (exact) or in the case's dtype."""
    built = build(case)
    a = built.arguments
    dtype = wider(a.q.dtype) if exact else a.q.dtype
    return reference(built, dtype)


def reference(built: Built, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """out, lse and every gradient by autograd through attention_ref in a dtype."""
    a = built.arguments
    leaves = {
        name: getattr(a, name).detach().to(dtype).requires_grad_()
        for name in ("q", "k", "v", "sinks", "bias")
        if getattr(a, name) is not None
    }
    extras = replace(a.extras(), sinks_H=leaves.get("sinks"), bias=leaves.get("bias"))
    out, lse = attention_ref(leaves["q"], leaves["k"], leaves["v"], a.options(), extras, dtype)
    found = gradients((out, lse), leaves, built.dout, built.dlse)
    grads = {"d" + name: grad for name, grad in found.items()}
    return {"out": out.detach(), "lse": lse.detach(), **grads}


def assert_within_rule(
    name: str,
    got: torch.Tensor,
    exact: torch.Tensor,
    baseline: torch.Tensor,
    dtype: torch.dtype,
    zero_floor: float = 0.0,
    more_floor: float = 0.0,
) -> None:
    """The numerics rule, in its max and mean forms.

    zero_floor is the floor of a result that is exactly 0: PyTorch then has no error. more_floor is
    added to the max form's, for an error that PyTorch's order of operations does not make.
    """
    assert got.shape == exact.shape, f"{name}: {tuple(got.shape)} is not {tuple(exact.shape)}"
    if not exact.numel():
        return
    got, exact, baseline = (x.detach().cpu().double() for x in (got, exact, baseline))
    empty = exact == float("-inf")
    assert torch.equal(got == float("-inf"), empty), f"{name}: other rows are empty"
    got, exact, baseline = (x.masked_fill(empty, 0.0) for x in (got, exact, baseline))
    error, allowed = (got - exact).abs(), (baseline - exact).abs()
    eps = torch.finfo(dtype).eps
    largest = float(exact.abs().max())
    floor = 1e-6 + eps * largest + (zero_floor if largest < 1e-9 else 0.0) + more_floor
    assert float(error.max()) <= 2 * float(allowed.max()) + floor, (
        f"{name} of {dtype_name(dtype)}: max error {error.max():.2e}, PyTorch's "
        f"{allowed.max():.2e}, floor {floor:.2e}"
    )
    mean_floor = 1e-6 + eps * float(exact.abs().mean()) + (zero_floor if largest < 1e-9 else 0.0)
    assert float(error.mean()) <= 2 * float(allowed.mean()) + mean_floor, (
        f"{name} of {dtype_name(dtype)}: mean error {error.mean():.2e}, PyTorch's "
        f"{allowed.mean():.2e}, floor {mean_floor:.2e}"
    )


def check_forward(impl: str, case: Case, device: str = "cpu") -> None:
    """One implementation's forward on one case against the rule."""
    a = build(case, device).arguments
    out, lse = module_of(impl).forward(a.q, a.k, a.v, a.options(), a.extras())
    exact, baseline = expected(case, True), expected(case, False)
    assert out.dtype == a.q.dtype and lse.dtype == torch.float32
    assert_within_rule("out", out, exact["out"], baseline["out"], a.q.dtype)
    assert_within_rule("lse", lse, exact["lse"], baseline["lse"], torch.float32)


def check_backward(impl: str, case: Case, device: str = "cpu") -> None:
    """One implementation's gradients on one case against the rule."""
    built = build(case, device)
    a = built.arguments
    module = module_of(impl)
    out, lse = module.forward(a.q, a.k, a.v, a.options(), a.extras())
    grads = module.backward(
        built.dout, built.dlse, a.q, a.k, a.v, out, lse, a.options(), a.extras()
    )
    assert_gradients(case, built, out, grads)


def assert_gradients(case: Case, built: Built, out: torch.Tensor, grads: AttentionGrads) -> None:
    """Every gradient of a case against the rule."""
    a = built.arguments
    exact, baseline = expected(case, True), expected(case, False)
    # where a row sees one key dS = P (dP - rowsum(dO O)) is 0, but O was rounded
    cancelled = float((built.dout * out).abs().sum(-1).max()) if out.numel() else 0.0
    zero_floor = 2 * torch.finfo(out.dtype).eps * cancelled
    floors = delta_floors(a, cancelled)
    for name in ("dq", "dk", "dv", "dsinks", "dbias"):
        got = getattr(grads, name)
        if name not in exact:
            assert got is None, f"{name} of an input that is not there"
            continue
        like = {"dsinks": a.sinks, "dbias": a.bias}.get(name, a.q)
        assert got.dtype == like.dtype
        more = floors.get(name, 0.0)
        assert_within_rule(name, got, exact[name], baseline[name], a.q.dtype, zero_floor, more)


def delta_floors(a: Arguments, cancelled: float) -> dict[str, float]:
    """What the rounding of delta makes of an fp32 gradient; cancelled: largest rowsum(|dO O|).

    In dS = P (dP - delta) PyTorch's softmax sums delta from the very dP that it is taken from, so
    that they cancel exactly where a row sees one key. A flash backward sums it from dO and O, D_v
    products in another order: at least one rounding of their sum of magnitudes stays, times P,
    which is 1 there, and reaches dQ times K, dK times Q and dbias as it is. In the interpreter,
    whose products are plain fp32, dK of batch_idx-plain-float32 errs by 3.02e-6; with the tensor
    cores' three tf32 products and truncated sums imitated by 3.14e-6; an H200 gave 3.13e-6.
    16-bit results are rounded more coarsely than that, as PyTorch's are.
    """
    if a.q.dtype != torch.float32 or not a.q.numel() or not a.k.numel():
        return {}
    error = torch.finfo(torch.float32).eps / 2 * cancelled
    scale = abs(a.softmax_scale)
    dq, dk = (error * scale * float(x.abs().max()) for x in (a.k, a.q))
    return {"dq": dq, "dk": dk, "dbias": error}


def pretend_packages(monkeypatch: pytest.MonkeyPatch, present: tuple[str, ...]) -> None:
    """As if of the Hopper kernels' two packages these were installed."""
    real = importlib.util.find_spec

    def find(name: str, *rest: object) -> object:
        if name in ("cutlass", "tvm_ffi"):
            return importlib.machinery.ModuleSpec(name, None) if name in present else None
        return real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)
