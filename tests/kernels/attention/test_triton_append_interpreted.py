"""The append kernels on a machine without a GPU (tests/interpreted.py)."""

from __future__ import annotations

from tests.interpreted import passed


def test_under_the_interpreter():
    assert passed("kernels/attention/test_triton_append.py") >= 26
