"""Distributions of latencies as an SVG file of their own."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib

from ridgeline.report.figures import BLUE, GREEN, ORANGE, STYLE, canvas, svg_text

_PAGE = "<style>svg{color:#1d2126;--line:#d9dce0;background:#fff}</style>"
MARKS = (50, 99)


def latency_figure(panels: Sequence[tuple[str, Sequence[float]]]) -> str:
    """One panel a latency (what it is, milliseconds): the share of values at most so large."""
    with matplotlib.rc_context(STYLE):
        figure, all_axes = canvas(len(panels), width=4.0 * len(panels), height=3.2)
        for axes, (name, values), color in zip(
            all_axes, panels, (BLUE, ORANGE, GREEN), strict=False
        ):
            ordered = sorted(values)
            shares = [100 * (i + 1) / len(ordered) for i in range(len(ordered))]
            axes.step([0.0, *ordered], [0.0, *shares], where="post", color=color, linewidth=1.8)
            for mark in MARKS:
                if not ordered:
                    continue
                value = ordered[max(0, -(-mark * len(ordered) // 100) - 1)]
                axes.plot(value, mark, "o", color=color, markersize=5)
                axes.annotate(
                    f"p{mark} {_number(value)} ms", (value, mark), (-6, 4),
                    textcoords="offset points", ha="right", va="bottom",
                )  # fmt: skip
            right = 1.08 * ordered[-1] if ordered else 1.0
            axes.set_xlim(-0.55 * right, right)
            axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= right])
            axes.set_xlim(-0.55 * right, right)
            axes.set_ylim(0, 112)
            axes.set_yticks([0, 25, 50, 75, 100])
            axes.set_title(f"time {name}")
            axes.set_xlabel("ms")
        all_axes[0].set_ylabel("% of the values")
        text = svg_text(figure, "latency")
    head, _, rest = text.partition(">")
    return f"{head}>{_PAGE}{rest}"


def _number(value: float) -> str:
    """Three significant digits, thousands whole."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
