"""Placement: the one peer that moves to another stage.

Every peer announces its stage and its throughput, and every peer computes the same decision from
the same announcements. The peer that the decision names moves; nobody orders it to.

**Level.** Samples per second that the peers of a stage can pass through it together. The run is as
fast as its lowest level. Records are added in the order of their PeerIDs: floating-point sums
depend on the order, and a decision must not (Petals, `block_selection.py`, does the same). Apart
from sums there are products, quotients and comparisons alone, which IEEE 754 rounds alike
everywhere.

**Gain.** A peer moves from a stage with more to the lowest one. The gain is the rise of the lower
level of the two, net of what the download costs. It has to be above `GAIN` times the mover's own
throughput where it goes. Measured against the throughput of the whole run, a gain of 25% would be
out of reach wherever a stage has more than five peers, and a run of hundreds
would never move anybody. Of the peers whose moves are worth it, one that gains most is named.

A move raises the lower of two levels and touches no third, so the sorted levels rise in
lexicographic order. They cannot come back to what they were: without churn, moves end, and no move
undoes another. If several stages are equally low, each gets its mover in turn.

**One at a time.** While a mover is on its way, no other peer is named, and a decision counts once
two looks at least `CONFIRM_S` apart agree on it (`Confirmed`). Petals' servers decided alone and at
once, and went back and forth (its issue 389). SWARM (arXiv:2301.11913) moves the peer with the
smallest queue of the least loaded stage to the most loaded one every T seconds, whether the run
gains or not.

**A vacant stage** stops the run. It is filled at once, without confirmation or cooldown, by the
peer with which the run computes most afterwards, its download counted.

No move takes the last serving peer of a stage.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

GAIN = 0.25
"""Least net gain of a move, as a share of the mover's work. Measured throughputs scatter by a
tenth or so, and a stage's sum by less than half of one of its peers."""

# How long a better assignment stays better, on average: until peers come or go at one of the two
# stages. Preemptible instances live for hours and a stage has several peers.
HORIZON_S = 1800.0

LOOK_S = 300.0  # between two looks of a peer at the view while nothing is out of balance
# Between a look that finds a move and the one that confirms it. A record takes seconds to be read
# by others, so two peers that decide at once see one another before they move.
CONFIRM_S = 30.0
PEER_COOLDOWN_S = 900.0  # after its arrival, in which a mover moves no more: three looks
STAGE_COOLDOWN_S = 60.0  # after an arrival, until the mover's throughput there has been measured
SWITCH_S = 20.0  # of a move beyond its download: draining, the self-test, and being found

# Movers whose gains are as near as this to the best are equally good, and a hash chooses: the last
# digit of a measured throughput does not change who is named from one look to the next.
ALIKE = 0.9

MAX_RATE = 1e12  # of samples or Mbit/s a second; sums of such stay finite

PATIENCE_LOOKS = 3  # periods for which a named peer may fail to move before it is passed over


class Duty(Enum):
    """A peer's activity at the stage of its record."""

    SERVING = "serving"
    MOVING = "moving"
    """Fetching the stage's state; it serves soon. Newcomers begin with this."""
    LEAVING = "leaving"
    """Draining before it stops; it counts nowhere."""


@dataclass(frozen=True, kw_only=True)
class StageNeeds:
    """A stage's needs, by the run's spec."""

    cost: float
    """Work per sample, relative to the other stages."""
    state_bytes: int
    """Bytes that a peer downloads before it can serve the stage."""
    device_bytes: int
    """Memory of a device that serves the stage."""

    def __post_init__(self) -> None:
        if not (self.cost > 0 and math.isfinite(self.cost)):
            raise ValueError(f"expected a positive cost of a stage, got {self.cost}")


@dataclass(frozen=True, kw_only=True)
class PlaceRecord:
    """A peer's announcement about itself."""

    peer_id: str
    incarnation: str
    stage: int
    """The stage that it serves, moves to, or leaves."""
    duty: Duty = Duty.SERVING
    samples_per_s: float | None
    """What it can do at `stage`, from the seconds that a sample takes it; None before it was
    measured. The rate at which samples came would show a stage in excess as a slow one."""
    download_mbit_s: float
    """Measured; 0 if unknown."""
    device_bytes: int
    came_from: int | None = None
    """The stage that it left, from its departure until `STAGE_COOLDOWN_S` after its arrival."""
    is_rested: bool = True
    """False from a move's departure until `PEER_COOLDOWN_S` after its arrival."""

    def __post_init__(self) -> None:
        """Refuse numbers that no honest peer announces.

        Raises:
            ValueError: a rate is negative, absurd or not finite; the record counts for nobody.
        """
        for rate in (self.samples_per_s or 0.0, self.download_mbit_s):
            if not 0 <= rate <= MAX_RATE:
                raise ValueError(
                    f"expected a rate up to {MAX_RATE:g} from {self.peer_id}, got {rate}"
                )


