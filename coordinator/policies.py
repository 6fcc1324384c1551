"""The coordinator's policies: pure functions and small state machines over the peers it hears from.

Times are seconds of any steady clock; the caller passes them in.
"""

from __future__ import annotations

import ipaddress
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import unquote

from atoll.coordinator.presence import KnownPeer
from atoll.coordinator.run.status import MAX_LOOK_S, PeerStatus
from atoll.optim.log.electorate import FEW_ELECTORS, NEW_PER_OLD, TRIAL_ENTRIES, Succession
from atoll.optim.log.entry import Elector, Newcomer, Trust, is_quorum, max_liars

STALL_S = 60.0  # without progress for this long a new epoch opens (docs/protocol.md, part 1)
MAX_STALL_S = 3600.0  # each epoch without progress doubles the wait for the next, up to this
# Wait of a keeper that joins for the epoch that names it. Each such epoch may void a round, so
# keepers that an organiser starts one after the other enter with the same one.
KEEPER_WAIT_S = 120.0
# Of silence beyond that after which a peer counts as gone: if the coordinator's own link broke, the
# others are heard again within seconds of the first one.
SILENT_S = 5.0
# For acceptors that restarted to hold the state again, so that the epoch names them. Most do within
# seconds; without them fewer peers decide, and a liar among these has more weight.
RESTARTED_S = 10.0
# Between two epochs for acceptors that were lost, doubled while no round is decided: a peer that
# restarts, or says so, again and again opens few.
LOST_AGAIN_S = 10.0
LONGER_ROUND = 4.0  # than the last ones may a round be expected to take
FASTEST = 8.0  # times the median may a peer of a stage count when a newcomer is placed
PUBLISH_S = 15.0  # a peer asked for entries that sends none for this long is passed over
REPORT_BURST = 50.0  # at once: a restored link delivers what it kept, 32 items per report
REPORTS_PER_S = 10.0  # far above a heartbeat per second
CALL_BURST = 256.0  # at once from one address: a lab behind one router starts again
MAX_ADDRESSES = 4096  # remembered; about 1 MB
CALLS_PER_S = 20.0  # a dashboard asks once a second; a join costs two signatures
LOOK_S = 1.0  # peers report about as often
WATCH_BYTES_PER_S = 2.5e6  # 20 Mbit/s, of which a small cloud machine has some 100
SHUN_S = 300.0  # a peer that claimed entries and sent none is asked again after this

_ELECTABLE = (
    "ready",
    "training",
    "syncing",
)  # states in which a peer holds the run's present state

MAX_INCARNATION_CHARS = 32  # 128 bits in hex; a record of the log refuses a longer one

Retired = dict[tuple[str, str], tuple[int, int]]
"""By (PeerID, incarnation) of a peer that left: the (epoch, position) from which it never votes."""


def electable(
    alive: Iterable[KnownPeer],
    *,
    epoch: int | None,
    role: Literal["trainer", "keeper"] = "trainer",
) -> list[PeerStatus]:
    """Return the peers of a role that may vote in a new epoch: those that hold a state.

    Before the first epoch (None) these are only the peers that reported ready.
    """
    states = ("ready",) if epoch is None else _ELECTABLE
    return [
        member.status
        for member in alive
        if member.status.role == role
        and member.status.state in states
        and 0 < len(member.status.incarnation) <= MAX_INCARNATION_CHARS
    ]


def electors_after_stall(
    online: Sequence[Elector],
    voters: Succession,
    *,
    known: Collection[str],
) -> list[Elector]:
    """Return the electors of an epoch that opens because a run with a log stands still.

    Whoever can stop the run could otherwise bring in any number of keys that contributed once.
    Electors that have not restarted come first: half of an electorate is a quorum if the first is
    in it, so of two the one that stays decides without the one that restarts again.

    Args:
        online: the peers that may vote, under the incarnations that they have now.
        voters: at the head of the log.
        known: PeerIDs of the newest entries; they vote only if nobody else is left.
    """
    present = {elector.peer_id for elector in voters.electorate}
    by_peer = {elector.peer_id: elector for elector in online}
    stay = [elector for elector in online if elector.peer_id in present]
    stay.sort(key=lambda elector: elector not in voters.electorate)
    tried = [
        by_peer[n.peer_id]
        for n in voters.newcomers
        if n.peer_id in by_peer and n.peer_id not in present and is_tried(n)
    ]
    if stay:
        return [*stay, *tried[: max(1, int(NEW_PER_OLD * len(stay)))]]
    return tried or [elector for elector in online if elector.peer_id in known]


