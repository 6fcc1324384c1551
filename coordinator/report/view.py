"""The values that the dashboard draws: the run's last status and the state of the connection.

The only local clock is the monotonic one, for the age of the status. The server's time stamps are
printed and subtracted from each other, but never compared with a local clock.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from atoll.coordinator.run.status import (
    Event,
    Gap,
    ModuleStatus,
    PeerStatus,
    RoundSummary,
    RunStatus,
    seconds_between,
)
from atoll.coordinator.run.text import ABSENT, clean, duration, finite, percent, short_id, size

SHORT_CHARS = 6  # letters by which peers name each other in messages
_IDENTITY = re.compile(rf"\b[1-9A-HJ-NP-Za-km-z]{{{SHORT_CHARS},128}}\b")  # base58
IMPORTANT = frozenset({"warning", "error"})  # levels with a colour of their own
_WAITS = {
    "input": "input",
    "route": "next stage",
    "returns": "gradients",
    "step": "end of step",
    "drain": "its start",
}
"""By reason, as in `FlowStatus.waited_s`."""
NUM_RECENT_ROUNDS = 16  # enough for a steady rate, few enough to follow a changed swarm


@dataclass(frozen=True, kw_only=True)
class View:
    """Everything on the screen, as plain values."""

    title: str = "atoll"
    status: RunStatus | None = None
    age_s: float = 0.0
    """Seconds since the last status arrived."""
    failure: str = ""
    """Why the last reading failed; empty while connected."""
    num_attempts: int = 0
    """Failed readings since then."""
    paused: bool = False
    replay: str = ""
    """Shown in the place of the status's age when it is one of an earlier round."""
    me: str = ""
    """PeerID of the viewer's own peer; empty if it is not known."""
    axis: Literal["rounds", "time", "tokens"] = "rounds"
    """Of the loss curve."""
    log_scale: bool = False
    smooth: bool = True
    closing_in_s: float | None = None
    """Seconds until the screen of a finished run closes by itself."""


def round_seconds(history: Sequence[RoundSummary]) -> float | None:
    """Return the median time between committed rounds, by the server's clock."""
    pairs = pairwise(history[-NUM_RECENT_ROUNDS:])
    steady = [gap for a, b in pairs if finite(gap := seconds_between(a, b)) and gap]
    return median(steady) if steady else None


def eta_seconds(status: RunStatus) -> float | None:
    """Estimate how long the remaining rounds take at the recent pace."""
    pace = round_seconds(status.history)
    is_moving = status.state not in ("finished", "stalled", "paused")
    if pace is None or status.rounds_total <= 0 or not is_moving:
        return None
    return pace * max(0, status.rounds_total - status.position)


def elapsed_seconds(status: RunStatus) -> float | None:
    """Return how long the run has been open, by the server's clock."""
    return None if status.started_at is None else status.now - status.started_at


def token_rates(history: Sequence[RoundSummary]) -> list[float]:
    """Return tokens per second of each round but the first, if the time of both rounds is known."""
    return [b.tokens / gap for a, b in pairwise(history) if (gap := seconds_between(a, b))]


def is_gone(peer: PeerStatus) -> bool:
    """Return True if the peer is known but not online; it is shown dimmed."""
    return peer.state in ("left", "gone")


def sorted_peers(status: RunStatus) -> list[PeerStatus]:
    """Sort peers by name and identity, so that rows stay in place whatever the numbers do.

    Those of a pipeline are sorted by stage first.
    """
    order = {module.name: index for index, module in enumerate(status.modules)}
    return sorted(status.peers, key=lambda p: (order.get(p.module, 0), p.name, p.peer_id))


def peers_of(status: RunStatus, module: ModuleStatus) -> list[PeerStatus]:
    """Return the peers of a module that are known, sorted; those that left come last."""
    found = [peer for peer in sorted_peers(status) if peer.module == module.name]
    return sorted(found, key=is_gone)


def binding(status: RunStatus) -> str:
    """Return the names of the stages that the others of a pipeline wait for; empty if none."""
    return ", ".join(clean(module.name) for module in status.modules if module.binds)


def waited_for(reason: str) -> str:
    """Return what the trainer of a stage waits for, as people read it; a dash if for nothing."""
    return _WAITS.get(reason) or clean(reason, num_max=16) or ABSENT


def orders_text(status: RunStatus) -> str:
    """Return what the organiser's orders have changed, and how many wait; empty without any."""
    changed = [f"{clean(name)} = {value:g}" for name, value in status.settings.items()]
    if status.reducer:
        changed.append(f"reducer = {clean(status.reducer)}")
    if status.evicted:
        names = {peer.peer_id: peer.name for peer in status.peers}
        shown = [clean(names.get(peer) or short_id(peer)) for peer in status.evicted]
        changed.append(f"evicted: {', '.join(shown)}")
    waiting = status.orders_waiting
    return ", ".join([*changed, *([f"{waiting} waiting for a decision"] if waiting else [])])


def num_present(status: RunStatus) -> int:
    """Count the peers that are online."""
    return sum(not is_gone(peer) for peer in status.peers)


def num_online(status: RunStatus, role: str) -> int:
    """Count the peers of a role that are online."""
    return sum(peer.role == role and not is_gone(peer) for peer in status.peers)


