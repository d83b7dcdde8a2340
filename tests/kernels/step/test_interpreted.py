"""The values of test_triton.py, in the interpreter."""

from __future__ import annotations

from tests.interpreted import passed


def test_values_in_the_interpreter():
    assert passed("kernels/step/test_triton.py") >= 71
