"""The result of a simulation as rows and as a table."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from atoll.peer.lab.simulate import Result
from atoll.peer.lab.simulation_settings import Settings
from atoll.peer.lab.simulation_time import Network, ddp_bytes, utilisation

RATES_MBIT_S = (50, 200, 1_000)
SPEC_CHARS = 32


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
        f"{short_spec(row.settings['spec']):<34}{row.valid_loss:7.3f}{row.seeds:7}{gap:>8}"
        f"{result.sent_bytes / 1e6:10.2f}{less:>9}"
        + "".join(f"{100 * share:12.1f}%" for share in shares)
    )


def short_spec(spec: str) -> str:
    """Return the spec of a method cut to the width of the table and of a legend."""
    return spec if len(spec) <= SPEC_CHARS else spec[: SPEC_CHARS - 1] + "…"