def shown_state(peer: PeerStatus) -> str:
    """Return a peer's state; that of a keeper that is here and does its work is "keeper"."""
    works = peer.state in ("ready", "training", "syncing")
    return "keeper" if works and peer.role == "keeper" else peer.state


def waits_for(status: RunStatus) -> str:
    """Return who is online of those without whom the run does not start."""
    online = num_online(status, "trainer")
    at_least = "at least " if online > status.min_peers else ""
    here = f"{online} of {at_least}{status.min_peers}"
    if not status.min_keepers:
        return here
    keepers = num_online(status, "keeper")
    plural = "" if status.min_keepers == 1 else "s"
    return f"{here} trainers and {keepers} of {status.min_keepers} keeper{plural}"


def utilisation(status: RunStatus) -> str:
    """Format the mean utilisation of online peers; a dash if none of them has trained."""
    known = any(utilisation_of(peer) is not None for peer in status.peers)
    return percent(status.utilisation, decimals=1) if known else ABSENT


def utilisation_of(peer: PeerStatus) -> float | None:
    """Return a peer's utilisation, or None if it is gone or has not trained yet."""
    return None if is_gone(peer) or not peer.tokens_total else peer.utilisation


def counted_rounds(peer: PeerStatus) -> str:
    """Format in how many rounds a peer's work counted; a dash if it has seen none."""
    return f"{peer.rounds_counted}/{peer.rounds_seen}" if peer.rounds_seen else ABSENT


def apart(status: RunStatus) -> list[tuple[PeerStatus, PeerStatus]]:
    """Return the pairs of peers online of which one reports that it cannot reach the other."""
    here = {peer.peer_id: peer for peer in sorted_peers(status) if not is_gone(peer)}
    pairs = {
        (min(peer.peer_id, other), max(peer.peer_id, other))
        for peer in here.values()
        for other in peer.unreached
        if other in here and other != peer.peer_id
    }
    return [(here[one], here[other]) for one, other in sorted(pairs)]


def missing(row: RoundSummary) -> list[str]:
    """Return the PeerIDs that a round continued without, wholly or from some cell on."""
    return list(dict.fromkeys([*row.left_out, *row.reasons]))


def naming(known: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that replaces PeerIDs, and their ends, in a message by names.

    Args:
        known: names by PeerID. An end that two peers share is left unchanged.
    """
    ends = Counter(peer_id[-SHORT_CHARS:] for peer_id in known)
    short = {
        peer_id[-SHORT_CHARS:]: name
        for peer_id, name in known.items()
        if ends[peer_id[-SHORT_CHARS:]] == 1
    }
    called = {**short, **known}
    return lambda message: _IDENTITY.sub(lambda match: called.get(match[0]) or match[0], message)


def without(row: RoundSummary, known: Mapping[str, str]) -> list[str]:
    """List the peers missing from a round, wholly or in part, each with the reported reason.

    Args:
        row: the round.
        known: names by PeerID.
    """
    name = naming(known) if row.reasons else str
    whole = set(row.left_out)
    return [
        f"{known.get(peer) or short_id(peer)}{'' if peer in whole else ' in part'}: "
        f"{clean(name(row.reasons.get(peer, ''))) or 'not in the group'}"
        for peer in missing(row)
    ]


def copies_text(status: RunStatus) -> str:
    """Return how far the run's copies are; empty if none are kept."""
    copies = status.copies
    if copies is None:
        return ""
    newest = "none yet" if copies.at is None else f"after round {copies.position}"
    if copies.at is not None and copies.failing:
        newest += f", {duration(max(0.0, status.now - copies.at))} ago"
    return f"{newest}; failing: {clean(copies.failing)}" if copies.failing else newest


def rows_text(status: RunStatus) -> str:
    """Return how far the run is in its rows; empty in a run without `data.once`."""
    rows = status.rows
    if rows is None or not rows.total:
        return ""
    share = percent(min(1.0, rows.done / rows.total))
    return f"pass {rows.number}, {share} of {rows.total:,} units, {rows.held:,} held"


def is_held(row: RoundSummary, gaps: Sequence[Gap]) -> bool:
    """Return True if the coordinator holds the round's update, so that it can be replayed."""
    return not any(gap.first <= row.position <= gap.last for gap in gaps)


def gap_text(gap: Gap) -> str:
    """Format the range of rounds without updates."""
    return f"{gap.first}" if gap.first == gap.last else f"{gap.first} to {gap.last}"


def label(peer: PeerStatus) -> str:
    """Return the peer's own name, or the end of its identity."""
    return clean(peer.name, num_max=40) or short_id(peer.peer_id)


def reached(peer: PeerStatus, known: Mapping[str, str]) -> str:
    """Format how others reach a peer, and the relay that it prefers; a dash if it is not known.

    Args:
        peer: any.
        known: names by PeerID; a relay that is no peer of the run is the coordinator's node.
    """
    if peer.reach != "relayed":
        return peer.reach or ABSENT
    relay = known.get(peer.relays[0], "coordinator") if peer.relays else ABSENT
    return f"relayed by {relay}, {size(peer.relayed_bytes)}"


def names(status: RunStatus) -> dict[str, str]:
    """Return the name of each peer, by identity."""
    return {peer.peer_id: label(peer) for peer in status.peers}


def event_text(event: Event, name: Callable[[str], str]) -> str:
    """Return an event's text with names instead of identities, safe to print."""
    return clean(name(event.text))
