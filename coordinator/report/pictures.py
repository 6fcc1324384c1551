"""The plots of a report, drawn by matplotlib as SVG."""

from __future__ import annotations

from io import BytesIO

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from atoll.coordinator.report.curves import Curve

INK, FAINT, GRID = "#1b2a33", "#7d8b93", "#e6ebee"  # of all plots
COLORS = ("#0b7285", "#e8590c", "#5f3dc4", "#2b8a3e")


def drawn(curve: Curve) -> bytes:
    """Return a plot as SVG."""
    figure = Figure(figsize=(9.6, 2.6), facecolor="white", layout="constrained")
    FigureCanvasSVG(figure)  # pyplot keeps global state and needs the main thread
    axes = figure.subplots()
    axes.set_title(curve.title, loc="left", size=10, weight="bold", color=INK)
    axes.set_xlabel(curve.x, color=FAINT, size=9)
    axes.set_ylabel(curve.y, color=FAINT, size=9)
    axes.grid(axis="y", color=GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if curve.from_zero:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.tick_params(colors=FAINT, labelsize=8, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(FAINT)
    for line, color in zip(curve.lines, COLORS, strict=False):
        style = "o" if line.dotted else "-"
        xs, ys = [x for x, _ in line.points], [y for _, y in line.points]
        axes.plot(xs, ys, style, color=color, linewidth=1.4, markersize=3, label=line.name)
    if curve.from_zero:
        axes.set_ylim(bottom=0)
    if len(curve.lines) > 1:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    file = BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
