"""What the widgets are given: the last state of the run, and how this screen came by it.

The only clock here is this machine's monotonic one, for the age of the state; time stamps of the
server are printed, and subtracted from each other, but never from a clock of this machine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from atoll.coordinator.report.text import ABSENT, clean, finite, percent, short_id
from atoll.coordinator.run.status import (
    Event,
    Gap,
    PeerStatus,
    RoundSummary,
    RunStatus,
    seconds_between,
)

SHORT_CHARS = 6  # by which peers tell each other apart in what they say
_IDENTITY = re.compile(rf"\b[1-9A-HJ-NP-Za-km-z]{{{SHORT_CHARS},128}}\b")  # base58
IMPORTANT = frozenset({"warning", "error"})  # levels worth a colour of their own
NUM_RECENT_ROUNDS = 16  # enough to be steady, few enough to follow a changed swarm


@dataclass(frozen=True, kw_only=True)
class View:
    """Everything that is on the screen, as plain values."""

    title: str = "atoll"
    status: RunStatus | None = None
    age_s: float = 0.0
    """Since the last state arrived."""
    failure: str = ""
    """Why the last attempt to read the state failed; empty while connected."""
    num_attempts: int = 0
    """Attempts since then."""
    paused: bool = False
    log_scale: bool = False
    smooth: bool = True
    closing_in_s: float | None = None
    """Until a finished run closes the screen by itself."""


def round_seconds(history: Sequence[RoundSummary]) -> float | None:
    """The median time from one committed round to the next, by the server's clock."""
    pairs = pairwise(history[-NUM_RECENT_ROUNDS:])
    steady = [gap for a, b in pairs if finite(gap := seconds_between(a, b)) and gap]
    return median(steady) if steady else None


def eta_seconds(status: RunStatus) -> float | None:
    """What the rounds that remain will take at the pace of the last ones."""
    pace = round_seconds(status.history)
    if pace is None or status.rounds_total <= 0 or status.state == "finished":
        return None
    return pace * max(0, status.rounds_total - status.position)


def elapsed_seconds(status: RunStatus) -> float | None:
    """How long the run has been open, by the server's clock."""
    return None if status.started_at is None else status.now - status.started_at


def token_rates(history: Sequence[RoundSummary]) -> list[float]:
    """Tokens per second of each round but the first, where it is known when they were."""
    return [b.tokens / gap for a, b in pairwise(history) if (gap := seconds_between(a, b))]


def is_gone(peer: PeerStatus) -> bool:
    """Whether the peer is shown dimmed: known, but not there."""
    return peer.state == "gone"


def sorted_peers(status: RunStatus) -> list[PeerStatus]:
    """By name and identity, so that a row stays where it is whatever the numbers do."""
    return sorted(status.peers, key=lambda peer: (peer.name, peer.peer_id))


def num_present(status: RunStatus) -> int:
    """Peers that are there."""
    return sum(not is_gone(peer) for peer in status.peers)


def utilisation(status: RunStatus) -> str:
    """Of the peers that are here: none may be, as at a run's end, or none that has trained."""
    known = any(utilisation_of(peer) is not None for peer in status.peers)
    return percent(status.utilisation, decimals=1) if known else ABSENT


def utilisation_of(peer: PeerStatus) -> float | None:
    """None for a peer that is gone or has not trained yet."""
    return None if is_gone(peer) or not peer.tokens_total else peer.utilisation


def missing(row: RoundSummary) -> list[str]:
    """PeerIDs that a round went on without, wholly or from some cell on."""
    return list(dict.fromkeys([*row.left_out, *row.reasons]))


def naming(known: Mapping[str, str]) -> Callable[[str], str]:
    """Puts names in the place of identities, or of their ends, in what peers say of each other.

    Args:
        known: names by PeerID. An end that two peers share is left as it is.
    """
    ends = Counter(peer_id[-SHORT_CHARS:] for peer_id in known)
    short = {
        peer_id[-SHORT_CHARS:]: name
        for peer_id, name in known.items()
        if ends[peer_id[-SHORT_CHARS:]] == 1
    }
    called = {**short, **known}
    return lambda told: _IDENTITY.sub(lambda found: called.get(found[0]) or found[0], told)


def without(row: RoundSummary, known: Mapping[str, str]) -> list[str]:
    """Who is missing in a round, wholly or in part, and why, as whoever left them out says.

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


def is_held(row: RoundSummary, gaps: Sequence[Gap]) -> bool:
    """Whether the coordinator has the round's update, so that it can be replayed."""
    return not any(gap.first <= row.position <= gap.last for gap in gaps)


def gap_text(gap: Gap) -> str:
    """Rounds without updates, as people count them."""
    return f"{gap.first}" if gap.first == gap.last else f"{gap.first} to {gap.last}"


def label(peer: PeerStatus) -> str:
    """The peer's own name, or the end of its identity."""
    return clean(peer.name, num_max=40) or short_id(peer.peer_id)


def names(status: RunStatus) -> dict[str, str]:
    """What to call each peer, by its identity."""
    return {peer.peer_id: label(peer) for peer in status.peers}


def told(event: Event, name: Callable[[str], str]) -> str:
    """An event's text with names for identities, safe to print."""
    return clean(name(event.text))
