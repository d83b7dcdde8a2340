"""Random quantized weights of any form, and bitwise comparison."""

from __future__ import annotations

import dataclasses

import torch

from ridgeline.formats.base import QuantizedWeight


def random_weight(
    form,
    n: int,
    k: int,
    *,
    low_zero: int = 0,
    bias: bool = False,
    dtype: torch.dtype = torch.float16,
) -> QuantizedWeight:
    """Any codes and scales; zero points from low_zero up; shuffled groups under desc_act."""
    group = form.group_of(k)
    R = -(-k // group)
    zero = torch.randint(low_zero, 2**form.bits, (n, R), dtype=torch.uint8)
    zero[0, 0] = 1  # never all the middle one, which reads back as symmetric
    table = None
    if form.desc_act and R > 1:
        table = (torch.arange(k, dtype=torch.int32) // group).roll(1)
    return QuantizedWeight(
        code_NK=torch.randint(0, 2**form.bits, (n, k), dtype=torch.uint8),
        scale_NR=torch.randn(n, R).to(dtype),
        zero_NR=None if form.symmetric else zero,
        bits=form.bits,
        group_size=group,
        group_of_K=table,
        bias_N=torch.randn(n).to(dtype) if bias else None,
    )


def assert_same(a: QuantizedWeight, b: QuantizedWeight) -> None:
    """Every field equal, bit for bit."""
    for field in dataclasses.fields(QuantizedWeight):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if isinstance(left, torch.Tensor):
            assert right is not None and left.dtype == right.dtype, field.name
            assert torch.equal(left, right), field.name
        else:
            assert left == right, field.name


def assert_same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """The same names, dtypes, shapes and bits."""
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and torch.equal(tensor, b[name]), name


def words(tensor: torch.Tensor) -> set[str]:
    """Distinct words as eight hexadecimal digits."""
    return {f"{word & 0xFFFFFFFF:08X}" for word in tensor.flatten().tolist()}
