"""A small random decoder that satisfies BlockwiseModel, and a textbook GPTQ to compare with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class TinyBlock(nn.Module):
    def __init__(self, width: int, ffn: int, bias: bool) -> None:
        super().__init__()
        self.attn = nn.ModuleDict(
            {name: nn.Linear(width, width, bias=bias) for name in ("q", "k", "v", "o")}
        )
        self.mlp = nn.ModuleDict(
            {
                "gate": nn.Linear(width, ffn, bias=False),
                "up": nn.Linear(width, ffn, bias=False),
                "down": nn.Linear(ffn, width, bias=False),
            }
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.rms_norm(x, x.shape[-1:])
        q, k, v = (self.attn[name](h)[:, None] for name in ("q", "k", "v"))
        x = x + self.attn["o"](F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])
        h = F.rms_norm(x, x.shape[-1:])
        return x + self.mlp["down"](F.silu(self.mlp["gate"](h)) * self.mlp["up"](h))


class TinyModel(nn.Module):
    """Two blocks of width 32; inputs with a few strong channels, as real ones have."""

    def __init__(self, *, width: int = 32, ffn: int = 64, layers: int = 2, bias: bool = False):
        super().__init__()
        self.table = nn.Embedding(50, width)
        with torch.no_grad():
            self.table.weight *= torch.logspace(0, 1.2, width)
        self.layers = nn.ModuleList(TinyBlock(width, ffn, bias) for _ in range(layers))
        self.requires_grad_(False)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.layers

    def block_prefix(self, index: int) -> str:
        return f"layers.{index}"

    def linear_groups(self) -> list[list[str]]:
        return [["attn.q", "attn.k", "attn.v"], ["attn.o"], ["mlp.gate", "mlp.up"], ["mlp.down"]]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.table(token_ids)

    def run_block(self, index: int, x_BSC: torch.Tensor) -> torch.Tensor:
        return self.layers[index](x_BSC)

    def head(self, x_BSC: torch.Tensor) -> torch.Tensor:
        return x_BSC @ self.table.weight.T

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(token_ids)
        for index in range(len(self.layers)):
            x = self.run_block(index, x)
        return self.head(x)


def textbook_gptq(
    w_NK: torch.Tensor, H: torch.Tensor, *, group: int, order: str, damping: float, bits: int,
    symmetric: bool,
) -> torch.Tensor:  # fmt: skip
    """GPTQ as the paper writes it, column by column with rank-1 updates, in fp64: W after rounding.

    Two Cholesky factorizations around an inverse, no blocks, scales in fp16, plain ranges.
    """
    w, H = w_NK.double().clone(), H.double().clone()
    N, K = w.shape
    dead = H.diagonal() == 0
    mean = H.diagonal().mean()
    w[:, dead], H[dead, dead] = 0.0, 1.0
    perm = torch.arange(K)
    if order != "natural":
        perm = torch.argsort(H.diagonal().masked_fill(dead, 0.0), descending=True, stable=True)
    H.diagonal().add_(damping * mean)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(H[perm][:, perm]))
    upper = torch.linalg.cholesky(inverse, upper=True)
    top = 2**bits - 1

    def params(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = part.amin(1), part.amax(1)
        if symmetric:
            scale = torch.maximum(-low, high) * 2 / top
            zero = torch.full_like(scale, 2.0 ** (bits - 1))
        else:
            low, high = low.clamp(max=0), high.clamp(min=0)
            scale = (high - low) / top
        scale = torch.where(scale > 0, scale, 1.0).half().double()
        if not symmetric:
            zero = (-low / scale).round().clamp(0, top)
        return scale, zero

    fixed = {g: params(w[:, g * group : (g + 1) * group]) for g in range(-(-K // group))}
    work, out = w[:, perm].clone(), torch.empty_like(w)
    scale = zero = torch.empty(0)
    for i in range(K):
        if order == "static":
            scale, zero = fixed[int(perm[i]) // group]
        elif i % group == 0:
            scale, zero = params(work[:, i : i + group])
        code = ((work[:, i] / scale).round() + zero).clamp(0, top)
        rounded = scale * (code - zero)
        error = (work[:, i] - rounded) / upper[i, i]
        work[:, i + 1 :] -= error[:, None] * upper[i, i + 1 :]
        out[:, perm[i]] = rounded
    return out
