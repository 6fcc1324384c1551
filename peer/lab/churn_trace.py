"""Playback of a trace of peers that come and go, to measure policies of placement.

A **trace** is a list of visits: who came when, left when, how fast it computes and downloads.
`synthetic` draws one from a seed; `read_trace` reads a recorded one from a CSV file with the header

    peer,joins_s,leaves_s,speed,download_mbit_s

in which times count from the trace's start, and speed is work per second: a peer does speed / cost
samples per second at a stage.

`Playback` plays a trace under a rule. The run computes the minimum over stages of the summed
throughput of the peers that serve them. A peer that joins, or moves, computes nothing while it
downloads. Announcements are late, deaths are noticed later still, and throughputs are announced
with an error. Each peer looks at a time of its own.

The **optimum** is an upper bound of the best assignment of the peers present, moves free and
instant. Let v be their speeds in descending order, c the stages' costs, and T the rate of any
assignment: each stage s has speeds that sum to c_s T or more. Cut each peer's speed to max(c) T:
still each stage has c_s T, since a stage with a peer that was cut has max(c) T by that peer alone.
So T sum(c) <= k max(c) T + sum(v[k:]) for every k, that is

    T <= sum(v[k:]) / (sum(c) - k max(c))       for every k with a positive denominator.

Besides, a stage needs at least as many peers as the fastest of all would be. If the stages need
more than there are, T is out of reach; with equal peers this bound is exact. Fewer peers than
stages do nothing. The bound ignores memory and the joiners' downloads, so a policy's share of it is
at most its share of the true optimum.
"""

from __future__ import annotations

import csv
import heapq
import io
import itertools
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Literal

from atoll.coordinator.policies import needs_most
from atoll.peer.pipeline.placement import (
    HORIZON_S,
    PEER_COOLDOWN_S,
    STAGE_COOLDOWN_S,
    Confirmed,
    Duty,
    Move,
    PlacementView,
    PlaceRecord,
    StageNeeds,
    decide,
    departing,
    levels,
    move_s,
    next_look_s,
)

LATE_S = 5.0  # from an announcement until others read it
NOTICED_S = 20.0  # from a death until no view has the peer: two missed answers and a record's end
REMEASURED_S = 3600.0  # between two announcements of a new measurement
SCATTER = 0.05  # standard deviation of an announced throughput, as a share of the true one
MAX_TRACE_BYTES = 1 << 26
BOUND_ERROR = 1e-6  # of the bound, upwards

Rule = Callable[[PlacementView], Move | None]
"""What a rule decides from a view."""

Newcomers = Literal["lowest", "anywhere"]


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One peer's stay in the run."""

    peer: str
    joins_s: float
    leaves_s: float
    speed: float
    """Work per second."""
    download_mbit_s: float


@dataclass(frozen=True, kw_only=True)
class Churn:
    """Parameters of a synthetic trace: preemptible instances in several zones."""

    hours: float = 32.0
    """As long as SWARM's trace."""
    peers: int
    """Mean number of peers; as many begin."""
    swing: float = 0.3
    """Swing of that number over a day, as a share of it."""
    lifetime_h: float = 6.0
    """Mean life of a peer that no burst ends."""
    zones: int = 4
    replaced: float = 1.0
    """Joins, as a share of those that keep the number of peers."""
    bursts_per_h: float = 0.25
    """Preemptions of many peers of one zone at the same moment."""
    burst_share: float = 0.5
    """Share of the zone's peers that a burst ends."""
    fastest: float = 4.0
    """Speeds are between 1 and this, evenly on a logarithmic scale."""
    mbit_s: tuple[float, float] = (50.0, 400.0)
    """Range of download rates, evenly on a logarithmic scale."""


def synthetic(churn: Churn, seed: int) -> tuple[Visit, ...]:
    """Draw a trace: equal parameters and seeds give equal traces."""
    rng = random.Random(f"churn trace {seed}")
    end_s = 3600 * churn.hours
    bursts = [
        (at_s, rng.randrange(churn.zones))
        for at_s in _arrivals(
            rng, lambda _: churn.bursts_per_h / 3600, churn.bursts_per_h / 3600, end_s
        )
    ]
    dies_per_s = (
        1 / churn.lifetime_h + churn.bursts_per_h * churn.burst_share / churn.zones
    ) / 3600
    replaced_per_s = churn.replaced * dies_per_s
    most = churn.peers * (1 + churn.swing) * replaced_per_s

    def joins_per_s(at_s: float) -> float:
        return churn.peers * (1 + churn.swing * math.sin(math.tau * at_s / 86400)) * replaced_per_s

    joins = [0.0] * churn.peers + _arrivals(rng, joins_per_s, most, end_s)
    return tuple(
        _visit(f"peer{number:05}", at_s, churn, bursts, rng) for number, at_s in enumerate(joins)
    )


