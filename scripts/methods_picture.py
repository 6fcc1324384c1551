"""The plot of `./scripts/bench methods --plot`: loss by traffic, model size and workers."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pictures
from matplotlib.axes import Axes
from pictures import Point

from atoll.coordinator.report.pictures import FAINT

COLORS = {
    "ddp": "#1b2a33",
    "diloco": "#0b7285",
    "muloco": "#e8590c",
    "sparseloco": "#5c4b8a",
    "streaming": "#4a7a59",
    "noloco": "#9a8c7a",
}
OWN_CONSTANTS = ("lr", "momentum", "peers", "clip_norm")
EVERY_STEP = ("ddp", "demo", "dlion")
FOLLOWED = ("diloco", "muloco")  # plotted over sizes and workers
WORKERS = 4
TOKENS_PER_PARAM = 15
MOST_GAP = 0.25  # rows farther behind are left out
GAP = "loss above data parallel's, %"


def draw(groups: Iterable[Sequence[dict]], path: Path) -> None:
    """Draw rows, grouped by those that are compared with one another.

    The first panel has the group with most rows: every method and codec by its traffic. The others
    plot two methods over model sizes, and over workers at the first panel's size.
    """
    shown = [lowest(filter(_is_shown, rows)) for rows in groups]
    main = max(shown, key=len)
    points = [_point(row) for row in main]
    figure, panels = pictures.page(
        f"Methods at {TOKENS_PER_PARAM} tokens per parameter: loss by traffic",
        widths=(2.6, 1, 1),
        size=(15, 6),
    )
    panels[0].set_xscale("log")
    pictures.dress(
        panels[0],
        title=f"{_millions(main[0]):.2f}M parameters, {WORKERS} workers; lower right is better",
        x="times less traffic than data parallel in bf16",
        y=GAP,
    )
    pictures.scatter(panels[0], points)
    panels[0].set_xlim(0.5, 12_000)  # room for names to the right of the last points
    panels[0].xaxis.set_major_formatter("{x:,.0f}x")
    several = [row for rows in shown for row in rows if _shape(row) == _shape(main[0])]
    by_size = [row for row in several if row["workers"] == WORKERS]
    _follow(panels[1], by_size, _millions, title=f"{WORKERS} workers", x="parameters, millions")
    same_size = [row for row in several if _millions(row) == _millions(main[0])]
    _follow(
        panels[2],
        same_size,
        lambda row: row["workers"],
        title=f"{_millions(main[0]):.2f}M parameters",
        x="workers",
    )
    pictures.label(panels[0], points)
    pictures.save(figure, path)


def lowest(rows: Iterable[dict]) -> list[dict]:
    """Return the row with the lowest loss of those that differ only in rate and outer constants."""
    found: dict[tuple, dict] = {}
    for row in sorted(rows, key=lambda row: (-row["seeds"], row["gap_to_ddp"])):
        own = row["settings"]
        found.setdefault((_short(own["spec"]), own["inner_steps"], own.get("inner")), row)
    return list(found.values())


def _is_shown(row: dict) -> bool:
    own, gap = row["settings"], row["gap_to_ddp"]
    enough = own["tokens"] >= TOKENS_PER_PARAM * own["params"]
    return enough and gap is not None and gap <= MOST_GAP


def _millions(row: dict) -> float:
    return row["settings"]["params"] / 1e6


def _shape(row: dict) -> tuple[int, int]:
    """Return the shape of a worker's batch."""
    return row["settings"]["batch_size"], row["settings"]["seq_len"]


def _point(row: dict) -> Point:
    own, each_step = row["settings"], row["method"] in EVERY_STEP
    window = "" if each_step else f" H={own['inner_steps']}"
    inner = f" with {own['inner']}" if own.get("inner") else ""
    return Point(
        x=row["traffic_ratio_vs_bf16_ddp"] or 1,
        y=100 * row["gap_to_ddp"],
        name=_short(own["spec"]) + inner + window,
        color=COLORS.get(row["method"], FAINT),
    )


def _short(spec: str) -> str:
    """Return a spec without its outer constants."""
    name, _, options = spec.removesuffix(")").partition("(")
    kept = [o for o in options.split(", ") if o and o.partition("=")[0] not in OWN_CONSTANTS]
    return f"{name}({', '.join(kept)})" if kept else name


def _follow(
    axes: Axes, rows: Iterable[dict], along: Callable[[dict], float], *, title: str, x: str
) -> None:
    """Plot lines of the followed methods, each at the shortest window of a size."""
    curves: dict[str, dict[float, dict]] = defaultdict(dict)
    for row in sorted(rows, key=lambda row: row["settings"]["inner_steps"], reverse=True):
        if _short(row["settings"]["spec"]) in FOLLOWED:
            curves[row["method"]][along(row)] = row
    pictures.dress(axes, title=title, x=x, y=GAP)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axhline(0, color=COLORS["ddp"], linewidth=1)
    for method, found in curves.items():
        xs = sorted(found)
        ys = [100 * found[at]["gap_to_ddp"] for at in xs]
        axes.plot(xs, ys, "-o", color=COLORS[method], ms=5, mec="white", label=method)
    axes.legend(frameon=False, fontsize=8)
