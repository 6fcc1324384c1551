"""A line chart in braille dots: each terminal cell holds 2 x 4 of them.

Not a plotting library: the colours follow the theme, the size follows the terminal on every frame,
and one curve over one axis is all there is to draw.

`plot` is pure: series in, text out. x is a round, y a loss. Points that are not finite or are
absurdly large are omitted, and so are points at or below zero on a logarithmic axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

import numpy as np
from textual.content import Content

from atoll.coordinator.run.text import count, fit

ChartPoint = tuple[float, float]

_DOT_BITS: Final = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # [x % 2][y % 4]
_MAX_VALUE: Final = 1e12  # no loss is larger; differences and ratios below it stay finite
_DOT_CELLS: Final = 4  # between dots: a cell has one colour, and the curve must stay visible
_AXIS_CELLS: Final = 7  # a label of five characters, a space, the axis itself
_LONG_ROUND: Final = 100_000  # smaller round numbers are written out, as in the list
_STEPS: Final = (1.0, 2.0, 2.5, 5.0, 10.0, 20.0)  # round distances between ticks
_LOG_STEPS: Final = (1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.3, 8.0)


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve; later series are drawn over earlier ones."""

    points: Sequence[ChartPoint]
    style: str
    dots: bool = False
    """Draw separate points instead of a line; few enough that the curve below stays visible."""