@dataclass(frozen=True, kw_only=True)
class PlacementView:
    """The stages, and what their live peers announce. The order of records is of no account.

    Records of stages that the run does not have are left out.
    """

    stages: tuple[StageNeeds, ...]
    peers: tuple[PlaceRecord, ...]

    def __post_init__(self) -> None:
        known = (peer for peer in self.peers if 0 <= peer.stage < len(self.stages))
        in_order = tuple(sorted(known, key=lambda peer: (peer.peer_id, peer.incarnation)))
        object.__setattr__(self, "peers", in_order)

    @cached_property
    def mover(self) -> PlaceRecord | None:
        """The first peer on its way from one stage to another; newcomers come from none."""
        on_their_way = (p for p in self.peers if p.duty is Duty.MOVING and p.came_from is not None)
        return next(on_their_way, None)


@dataclass(frozen=True, kw_only=True)
class Move:
    """One peer goes from one stage to another."""

    peer_id: str
    incarnation: str
    source: int
    target: int
    fills: bool
    """True if the target has no live peer."""
    gain: float = field(compare=False)
    """Samples per second, net of the download: by which the lower of the two stages rises, or, if
    the target is vacant, of the run with it."""


def levels(view: PlacementView) -> tuple[float, ...]:
    """Return the samples per second through each stage, those on their way to it included."""
    return tuple(_Balance(view).levels)


def move_s(peer: PlaceRecord, needs: StageNeeds) -> float:
    """Return the seconds for which a peer does not work when it moves to a stage.

    A rate of 0 is unknown and counts as endless: the peer is then a mover of last resort.
    """
    if not peer.download_mbit_s:
        return math.inf
    return SWITCH_S + needs.state_bytes * 8e-6 / peer.download_mbit_s


def decide(view: PlacementView, passed_over: Collection[tuple[str, str]] = ()) -> Move | None:
    """Return the one move that the run needs now, or None. All who see the same decide the same.

    Args:
        view: what is announced.
        passed_over: PeerID and incarnation of peers that were named and did not move.
    """
    balance = _Balance(view, passed_over)
    vacant = balance.vacant
    if vacant:
        return _filling(balance, vacant[0])
    if view.mover is not None:
        return None
    return _balancing(balance)


def departing(peer: PlaceRecord, move: Move, stages: Sequence[StageNeeds]) -> PlaceRecord:
    """Return what a peer announces as it sets out; on arrival it announces the duty SERVING."""
    rate = peer.samples_per_s
    return replace(
        peer,
        stage=move.target,
        duty=Duty.MOVING,
        came_from=move.source,
        is_rested=False,
        samples_per_s=rate and rate * stages[move.source].cost / stages[move.target].cost,
    )


def next_look_s(view: PlacementView, move: Move | None, period_s: float = LOOK_S) -> float:
    """Return the seconds until a peer looks again: soon while anybody is to move or moves."""
    is_calm = move is None and view.mover is None
    return period_s if is_calm else min(CONFIRM_S, period_s)


class Confirmed:
    """One peer's memory of decisions: a move counts at the second look that agrees.

    A peer that is named and stays is passed over after a while. Otherwise it would be named for
    ever, and nobody else would move.
    """

    def __init__(self, period_s: float = LOOK_S) -> None:
        """`period_s` is the time between two looks of a peer while the run is in balance."""
        self._patience_s = PATIENCE_LOOKS * period_s + CONFIRM_S
        self._move: Move | None = None
        self._since_s = 0.0
        self._passed_over: set[tuple[str, str]] = set()

    @property
    def passed_over(self) -> frozenset[tuple[str, str]]:
        """PeerID and incarnation of peers that `decide` leaves out."""
        return frozenset(self._passed_over)

    def look(self, move: Move | None, now_s: float) -> Move | None:
        """Return the move if it is to be made now.

        Args:
            move: what `decide` returned.
            now_s: the time on this peer's clock.
        """
        if move != self._move:
            self._move, self._since_s = move, now_s
        if move is None:
            return None
        stood_s = now_s - self._since_s
        if stood_s >= (2 * CONFIRM_S if move.fills else self._patience_s):
            self._passed_over.add((move.peer_id, move.incarnation))
            self._move = None
            return None
        return move if move.fills or stood_s >= CONFIRM_S else None


