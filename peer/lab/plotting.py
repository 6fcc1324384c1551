"""Plot the loss of a run.

Thin lines show each peer's training loss and the thick line their mean; dots show the loss of the
synced parameters on held-out text; dashed lines show the baselines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from atoll.coordinator.report.pictures import FAINT, GRID, INK

Points = Sequence[tuple[float, float]]
"""Pairs of the position of the log and the loss in nats per token."""

RUN, VALID = "#0b7285", "#e8590c"
PEERS = ("#66b3c1", "#8fbf8f", "#c3a6d8", "#d8b98a", "#9db4d6", "#d9a0a8", "#b6c48a", "#a9a9b8")
COMPARED = ("#5c4b8a", "#9a8c7a", "#4a7a59")
LABEL_GAP = 0.045  # fraction of the axes' height; closer labels touch


@dataclass(frozen=True, kw_only=True)
class LossPlot:
    """Content of the plot. Points that are not finite are omitted."""

    title: str
    """Name of the run."""
    subtitle: str = ""
    """Line below the title: model, peers, tokens."""
    peers: Mapping[str, Points] = field(default_factory=dict)
    """Training loss of each peer, by name."""
    run: Points = ()
    """Mean training loss of the members of each round."""
    valid: Points = ()
    """Loss of the synced parameters on held-out text."""
    compared: Mapping[str, Points] = field(default_factory=dict)
    """Held-out loss of each baseline, by name."""
    marks: Mapping[str, float] = field(default_factory=dict)
    """Positions of events by name, for example when a peer was killed."""


def draw_loss(plot: LossPlot, path: Path) -> None:
    """Write the plot as PNG.

    Args:
        plot: content of the plot.
        path: file to write; its folder must exist.

    Raises:
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=(9.6, 5.4), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)  # pyplot keeps global state and needs the main thread
    axes = figure.add_axes((0.075, 0.115, 0.715, 0.735))
    _dress(figure, axes, plot)
    _draw_peers(axes, plot.peers)
    ends = [*_draw_main(axes, plot), *_draw_compared(axes, plot.compared)]
    _draw_marks(axes, plot.marks)
    _limit(axes, plot)
    _label(axes, ends)
    figure.savefig(path, format="png")


def _finite(points: Points) -> tuple[list[float], list[float]]:
    kept = [(x, y) for x, y in points if isfinite(x) and isfinite(y)]
    return [x for x, _ in kept], [y for _, y in kept]


def _dress(figure: Figure, axes: Axes, plot: LossPlot) -> None:
    figure.text(0.075, 0.935, plot.title, size=15, weight="bold", color=INK)
    figure.text(0.075, 0.888, plot.subtitle, size=9.5, color=FAINT)
    if plot.peers:
        figure.text(0.79, 0.03, "thin: each peer's training", size=8.5, color=FAINT, ha="right")
    axes.set_xlabel("round", color=INK, size=10)
    axes.set_ylabel("loss, nats per token", color=INK, size=10)
    axes.grid(axis="y", color=GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelsize=9, length=0, pad=6)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(FAINT)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))


_End = tuple[str, str, float, float]  # label, colour, x and y of the last point


def _draw_peers(axes: Axes, peers: Mapping[str, Points]) -> None:
    for number, points in enumerate(peers.values()):
        xs, ys = _finite(points)
        color = PEERS[number % len(PEERS)]
        axes.plot(xs, ys, color=color, linewidth=1.0, alpha=0.9, zorder=2)
        if len(xs) == 1:
            axes.plot(xs, ys, ".", color=color, zorder=2)


def _draw_main(axes: Axes, plot: LossPlot) -> list[_End]:
    ends: list[_End] = []
    xs, ys = _finite(plot.run)
    if xs:
        axes.plot(xs, ys, color=RUN, linewidth=2.4, zorder=4, solid_capstyle="round")
        ends.append(("training, mean", RUN, xs[-1], ys[-1]))
    xs, ys = _finite(plot.valid)
    if xs:
        axes.plot(xs, ys, color=VALID, linewidth=1.3, alpha=0.55, zorder=5)
        axes.plot(xs, ys, "o", color=VALID, ms=5, mec="white", zorder=6, clip_on=False)
        ends.append(("held-out", VALID, xs[-1], ys[-1]))
    return ends


def _draw_compared(axes: Axes, compared: Mapping[str, Points]) -> list[_End]:
    ends: list[_End] = []
    for number, (name, points) in enumerate(compared.items()):
        xs, ys = _finite(points)
        if not xs:
            continue
        color = COMPARED[number % len(COMPARED)]
        axes.plot(xs, ys, "--", color=color, linewidth=1.6, zorder=3, dashes=(4, 2))
        axes.plot(xs[-1:], ys[-1:], "D", color=color, ms=4.5, zorder=3, clip_on=False)
        ends.append((name, color, xs[-1], ys[-1]))
    return ends


def _draw_marks(axes: Axes, marks: Mapping[str, float]) -> None:
    across = axes.get_xaxis_transform()
    for number, (name, position) in enumerate(marks.items()):
        axes.axvline(position, color=FAINT, linewidth=0.9, linestyle=":", zorder=1)
        height = 0.985 - LABEL_GAP * (number % 2)  # staggered, because two marks may be close
        axes.text(position, height, f" {name}", transform=across, size=8.5, color=FAINT, va="top")


def _limit(axes: Axes, plot: LossPlot) -> None:
    lines = [plot.run, plot.valid, *plot.peers.values(), *plot.compared.values()]
    xs = [x for points in lines for x in _finite(points)[0]]
    if xs:
        axes.set_xlim(min(xs), max(max(xs), min(xs) + 1))
    axes.margins(y=0.08)


def _label(axes: Axes, ends: Sequence[_End]) -> None:
    """Label each line with its name and last value, moved apart if they would touch."""
    bottom, top = axes.get_ylim()
    wanted = sorted(ends, key=lambda end: end[3])
    heights = spread([(y - bottom) / (top - bottom) for *_, y in wanted], gap=LABEL_GAP)
    for (name, color, _, y), height in zip(wanted, heights, strict=True):
        axes.text(
            1.015,
            height,
            f"{y:.3f}  {name}",
            transform=axes.transAxes,
            color=color,
            size=9.5,
            va="center",
            weight="bold" if color in (RUN, VALID) else "normal",
            clip_on=False,
        )


def spread(heights: Sequence[float], *, gap: float) -> list[float]:
    """Move sorted heights apart until neighbours are `gap` apart, each as little as needed.

    Neighbours that touch form a block around their mean, and blocks that touch join.
    """
    blocks: list[list[float]] = []
    for height in heights:
        blocks.append([height])
        while len(blocks) > 1 and _top(blocks[-2], gap) + gap > _bottom(blocks[-1], gap):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    return [_bottom(block, gap) + gap * i for block in blocks for i in range(len(block))]


def _bottom(block: Sequence[float], gap: float) -> float:
    return sum(block) / len(block) - gap * (len(block) - 1) / 2


def _top(block: Sequence[float], gap: float) -> float:
    return sum(block) / len(block) + gap * (len(block) - 1) / 2
