"""Rows of `scripts/bench_attacks.py`, which are alike in memory and with real processes."""

import math
import resource
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of a run."""

    rate: float
    """rounds per minute of the slowest honest peer"""
    longest_s: float
    """without a round"""


@dataclass(kw_only=True)
class Progress:
    """Positions over time, as somebody looks at them."""

    began_s: float
    first: int
    at: int = field(init=False)
    since_s: float = field(init=False)
    now_s: float = field(init=False)
    longest_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.at, self.since_s, self.now_s = self.first, self.began_s, self.began_s

    def note(self, now_s: float, position: int) -> None:
        """Take what was seen at a time."""
        self.now_s = now_s
        self.longest_s = max(self.longest_s, now_s - self.since_s)
        if position > self.at:
            self.at, self.since_s = position, now_s

    def phase(self) -> Phase:
        """Return what was seen so far."""
        rate = 60 * (self.at - self.first) / max(self.now_s - self.began_s, 1e-9)
        return Phase(rate=rate, longest_s=self.longest_s)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One attack on a run."""

    attack: str
    what: str
    stranger: bool
    """whether the attacker has no admission; else it is one member of four"""
    before: float
    """rounds per minute"""
    during: float
    after: float
    longest_s: float
    """between two rounds during the attack"""
    deadline_s: float
    """of a member with one leader; the target is two"""
    memory_mb: float
    """in memory: growth of the peak of the process with all peers, during the attack; real: of the
    coordinator's or of an honest peer's, whichever grew more"""
    cpu: float | None
    """CPU time of the process with all peers, during the attack over before; None: not measured"""
    out_s: float | None
    """until the honest peers left the attacker out; None: never"""
    saw: str = ""
    """what the attacker, or a newcomer, met"""


def row_of(
    attack: str,
    what: str,
    phases: Sequence[Phase],
    *,
    stranger: bool,
    deadline_s: float,
    memory_mb: float,
    cpu: float | None = None,
    out_s: float | None = None,
    saw: str = "",
) -> Row:
    """Return the row of an attack with its three phases."""
    before, during, after = phases
    return Row(
        attack=attack,
        what=what,
        stranger=stranger,
        before=before.rate,
        during=during.rate,
        after=after.rate,
        longest_s=during.longest_s,
        deadline_s=deadline_s,
        memory_mb=memory_mb,
        cpu=cpu,
        out_s=out_s,
        saw=saw,
    )


def missed(row: Row) -> list[str]:
    """Return the targets that an attack misses, in words."""
    wrong = []
    if row.longest_s > 2 * row.deadline_s:
        limit = f"two deadlines ({2 * row.deadline_s:.0f} s)"
        wrong.append(f"stops the run for {row.longest_s:.0f} s, more than {limit}")
    if row.stranger and row.during < row.before / 1.1:
        slower = math.inf if not row.during else row.before / row.during - 1
        wrong.append(f"rounds take {100 * slower:.0f}% longer, more than 10%")
    if row.memory_mb > 100:
        wrong.append(f"costs {row.memory_mb:.0f} MB, more than 100 MB")
    return wrong


def table(rows: Sequence[Row]) -> str:
    """Return rows as Markdown."""
    lines = [
        "| attack | | before | during | after | longest, s | memory, MB | CPU | out, s "
        "| what it met | target |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        out = "n/a" if row.out_s is None else f"{row.out_s:.0f}"
        cpu = "n/a" if row.cpu is None else f"{row.cpu:.1f}x"
        target = "; ".join(missed(row)) or "met"
        lines.append(
            f"| {row.attack} | {row.what} | {row.before:.1f} | {row.during:.1f} | {row.after:.1f} "
            f"| {row.longest_s:.1f} | {row.memory_mb:.0f} | {cpu} | {out} | {row.saw} | {target} |"
        )
    return "\n".join(lines)


def counted(seen: Counter[str]) -> str:
    """Return what was seen how often, as one cell."""
    return ", ".join(f"{what} {count}x" for what, count in seen.most_common(3))


def peak_mb() -> float:
    """Return the most memory that this process ever held."""
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib * 1024 / MIB if sys.platform != "darwin" else kib / MIB
