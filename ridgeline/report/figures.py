"""Figures of a run as SVG text, drawn with matplotlib for a light and a dark page alike.

Text and axes are drawn in two marker colours that become `currentColor` and `var(--line)`, so the
page decides; series colours are readable on both. No display, no pyplot state.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

BLUE, ORANGE, GREEN, GREY = "#3f83d6", "#dd7a36", "#3c9d70", "#8a8f98"
_INK, _LINE = "#010203", "#030201"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 12,
    "axes.titlecolor": _INK,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.6,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "text.color": _INK,
    "legend.frameon": False,
    "legend.labelcolor": _INK,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar of a bar chart."""

    name: str
    value: float
    text: str
    """The value as printed beside the bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflinePoint:
    """One kernel as it ran."""

    name: str
    flops: float
    """FLOPs of one call."""
    bytes: float
    """Least bytes through main memory of one call."""
    us: float
    """Time of one call, microseconds."""

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    @property
    def tflops(self) -> float:
        return self.flops / self.us / 1e6


def loss_curve(
    steps: Sequence[int],
    losses: Sequence[float],
    *,
    resumed_at: int | None = None,
    check: tuple[Sequence[int], Sequence[float]] | None = None,
) -> str:
    """Training loss by step, the resume marked; `check` (steps, losses) of a run that was not
    interrupted as rings on the curve."""
    with matplotlib.rc_context(STYLE):
        figure, (axes,) = canvas(1, width=7.4, height=3.4)
        axes.plot(steps, losses, color=BLUE, linewidth=1.8, label="stopped and resumed")
        if check is not None:
            axes.plot(
                *check, linestyle="none", marker="o", markersize=6.5, markerfacecolor="none",
                markeredgecolor=ORANGE, label="not interrupted",
            )  # fmt: skip
        if resumed_at is not None:
            axes.axvline(resumed_at, color=ORANGE, linewidth=1.0, linestyle="--")
            axes.annotate(
                f"resumed at step {resumed_at}", (resumed_at, 1.0), (5, -4),
                xycoords=("data", "axes fraction"), textcoords="offset points", va="top",
            )  # fmt: skip
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("loss (nats a token)")
        axes.margins(x=0.01)
        axes.legend(loc="upper right", bbox_to_anchor=(1.0, 0.9))
        return svg_text(figure, "loss")


def bar_panels(panels: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """Horizontal bars side by side, one panel a quantity, the first bar the baseline."""
    with matplotlib.rc_context(STYLE):
        rows = max(len(bars) for _, bars in panels)
        figure, all_axes = canvas(len(panels), width=9.0, height=0.9 + 0.55 * rows)
        for axes, (title, bars) in zip(all_axes, panels, strict=True):
            colors = [GREY, *[ORANGE, BLUE, GREEN, ORANGE, BLUE][: len(bars) - 1]]
            places = range(len(bars))
            axes.barh(places, [bar.value for bar in bars], color=colors[: len(bars)], height=0.62)
            for place, bar in zip(places, bars, strict=True):
                axes.annotate(
                    bar.text, (bar.value, place), (5, 0), textcoords="offset points", va="center"
                )
            axes.set_yticks(list(places), [bar.name for bar in bars])
            axes.invert_yaxis()
            axes.set_title(title)
            axes.grid(axis="y", visible=False)
            axes.tick_params(left=False)
            axes.set_xlim(0, 1.28 * max(bar.value for bar in bars))
        return svg_text(figure, "bars")


def _sparse_label(value: float, _: int) -> str:
    """Of a logarithmic axis: 1, 2 and 5 of a decade; all nine would lie over each other."""
    return f"{value:.3g}" if f"{value:e}"[0] in "125" else ""


def lines(
    series: Sequence[tuple[str, Sequence[int], Sequence[float]]],
    *,
    x: str,
    y: str,
    log: bool = False,
) -> str:
    """Curves over a whole-number axis, one name each: (name, places, values)."""
    with matplotlib.rc_context(STYLE):
        figure, (axes,) = canvas(1, width=8.6, height=3.4)
        palette = (BLUE, ORANGE, GREEN, "#8b62c9", "#c2506b", "#4aa3a8", GREY)
        for number, (name, places, values) in enumerate(series):
            color = palette[number % len(palette)]
            axes.plot(
                places, values, color=color, linewidth=1.6, marker="o", markersize=3.4, label=name
            )
        if log:
            axes.set_yscale("log")
            for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                ticks(FuncFormatter(_sparse_label))
        else:
            axes.set_ylim(bottom=0.0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.margins(x=0.02)
        if len(series) > 1:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        return svg_text(figure, y)


def roofline(read_gbps: float, tflops: dict[str, float], points: Sequence[RooflinePoint]) -> str:
    """The machine's measured roofs (one a dtype) and the kernels under them, log-log.

    x: FLOPs a byte; y: TFLOP/s. A point on a slope moves bytes as fast as memory can.
    """
    with matplotlib.rc_context(STYLE):
        figure, (axes,) = canvas(1, width=8.2, height=4.6)
        slope = read_gbps / 1e3
        ridges = [rate / slope for rate in tflops.values()]
        xs = [point.intensity for point in points] + ridges
        low, high = min(xs) / 8, max(xs) * 8
        axes.set_xscale("log")
        axes.set_yscale("log")
        for (dtype, rate), ridge, color in zip(
            tflops.items(), ridges, (GREY, ORANGE, GREEN, BLUE), strict=False
        ):
            axes.plot([low, ridge, high], [low * slope, rate, rate], color=color, linewidth=1.6)
            axes.annotate(
                f"{dtype} {rate:.3g} TFLOP/s, ridge {ridge:.3g}", (high, rate), (0, 4),
                textcoords="offset points", ha="right",
            )  # fmt: skip
        middle = (low * min(ridges)) ** 0.5
        axes.annotate(
            f"read {read_gbps:.3g} GB/s", (middle, middle * slope), (-8, 4),
            textcoords="offset points", ha="right", va="bottom",
        )  # fmt: skip
        floor = min([low * slope, *(point.tflops for point in points)])
        axes.set_ylim(floor / 3, max([*tflops.values(), *(p.tflops for p in points)]) * 3)
        axes.set_xlim(low, high)
        for number, point in enumerate(points, start=1):
            axes.plot(point.intensity, point.tflops, "o", color=BLUE, markersize=7)
            axes.annotate(
                str(number), (point.intensity, point.tflops), (0, -9),
                textcoords="offset points", ha="center", va="top", weight="bold",
            )  # fmt: skip
        axes.set_xlabel("arithmetic intensity (FLOP/byte)")
        axes.set_ylabel("TFLOP/s")
        return svg_text(figure, "roofline")


def canvas(panels: int, *, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with so many axes side by side, in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def svg_text(figure: Figure, salt: str) -> str:
    """The figure as an <svg> element that takes its ink from the page."""
    figure.patch.set_alpha(0.0)
    for axes in figure.axes:
        axes.patch.set_alpha(0.0)
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    return svg.replace(_INK, "currentColor").replace(_LINE, "var(--line)")
