"""Numbers and tables as a person reads them."""

from __future__ import annotations

import pytest

from ridgeline.cli import tables


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (tables.number(0.012345), "0.0123"),
        (tables.number(12345.6), "12,346"),
        (tables.number(float("inf")), "inf"),
        (tables.flops_text(2.75e11), "275 GFLOP"),
        (tables.bytes_text(8.44e7), "84.4 MB"),
        (tables.bytes_text(12), "12 B"),
        (tables.time_text(14.14), "14.1 us"),
        (tables.time_text(14140), "14.1 ms"),
        (tables.time_text(2.5e6), "2.5 s"),
    ],
)
def test_numbers(text, want):
    assert text == want


def test_columns_are_as_wide_as_their_widest_cell():
    assert tables.table(("a", "long"), [("xyz", "1"), ("", "22")]) == (
        "a    long\n---  ----\nxyz  1\n     22"
    )
