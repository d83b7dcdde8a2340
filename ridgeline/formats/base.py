"""The logical form of a quantized weight, between every file format and every kernel layout.

    W[n, k] = scale[n, group(k)] * (code[n, k] - zero[n, group(k)])

group(k) = k // group_size unless `group_of_K` says otherwise (act-order). Codes are unsigned; a
symmetric weight has zero = 2^(bits - 1) everywhere, written as zero_NR = None.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """One linear layer's weight, quantized; bit-exact in what a format stores."""

    code_NK: torch.Tensor
    """uint8 [N, K], unsigned codes 0 .. 2^bits - 1."""
    scale_NR: torch.Tensor
    """[N, R] in the file's dtype (fp16, bf16 or fp32); R = ceil(K / group_size)."""
    zero_NR: torch.Tensor | None
    """uint8 [N, R] unsigned zero points; None: symmetric, 2^(bits - 1)."""
    bits: int
    """2, 3, 4 or 8."""
    group_size: int
    """Inputs that share a scale; K itself for whole-channel."""
    group_of_K: torch.Tensor | None = None
    """int32 [K], group of each input (g_idx); None: k // group_size."""
    bias_N: torch.Tensor | None = None

    @property
    def shape_nk(self) -> tuple[int, int]:
        """(N, K)."""
        return self.code_NK.shape[0], self.code_NK.shape[1]

    def groups_K(self) -> torch.Tensor:
        """int64 [K], group of each input."""
        if self.group_of_K is not None:
            return self.group_of_K.long()
        K = self.code_NK.shape[1]
        return torch.arange(K, device=self.code_NK.device) // self.group_size

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """W_NK in `dtype`; computed in fp32 (exact for fp16 and bf16 scales), rounded once."""
        N, K = self.shape_nk
        if self.group_of_K is None and K % self.group_size == 0:  # no gather
            code_NRG = self.code_NK.float().reshape(N, K // self.group_size, self.group_size)
            if self.zero_NR is None:
                code_NRG.sub_(2 ** (self.bits - 1))
            else:
                code_NRG.sub_(self.zero_NR.float().unsqueeze(-1))
            return code_NRG.mul_(self.scale_NR.float().unsqueeze(-1)).reshape(N, K).to(dtype)
        groups = self.groups_K()
        zero = 2 ** (self.bits - 1) if self.zero_NR is None else self.zero_NR.float()[:, groups]
        scale_NK = self.scale_NR.float()[:, groups]
        return (scale_NK * (self.code_NK.float() - zero)).to(dtype)
