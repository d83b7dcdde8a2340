"""The figure of latencies: one panel each, percentiles named, a file of its own."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from ridgeline.report.latency import latency_figure


def test_percentiles_are_named():
    text = latency_figure([("a", [float(i) for i in range(1, 101)]), ("b", [2.0])])
    ET.fromstring(text)
    for part in ("time a", "time b", "p50 50 ms", "p99 99 ms", "p50 2 ms", "--line:"):
        assert part in text, part
    assert latency_figure([("empty", [])]).startswith("<svg")
