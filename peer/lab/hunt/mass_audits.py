"""The rule of gossip: mass, and what it carries, is conserved (docs/protocol.md, part 11).

A peer has weights x, a momentum m and a mass w. With the share mu of the momentum that is kept,
z = x + mu / (1 - mu) m is where it goes if it learns nothing more. Whatever breaks, and whoever
dies in the middle,

    begin       a process has mass only with the run's first state
    alone       w stays; z moves by -lr / (1 - mu) u, where u is what the window learned
    exchange    counts at both ends or at neither. w1 + w2 stays; w1 z1 + w2 z2 moves by
                -lr / (1 - mu) (w1 + w2) u, where u is the mean of both windows, by their weights
    between     neither w nor x nor m changes
    loss        a process that ends takes its mass with it. One that cannot learn whether its
                partner has committed goes on with mass 0; nobody else loses any

The partner that commits first settles what the other owes: what is left of both sums. So what is
counted twice shows at the first commit, or at the next move of the other.

Vectors are taken as they are, not as a codec leaves them, so the rule is exact for fp32 alone.

# N parameters
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.optim.state.outer_state import OuterState
from atoll.peer.gossip.meeting import GossipWindow, OwnSide

CLOSE = 1e-4  # of one exchange in fp32, of values around 1
WEIGHT_CAP = 4.0  # times the lighter of two windows that weigh something
RULE = "gossip conserves mass"

Process = tuple[str, int]
"""A machine's name, and the number of its start."""
Fail = Callable[[str, str], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldMass:
    """What a process holds between two moves."""

    mass: float
    z_N: Tensor  # noqa: N815
    """float64"""

    @property
    def moment_N(self) -> Tensor:  # noqa: N802
        """Return what it adds to the sum over all."""
        return self.mass * self.z_N


@dataclass(frozen=True, kw_only=True, eq=False)
class OfferedMass:
    """One side of an exchange that has sent and received everything."""

    process: Process
    exchange: bytes
    held: HeldMass
    delta_N: Tensor  # noqa: N815
    weight: float
    after: OuterState
    """The state that it commits to."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Owed:
    """What one side of an exchange must hold once it has committed, as the other has."""

    exchange: bytes
    mass: float
    moment_N: Tensor  # noqa: N815


class MassAudit:
    """The masses of all peers of a run by gossip."""

    def __init__(self, scalars: tuple[float, float], genesis: OuterState, fail: Fail) -> None:
        """Begin a run with learning rate and momentum of its outer step, at its first state."""
        self._lr, self._mu = scalars
        self._genesis = genesis
        self._fail = fail
        self._held: dict[Process, HeldMass] = {}
        self._offered: dict[Process, OfferedMass] = {}
        """The exchange that each process may commit next."""
        self._owed: dict[Process, Owed] = {}
        self._sides: Counter[bytes] = Counter()
        """How many ends of each exchange have computed a result."""
        self.num_exchanges = 0
        """Exchanges that both ends have committed."""

    # What a process does

    def begun(self, process: Process, state: OuterState, mass: float) -> None:
        """Take what a process begins with; earlier ones of its machine are gone."""
        for book in (self._held, self._offered, self._owed):
            _forget(book, process[0])
        if mass and not _is_same(state, self._genesis):
            self._broken(process, f"begins with mass {mass} at the state of round {state.position}")
        self._held[process] = self._holding(state, mass)

    def offered(self, process: Process, exchange: bytes, side: OwnSide, after: OuterState) -> None:
        """Take an exchange whose result a process has computed, and not committed."""
        self._sides[exchange] += 1
        self._offered[process] = OfferedMass(
            process=process,
            exchange=exchange,
            held=self._expect_held(process, side.state, side.mass),
            delta_N=side.window.delta_N.double(),
            weight=side.window.weight,
            after=after,
        )

    def moved(
        self,
        process: Process,
        before: tuple[OuterState, float],
        after: tuple[OuterState, float],
        window: GossipWindow | None,
    ) -> None:
        """Take another state of a process, and its mass; without a window, one that was saved."""
        held, now = self._expect_held(process, *before), self._holding(*after)
        offered = self._offered.pop(process, None)
        if offered is not None and offered.after is after[0]:
            self._expect_met(offered, now)
        elif window is None:
            self._expect_saved(process, now)
        else:
            self._expect_alone(process, held, now, window)
        self._held[process] = now

    def gave_up(self, process: Process, state: OuterState, mass: float) -> None:
        """Take that a process cannot learn the outcome of an exchange, and drops its mass."""
        if mass or process not in self._offered:
            self._broken(process, f"gives up an exchange, and has mass {mass}")
        self._offered.pop(process, None)
        self._owed.pop(process, None)
        self._held[process] = self._holding(state, mass)

    def look(self, process: Process, mass: float) -> None:
        """Look at a process between its moves."""
        held = self._held.get(process)
        if held is not None and mass != held.mass:
            self._broken(process, f"has mass {mass} between two moves, and had {held.mass}")

    # The sums

    @property
    def _step(self) -> float:
        return self._lr / (1 - self._mu)

    def _holding(self, state: OuterState, mass: float) -> HeldMass:
        ahead = self._mu / (1 - self._mu)
        return HeldMass(mass=mass, z_N=state.params_N.double() + ahead * state.momentum_N.double())

    def _expect_held(self, process: Process, state: OuterState, mass: float) -> HeldMass:
        """Return what a process holds, which must be what it held after its last move."""
        held, now = self._held[process], self._holding(state, mass)
        if mass != held.mass or not torch.equal(now.z_N, held.z_N):
            self._broken(process, f"changed between two moves: mass {held.mass} became {mass}")
        return now

    def _expect_saved(self, process: Process, now: HeldMass) -> None:
        if now.mass:
            self._broken(process, f"takes over a saved state with mass {now.mass}")

    def _expect_alone(
        self, process: Process, held: HeldMass, now: HeldMass, window: GossipWindow
    ) -> None:
        if self._owed.pop(process, None) is not None:
            self._broken(process, "goes on as if an exchange that its partner counts had not been")
        learned_N = window.delta_N.double() if window.weight else torch.zeros_like(held.z_N)
        wrong = _distance(now.z_N, held.z_N - self._step * learned_N)
        if now.mass != held.mass or wrong > CLOSE:
            self._broken(process, f"alone, has mass {now.mass}, not {held.mass}; {wrong:.5f} off")

    def _expect_met(self, mine: OfferedMass, now: HeldMass) -> None:
        owed = self._owed.pop(mine.process, None)
        if owed is None:
            self._settle_first(mine, now)
        elif owed.exchange != mine.exchange:
            self._broken(mine.process, "commits an exchange, and its partner another")
        else:
            self.num_exchanges += 1
            self._expect_owed(mine.process, owed, now)

    def _settle_first(self, mine: OfferedMass, now: HeldMass) -> None:
        """Leave to the other end what is left of both sums."""
        if self._sides[mine.exchange] != 2:
            self._broken(mine.process, "commits an exchange that its partner cannot commit")
        for other in [o for o in self._offered.values() if o.exchange == mine.exchange]:
            total = mine.held.mass + other.held.mass
            moved_N = self._step * total * _mean(mine, other)
            self._owed[other.process] = Owed(
                exchange=mine.exchange,
                mass=total - now.mass,
                moment_N=mine.held.moment_N + other.held.moment_N - moved_N - now.moment_N,
            )

    def _expect_owed(self, process: Process, owed: Owed, now: HeldMass) -> None:
        wrong = _distance(now.moment_N, owed.moment_N)
        if abs(now.mass - owed.mass) > CLOSE or wrong > CLOSE * (1 + float(now.z_N.abs().max())):
            self._broken(
                process,
                f"after an exchange has mass {now.mass:.5f}, not {owed.mass:.5f}; the sum over "
                f"both has moved by {wrong:.5f}",
            )

    def _broken(self, process: Process, text: str) -> None:
        self._fail(RULE, f"{process[0]} {text}")


def _forget(book: dict[Process, Any], name: str) -> None:
    for process in [each for each in book if each[0] == name]:
        del book[process]


def _mean(one: OfferedMass, other: OfferedMass) -> Tensor:
    """Return the mean of what two windows have learned, by their weights."""
    positive = [each.weight for each in (one, other) if each.weight > 0]
    if not positive:
        return torch.zeros_like(one.delta_N)
    first, second = (min(each.weight, WEIGHT_CAP * min(positive)) for each in (one, other))
    return (first * one.delta_N + second * other.delta_N) / (first + second)


def _distance(a_N: Tensor, b_N: Tensor) -> float:
    return float((a_N - b_N).abs().max())


def _is_same(state: OuterState, other: OuterState) -> bool:
    return torch.equal(state.params_N, other.params_N) and torch.equal(
        state.memory_M, other.memory_M
    )
