"""What a simulation came to: rows, a table and a picture."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from atoll.peer.lab.plotting import COMPARED, FAINT, GRID, INK, PEERS, RUN, VALID
from atoll.peer.lab.simulate import Result
from atoll.peer.lab.simulation_settings import Settings
from atoll.peer.lab.simulation_time import Network, ddp_bytes, utilisation, wall_s

RATES_MBIT_S = (50, 200, 1_000)
SPEC_CHARS = 32
COLORS = (INK, RUN, VALID, *COMPARED, *PEERS)
Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method over its seeds."""

    method: str
    workers: int
    seeds: int
    valid_loss: float
    """Mean over the seeds."""
    gap_to_ddp: float | None
    """Share by which it is above `ddp`; None where that was not simulated."""
    bytes_per_token: float
    """Payload of all workers for each token."""
    traffic_ratio_vs_bf16_ddp: float | None
    """How many times less than bf16 data parallel; None where nothing was sent."""
    settings: dict[str, Any]


def rows(results: Sequence[Result], settings: Settings) -> list[Row]:
    """Results by method, in the order in which they come first."""
    by_spec: dict[str, list[Result]] = {}
    for result in results:
        by_spec.setdefault(result.spec, []).append(result)
    ddp = next((each for each in by_spec.values() if each[0].method == "ddp"), None)
    base = None if ddp is None else _mean_loss(ddp)
    return [_row(each, settings, base) for each in by_spec.values()]


def _mean_loss(results: Sequence[Result]) -> float:
    return sum(result.valid_loss for result in results) / len(results)


def _row(results: Sequence[Result], settings: Settings, base: float | None) -> Row:
    first, loss = results[0], _mean_loss(results)
    reference = ddp_bytes(first.params, settings.workers, settings.steps)
    return Row(
        method=first.method,
        workers=settings.workers,
        seeds=len(results),
        valid_loss=loss,
        gap_to_ddp=None if base is None else loss / base - 1.0,
        bytes_per_token=first.sent_bytes * settings.workers / first.points[-1].tokens,
        traffic_ratio_vs_bf16_ddp=reference / first.sent_bytes if first.sent_bytes else None,
        settings=asdict(settings) | {"spec": first.spec, "params": first.params},
    )


def table(results: Sequence[Result], settings: Settings, *, step_s: float) -> list[str]:
    """A line a method under a heading.

    Args:
        results: of all methods and seeds.
        settings: that they share.
        step_s: seconds of an inner step, for the share of time spent computing.
    """
    heads = [f"{rate} Mbit/s" for rate in RATES_MBIT_S]
    head = f"{'method':<34}{'loss':>7}{'seeds':>7}{'gap':>8}{'MB sent':>10}{'vs ddp':>9}" + "".join(
        f"{name:>13}" for name in heads
    )
    firsts = {result.spec: result for result in reversed(results)}
    lines = [
        _line(row, firsts[row.settings["spec"]], settings, step_s)
        for row in rows(results, settings)
    ]
    return [head, *lines]


def _line(row: Row, result: Result, settings: Settings, step_s: float) -> str:
    gap = "" if row.gap_to_ddp is None else f"{100 * row.gap_to_ddp:+.1f}%"
    ratio = row.traffic_ratio_vs_bf16_ddp
    less = "" if ratio is None else f"{ratio:,.1f}x"
    shares = [
        utilisation(result.sent, settings.steps, result.delay, Network(mbit_s=rate, step_s=step_s))
        for rate in RATES_MBIT_S
    ]
    return (
        f"{_short(row.settings['spec']):<34}{row.valid_loss:7.3f}{row.seeds:7}{gap:>8}"
        f"{result.sent_bytes / 1e6:10.2f}{less:>9}"
        + "".join(f"{100 * share:12.1f}%" for share in shares)
    )


def draw(results: Sequence[Result], settings: Settings, path: Path, *, step_s: float) -> None:
    """Write the picture: loss against bytes, and against time at each rate.

    Raises:
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=(14.0, 4.6), dpi=140, facecolor="white")
    FigureCanvasAgg(figure)  # no pyplot: it keeps global state and wants the main thread
    panels = figure.subplots(1, 1 + len(RATES_MBIT_S), sharey=True)
    firsts = list({result.spec: result for result in reversed(results)}.values())[::-1]
    for number, (result, label) in enumerate(zip(firsts, _labels(firsts), strict=True)):
        color = COLORS[number % len(COLORS)]
        _plot(panels[0], _against_bytes(result), color, label)
        for axes, rate in zip(panels[1:], RATES_MBIT_S, strict=True):
            network = Network(mbit_s=rate, step_s=step_s)
            _plot(axes, _against_time(result, settings, network), color, label)
    titles = ["MB sent by a worker", *(f"seconds at {rate} Mbit/s" for rate in RATES_MBIT_S)]
    for axes, title in zip(panels, titles, strict=True):
        _dress(axes, title)
    panels[0].set_xscale("log")
    panels[0].set_ylabel("held-out loss, nats a token", color=INK, size=10)
    lines, labels = panels[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="center right", frameon=False, fontsize=8.5, labelcolor=INK)
    figure.suptitle(_title(firsts, settings, step_s), size=11, color=INK)
    figure.tight_layout(rect=(0.0, 0.0, 0.87, 1.0))
    figure.savefig(path, format="png")


def _labels(results: Sequence[Result]) -> list[str]:
    """The name of each method, or its spec where another has the same name."""
    names = [result.method for result in results]
    return [
        _short(result.spec) if names.count(result.method) > 1 else result.method
        for result in results
    ]


def _short(spec: str) -> str:
    return spec if len(spec) <= SPEC_CHARS else spec[: SPEC_CHARS - 1] + "…"


def _title(results: Sequence[Result], settings: Settings, step_s: float) -> str:
    return (
        f"{results[0].params / 1e6:.2g}M parameters, {settings.workers} workers, "
        f"{settings.tokens / 1e6:.3g}M tokens, H={settings.inner_steps}, "
        f"{1000 * step_s:.0f} ms a step" + (f"\n{settings.churn}" if settings.churn else "")
    )


def _against_bytes(result: Result) -> Curve:
    return [(point.sent_bytes / 1e6, point.valid_loss) for point in result.points]


def _against_time(result: Result, settings: Settings, network: Network) -> Curve:
    times = wall_s(result.sent, settings.steps, result.delay, network)
    return [(times[point.step - 1], point.valid_loss) for point in result.points]


def _plot(axes: Axes, curve: Curve, color: str, label: str) -> None:
    seen = [(x, y) for x, y in curve if x > 0]
    xs, ys = [x for x, _ in seen], [y for _, y in seen]
    axes.plot(xs, ys, "-o", color=color, linewidth=1.5, markersize=3, label=label)


def _dress(axes: Axes, xlabel: str) -> None:
    axes.set_xlabel(xlabel, color=INK, size=10)
    axes.grid(axis="y", color=GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelsize=8.5, length=0, pad=5)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(FAINT)
