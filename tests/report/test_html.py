"""The page holds what it was given, is self-contained, and escapes text."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from ridgeline.report import figures
from ridgeline.report.html import render, write
from ridgeline.report.section import Figure, Report, Section, Table


class Page(HTMLParser):
    """Text by tag, and every attribute."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if self.open and data.strip():
            self.texts.setdefault(self.open[-1], []).append(data.strip())


@pytest.fixture
def report() -> Report:
    losses = [5.0, 4.0, 3.5, 3.25]
    return Report(
        title="a run",
        lead="what <was> done",
        sections=(
            Section(
                title="Training & more",
                paragraphs=("first", "second"),
                facts=(("loss", "3.25"), ("tokens/s", "1,234")),
                quote="Paris <script>",
                figures=(
                    Figure(
                        svg=figures.loss_curve(
                            [1, 2, 3, 4], losses, resumed_at=2, check=([3, 4], losses[2:])
                        ),
                        caption="the curve",
                    ),
                ),
                tables=(Table(header=("kernel", "us"), rows=(("attention", "12"),)),),
            ),
        ),
        machine=(("CPU", "two cores"),),
    )


def test_it_holds_the_data(report):
    page = Page(render(report))
    assert page.texts["h1"] == ["a run"]
    assert page.texts["h2"] == ["Training & more", "Measured on"]
    assert page.texts["dt"] == ["loss", "tokens/s"] and page.texts["dd"] == ["3.25", "1,234"]
    assert page.texts["td"] == ["attention", "12", "CPU", "two cores"]
    assert page.texts["blockquote"] == ["Paris <script>"]
    assert "resumed at step 2" in page.texts["text"]


def test_it_needs_nothing_from_outside(report):
    page = Page(render(report))
    assert not {tag for tag, _, _ in page.attributes} & {"script", "link", "iframe", "img"}
    for _, name, value in page.attributes:
        if name in ("src", "href", "xlink:href"):
            assert value.startswith("#"), value
    assert "url(http" not in render(report) and "@import" not in render(report)


def test_it_is_light_and_dark(report):
    text = render(report)
    assert "prefers-color-scheme: dark" in text
    svg = text[text.index("<svg") : text.index("</svg>")]
    assert "currentColor" in svg and "var(--line)" in svg
    assert "#ffffff" not in svg and "#000000" not in svg


def test_writing_is_all_or_nothing(report, tmp_path):
    path = write(report, tmp_path / "deep" / "report.html")
    assert path.read_text(encoding="utf-8") == render(report)
    assert [each.name for each in path.parent.iterdir()] == ["report.html"]


def _line_points(svg: str, color: str) -> list[tuple[float, float]]:
    """Points of the path drawn in a colour."""
    path = next(
        found
        for found in re.findall(r'<path d="([^"]+)"[^>]*style="([^"]*)"', svg, re.S)
        if f"stroke: {color}" in found[1]
    )[0]
    numbers = re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)
    return [(float(x), float(y)) for x, y in numbers]


def test_the_loss_curve_is_the_losses():
    losses = [5.0, 4.0, 3.5, 3.25]
    points = _line_points(figures.loss_curve([1, 2, 3, 4], losses), figures.BLUE)
    assert len(points) == 4
    down = [(y - points[0][1]) / (points[-1][1] - points[0][1]) for _, y in points]
    assert down == pytest.approx([(5.0 - loss) / 1.75 for loss in losses], abs=1e-3)


def test_the_bars_are_the_values():
    panel = [
        figures.Bar(name="16-bit", value=10.0, text="10.0"),
        figures.Bar(name="RTN", value=20.0, text="20.0"),
        figures.Bar(name="GPTQ", value=15.0, text="15.0"),
    ]
    svg = figures.bar_panels([("perplexity", panel)])
    widths = []
    for color in (figures.GREY, figures.ORANGE, figures.BLUE):
        path = re.search(rf'<path d="([^"]+)"[^>]*style="fill: {color}"', svg, re.S)
        assert path is not None
        xs = [float(x) for x, _ in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path.group(1))]
        widths.append(max(xs) - min(xs))
    assert [width / widths[0] for width in widths] == pytest.approx([1.0, 2.0, 1.5], abs=1e-3)
    for text in ("perplexity", "16-bit", "RTN", "15.0"):
        assert f">{text}<" in svg


def test_the_roofline_bends_at_the_ridge():
    points = [figures.RooflinePoint(name="a", flops=1e9, bytes=1e6, us=1e4)]
    svg = figures.roofline(20.0, {"float32": 0.2}, points)
    low, bend, high = _line_points(svg, figures.GREY)
    assert bend[1] == pytest.approx(high[1], abs=1e-3) and low[1] > bend[1]
    # A point of 1000 FLOP/byte and 0.1 TFLOP/s lies a factor two under the flat roof.
    assert points[0].intensity == 1000.0 and points[0].tflops == pytest.approx(0.1)
    assert ">float32 0.2 TFLOP/s, ridge 10<" in svg and ">read 20 GB/s<" in svg