def is_tried(newcomer: Newcomer) -> bool:
    """Return whether a newcomer has contributed often enough to vote."""
    return newcomer.entries >= TRIAL_ENTRIES


def can_decide(
    electorate: Sequence[Elector],
    retired: Mapping[tuple[str, str], tuple[int, int]],
    at: tuple[int, int],
    trust: Trust = "crash",
) -> bool:
    """Return True if anything may have been decided at (epoch, position), or still may be.

    It cannot if the electors that have not resigned no longer form a quorum. In a run that
    tolerates liars, as many more may have lied about that. True if the electorate is unknown.
    """
    since = [retired.get((e.peer_id, e.incarnation)) for e in electorate]
    voters = [i for i, place in enumerate(since) if place is None or place > at]
    if trust == "byzantine":
        gone = [i for i in range(len(electorate)) if i not in voters]
        voters += gone[: max_liars(len(electorate))]
    return not electorate or is_quorum(voters, len(electorate), trust)


def not_restarted(electorate: Sequence[Elector], alive: Iterable[KnownPeer]) -> list[Elector]:
    """Return the electors whose key no other incarnation uses.

    A restarted trainer votes no longer. One that is silent may still vote somewhere else.
    """
    now = {member.status.peer_id: member.status.incarnation for member in alive}
    return [e for e in electorate if now.get(e.peer_id, e.incarnation) == e.incarnation]


def hold_quorum(electors: Collection[Elector], electorate: Sequence[Elector]) -> bool:
    """Return whether these are a quorum of an electorate; True if that is unknown."""
    here = [index for index, elector in enumerate(electorate) if elector in electors]
    return not electorate or is_quorum(here, len(electorate))


@dataclass
class Lasting:
    """Measures how long something has been so."""

    since_s: float = math.inf

    def note(self, is_so: bool, now_s: float) -> float:
        """Return for how many seconds it has been so; negative if it is not."""
        self.since_s = min(self.since_s, now_s) if is_so else math.inf
        return now_s - self.since_s


@dataclass
class LostQuorum:
    """Notices that so many of a few electors died that the others are no quorum.

    One that restarted is dead: only its key can report another incarnation. One that was heard and
    is silent is presumed dead after a while. Of many electors half do not die at once, but the
    network between them may break; for these a run waits until it stands still (`StallClock`).
    """

    position: int = -1
    opened: int = 0
    """Epochs opened for this since the last progress."""
    again_s: float = -math.inf
    """When the next one may open."""
    _heard: set[Elector] = field(default_factory=set)
    """electors that this coordinator has heard; the others may be on their way to it"""
    _restarted: Lasting = field(default_factory=Lasting)
    _silent: Lasting = field(default_factory=Lasting)

    def look(
        self,
        electorate: Sequence[Elector],
        alive: Collection[KnownPeer],
        *,
        position: int,
        now_s: float,
    ) -> set[Elector]:
        """Return the electors that are lost, if an epoch shall open without them; else none.

        Args:
            electorate: of the position.
            alive: the peers online.
            position: the end of the log.
            now_s: the time.
        """
        if position > self.position:
            self.position, self.opened = position, 0
        online = {(m.status.peer_id, m.status.incarnation) for m in alive}
        here = [e for e in electorate if (e.peer_id, e.incarnation) in online]
        self._heard = set(e for e in electorate if e in here or e in self._heard)
        able = {status.peer_id for status in electable(alive, epoch=0)}
        stay = not_restarted(electorate, alive)
        restarted = set(electorate).difference(stay)
        silent = self._heard.intersection(stay).difference(here)
        are_few = len(electorate) < FEW_ELECTORS
        by_restart = are_few and not hold_quorum(stay, electorate)
        by_silence = are_few and bool(able) and not hold_quorum(set(stay) - silent, electorate)
        restarted_s = self._restarted.note(by_restart, now_s)
        silent_s = self._silent.note(by_silence and not by_restart, now_s)
        if now_s < self.again_s:
            return set()
        are_back = by_restart and all(elector.peer_id in able for elector in restarted)
        if are_back or restarted_s >= RESTARTED_S:
            return restarted
        return restarted | silent if silent_s >= SILENT_S else set()

    def note_opened(self, now_s: float) -> None:
        """Note that an epoch opened without those that are lost."""
        pause_s = LOST_AGAIN_S * 2.0 ** min(self.opened, 10)
        self.again_s = now_s + min(pause_s, MAX_STALL_S)
        self.opened += 1


