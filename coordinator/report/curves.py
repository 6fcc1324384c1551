"""Choose what is plotted of a run: a few curves, with few enough points to draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    began_s = rounds[0].at
    rates = [
        ((after.at - began_s) / 3600, after.tokens / gap)
        for before, after in pairwise(rounds)
        if (gap := seconds_between(before, after))
    ]
    numbers = [row.position for row in rounds]
    found = [
        _losses("Loss by tokens", "tokens", _by_tokens(rounds)),
        _losses("Loss by time", "hours", _by_hours(rounds)),
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


def compared(runs: Mapping[str, Sequence[RoundSummary]]) -> list[Curve]:
    """Return plots of the training loss of several runs, by rounds, tokens and time.

    Args:
        runs: rounds by the name of the run.
    """
    found = []
    for title, x, xs_of in (
        ("Loss by rounds", "round", _by_round),
        ("Loss by tokens", "tokens", _by_tokens),
        ("Loss by time", "hours", _by_hours),
    ):
        lines = [
            PlottedLine(
                name=name,
                points=thinned([(x, row.loss) for x, row in xs_of(rows) if row.loss is not None]),
            )
            for name, rows in runs.items()
        ]
        found.append(Curve(title=title, x=x, y="nats per token", lines=lines, from_zero=False))
    return [curve for curve in found if any(len(line.points) > 1 for line in curve.lines)]


def _by_round(rounds: Sequence[RoundSummary]) -> list[tuple[float, RoundSummary]]:
    return [(float(row.position), row) for row in rounds]


def _by_tokens(rounds: Sequence[RoundSummary]) -> list[tuple[float, RoundSummary]]:
    return list(zip(accumulate(row.tokens for row in rounds), rounds, strict=True))


def _by_hours(rounds: Sequence[RoundSummary]) -> list[tuple[float, RoundSummary]]:
    # What was learned late has no time of its own, and would go back or stand still.
    return [((row.at - rounds[0].at) / 3600, row) for row in rounds if not row.late]


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
