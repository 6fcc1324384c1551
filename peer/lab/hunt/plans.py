"""Plans of simulated runs, as plain data: the run's settings, and faults by the second.

`draw` is a pure function of the seed. A plan can lose faults and minutes, and is then still a plan:
that is how a failing one shrinks.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

FaultKind = Literal[
    "kill",  # SIGKILL of a machine's process, for a while
    "power",  # loss of power: what was not synced is lost in part
    "crash",  # the same in the middle of a change of the disk
    "wipe",  # the machine comes back with an empty disk
    "freeze",  # SIGSTOP, for a while
    "cut",  # nothing passes between two machines, for a while
    "part",  # or between two groups
    "reset",  # connections of two machines break
    "slow",  # a thin uplink, for a while
    "loss",  # lost packets between two machines, for a while
    "full",  # a full disk, until the process has been started again
    "rot",  # a byte of a stored update or snapshot changes
    "clock",  # a clock jumps
    "away",  # the coordinator is away: seconds to hours
    "lone",  # all trainers but one die
    "leave",  # a trainer leaves cleanly, and is back later
    "join",  # one more trainer
    "evict",  # the organiser puts a trainer out
    "pause",  # the organiser pauses the run, for a while
    "stop",  # or ends it after a round; mostly with a change of mind
    "set",  # or changes a number
    "oust",  # or evicts a peer, for a while
    "forge",  # a peer is given an order under another key
    "repeat",  # or all orders again
    "rival",  # or one that has the number of the organiser's next one
    "lost",  # the coordinator's machine is lost; another begins with its newest copy
    "uncopied",  # nothing more can be copied, for a while, in the middle of a copy
    "twin",  # another coordinator begins with the newest copy, and the first runs on, out of reach
    "commit",  # a peer that commits an exchange by gossip loses its partner, or ends, just then
]

KINDS: dict[FaultKind, float] = {
    "kill": 4,
    "power": 3,
    "crash": 3,
    "wipe": 1,
    "freeze": 2,
    "cut": 3,
    "part": 2,
    "reset": 2,
    "slow": 1,
    "loss": 1,
    "full": 1,
    "rot": 2,
    "clock": 1,
    "away": 2,
    "lone": 1,
    "leave": 1,
    "join": 1,
    "evict": 0.3,
}
"""The frequency of each, relative to the others."""

ORDERS: dict[FaultKind, float] = {
    "pause": 3,
    "stop": 0.7,
    "set": 4,
    "oust": 1.5,
    "forge": 1,
    "repeat": 1,
    "rival": 1,
}
"""The same of what comes beside faults in half of the runs that have a log."""

COPIES: dict[FaultKind, float] = {"lost": 2, "uncopied": 1}
"""The same in a third of the runs, whose coordinators keep copies."""

TWINS: dict[FaultKind, float] = {"twin": 1}
"""The same in half of those."""

COMMITS: dict[FaultKind, float] = {"commit": 1}
"""The same in half of the runs by gossip: by chance, faults hardly ever hit a commit on its way."""

LASTS_S = (0.5, 2.0, 5.0, 20.0, 70.0, 200.0)
AWAY_S = (20.0, 200.0, 900.0, 7200.0)


@dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """One thing that goes wrong."""

    at_s: float
    kind: FaultKind
    who: int
    """Number of a machine, modulo how many there are."""
    other: int
    lasts_s: float
    amount: float
    """In [0, 1): how much, whatever the kind makes of it."""

    def __str__(self) -> str:
        return f"{self.at_s:8.1f} s  {self.kind:6} {self.who} {self.other} for {self.lasts_s:g} s"


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run and what happens in it."""

    seed: int
    method: str
    codec: str
    trainers: int
    keepers: int
    step_s: float
    latency_s: float
    jitter_s: float
    longest_job_s: float
    admission_hours: float
    snapshot_every: int
    lasts_s: float
    """Seconds until everything heals."""
    faults: tuple[PlannedFault, ...]
    units: int = 0
    """The number of units of a pass, in a run with `data.once`; 0 in another."""
    copies: bool = False
    """whether the coordinator keeps copies"""

    def without(self, gone: range) -> RunPlan:
        """Return the plan without some of its faults."""
        kept = tuple(f for index, f in enumerate(self.faults) if index not in gone)
        return replace(self, faults=kept)

    def shortened(self) -> RunPlan:
        """Return the plan, healed soon after its last fault."""
        last_s = max((f.at_s for f in self.faults), default=0.0)
        return replace(self, lasts_s=min(self.lasts_s, last_s + 5.0))


