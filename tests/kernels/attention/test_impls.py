"""Every implementation that runs here, on the whole grid."""

from __future__ import annotations

import pytest
import torch

from ridgeline.core import registry
from ridgeline.core.arch import pretend

from . import cases


def _named(pairs):
    return [pytest.param(impl, case, id=f"{impl}-{case.name}") for impl, case in pairs]


@pytest.mark.parametrize("impl, case", _named(cases.accepted("fwd", largest=600)))
def test_forward(impl, case):
    cases.check_forward(impl, case)


@pytest.mark.parametrize("impl, case", _named(cases.accepted("bwd", largest=600)))
def test_backward(impl, case):
    cases.check_backward(impl, case)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_head_dim(dtype):
    for dim in range(16, 257, 8):
        case = cases.Case(
            name=f"{dim}",
            seqlen_q=5,
            seqlen_k=6,
            causal=True,
            dim=dim,
            dim_v=272 - dim,
            dtype=dtype,
        )
        cases.check_forward("cpu", case)
        cases.check_backward("cpu", case)


@pytest.mark.parametrize("page", [16, 32, 64, 128])
def test_page_sizes(page):
    kind = dict(name="", layout="paged", page=page, seqlen_q=9, seqlen_k=150, batch=3, causal=True)
    for impl in ("cpu", "ref"):
        cases.check_forward(impl, cases.Case(**kind))


def test_who_is_tested_here():
    count: dict[str, int] = {}
    for impl, _ in cases.accepted("fwd"):
        count[impl] = count.get(impl, 0) + 1
    assert count["cpu"] == len(cases.CASES)
    assert count["ref"] >= len(cases.CASES) // 6
    assert count["tiled"] >= 15


def test_priorities():
    problem = cases.build(cases.CASES[0]).arguments.problem("fwd")
    assert registry.select(problem, pretend("cpu")).name == "cpu"
    assert registry.select(problem, pretend("cpu"), "tiled").name == "tiled"
    assert registry.select(problem, pretend("cpu"), "ref").name == "ref"


def test_a_refusal_names_everybody():
    case = next(c for c in cases.CASES if c.name.startswith("softcap"))
    problem = cases.build(case).arguments.problem("fwd")
    with pytest.raises(NotImplementedError, match="tiled: takes only causal, not softcap"):
        registry.select(problem, pretend("cpu"), "tiled")


@pytest.mark.parametrize("impl", ["cpu", "tiled"])
def test_backward_repeats_bitwise(impl):
    case = cases.Case(name="repeat", seqlen_q=130, seqlen_k=190, causal=True, dtype="bfloat16")
    built = cases.build(case)
    a, module = built.arguments, cases.module_of(impl)
    out, lse = module.forward(a.q, a.k, a.v, a.options(), a.extras())
    runs = [
        module.backward(built.dout, None, a.q, a.k, a.v, out, lse, a.options(), a.extras())
        for _ in range(3)
    ]
    for other in runs[1:]:
        for name in ("dq", "dk", "dv"):
            assert torch.equal(getattr(runs[0], name), getattr(other, name))


@pytest.mark.parametrize("impl", [i.name for i in cases.impls_here()])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_bad_query_row_stays_in_its_row(impl, poison):
    built = cases.build(cases.Case(name="poison", seqlen_q=40, seqlen_k=50, causal=True))
    a, module = built.arguments, cases.module_of(impl)
    clean, clean_lse = module.forward(a.q, a.k, a.v, a.options(), a.extras())
    q = a.q.clone()
    q[1, 7, 2, 3] = poison
    out, lse = module.forward(q, a.k, a.v, a.options(), a.extras())
    touched = torch.zeros_like(out, dtype=torch.bool)
    touched[1, 7, 2] = True
    assert not out[1, 7, 2].isfinite().all()
    assert torch.equal(out[~touched], clean[~touched])
    same = ~touched[..., 0].transpose(1, 2)
    assert torch.equal(lse[same], clean_lse[same])


@pytest.mark.parametrize("impl", ["ref", "cpu"])
@pytest.mark.parametrize("option", ["causal", "softcap", "sinks-window"])
def test_keys_that_do_not_exist_have_no_influence(impl, option):
    case = cases.Case(name="x", seqlen_q=9, seqlen_k=30, batch=3, **cases.OPTIONS[option])
    a = cases.build(case).arguments
    used, pad = torch.tensor([30, 11, 12]), torch.tensor([0, 4, 12])
    j = torch.arange(30)
    exists = (j < used[:, None]) & (j >= pad[:, None])
    k, v = (x.masked_fill(~exists[:, :, None, None], float("nan")) for x in (a.k, a.v))
    extras = cases.replace(a.extras(), seqused_k=used.int(), leftpad_k=pad.int())
    module = cases.module_of(impl)
    out, lse = module.forward(a.q, k, v, a.options(), extras)
    clean, clean_lse = module.forward(a.q, a.k, a.v, a.options(), extras)
    assert out.isfinite().all() and torch.equal(out, clean)
    assert torch.equal(lse, clean_lse)
    dout = torch.ones_like(out)
    grads = module.backward(dout, None, a.q, k, v, out, lse, a.options(), extras)
    assert grads.dq.isfinite().all()
    assert torch.equal(grads.dk[~exists], torch.zeros_like(grads.dk[~exists]))


@pytest.mark.parametrize("impl", ["ref", "cpu"])
def test_dropout_drops_the_entries_that_rng_names(impl):
    # v = identity: out is P itself, its zeros are the dropped entries
    from ridgeline.kernels.attention.rng import keep_mask

    case = cases.Case(name="x", heads=2, kv_heads=2, seqlen_q=24, seqlen_k=24, dropout=0.4)
    a = cases.build(case).arguments
    v = torch.eye(24)[None, :, None, :].expand(2, 24, 2, 24)
    out, _ = cases.module_of(impl).forward(a.q, a.k, v, a.options(), a.extras())
    b, h, i, j = (torch.arange(n) for n in (2, 2, 24, 24))
    keep = keep_mask(0.4, (2**40 + 17, 3), b[:, None, None, None], h[:, None, None], i[:, None], j)
    assert torch.equal(out != 0, keep.transpose(1, 2))
