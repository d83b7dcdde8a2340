"""Figures as SVG text."""

from __future__ import annotations

import re

from ridgeline.report.figures import lines


def test_a_logarithmic_axis_is_labelled_sparsely():
    svg = lines([("q", [0, 1, 2], [0.004, 0.03, 0.09])], x="block", y="error", log=True)
    labels = {text for text in re.findall(r">([\d.]+)</text>", svg) if text.startswith("0.")}
    assert labels == {"0.005", "0.01", "0.02", "0.05", "0.1"}