class _Balance:
    """The quantities that follow from a view before anything is decided."""

    def __init__(self, view: PlacementView, passed_over: Collection[tuple[str, str]] = ()) -> None:
        self.stages = view.stages
        self.levels = [0.0] * len(view.stages)
        self.serving = [0] * len(view.stages)
        self.staying = {p.came_from for p in view.peers if p.came_from is not None}
        """Stages that somebody has just left: nobody moves there."""
        self.keeping = {p.stage for p in view.peers if p.came_from is not None}
        """Stages that somebody has just come to, or is coming to: nobody moves from there."""
        self._usual = _usual_speed(view)
        live = [0] * len(view.stages)
        candidates = []
        for peer in view.peers:
            if peer.duty is Duty.LEAVING:
                continue
            live[peer.stage] += 1
            self.levels[peer.stage] += self.rate(peer, peer.stage)
            if peer.duty is Duty.SERVING:
                self.serving[peer.stage] += 1
                if (peer.peer_id, peer.incarnation) not in passed_over:
                    candidates.append(peer)
        self.vacant = [stage for stage, count in enumerate(live) if not count]
        self._candidates = candidates

    def rate(self, peer: PlaceRecord, stage: int) -> float:
        """Return the samples per second of a peer at a stage, scaled by the stages' costs."""
        if peer.samples_per_s is None:
            return self._usual / self.stages[stage].cost
        return peer.samples_per_s * self.stages[peer.stage].cost / self.stages[stage].cost

    def movers(self, target: int) -> Iterable[PlaceRecord]:
        """Return the peers that can serve a stage and whose own one has another to serve it."""
        needed_bytes = self.stages[target].device_bytes
        return (
            peer
            for peer in self._candidates
            if peer.stage != target
            and self.serving[peer.stage] > 1
            and peer.device_bytes >= needed_bytes
        )


def _usual_speed(view: PlacementView) -> float:
    """Return the work per second that stands for peers that have not been measured."""
    speeds = [
        peer.samples_per_s * view.stages[peer.stage].cost
        for peer in view.peers
        if peer.samples_per_s is not None
    ]
    return statistics.median_low(speeds) if speeds else 1.0


def _lasting(seconds: float) -> float:
    """Return the share of the horizon that is left after a move of so many seconds.

    If a move takes D seconds on average and the next change comes after H, both without memory, it
    ends before that change with the probability H / (H + D).
    """
    return HORIZON_S / (HORIZON_S + seconds)


def _filling(balance: _Balance, target: int) -> Move | None:
    """Return the move to a vacant stage with which the run computes most afterwards."""

    def gain(peer: PlaceRecord) -> float:
        after = balance.levels.copy()
        after[peer.stage] -= balance.rate(peer, peer.stage)
        after[target] = balance.rate(peer, target)
        others = [stage for stage in balance.vacant if stage != target]
        run = min(level for stage, level in enumerate(after) if stage not in others)
        return run * _lasting(move_s(peer, balance.stages[target]))

    gains = [(gain(peer), peer) for peer in balance.movers(target)]
    return _best(gains, target, fills=True, alike=1.0)


def _balancing(balance: _Balance) -> Move | None:
    """Return the move to one of the lowest stages that is worth it, or None."""
    lowest = min(balance.levels)
    for target, level in enumerate(balance.levels):
        if level > lowest or target in balance.staying:
            continue
        movers = [
            peer
            for peer in balance.movers(target)
            if peer.is_rested and peer.samples_per_s and peer.stage not in balance.keeping
        ]
        gains = [(_rise(balance, peer, target), peer) for peer in movers]
        worth = [(rise, peer) for rise, peer in gains if rise > GAIN * balance.rate(peer, target)]
        move = _best(worth, target)
        if move is not None:
            return move
    return None


def _rise(balance: _Balance, peer: PlaceRecord, target: int) -> float:
    """Return by how much the lower of two stages rises with a move, net of its download."""
    level = balance.levels[target]
    left = balance.levels[peer.stage] - balance.rate(peer, peer.stage)
    meanwhile, after = min(left, level), min(left, level + balance.rate(peer, target))
    lasting = _lasting(move_s(peer, balance.stages[target]))
    return meanwhile * (1 - lasting) + after * lasting - level


def _best(
    gains: Sequence[tuple[float, PlaceRecord]],
    target: int,
    *,
    fills: bool = False,
    alike: float = ALIKE,
) -> Move | None:
    """Return the move of one of the peers that gain most, chosen by hash; None of none."""
    if not gains:
        return None
    best = max(gain for gain, _ in gains)
    as_good = [(gain, peer) for gain, peer in gains if gain >= alike * best]
    gain, peer = min(as_good, key=lambda each: _lot(each[1], target))
    return Move(
        peer_id=peer.peer_id,
        incarnation=peer.incarnation,
        source=peer.stage,
        target=target,
        fills=fills,
        gain=gain,
    )


def _lot(peer: PlaceRecord, target: int) -> bytes:
    """Return the lot that a peer draws; the least of all moves."""
    words = (peer.peer_id, peer.incarnation, str(peer.stage), str(target))
    return hashlib.sha256("|".join(words).encode()).digest()