def _arrivals(
    rng: random.Random, rate_per_s: Callable[[float], float], most: float, end_s: float
) -> list[float]:
    """Return the times of a Poisson process whose rate never exceeds `most`."""
    found, at_s = [], 0.0
    while most and (at_s := at_s + rng.expovariate(most)) < end_s:
        if rng.random() * most < rate_per_s(at_s):
            found.append(at_s)
    return found


def _visit(
    peer: str, joins_s: float, churn: Churn, bursts: list[tuple[float, int]], rng: random.Random
) -> Visit:
    zone = rng.randrange(churn.zones)
    leaves_s = joins_s + rng.expovariate(1 / (3600 * churn.lifetime_h))
    hits = (
        at_s
        for at_s, struck in bursts
        if struck == zone and joins_s < at_s < leaves_s and rng.random() < churn.burst_share
    )
    slowest_link, fastest_link = churn.mbit_s
    return Visit(
        peer=peer,
        joins_s=joins_s,
        leaves_s=min(next(hits, leaves_s), 3600 * churn.hours),
        speed=churn.fastest ** rng.random(),
        download_mbit_s=slowest_link * (fastest_link / slowest_link) ** rng.random(),
    )


def write_trace(visits: Sequence[Visit], path: Path) -> None:
    """Write a trace as CSV."""
    names = [field.name for field in fields(Visit)]
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(names)
    rows.writerows([getattr(visit, name) for name in names] for visit in visits)
    path.write_text(text.getvalue(), encoding="utf-8")


def read_trace(path: Path) -> tuple[Visit, ...]:
    """Read a trace.

    Raises:
        ValueError: the file is too large, or a line is no visit.
    """
    if path.stat().st_size > MAX_TRACE_BYTES:
        raise ValueError(f"{path}: expected a trace of at most {MAX_TRACE_BYTES:,} bytes")
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(
            _parsed(row, f"{path}, line {at}") for at, row in enumerate(csv.DictReader(file), 2)
        )


