"""Backward is given O and LSE, which may be those of more keys than the call has: shares add up.

Context parallel rests on it: a rank calls backward once for each rank's keys with the final O and
LSE. An implementation that makes its own softmax instead is right everywhere but there.
"""

from __future__ import annotations

import pytest
import torch

from ridgeline.core import arch as arches
from ridgeline.core import registry
from tests.kernels.attention import cases
from tests.kernels.attention.cases import Case

CASES = {
    "plain": Case(name="shares", seqlen_q=33, seqlen_k=49, dim=16, dim_v=16),
    "softcap": Case(name="shares-softcap", seqlen_q=17, seqlen_k=35, softcap=2.0, dlse=True),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("impl", [impl.name for impl in cases.impls_here(cases.DEVICE)])
def test_shares_of_backward_add_up(impl: str, name: str) -> None:
    built = cases.build(CASES[name], cases.DEVICE)
    a = built.arguments
    registered = next(x for x in registry.impls("attention") if x.name == impl)
    if why := registry.refusal(registered, a.problem("bwd"), arches.detect(cases.DEVICE)):
        pytest.skip(why)
    module, given = cases.module_of(impl), (a.options(), a.extras())
    cut = 20
    halves = [slice(0, cut), slice(cut, None)]
    parts = [module.forward(a.q, a.k[:, at], a.v[:, at], *given) for at in halves]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    weights = [(part - lse).exp().transpose(1, 2)[..., None] for _, part in parts]
    out = sum(share * w for (share, _), w in zip(parts, weights, strict=True))
    shares = [
        module.backward(built.dout, built.dlse, a.q, a.k[:, at], a.v[:, at], out, lse, *given)
        for at in halves
    ]
    want = cases.reference(built, torch.float64)
    got = {
        "out": out,
        "lse": lse,
        "dq": shares[0].dq + shares[1].dq,
        "dk": torch.cat([share.dk for share in shares], dim=1),
        "dv": torch.cat([share.dv for share in shares], dim=1),
    }
    for tensor, value in got.items():
        torch.testing.assert_close(value.double(), want[tensor], rtol=1e-4, atol=1e-5, msg=tensor)
