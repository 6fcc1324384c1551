"""Report the results of a simulation as rows and as a table, with their time on a given network.

Every inner step takes a given time. Each worker has one link that carries its bytes, in both
directions at once, one reduction after the other. A method that overlaps continues training until
its reduction is due.

# T steps, W workers
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from atoll.peer.lab.simulate import Result
from atoll.peer.lab.simulation_settings import Settings

RATES_MBIT_S = (50, 200, 1_000)  # links in the table and in the plot
SPEC_CHARS = 32  # the width of a method in the table and in the legend


@dataclass(frozen=True, kw_only=True)
class Network:
    """A worker's link and its training speed."""

    mbit_s: float
    """Rate of the link in each direction."""
    step_s: float
    """Seconds per inner step."""
    latency_s: float = 0.05
    """Seconds that a reduction takes in addition to its transfer."""


def wall_s(
    sent: Sequence[tuple[int, int]], steps: int, delay: int, network: Network
) -> list[float]:
    """Return the time at which each step's results are available.

    Args:
        sent: step and bytes of each reduction, in order.
        steps: T.
        delay: steps that a reduction may take; 0 waits for it at once.
        network: link and speed.

    Returns:
        T times in seconds.
    """
    sizes = dict(sent)
    due: list[tuple[int, float]] = []
    now_s = free_s = 0.0
    times = []
    for step in range(1, steps + 1):
        now_s += network.step_s
        while due and due[0][0] <= step:
            now_s = max(now_s, due.pop(0)[1])
        if step in sizes:
            transfer_s = sizes[step] * 8 / (network.mbit_s * 1e6)
            free_s = max(now_s, free_s) + network.latency_s + transfer_s
            due.append((step + delay, free_s))
        if delay == 0 and due:
            now_s = due.pop()[1]
        times.append(now_s)
    return times


def utilisation(sent: Sequence[tuple[int, int]], steps: int, delay: int, network: Network) -> float:
    """Return the fraction of time in which a worker computes; arguments as for `wall_s`."""
    return steps * network.step_s / wall_s(sent, steps, delay, network)[-1]


def ddp_bytes(params: int, workers: int, steps: int) -> int:
    """Return the bytes that a worker of bf16 data-parallel training sends.

    A ring all-reduce sends 2 (W - 1) / W of the gradient per step.
    """
    return 4 * params * (workers - 1) * steps // workers


@dataclass(frozen=True, kw_only=True)
class SimulationRow:
    """Results of one method over its seeds."""

    method: str
    workers: int
    seeds: int
    valid_loss: float
    """Held-out loss in nats per token, averaged over the seeds."""
    gap_to_ddp: float | None
    """Fraction above the loss of `ddp`; None if `ddp` was not simulated."""
    bytes_per_token: float
    """Payload of all workers per token."""
    traffic_ratio_vs_bf16_ddp: float | None
    """Bytes of bf16 data-parallel training relative to this method's; None if it sent none."""
    settings: dict[str, Any]


def rows(results: Sequence[Result], settings: Settings) -> list[SimulationRow]:
    """Return one row per method, in the order of their first results."""
    by_spec: dict[str, list[Result]] = {}
    for result in results:
        by_spec.setdefault(result.spec, []).append(result)
    ddp = next((each for each in by_spec.values() if each[0].method == "ddp"), None)
    base = None if ddp is None else _mean_loss(ddp)
    return [_row(each, settings, base) for each in by_spec.values()]


def _mean_loss(results: Sequence[Result]) -> float:
    return sum(result.valid_loss for result in results) / len(results)


def _row(results: Sequence[Result], settings: Settings, base: float | None) -> SimulationRow:
    first, loss = results[0], _mean_loss(results)
    reference = ddp_bytes(first.params, settings.workers, settings.steps)
    return SimulationRow(
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
    """Return a heading and one line per method.

    Args:
        results: results of all methods and seeds.
        settings: settings that they share.
        step_s: seconds per inner step, for the fraction of time spent computing.
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


def _line(row: SimulationRow, result: Result, settings: Settings, step_s: float) -> str:
    gap = "" if row.gap_to_ddp is None else f"{100 * row.gap_to_ddp:+.1f}%"
    ratio = row.traffic_ratio_vs_bf16_ddp
    less = "" if ratio is None else f"{ratio:,.1f}x"
    shares = [
        utilisation(result.sent, settings.steps, result.delay, Network(mbit_s=rate, step_s=step_s))
        for rate in RATES_MBIT_S
    ]
    return (
        f"{short_spec(row.settings['spec']):<34}{row.valid_loss:7.3f}{row.seeds:7}{gap:>8}"
        f"{result.sent_bytes / 1e6:10.2f}{less:>9}"
        + "".join(f"{100 * share:12.1f}%" for share in shares)
    )


def short_spec(spec: str) -> str:
    """Return the spec of a method, cut to the width of the table and the legend."""
    return spec if len(spec) <= SPEC_CHARS else spec[: SPEC_CHARS - 1] + "…"
