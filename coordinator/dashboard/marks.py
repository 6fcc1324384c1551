"""Marks drawn with characters: bars, stacked bars, sparklines. Pure: numbers in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from textual.content import Content

from atoll.coordinator.run.phases import RoundStage
from atoll.coordinator.run.text import clean, finite

PHASES: Final = tuple(stage.value for stage in RoundStage)
_SPARKS: Final = "▁▂▃▄▅▆▇█"


def bar(fraction: float | None, width: int, style: str = "$primary") -> Content:
    """Draw a thin bar in half-cell steps; clamp the fraction to 0..1, None is all track."""
    value = min(1.0, max(0.0, finite(fraction) or 0.0))
    halves = round(value * width * 2)
    full, half = divmod(halves, 2)
    if value > 0 and halves == 0 and width > 0:
        half = 1
    filled = "━" * full + "╸" * half
    return Content.assemble((filled, style), ("─" * (width - full - half), "$track"))


def shares(values: Sequence[float], width: int) -> list[int]:
    """Split `width` cells in proportion to values (largest remainder); zeros get none."""
    total = sum(values)
    if total <= 0 or width <= 0:
        return [0 for _ in values]
    exact = [value / total * width for value in values]
    cells = [int(share) for share in exact]
    by_remainder = sorted(range(len(values)), key=lambda i: cells[i] - exact[i])
    for i in by_remainder[: width - sum(cells)]:
        cells[i] += 1
    return cells


def phase_style(phase: str) -> str:
    """Return the colour of a phase; a newer peer's unknown phase gets a neutral one."""
    return f"$phase-{phase}" if phase in PHASES else "$phase-other"


def ordered_phases(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """Sort phases in the order in which they happen, unknown ones last; omit empty ones."""
    rank: dict[str, int] = {phase: i for i, phase in enumerate(PHASES)}
    known = sorted(seconds, key=lambda phase: (rank.get(phase, len(rank)), phase))
    parts = [(phase, finite(seconds[phase]) or 0.0) for phase in known]
    return [(phase, value) for phase, value in parts if value > 0]


def stacked(
    seconds: Mapping[str, float], width: int, *, scale_s: float = 0.0, mark: str = "■"
) -> Content:
    """Draw phases side by side; `width` cells stand for `scale_s` seconds (0: for their sum)."""
    parts = ordered_phases(seconds)
    total = sum(value for _, value in parts)
    if total <= 0:
        return Content.assemble(("─" * width, "$track"))
    used = width if scale_s <= total else max(1, round(width * total / scale_s))
    cells = shares([value for _, value in parts], used)
    filled = [(mark * n, phase_style(phase)) for (phase, _), n in zip(parts, cells, strict=True)]
    rest = [("─" * (width - used), "$track")] if used < width else []
    return Content.assemble(*filled, *rest)


def legend(seconds: Mapping[str, float] | None = None, *, names: Sequence[str] = PHASES) -> Content:
    """Name the phases in their colours, or those of `seconds` with their durations."""
    parts = ordered_phases(seconds) if seconds is not None else [(p, None) for p in names]
    spans: list[tuple[str, str]] = []
    for phase, value in parts:
        spans += [("■ ", phase_style(phase)), (clean(phase, num_max=16), "$dim")]
        spans.append((f" {value:.2f}s  " if value is not None else "  ", "$text-plain"))
    return Content.assemble(*spans)


def spark(values: Sequence[float], width: int, style: str = "$primary") -> Content:
    """Draw the last `width` values as a line of blocks from their minimum to their maximum."""
    recent = [value for value in values if finite(value) is not None][-width:]
    if not recent:
        return Content("")
    low, high = min(recent), max(recent)
    span = high - low or 1.0
    text = "".join(_SPARKS[min(7, int((value - low) / span * 8))] for value in recent)
    return Content.assemble((text, style))