def _parsed(row: dict[str, str], place: str) -> Visit:
    try:
        visit = Visit(
            peer=row["peer"],
            joins_s=float(row["joins_s"]),
            leaves_s=float(row["leaves_s"]),
            speed=float(row["speed"]),
            download_mbit_s=float(row["download_mbit_s"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        names = ",".join(field.name for field in fields(Visit))
        raise ValueError(f"{place}: expected numbers for {names}") from error
    positive = (visit.speed, visit.download_mbit_s)
    if not (0 <= visit.joins_s < visit.leaves_s and all(0 < rate < math.inf for rate in positive)):
        raise ValueError(
            f"{place}: expected a stay of positive length, speed and rate, got {visit}"
        )
    return visit


def upper_bound(speeds: Sequence[float], costs: Sequence[float]) -> float:
    """Return a rate that no assignment of peers to stages exceeds; the module proves it."""
    if len(speeds) < len(costs):
        return 0.0
    fastest = list(itertools.accumulate(sorted(speeds, reverse=True), initial=0.0))
    total, dearest = sum(costs), max(costs)
    bound = min(
        (fastest[-1] - fastest[count]) / (total - count * dearest)
        for count in range(len(costs))
        if total > count * dearest
    )

    def takes(rate: float) -> int:
        return sum(bisect_left(fastest, cost * rate) for cost in costs)

    if takes(bound) <= len(speeds):
        return bound
    feasible, infeasible = 0.0, bound
    while infeasible - feasible > BOUND_ERROR * bound:
        middle = (feasible + infeasible) / 2
        if takes(middle) <= len(speeds):
            feasible = middle
        else:
            infeasible = middle
    return infeasible


def most_to_least(view: PlacementView) -> Move | None:
    """Return the move by SWARM's rule: the least loaded stage gives, the most loaded one gets.

    A stage's load per peer is the reciprocal of its level. Where peers are used in proportion to
    their throughput, the smallest queue is the slowest peer's.
    """
    at = levels(view)
    target = at.index(min(at))
    by_stage = [
        [p for p in view.peers if p.stage == stage and p.duty is Duty.SERVING]
        for stage in range(len(at))
    ]
    source = max(range(len(at)), key=lambda stage: (len(by_stage[stage]) > 1, at[stage]))
    if at[source] <= at[target] or len(by_stage[source]) < 2:
        return None
    mover = min(by_stage[source], key=lambda p: (p.samples_per_s or 0.0, p.peer_id))
    return Move(
        peer_id=mover.peer_id,
        incarnation=mover.incarnation,
        source=source,
        target=target,
        fills=False,
        gain=0.0,
    )


@dataclass(kw_only=True)
class Score:
    """The outcome of a replay; times in seconds."""

    samples: float = 0.0
    optimal_samples: float = 0.0
    """By the upper bound."""
    moves: int = 0
    fills: int = 0
    """Moves to vacant stages."""
    stopped_s: float = 0.0
    """In which a stage was not served although there were peers enough."""
    at_once: int = 0
    """Moves that began while another peer was on its way to a stage that was not vacant."""
    emptied: int = 0
    """Moves that left no serving peer behind."""
    looks: int = 0
    peer_s: float = 0.0
    """Sum of the peers' stays."""

    @property
    def share(self) -> float:
        """Samples, as a share of the optimum."""
        return self.samples / self.optimal_samples if self.optimal_samples else 0.0


@dataclass(eq=False, kw_only=True)
class _Actor:
    """A peer in the replay: what it does, and what it announces."""

    visit: Visit
    record: PlaceRecord
    confirmed: Confirmed


class Playback:
    """One trace under one rule. Subclasses decide when peers look."""

    def __init__(
        self,
        visits: Sequence[Visit],
        stages: tuple[StageNeeds, ...],
        *,
        seed: int,
        newcomers: Newcomers = "lowest",
        end_s: float = math.inf,
    ) -> None:
        """Prepare a replay.

        Args:
            visits: of the trace; those that begin at 0 serve from the first moment.
            stages: of the run; every device holds any of them.
            seed: of the measurements' errors and the times of looks.
            newcomers: go to the lowest stage, as in production, or to any.
            end_s: where the replay ends (default: with the last visit).
        """
        self.outcome = Score()
        self.now_s = 0.0
        self._stages, self._newcomers = stages, newcomers
        self._costs = [needs.cost for needs in stages]
        self._rng = random.Random(f"replay {seed}")
        self._end_s = min(end_s, max(visit.leaves_s for visit in visits))
        self._hosts: dict[str, _Actor] = {}
        self._records: dict[str, PlaceRecord] = {}
        self._view: PlacementView | None = None
        self._rate = self._bound = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        for visit in sorted(visits, key=lambda visit: (visit.joins_s, visit.peer)):
            self._at(visit.joins_s, partial(self._join, visit))

    def run(self) -> Score:
        """Play the trace to its end."""
        while self._events and self._events[0][0] < self._end_s:
            at_s, _, action = heapq.heappop(self._events)
            self._pass_until(at_s)
            action()
        self._pass_until(self._end_s)
        return self.outcome

    @property
    def view(self) -> PlacementView:
        """The view that everybody reads now."""
        if self._view is None:
            self._view = PlacementView(stages=self._stages, peers=tuple(self._records.values()))
        return self._view

    def look_first(self, host: _Actor) -> None:
        """Begin the looks of a peer that has joined."""

    def on_change(self) -> None:
        """React to a view that has changed."""

    def depart(self, host: _Actor, move: Move) -> None:
        """Let a peer begin its move."""
        took_s = move_s(host.record, self._stages[move.target])
        others = [
            h for h in self._hosts.values() if h.record.stage == move.source and h is not host
        ]
        outcome = self.outcome
        outcome.moves += 1
        outcome.fills += move.fills
        outcome.emptied += not any(other.record.duty is Duty.SERVING for other in others)
        outcome.at_once += not move.fills and any(
            h.record.duty is Duty.MOVING and h.record.came_from is not None
            for h in self._hosts.values()
        )
        self._announce(host, departing(host.record, move, self._stages))
        self._at(self.now_s + took_s, partial(self._arrive, host))

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), action))

    def _pass_until(self, at_s: float) -> None:
        passed_s = at_s - self.now_s
        outcome = self.outcome
        outcome.samples += passed_s * self._rate
        outcome.optimal_samples += passed_s * self._bound
        outcome.stopped_s += passed_s * (self._bound > 0 and self._rate == 0)
        outcome.peer_s += passed_s * len(self._hosts)
        self.now_s = at_s

    def _join(self, visit: Visit) -> None:
        is_first = visit.joins_s == 0
        record = PlaceRecord(
            peer_id=visit.peer,
            incarnation="1",
            stage=0,
            duty=Duty.MOVING,
            samples_per_s=None,
            download_mbit_s=visit.download_mbit_s,
            device_bytes=max(needs.device_bytes for needs in self._stages),
        )
        if self._newcomers == "lowest" or is_first:
            record = replace(record, stage=self._lowest())
        else:
            record = replace(record, stage=self._rng.randrange(len(self._stages)))
        host = _Actor(visit=visit, record=record, confirmed=self._new_confirmed())
        self._hosts[visit.peer] = host
        self._count()
        self._at(visit.leaves_s, partial(self._leave, host))
        if is_first:
            self._measure(host, Duty.SERVING, is_read_at_once=True)
            self._at(self.now_s + REMEASURED_S, partial(self._remeasure, host, record.stage))
        else:
            self._announce(host, record)
            took_s = move_s(record, self._stages[record.stage])
            self._at(self.now_s + took_s, partial(self._arrive, host))
        self.look_first(host)

    def _lowest(self) -> int:
        """Return the stage that the coordinator gives a newcomer."""
        rates: dict[str, list[float]] = {str(stage): [] for stage in range(len(self._stages))}
        for record in self._records.values():
            rates[str(record.stage)].append(record.samples_per_s or 0.0)
        return int(needs_most(rates))

    def _new_confirmed(self) -> Confirmed:
        return Confirmed()

    def _arrive(self, host: _Actor) -> None:
        if not self._is_here(host):
            return
        self._measure(host, Duty.SERVING)
        self._at(self.now_s + STAGE_COOLDOWN_S, partial(self._rest, host, host.record.stage))
        self._at(self.now_s + PEER_COOLDOWN_S, partial(self._rested, host, host.record.stage))
        self._at(self.now_s + REMEASURED_S, partial(self._remeasure, host, host.record.stage))

    def _leave(self, host: _Actor) -> None:
        del self._hosts[host.visit.peer]
        self._count()
        self._at(self.now_s + NOTICED_S, partial(self._forget, host))

    def _forget(self, host: _Actor) -> None:
        self._records.pop(host.visit.peer, None)
        self._changed()

    def _is_here(self, host: _Actor) -> bool:
        return self._hosts.get(host.visit.peer) is host

    def _serves(self, host: _Actor, stage: int) -> bool:
        record = host.record
        return self._is_here(host) and (record.stage, record.duty) == (stage, Duty.SERVING)

    def _rest(self, host: _Actor, stage: int) -> None:
        if self._serves(host, stage):
            self._announce(host, replace(host.record, came_from=None))

    def _rested(self, host: _Actor, stage: int) -> None:
        if self._serves(host, stage):
            self._announce(host, replace(host.record, is_rested=True))

    def _remeasure(self, host: _Actor, stage: int) -> None:
        if self._serves(host, stage):
            self._measure(host, Duty.SERVING)
            self._at(self.now_s + REMEASURED_S, partial(self._remeasure, host, stage))

    def _measure(self, host: _Actor, duty: Duty, *, is_read_at_once: bool = False) -> None:
        true = host.visit.speed / self._costs[host.record.stage]
        told = true * max(0.5, self._rng.gauss(1.0, SCATTER))
        record = replace(host.record, duty=duty, samples_per_s=told)
        self._announce(host, record, is_read_at_once=is_read_at_once)

    def _announce(
        self, host: _Actor, record: PlaceRecord, *, is_read_at_once: bool = False
    ) -> None:
        was, host.record = host.record, record
        if (was.stage, was.duty) != (record.stage, record.duty):
            self._count()
        if is_read_at_once:
            self._read(host, record)
        else:
            self._at(self.now_s + LATE_S, partial(self._read, host, record))

    def _read(self, host: _Actor, record: PlaceRecord) -> None:
        if self._is_here(host) or host.visit.peer in self._records:
            self._records[host.visit.peer] = record
            self._changed()

    def _changed(self) -> None:
        self._view = None
        self.on_change()

    def _count(self) -> None:
        """Work out the run's rate and the bound anew."""
        sums = [0.0] * len(self._stages)
        for host in self._hosts.values():
            if host.record.duty is Duty.SERVING:
                sums[host.record.stage] += host.visit.speed / self._costs[host.record.stage]
        self._rate = min(sums)
        speeds = [host.visit.speed for host in self._hosts.values()]
        self._bound = upper_bound(speeds, self._costs)