METHODS = (
    ("diloco", "fp32"),
    ("diloco", "int8"),
    ("diloco", "int8"),
    ("diloco(count=3,tau=2)", "int8"),
    ("noloco", "fp32"),
)


def draw(seed: int, *, minutes: float | None = None) -> RunPlan:
    """Return the plan of a seed; `minutes` replaces how long it lasts."""
    chance = random.Random(f"plan {seed}")
    method, codec = chance.choice(METHODS)
    keepers = chance.choice([0, 0, 0, 1, 3]) if method != "noloco" else 0
    step_s = chance.choice([0.5, 1.0, 2.0])
    lasts_s = 60 * (minutes or chance.choice([1.0, 2.0, 4.0]))
    every_s = chance.choice([4.0, 10.0, 30.0])
    since_s = 8 * step_s + 5
    faults = _faults(chance, KINDS, since_s, lasts_s, every_s)
    ordering = random.Random(f"orders {seed}")  # of its own: faults are those without orders
    if method != "noloco" and ordering.random() < 0.5:
        every_s = ordering.choice([5.0, 15.0, 40.0])
        faults += _faults(ordering, ORDERS, since_s, lasts_s, every_s)
    counting = random.Random(f"units {seed}")  # likewise
    may_count = method == "diloco" and not keepers
    units = counting.choice([0, 0, 30, 300]) if may_count else 0
    copying = random.Random(f"copies {seed}")
    copies = copying.random() < 1 / 3
    if copies:
        faults += _faults(copying, COPIES, since_s, lasts_s, copying.choice([20.0, 60.0]))
    # Large models: going back, or to a snapshot, takes long enough for others to look meanwhile.
    slow_job_s = random.Random(f"jobs {seed}").choice([0.0, 0.0, 0.0, 0.0, 4.0])
    twinning = random.Random(f"twins {seed}")
    if copies and twinning.random() < 0.5:
        faults += _faults(twinning, TWINS, since_s, lasts_s, twinning.choice([30.0, 90.0]))
    aiming = random.Random(f"aims {seed}")
    if method == "noloco" and aiming.random() < 0.5:
        faults += _faults(aiming, COMMITS, since_s, lasts_s, aiming.choice([5.0, 20.0]))
    return RunPlan(
        seed=seed,
        method=method,
        codec=codec,
        trainers=chance.choice([2, 3, 3, 4]),
        keepers=keepers,
        step_s=step_s,
        latency_s=chance.choice([0.002, 0.025, 0.15]),
        jitter_s=chance.choice([0.0, 0.01, 0.1]),
        longest_job_s=max(slow_job_s, chance.choice([0.001, 0.05, 0.4])),
        admission_hours=chance.choice([0.01, 168.0]),
        snapshot_every=chance.choice([2, 4]),
        lasts_s=lasts_s,
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        units=units,
        copies=copies,
    )


def _faults(
    chance: random.Random,
    kinds: Mapping[FaultKind, float],
    since_s: float,
    until_s: float,
    every_s: float,
) -> list[PlannedFault]:
    faults, at_s, names, weights = [], since_s, tuple(kinds), tuple(kinds.values())
    while (at_s := at_s + chance.expovariate(1 / every_s)) < until_s:
        kind = chance.choices(names, weights)[0]
        faults.append(
            PlannedFault(
                at_s=round(at_s, 1),
                kind=kind,
                who=chance.randrange(1000),
                other=chance.randrange(1000),
                lasts_s=chance.choice(AWAY_S if kind == "away" else LASTS_S),
                amount=chance.random(),
            )
        )
    return faults
