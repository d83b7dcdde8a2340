"""The two passes over logits against plain PyTorch; on a CPU in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_interpreted.py, or on a GPU", allow_module_level=True)

from ridgeline.kernels.cross_entropy import ref, triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("N", "V"), [(0, 5), (1, 1), (3, 4095), (2, 4096), (2, 4097), (1, 9001)])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_both_passes(N, V, dtype, scale):
    logits = (scale * torch.randn(N, V, device=DEVICE)).to(dtype)
    columns = torch.randint(-1, V, (N,), device=DEVICE)
    columns[:1] = V - 1
    found, wanted = triton.statistics(logits, columns), ref.statistics(logits.clone(), columns)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-6)
    logsumexp = wanted[0] + wanted[1].log()
    valid = torch.arange(N, device=DEVICE) != 1
    narrow = ref.to_gradient(logits.clone(), logsumexp, columns, valid, torch.bfloat16)
    found = triton.to_gradient(logits.clone(), logsumexp, columns, valid, torch.bfloat16)
    torch.testing.assert_close(found, narrow, rtol=2**-7, atol=1e-6)
    want = ref.to_gradient(logits.clone(), logsumexp, columns, valid, dtype)
    got = triton.to_gradient(logits, logsumexp, columns, valid, dtype)
    assert got is logits and found.dtype == torch.bfloat16
    # The interpreter cuts bf16 off where a GPU rounds; sums of fp32 exponentials differ in order.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got, want, rtol=2 * eps, atol=1e-6)


def test_a_row_of_a_partial_vocabulary_without_its_target():
    logits = torch.randn(2, 7, device=DEVICE)
    columns = torch.tensor([-1, 3], device=DEVICE)
    assert triton.statistics(logits, columns)[2].tolist() == [0.0, logits[1, 3].item()]
    logsumexp = torch.full((2,), 4.0, device=DEVICE)
    whole = (logits - 4.0).exp()
    valid = torch.ones(2, dtype=torch.bool, device=DEVICE)
    got = triton.to_gradient(logits, logsumexp, columns, valid, torch.float32)
    whole[1, 3] -= 1.0
    torch.testing.assert_close(got, whole)
