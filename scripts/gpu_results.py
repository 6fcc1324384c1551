"""Keep the results of `scripts/gpu` after each step, and show them as a page.

The file is replaced at once and as a whole, so an interruption loses at most the step under way.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Facts = dict[str, Any]

MARKS = ("<!-- rows of gpu.json -->", "<!-- end of rows -->")
NOTHING = "Not measured yet: no GPU was at hand."


@dataclass(frozen=True, kw_only=True)
class Check:
    """Something that must hold."""

    name: str
    got: str
    expected: str
    is_met: bool
    is_speed: bool = False
    """whether it says nothing about a tiny size on a CPU"""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The outcome of one step, or of a part of it."""

    rows: list[Facts]
    checks: list[Check] = field(default_factory=list)
    is_complete: bool = True
    """False if time was over before the end; the step continues next time"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One step on one device at one commit."""

    step: str
    device: str
    commit: str
    date: str
    seconds: float | None
    """None if the rows were copied from what was printed"""
    rows: list[Facts]
    checks: list[Facts]
    is_complete: bool

    @property
    def missed(self) -> list[str]:
        """Return the checks that do not hold; those of speed hold for a dry run."""
        return [
            f"{check['name']}: {check['got']}, expected {check['expected']}"
            for check in self.checks
            if not check["is_met"]
        ]


class Kept:
    """Outcomes in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def all(self) -> list[Outcome]:
        """Return what was kept, oldest first."""
        if not self.path.exists():
            return []
        return [Outcome(**each) for each in json.loads(self.path.read_text())]

    def of(self, commit: str, device: str) -> dict[str, Outcome]:
        """Return what was kept of a commit and a device, by step."""
        return {o.step: o for o in self.all() if (o.commit, o.device) == (commit, device)}

    def keep(self, new: Outcome) -> None:
        """Add an outcome, in the place of an earlier one of its step, device and commit."""
        key = (new.step, new.device, new.commit)
        others = [o for o in self.all() if (o.step, o.device, o.commit) != key]
        store(self.path, [*others, new])


def store(path: Path, outcomes: list[Outcome]) -> None:
    """Write outcomes to a file, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")
    os.replace(partial, path)


# --- as text


def shown(value: object) -> str:
    """Return a value of a row as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else str(value)


def table(rows: list[Facts]) -> list[str]:
    """Return rows as a Markdown table; each kind of row has its own columns."""
    lines: list[str] = []
    columns: list[str] = []
    for row in rows:
        if list(row) != columns:
            columns = list(row)
            lines += [""] if lines else []
            lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        cells = (f"`{v}`" if "(" in str(v) else shown(v) for v in row.values())
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def section(outcome: Outcome, title: str) -> list[str]:
    """Return the part of the page about one step."""
    where = f"{outcome.device}, {outcome.date}, commit {outcome.commit}"
    where += "" if outcome.seconds is None else f", {outcome.seconds:.0f} s"
    unfinished = "" if outcome.is_complete else "; not complete"
    missed = [f"- not met: {line}" for line in outcome.missed] or ["- all checks hold"]
    return [
        f"### {outcome.step}: {title}",
        "",
        f"{where}{unfinished}.",
        "",
        *table(outcome.rows),
        "",
        *(missed if outcome.checks else ["- nothing to check"]),
        "",
    ]


def page(text: str, outcomes: list[Outcome], titles: dict[str, str]) -> str:
    """Return a page with its rows replaced."""
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    newest = {outcome.step: outcome for outcome in outcomes}
    written = [
        line for step in titles if step in newest for line in section(newest[step], titles[step])
    ]
    inside = "\n".join(written).rstrip() or NOTHING
    return f"{before}{MARKS[0]}\n\n{inside}\n\n{MARKS[1]}{after}"