class Ticked(Playback):
    """At each multiple of T, the peer that a rule names moves at once, as in SWARM."""

    def __init__(
        self,
        visits: Sequence[Visit],
        stages: tuple[StageNeeds, ...],
        *,
        rule: Rule,
        period_s: float,
        seed: int,
        newcomers: Newcomers = "lowest",
        end_s: float = math.inf,
    ) -> None:
        """Prepare a replay; an endless period never moves anybody."""
        super().__init__(visits, stages, seed=seed, newcomers=newcomers, end_s=end_s)
        self._rule, self._period_s = rule, period_s
        if period_s < math.inf:
            self._at(period_s, self._tick)

    def _tick(self) -> None:
        self.outcome.looks += len(self._hosts)
        move = self._rule(self.view)
        host = self._hosts.get(move.peer_id) if move else None
        if move and host and self._serves(host, move.source):
            self.depart(host, move)
        self._at(self.now_s + self._period_s, self._tick)


class Watched(Playback):
    """Each peer looks at times of its own and moves when it is named and confirmed.

    While nothing is to be done a peer looks every `period_s`; a view in which a stage is vacant is
    looked at by everybody at once, since the run has stopped.
    """

    def __init__(
        self,
        visits: Sequence[Visit],
        stages: tuple[StageNeeds, ...],
        *,
        period_s: float,
        seed: int,
        rule: Callable[[PlacementView, frozenset[tuple[str, str]]], Move | None] = decide,
        newcomers: Newcomers = "lowest",
        end_s: float = math.inf,
    ) -> None:
        """Prepare a replay of the production policy, or of a variant of its rule."""
        super().__init__(visits, stages, seed=seed, newcomers=newcomers, end_s=end_s)
        self._rule, self._period_s = rule, period_s
        self._decisions: dict[frozenset[tuple[str, str]], Move | None] = {}

    def look_first(self, host: _Actor) -> None:
        self._at(self.now_s + self._rng.random() * self._period_s, partial(self._look, host))

    def on_change(self) -> None:
        self._decisions.clear()
        live = {record.stage for record in self._records.values()}
        if len(live) == len(self._stages):
            return
        for host in list(self._hosts.values()):
            self._decide(host)

    def _new_confirmed(self) -> Confirmed:
        return Confirmed(self._period_s)

    def _look(self, host: _Actor) -> None:
        if self._is_here(host):
            move = self._decide(host)
            wait_s = next_look_s(self.view, move, self._period_s)
            self._at(self.now_s + wait_s, partial(self._look, host))

    def _decide(self, host: _Actor) -> Move | None:
        """Let one peer look; it sets out if it is to move. Return what it decided."""
        self.outcome.looks += 1
        passed_over = host.confirmed.passed_over
        if passed_over not in self._decisions:
            self._decisions[passed_over] = self._rule(self.view, passed_over)
        move = self._decisions[passed_over]
        now = host.confirmed.look(move, self.now_s)
        if now and now.peer_id == host.visit.peer and self._serves(host, now.source):
            self.depart(host, now)
        return move


def of_the_whole(view: PlacementView, passed_over: frozenset[tuple[str, str]]) -> Move | None:
    """Return the production policy's move if the whole run's throughput gains 25%, net."""
    move = decide(view, passed_over)
    if move is None or move.fills:
        return move
    mover = next(peer for peer in view.peers if peer.peer_id == move.peer_id)
    now = min(levels(view))
    moved = departing(mover, move, view.stages)
    others = tuple(peer for peer in view.peers if peer is not mover)
    gone = min(levels(PlacementView(stages=view.stages, peers=others)))
    then = min(levels(PlacementView(stages=view.stages, peers=(*others, moved))))
    lost_s = move_s(mover, view.stages[move.target])
    share = lost_s / (lost_s + HORIZON_S)
    return move if gone * share + then * (1 - share) > 1.25 * now else None
