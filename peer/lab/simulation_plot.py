"""Plot the results of a simulation: loss over bytes and over time."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from atoll.coordinator.report.pictures import FAINT, GRID, INK
from atoll.peer.lab.plotting import COMPARED, PEERS, RUN, VALID
from atoll.peer.lab.simulate import Result
from atoll.peer.lab.simulation_report import RATES_MBIT_S, Network, short_spec, wall_s
from atoll.peer.lab.simulation_settings import Settings

COLORS = (INK, RUN, VALID, *COMPARED, *PEERS)
Curve = Sequence[tuple[float, float]]


def draw(results: Sequence[Result], settings: Settings, path: Path, *, step_s: float) -> None:
    """Write the plot as PNG: loss over bytes, and over time at each rate.

    Raises:
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=(14.0, 4.6), dpi=140, facecolor="white")
    FigureCanvasAgg(figure)  # pyplot keeps global state and needs the main thread
    panels = figure.subplots(1, 1 + len(RATES_MBIT_S), sharey=True)
    firsts = list({result.spec: result for result in reversed(results)}.values())[::-1]
    for number, (result, label) in enumerate(zip(firsts, _labels(firsts), strict=True)):
        color = COLORS[number % len(COLORS)]
        against_bytes = [(point.sent_bytes / 1e6, point.valid_loss) for point in result.points]
        _plot(panels[0], against_bytes, color, label)
        for axes, rate in zip(panels[1:], RATES_MBIT_S, strict=True):
            network = Network(mbit_s=rate, step_s=step_s)
            _plot(axes, _against_time(result, settings, network), color, label)
    titles = ["MB sent by a worker", *(f"seconds at {rate} Mbit/s" for rate in RATES_MBIT_S)]
    for axes, title in zip(panels, titles, strict=True):
        _dress(axes, title)
    panels[0].set_xscale("log")
    panels[0].set_ylabel("held-out loss, nats per token", color=INK, size=10)
    lines, labels = panels[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="center right", frameon=False, fontsize=8.5, labelcolor=INK)
    figure.suptitle(_title(firsts, settings, step_s), size=11, color=INK)
    figure.tight_layout(rect=(0.0, 0.0, 0.87, 1.0))
    figure.savefig(path, format="png")


def _labels(results: Sequence[Result]) -> list[str]:
    # A method's name, or its spec if several methods have that name.
    names = [result.method for result in results]
    return [
        short_spec(result.spec) if names.count(result.method) > 1 else result.method
        for result in results
    ]


def _title(results: Sequence[Result], settings: Settings, step_s: float) -> str:
    return (
        f"{results[0].params / 1e6:.2g}M parameters, {settings.workers} workers, "
        f"{settings.tokens / 1e6:.3g}M tokens, H={settings.inner_steps}, "
        f"{1000 * step_s:.0f} ms per step" + (f"\n{settings.churn}" if settings.churn else "")
    )


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
