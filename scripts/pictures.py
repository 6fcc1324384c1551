"""Plots of the benchmarks' tables: points whose names do not cover one another."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox, BboxBase

from atoll.coordinator.report.pictures import FAINT, GRID, INK

DPI = 130
HALF_POINT = 5.0  # pixels around a point that no name may cover
TURNS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
DISTANCES = (
    8,
    18,
    32,
    50,
    72,
    98,
    130,
    170,
    220,
)  # from a point to its name, in pixels; distant names get a line


@dataclass(frozen=True, kw_only=True)
class Point:
    """A measured point with its name."""

    x: float
    y: float
    name: str
    color: str
    marker: str = "o"


def page(
    title: str, *, widths: Sequence[float], size: tuple[float, float]
) -> tuple[Figure, Sequence[Axes]]:
    """Return a white page with a title and panels side by side, of these relative widths."""
    figure = Figure(figsize=size, dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)  # pyplot keeps global state
    figure.suptitle(title, x=0.01, ha="left", size=12, weight="bold", color=INK)
    return figure, figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]


def dress(axes: Axes, *, title: str, x: str, y: str) -> None:
    """Set the names of the axes, a faint grid, and no frame."""
    axes.set_title(title, loc="left", size=10, color=INK)
    axes.set_xlabel(x, color=INK, size=9)
    axes.set_ylabel(y, color=INK, size=9)
    axes.grid(color=GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=FAINT, labelsize=8, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(FAINT)


def scatter(axes: Axes, points: Iterable[Point]) -> None:
    """Draw the points; `label` names them once all panels have their limits."""
    for point in points:
        axes.plot(point.x, point.y, point.marker, color=point.color, ms=6, mec="white", zorder=3)


def label(axes: Axes, points: Sequence[Point]) -> None:
    """Write each name at the nearest free place around its point, with a line if it is far away."""
    axes.figure.draw_without_rendering()
    at = [axes.transData.transform((point.x, point.y)) for point in points]
    taken = [_box(x, y, 2 * HALF_POINT, 2 * HALF_POINT) for x, y in at]
    for point, (x, y) in zip(points, at, strict=True):
        name = axes.annotate(
            point.name,
            (point.x, point.y),
            xytext=(0, 0),
            textcoords="offset pixels",
            size=7,
            color=point.color,
            ha="center",
            va="center",
            arrowprops={"arrowstyle": "-", "linewidth": 0.5, "color": FAINT},
        )
        extent = name.get_window_extent()
        right, up = _free_place(axes.bbox, taken, x, y, extent.width, extent.height)
        name.set_position((right, up))
        name.arrow_patch.set_visible(abs(up) > extent.height)
        taken.append(_box(x + right, y + up, extent.width, extent.height))


def _free_place(
    within: BboxBase, taken: Sequence[Bbox], x: float, y: float, width: float, height: float
) -> tuple[float, float]:
    """Return the offset from a point to its name, in pixels; the farthest if no place is free."""
    for distance, (right, up) in product(DISTANCES, TURNS):
        place = (right * (distance + width / 2), up * (distance / 2 + height / 2))
        box = _box(x + place[0], y + place[1], width, height)
        inside = within.containsx(box.x0) and within.containsx(box.x1)
        inside = inside and within.containsy(box.y0) and within.containsy(box.y1)
        if inside and not box.count_overlaps(taken):
            break
    return place


def _box(x: float, y: float, width: float, height: float) -> Bbox:
    return Bbox.from_bounds(x - width / 2, y - height / 2, width, height)


def save(figure: Figure, path: Path) -> None:
    """Write the page as PNG."""
    figure.savefig(path, format="png", dpi=DPI)
