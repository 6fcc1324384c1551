"""A run in a dozen figures, and several runs side by side, in the report and in `atoll status`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from atoll.coordinator.report.view import elapsed_seconds, round_seconds
from atoll.coordinator.run.status import RoundSummary, RunStatus
from atoll.coordinator.run.text import ABSENT, clean, count, duration, loss_text, short_hash, size

if TYPE_CHECKING:
    from atoll.coordinator.recorded import PastRun


def figures(status: RunStatus, rounds: Sequence[RoundSummary]) -> Sequence[tuple[str, str]]:
    """Return the names and texts of a run's figures, the same ones in the same order for each."""
    planned = f" of {status.rounds_total:,}" if status.rounds_total else ""
    sent = sum(row.wire_bytes for row in rounds)
    pace = round_seconds(rounds)
    return (
        ("rounds", f"{status.position:,}{planned}"),
        ("time", duration(elapsed_seconds(status))),
        ("seconds a round", ABSENT if pace is None else f"{pace:.1f}"),
        ("tokens", count(status.tokens_total)),
        ("training loss", loss_text(status.loss)),
        ("held-out loss", loss_text(status.valid_loss)),
        ("parameters", count(status.params)),
        ("method", f"{status.method}, H={status.inner_steps}"),
        ("codec", status.codec),
        ("sent by all peers", size(sent)),
        ("hash chain", short_hash(status.chain)),
    )


def side_by_side(runs: Sequence[PastRun]) -> list[tuple[str, ...]]:
    """Return a row for each figure: its name, and its text for each run."""
    told = [figures(run.status, run.rounds) for run in runs]
    return [(each[0][0], *(value for _, value in each)) for each in zip(*told, strict=True)]


def run_names(runs: Sequence[RunStatus]) -> list[str]:
    """Return the names of runs, with a number where several have one."""
    plain = [clean(run.run_name, num_max=40) for run in runs]
    numbers = [plain[: i + 1].count(name) for i, name in enumerate(plain)]
    return [
        f"{name} ({number})" if plain.count(name) > 1 else name
        for name, number in zip(plain, numbers, strict=True)
    ]