@dataclass
class Canvas:
    """Braille dots by cell; a cell takes the style of the last dot set in it."""

    width: int
    height: int
    bits: dict[tuple[int, int], int] = field(default_factory=dict)
    styles: dict[tuple[int, int], str] = field(default_factory=dict)

    def dot(self, x: int, y: int, style: str) -> None:
        """Set one dot, counted from the top left; ignore a dot outside."""
        if 0 <= x < 2 * self.width and 0 <= y < 4 * self.height:
            cell = (x // 2, y // 4)
            self.bits[cell] = self.bits.get(cell, 0) | _DOT_BITS[x % 2][y % 4]
            self.styles[cell] = style

    def line(self, start: tuple[int, int], end: tuple[int, int], style: str) -> None:
        """Draw a line between two dots."""
        (x0, y0), (x1, y1) = start, end
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        for i in range(steps + 1):
            self.dot(round(x0 + (x1 - x0) * i / steps), round(y0 + (y1 - y0) * i / steps), style)

    def row(self, y: int) -> list[tuple[str, str]]:
        """Return one line of cells as styled text."""
        cells = ((x, y) for x in range(self.width))
        return [
            (chr(0x2800 + self.bits[cell]), self.styles[cell]) if cell in self.bits else (" ", "")
            for cell in cells
        ]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """An axis that maps values from `low` to `high` to 0..1."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return the place of `value` between the ends, 0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def scale_of(values: Sequence[float], *, log: bool) -> Scale:
    """Return a scale around `values` with a small margin at both ends."""
    low, high = min(values), max(values)
    if log:
        ratio = max(high / low, 1.01) ** 0.04
        return Scale(low=low / ratio, high=high * ratio, log=True)
    air = max((high - low) * 0.04, abs(high) * 1e-3, 1e-9)
    return Scale(low=low - air, high=high + air)


def ticks(scale: Scale, num_max: int) -> list[float]:
    """Return at most `num_max` round values on the scale."""
    if num_max < 1:
        return []
    if scale.log and (found := _log_ticks(scale, num_max)):
        return found
    return _linear_ticks(scale.low, scale.high, num_max)


def _linear_ticks(low: float, high: float, num_max: int) -> list[float]:
    power = 10.0 ** math.floor(math.log10((high - low) / num_max))
    for factor in _STEPS:
        step = factor * power
        found = [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
        if len(found) <= num_max:
            return found
    return []


def _log_ticks(scale: Scale, num_max: int) -> list[float]:
    decades = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
    values = [step * 10.0**decade for decade in decades for step in _LOG_STEPS]
    inside = [value for value in values if scale.low <= value <= scale.high]
    return inside[:: max(1, math.ceil(len(inside) / num_max))] if len(inside) >= 2 else []


def smoothed(points: Sequence[ChartPoint]) -> list[ChartPoint]:
    """Smooth by a local weighted linear fit, in which near points count more.

    Unlike a running mean it neither lags behind a falling loss nor bends at the ends.
    """
    if not points:
        return []
    reach = min(24, max(3, len(points) // 16))
    x_P, y_P = np.asarray(points, dtype=float).T  # P points, W of them near each
    index_PW = np.arange(len(points))[:, None] + np.arange(-reach, reach + 1)
    is_near_PW = (index_PW >= 0) & (index_PW < len(points))
    index_PW = index_PW.clip(0, len(points) - 1)
    far_PW = np.abs(x_P[index_PW] - x_P[:, None]) * is_near_PW
    span_P1 = 1.001 * far_PW.max(axis=1, keepdims=True)
    span_P1[span_P1 == 0] = 1.0
    weight_PW = (1 - (far_PW / span_P1) ** 3) ** 3 * is_near_PW
    weight_PW /= weight_PW.sum(axis=1, keepdims=True)
    mean_x_P = (weight_PW * x_P[index_PW]).sum(axis=1)
    mean_y_P = (weight_PW * y_P[index_PW]).sum(axis=1)
    off_PW = x_P[index_PW] - mean_x_P[:, None]
    spread_P = (weight_PW * off_PW**2).sum(axis=1)
    slant_P = (weight_PW * off_PW * (y_P[index_PW] - mean_y_P[:, None])).sum(axis=1)
    is_flat_P = spread_P == 0
    spread_P[is_flat_P] = 1.0
    fit_P = np.where(is_flat_P, y_P, mean_y_P + slant_P / spread_P * (x_P - mean_x_P))
    return list(zip(x_P.tolist(), fit_P.tolist(), strict=True))


def thinned(points: Sequence[ChartPoint], num_max: int) -> list[ChartPoint]:
    """Keep the lowest and highest point of each of `num_max / 2` stretches, so no spike is lost."""
    if len(points) <= num_max:
        return list(points)
    num_stretches = max(1, num_max // 2)
    result: list[ChartPoint] = []
    for i in range(num_stretches):
        start = i * len(points) // num_stretches
        stretch = points[start : (i + 1) * len(points) // num_stretches]
        extremes = {min(stretch, key=_height), max(stretch, key=_height)}
        result += sorted(extremes)
    return result


def spaced(points: Sequence[ChartPoint], num_max: int) -> list[ChartPoint]:
    """Return at most `num_max` of the points: the newest, and others evenly spaced before it."""
    return list(points[:: -max(1, math.ceil(len(points) / max(1, num_max)))])


def _height(point: ChartPoint) -> float:
    return point[1]


def drawable(points: Sequence[ChartPoint], *, log: bool) -> list[ChartPoint]:
    """Return the points that an axis of this kind can show."""
    least = 1 / _MAX_VALUE if log else -_MAX_VALUE
    return [(x, y) for x, y in points if least <= y <= _MAX_VALUE]


def plot(series: Sequence[Series], width: int, height: int, *, log: bool = False) -> Content:
    """Draw the chart with its axes in `width` x `height` cells; empty if there is no room."""
    curves = [replace(curve, points=drawable(curve.points, log=log)) for curve in series]
    everything = [point for curve in curves for point in curve.points]
    plot_width, plot_height = width - _AXIS_CELLS, height - 2
    if not everything or plot_width < 4 or plot_height < 2:
        return Content("")
    xs = [x for x, _ in everything]
    x_scale = Scale(low=min(xs), high=max(max(xs), min(xs) + 1))
    y_scale = scale_of([y for _, y in everything], log=log)
    canvas = Canvas(plot_width, plot_height)
    for curve in curves:
        _draw(canvas, curve, x_scale, y_scale)
    y_labels = _y_labels(y_scale, plot_height)
    lines = [_line(canvas, row, y_labels.get(row)) for row in range(plot_height)]
    return Content("\n").join([*lines, *_x_axis(x_scale, plot_width)])


def _draw(canvas: Canvas, curve: Series, x_scale: Scale, y_scale: Scale) -> None:
    last_x, last_y = 2 * canvas.width - 1, 4 * canvas.height - 1
    if curve.dots:
        points = spaced(curve.points, canvas.width // _DOT_CELLS)
    else:
        points = thinned(curve.points, 4 * canvas.width)
    dots = [(round(x_scale.at(x) * last_x), round((1 - y_scale.at(y)) * last_y)) for x, y in points]
    pairs = [(dot, dot) for dot in dots] if curve.dots else pairwise(dots)
    for start, end in pairs:
        canvas.line(start, end, curve.style)


def _y_labels(scale: Scale, height: int) -> dict[int, str]:
    values = ticks(scale, min(8, max(2, height // 2)))
    decimals = _decimals(values)
    rows = {round((1 - scale.at(value)) * (height - 1)): value for value in values}
    return {row: _label(value, decimals) for row, value in rows.items()}


def _decimals(values: Sequence[float]) -> int:
    """The fewest decimals that write every tick exactly."""
    for decimals in range(1, 4):
        if all(math.isclose(round(value, decimals), value, abs_tol=1e-9) for value in values):
            return decimals
    return 4


def _label(value: float, decimals: int) -> str:
    text = f"{value:.{decimals}f}"
    return fit(text if len(text) <= _AXIS_CELLS - 2 else count(value), _AXIS_CELLS - 2, right=True)


def _line(canvas: Canvas, row: int, label: str | None) -> Content:
    axis = (f"{label or ' ' * (_AXIS_CELLS - 2)} ", "$dim"), ("┤" if label else "│", "$track")
    return Content.assemble(*axis, *canvas.row(row))


def _x_axis(scale: Scale, width: int) -> list[Content]:
    values = [value for value in ticks(scale, max(2, width // 12)) if value == int(value)]
    marks, labels = ["─"] * width, [" "] * width
    for value in values:
        column = round(scale.at(value) * (width - 1))
        text = f"{value:.0f}" if value < _LONG_ROUND else count(value)
        start = min(max(0, column - len(text) // 2), width - len(text))
        if any(taken != " " for taken in labels[max(0, start - 1) : start + len(text) + 1]):
            continue
        marks[column] = "┬"
        labels[start : start + len(text)] = text
    margin = " " * (_AXIS_CELLS - 1)
    return [
        Content.assemble((f"{margin}└{''.join(marks)}", "$track")),
        Content.assemble((f"{margin} {''.join(labels)}", "$dim")),
    ]