@dataclass
class StallClock:
    """Measures how long a run makes no progress."""

    position: int = -1
    since_s: float = 0.0
    reopened: int = 0
    """Epochs opened since the last progress."""
    round_s: float = 0.0
    """The shortest that a round was expected to take since the last progress; 0 if unknown.

    Speeds that trainers report may fall while they wait, so that the expected round always stays
    longer than the wait."""

    def note(self, position: int, now_s: float, round_s: float = 0.0) -> None:
        """Note the furthest position of any peer, and how long a round takes, 0 if unknown."""
        if position > self.position:
            self.position, self.since_s, self.reopened, self.round_s = position, now_s, 0, 0.0
        if round_s:
            self.round_s = min(self.round_s or round_s, round_s)

    def restart(self, now_s: float, *, again: bool) -> None:
        """Restart the clock after an epoch opened; `again` unless it was the first."""
        self.since_s = now_s
        self.reopened += again

    def pause(self, now_s: float) -> None:
        """Exclude time in which no peer is online that could make progress."""
        self.since_s = now_s

    def is_stalled(self, now_s: float, *, can_move: bool = True) -> bool:
        """Return True if a new epoch is due.

        A slow run gets three rounds, so that a long round is not taken for a stall; none if it
        cannot move. Each epoch that brings no progress doubles the wait.
        """
        rounds_s = 3 * self.round_s if can_move else 0.0
        # 2**10 exceeds the limit below in any case, and a float overflows at 2**1024.
        patience_s = max(STALL_S, rounds_s) * 2.0 ** min(self.reopened, 10)
        return now_s - self.since_s > min(patience_s, max(MAX_STALL_S, rounds_s))


@dataclass
class KeepersWaiting:
    """Notices keepers that the present epoch does not name, and how long they have waited."""

    since_s: dict[Elector, float] = field(default_factory=dict)

    def due(
        self, here: Iterable[Elector], electorate: Collection[Elector], now_s: float
    ) -> list[Elector]:
        """Return all that wait, once one of them has waited for `KEEPER_WAIT_S`."""
        waiting = [keeper for keeper in here if keeper not in electorate]
        self.since_s = {keeper: self.since_s.get(keeper, now_s) for keeper in waiting}
        longest_s = max((now_s - since_s for since_s in self.since_s.values()), default=0.0)
        return waiting if longest_s >= KEEPER_WAIT_S else []


