"""Choose what is plotted of a run: a few curves, with few enough points to draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isfinite

from atoll.coordinator.run.status import RoundSummary, seconds_between

MAX_POINTS = 1000  # of a curve: a page is 900 pixels wide

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class PlottedLine:
    """One line of a plot."""

    name: str
    points: Points
    dotted: bool = False
    """measured now and then"""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One plot."""

    title: str
    x: str
    y: str
    lines: Sequence[PlottedLine]
    from_zero: bool = True
    """whether the vertical axis begins at 0"""


def curves(rounds: Sequence[RoundSummary]) -> list[Curve]:
    """Return the plots of a run: loss by tokens and by time, tokens/s, members and bytes."""
    tokens = list(accumulate(row.tokens for row in rounds))
    began_s = rounds[0].at
    hours = [(row.at - began_s) / 3600 for row in rounds]
    # What was learned late has no time of its own, and would go back or stand still.
    timed = [(h, row) for h, row in zip(hours, rounds, strict=True) if not row.late]
    rates = [
        ((after.at - began_s) / 3600, after.tokens / gap)
        for before, after in pairwise(rounds)
        if (gap := seconds_between(before, after))
    ]
    numbers = [row.position for row in rounds]
    found = [
        _losses("Loss by tokens", "tokens", list(zip(tokens, rounds, strict=True))),
        _losses("Loss by time", "hours", timed),
        Curve(
            title="Speed",
            x="hours",
            y="tokens/s",
            lines=[PlottedLine(name="all peers", points=thinned(rates))],
        ),
        Curve(
            title="Members of a round",
            x="round",
            y="peers",
            lines=[
                _line("members", numbers, rounds, lambda row: row.members),
                _line("left out", numbers, rounds, lambda row: len(row.left_out)),
            ],
        ),
        Curve(
            title="Sent in a round by all members",
            x="round",
            y="MB",
            lines=[_line("bytes", numbers, rounds, lambda row: row.wire_bytes / 1e6)],
        ),
    ]
    return [curve for curve in found if any(len(line.points) > 1 for line in curve.lines)]


def _losses(title: str, x: str, rows: Sequence[tuple[float, RoundSummary]]) -> Curve:
    training = [(at, row.loss) for at, row in rows if row.loss is not None]
    held_out = [(at, row.valid_loss) for at, row in rows if row.valid_loss is not None]
    lines = [
        PlottedLine(name="training", points=thinned(training)),
        PlottedLine(name="held-out text", points=thinned(held_out), dotted=True),
    ]
    return Curve(title=title, x=x, y="nats per token", lines=lines, from_zero=False)


def _line(
    name: str,
    xs: Sequence[float],
    rounds: Sequence[RoundSummary],
    value: Callable[[RoundSummary], float],
) -> PlottedLine:
    points = [(x, float(value(row))) for x, row in zip(xs, rounds, strict=True)]
    return PlottedLine(name=name, points=thinned(points))


def thinned(points: Points, most: int = MAX_POINTS) -> Points:
    """Return the finite points; of more than `most`, the means of consecutive ones."""
    kept = [(x, y) for x, y in points if isfinite(x) and isfinite(y)]
    together = -(-len(kept) // most)
    if together <= 1:
        return kept
    groups = [kept[start : start + together] for start in range(0, len(kept), together)]
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group))
        for group in groups
    ]
