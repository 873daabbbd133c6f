"""Panels of points and fitted lines on logarithmic axes, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT, MARGIN = 240, 170, 34
COLUMNS = 4

Points = Sequence[tuple[int, float]]


def picture(grown: Mapping[str, Mapping[str, Points]], fitted: Mapping[str, Mapping[str, Any]]) -> str:
    """An SVG with a panel per measured growth: sizes against processor seconds, and the line of the exponent.

    Args:
        grown: sizes and seconds, by work and axis.
        fitted: what scale.py's `fit` says of the same.
    """
    panels = [
        _panel(f"{what}: {axis}", points, fitted[what][axis]["exponent"])
        for what, axes in grown.items()
        for axis, points in axes.items()
    ]
    rows = -(-len(panels) // COLUMNS)
    placed = "".join(
        f'<g transform="translate({number % COLUMNS * WIDTH},{number // COLUMNS * HEIGHT})">{panel}</g>\n'
        for number, panel in enumerate(panels)
    )
    size = f'width="{COLUMNS * WIDTH}" height="{rows * HEIGHT}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="10">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{placed}</svg>\n'
    )


def _panel(title: str, points: Points, exponent: float) -> str:
    xs = [math.log(size) for size, _ in points]
    ys = [math.log(seconds) for _, seconds in points]
    middle = (sum(xs) / len(xs), sum(ys) / len(ys))
    line = [middle[1] + exponent * (x - middle[0]) for x in (xs[0], xs[-1])]
    low, high = min(*ys, *line), max(*ys, *line)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - xs[0]) / (xs[-1] - xs[0])
        up = (y - low) / ((high - low) or 1.0)
        return (
            MARGIN + across * (WIDTH - 2 * MARGIN),
            HEIGHT - MARGIN - up * (HEIGHT - 2 * MARGIN),
        )

    (x1, y1), (x2, y2) = at(xs[0], line[0]), at(xs[-1], line[1])
    marks = [
        f'<text x="{WIDTH / 2}" y="14" text-anchor="middle">{escape(title)}, exponent {exponent:.2f}</text>',
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#888"/>',
    ]
    for x, y, (size, seconds) in zip(xs, ys, points, strict=True):
        across, down = at(x, y)
        marks += [
            f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="#1565c0"/>',
            f'<text x="{across:.1f}" y="{HEIGHT - 12}" text-anchor="middle">{size}</text>',
            f'<text x="{across:.1f}" y="{down - 6:.1f}" text-anchor="middle" fill="#555">{seconds:.3g} s</text>',
        ]
    return "".join(marks)
