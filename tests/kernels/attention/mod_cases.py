"""Score and mask functions for the tests of every implementation, and what they must give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ridgeline.kernels.attention import mods

from . import cases


@dataclass(frozen=True)
class ModCase:
    """User functions with the shapes to try them on; `made` builds them on a device."""

    name: str
    score: str = ""
    mask: str = ""
    blocks: bool = False
    case: cases.Case = cases.Case(name="mods", seqlen_q=37, seqlen_k=45, heads=2, kv_heads=1)

    def made(self, device: str) -> mods.Mods:
        """The functions, capturing tensors on a device."""
        score = SCORES[self.score](device) if self.score else None
        mask = MASKS[self.mask](device) if self.mask else None
        blocks = None
        if self.blocks:
            case = self.case
            by_batch = case.batch if self.mask == "documents" else None
            sizes = (case.seqlen_q, case.seqlen_k)
            blocks = mods.create_block_mask(mask, by_batch, None, *sizes, device)
        return mods.Mods(score, mask, blocks)


def _slopes(device):
    slopes = torch.tensor([0.1, 0.25, 0.5, 1.0], device=device)
    return lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()


def _table(device):
    table = torch.linspace(-1, 1, 600, device=device).sin()
    return lambda s, b, h, i, j: s + table[j - i + 300]


def _curved(device):
    factor = torch.tensor(0.3, device=device)
    return lambda s, b, h, i, j: (
        torch.where(i % 3 == 0, torch.tanh(s / 2) * 2, s * torch.sigmoid(s)) + factor * (h - b)
    )


def _hidden(device):
    return lambda s, b, h, i, j: torch.where(j <= i + 4, s.clamp(-2.0, 2.0), float("-inf"))


SCORES: dict[str, Any] = {
    "slopes": _slopes, "table": _table, "curved": _curved, "hidden": _hidden
}  # fmt: skip


def _documents(device):
    document = torch.arange(600, device=device)[None, :] // torch.tensor(
        [[70], [150]], device=device
    )
    return lambda b, h, i, j: (document[b, i] == document[b, j]) & (i >= j)


MASKS: dict[str, Any] = {
    "causal": lambda device: lambda b, h, i, j: i >= j,
    "strided": lambda device: lambda b, h, i, j: ((i - j) // 3 % 2 == 0) | (h == 1),
    "documents": _documents,
    "nothing": lambda device: lambda b, h, i, j: (i < 5) & (j < 0),
}
_LONG = cases.Case(
    name="blocks", seqlen_q=140, seqlen_k=270, heads=2, kv_heads=1, dim=16, dim_v=16, batch=2
)
_SMALL = cases.Case(
    name="small", seqlen_q=37, seqlen_k=45, heads=2, kv_heads=1, dim=16, dim_v=24, batch=1
)
_PACKED = cases.Case(
    name="packed", layout="varlen", seqlen_q=37, seqlen_k=37, heads=2, kv_heads=1, dim=16,
    dim_v=16, batch=3,
)  # fmt: skip
MOD_CASES = [
    ModCase("slopes", score="slopes", case=_SMALL),
    ModCase("table-causal", score="table", mask="causal", case=_SMALL),
    ModCase("curved", score="curved", case=_SMALL),
    ModCase("hidden", score="hidden", mask="strided", case=_SMALL),
    ModCase("nothing", mask="nothing", case=_SMALL),
    ModCase("packed", score="curved", mask="strided", case=_PACKED),
    ModCase("blocks-causal", mask="causal", blocks=True, case=cases.replace(_LONG, batch=1)),
    ModCase("blocks-documents", score="slopes", mask="documents", blocks=True, case=_LONG),
]


def check(impl: str, mod: ModCase, device: str = "cpu", dtype: str | None = None) -> None:
    """An implementation's results and gradients against the reference's, by the numerics rule."""
    case = mod.case if dtype is None else cases.replace(mod.case, dtype=dtype)
    found = run(impl, mod, cases.build(case, device), device)
    built = cases.build(case)
    exact = run("ref", mod, _to(built, cases.wider(built.arguments.q.dtype)), "cpu")
    baseline = plain(mod, built)
    for name, got in found.items():
        kind = torch.float32 if name == "lse" else built.arguments.q.dtype
        cases.assert_within_rule(name, got, exact[name], baseline[name], kind, 1e-5)


def run(impl: str, mod: ModCase, built: cases.Built, device: str) -> dict[str, torch.Tensor]:
    """out, lse and gradients of an implementation's module."""
    a, module = built.arguments, cases.module_of(impl)
    extras = cases.replace(a.extras(), mods=mod.made(device))
    out, lse = module.forward(a.q, a.k, a.v, a.options(), extras)
    dlse = torch.linspace(-1, 1, lse.numel(), device=lse.device).view(lse.shape).to(lse.dtype)
    dout = built.dout.to(out.dtype)
    grads = module.backward(dout, dlse, a.q, a.k, a.v, out, lse, a.options(), extras)
    return {"out": out, "lse": lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}


def plain(mod: ModCase, built: cases.Built) -> dict[str, torch.Tensor]:
    """The same by autograd through the differentiable reference in the inputs' dtype."""
    a = built.arguments
    leaves = {n: getattr(a, n).detach().clone().requires_grad_() for n in "qkv"}
    extras = cases.replace(a.extras(), mods=mod.made("cpu"))
    out, lse = cases.attention_ref(*leaves.values(), a.options(), extras, a.q.dtype)
    dlse = torch.linspace(-1, 1, lse.numel()).view(lse.shape)
    dlse = dlse.masked_fill(lse == float("-inf"), 0.0)
    found = cases.gradients((out, lse), leaves, built.dout, dlse)
    return {"out": out, "lse": lse, **{f"d{n}": grad for n, grad in found.items()}}


def _to(built: cases.Built, dtype: torch.dtype) -> cases.Built:
    a = built.arguments
    wide = cases.replace(a, q=a.q.to(dtype), k=a.k.to(dtype), v=a.v.to(dtype))
    return cases.replace(built, arguments=wide)
