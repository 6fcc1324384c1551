"""The loss curve of a whole run: the newest rounds one by one, of those before a few at a point."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

from atoll.coordinator.run import text
from atoll.coordinator.run.status import RunStatus

Axis = Literal["rounds", "time", "tokens"]
AXES: Final[tuple[Axis, ...]] = ("rounds", "time", "tokens")
_UNITS: Final = ((172_800.0, 86_400.0, "days"), (7200.0, 3600.0, "hours"), (120.0, 60.0, "minutes"))
"""Of time: from so many seconds on, the seconds of a unit and its name."""


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    """Points of x and loss."""

    training: list[tuple[float, float]]
    held_out: list[tuple[float, float]]
    """On text that is not trained on; not measured every round."""
    unit: str
    """Of x."""


@dataclass(frozen=True, kw_only=True)
class _Row:
    x: float
    loss: float | None
    valid_loss: float | None


def loss_curve(status: RunStatus, axis: Axis) -> LossCurve:
    """Return the curve over rounds, the time since the run's start, or tokens."""
    rows = list(_rows(status, axis))
    unit_s, unit = _unit(rows[-1].x) if axis == "time" and rows else (1.0, str(axis))
    return LossCurve(
        training=[(r.x / unit_s, y) for r in rows if (y := text.finite(r.loss)) is not None],
        held_out=[(r.x / unit_s, y) for r in rows if (y := text.finite(r.valid_loss)) is not None],
        unit=unit,
    )


def _unit(seconds: float) -> tuple[float, str]:
    """Return the seconds of the unit that so long a time is told in, and its name."""
    found = ((unit_s, name) for least_s, unit_s, name in _UNITS if seconds >= least_s)
    return next(found, (1.0, "seconds"))


def _rows(status: RunStatus, axis: Axis) -> Iterator[_Row]:
    first = [*(p.at for p in status.earlier), *(r.at for r in status.history if not r.late)][:1]
    began_s = status.started_at if status.started_at is not None else next(iter(first), 0.0)
    for point in status.earlier:
        xs = {"rounds": point.position, "time": point.at - began_s, "tokens": point.tokens}
        yield _Row(x=xs[axis], loss=point.loss, valid_loss=point.valid_loss)
    before = status.tokens_total - sum(row.tokens for row in status.history)
    totals = accumulate((row.tokens for row in status.history), initial=max(0, before))
    next(totals)
    for row, tokens in zip(status.history, totals, strict=True):
        if axis == "time" and row.late:
            continue  # nobody knows when it was
        xs = {"rounds": row.position, "time": row.at - began_s, "tokens": tokens}
        yield _Row(x=xs[axis], loss=row.loss, valid_loss=row.valid_loss)
