"""The values of test_triton.py, in the interpreter."""

from __future__ import annotations

from tests.interpreted import passed


def test_values_in_the_interpreter():
    assert passed("kernels/w4a16/test_triton.py") >= 14