def window_s(alive: Iterable[KnownPeer], *, tokens: int) -> float:
    """Return the median length of a window of `tokens` by the trainers' reported speeds, or 0."""
    speeds = (m.status.tokens_per_s for m in alive if m.status.role == "trainer")
    times = sorted(tokens / speed for speed in speeds if speed > 0)
    # The lower of two middle values, so that one of two peers cannot raise it.
    return times[(len(times) - 1) // 2] if times else 0.0


def needs_most(rates: Mapping[str, Sequence[float]], costs: Sequence[float] = ()) -> str:
    """Return the module of a pipeline that a newcomer serves: the one with the lowest level.

    The level is the sum of its peers' rates. A peer's speed is its rate times the module's cost.
    One that is not measured has the median speed of its module, or of all. No peer counts more
    than `FASTEST` medians of all: who claims more would keep newcomers away.

    Args:
        rates: by module, in order: tokens/s that each of its peers can do; 0 if not measured.
        costs: of a token, by module; equal by default.
    """
    cost_of = dict(zip(rates, costs or [1.0] * len(rates), strict=True))
    speeds = {name: [rate * cost_of[name] for rate in each] for name, each in rates.items()}
    usual = _median_low([speed for each in speeds.values() for speed in each if speed]) or 1.0

    def level(module: str) -> float:
        here = _median_low([speed for speed in speeds[module] if speed]) or usual
        able = sum(min(speed or here, FASTEST * usual) for speed in speeds[module])
        return able / cost_of[module]

    return min(rates, key=level)


def _median_low(values: Sequence[float]) -> float:
    return statistics.median_low(values) if values else 0.0


def expected_round_s(window: float, interval: float) -> float:
    """Return how long a round may take: as the last ones did, or as long as a window does.

    A loop of one's own may count other tokens than the spec does, and so report a hundredth of the
    speed; then what was measured bounds it. Windows that grow are at most twice the last one.

    Args:
        window: in seconds, by what trainers report; 0 if unknown.
        interval: seconds between the last rounds; 0 if there are none.
    """
    return max(interval, min(window, LONGER_ROUND * interval)) if interval else window


def look_every_s(page_bytes: int, watchers: int) -> float:
    """Return how often watchers may look, so that together they fetch at most `WATCH_BYTES_PER_S`.

    Args:
        page_bytes: of a status as it is sent.
        watchers: that look.
    """
    return min(MAX_LOOK_S, max(LOOK_S, page_bytes * watchers / WATCH_BYTES_PER_S))


@dataclass
class ReportLimit:
    """Limits how often one peer may report, or one address may call: a token bucket."""

    left: float = REPORT_BURST
    at_s: float = 0.0
    burst: float = REPORT_BURST
    per_s: float = REPORTS_PER_S

    def take(self, now_s: float) -> bool:
        """Take one token; return False if none is left."""
        self.left = min(self.burst, self.left + (now_s - self.at_s) * self.per_s)
        self.at_s = now_s
        if self.left < 1:
            return False
        self.left -= 1
        return True


@dataclass
class CallLimits:
    """Limits calls by address, of peers and strangers alike. Times are of any steady clock."""

    limits: dict[str, ReportLimit] = field(default_factory=dict)

    def take(self, address: str, now_s: float) -> bool:
        """Take one call of an address; return False if it calls far too often."""
        limit = self.limits.pop(address, None)
        if limit is None:
            limit = ReportLimit(left=CALL_BURST, at_s=now_s, burst=CALL_BURST, per_s=CALLS_PER_S)
            if len(self.limits) >= MAX_ADDRESSES:
                del self.limits[next(iter(self.limits))]  # the longest silent
        self.limits[address] = limit
        return limit.take(now_s)


def host_of(peer: str) -> str:
    """Return the IP address in gRPC's name of a caller; empty if there is none."""
    kind, _, rest = peer.partition(":")
    host = unquote(rest.rpartition(":")[0]).strip("[]").partition("%")[0]
    try:
        return str(ipaddress.ip_address(host)) if kind in ("ipv4", "ipv6") else ""
    except ValueError:
        return ""


def source_of(peer: str) -> str:
    """Return the address in gRPC's name of a caller, such as `ipv4:203.0.113.7:41234`.

    An IPv6 caller counts by its /64, which is what one line gets.
    """
    kind, _, rest = peer.partition(":")
    host = unquote(rest.rpartition(":")[0]).strip("[]")
    if kind != "ipv6":
        return f"{kind}:{host}"
    with suppress(ValueError):
        return f"ipv6:{ipaddress.IPv6Address(host.partition('%')[0]).packed[:8].hex()}"
    return peer[:64]


def common_position(alive: Sequence[KnownPeer], *, epoch: int) -> int:
    """Return the position that at least half of the online trainers have reached.

    One peer that lies cannot move it.
    """
    reported = sorted(
        m.status.position if m.status.epoch == epoch else 0
        for m in alive
        if m.status.role == "trainer"
    )
    return reported[(len(reported) - 1) // 2] if reported else 0


@dataclass
class PublisherChoice:
    """Chooses the one peer that sends the coordinator the entries that it lacks."""

    peer_id: str = ""
    position: int = -1
    since_s: float = 0.0
    shunned: dict[str, float] = field(default_factory=dict)
    """By PeerID, the time until which a peer is not asked."""

    def asked(
        self, peer_id: str, alive: Sequence[KnownPeer], *, epoch: int, position: int, now_s: float
    ) -> bool:
        """Return True if `peer_id` is to send the entries from `position` on."""
        ahead = [
            m.status.peer_id
            for m in alive
            if m.status.epoch == epoch
            and m.status.position > position
            and self.shunned.get(m.status.peer_id, now_s) <= now_s
        ]
        if peer_id not in ahead:
            return False
        if now_s - self.since_s > PUBLISH_S and position == self.position:
            ahead = self._shun(ahead, now_s)
        if self.peer_id not in ahead:
            self._choose(ahead[position % len(ahead)], position, now_s)
        if position != self.position:
            self._choose(self.peer_id, position, now_s)
        return peer_id == self.peer_id

    def _shun(self, ahead: list[str], now_s: float) -> list[str]:
        others = [peer_id for peer_id in ahead if peer_id != self.peer_id]
        # Expired ones go: the table would grow with every invented name.
        self.shunned = {p: until_s for p, until_s in self.shunned.items() if until_s > now_s}
        if others:
            self.shunned[self.peer_id] = now_s + SHUN_S
        return others or ahead

    def _choose(self, peer_id: str, position: int, now_s: float) -> None:
        self.peer_id, self.position, self.since_s = peer_id, position, now_s
