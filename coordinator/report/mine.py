"""One peer among the others: what its owner asks first."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from atoll.coordinator.report.view import label, reached
from atoll.coordinator.run import text
from atoll.coordinator.run.status import PeerStatus, RunStatus

MIN_END_CHARS = 6  # of a PeerID, as messages show it


class NoSuchPeer(ValueError):
    """No peer of the run is called so, or several are."""


@dataclass(frozen=True, kw_only=True)
class MyPeer:
    """One peer's part in a run."""

    peer_id: str
    status: PeerStatus | None
    """None once the coordinator has forgotten it."""
    rank: int
    """By tokens, from 1; peers with as many share a rank. 0 while it has contributed nothing."""
    num_ranked: int
    """Peers that have contributed."""
    share: float
    """Of all tokens that rounds took."""
    rounds: int
    missed: int

    @property
    def name(self) -> str:
        """Its name, or the end of its identity."""
        return label(self.status) if self.status else text.short_id(self.peer_id)


def find_peer(status: RunStatus, wanted: str) -> str:
    """Return the PeerID that a name, a PeerID or its end stands for; empty if none or several do.

    A PeerID that the run does not know yet stands for itself.
    """
    called = [peer.peer_id for peer in status.peers if peer.name == wanted]
    known = {peer.peer_id for peer in status.peers}
    known |= {given.peer_id for given in status.contributions}
    if wanted in known or wanted.startswith("12D3KooW"):
        return wanted
    if len(wanted) >= MIN_END_CHARS and not called:
        called = [peer_id for peer_id in known if peer_id.endswith(wanted)]
    return called[0] if len(called) == 1 else ""


def mine(status: RunStatus, peer_id: str) -> MyPeer:
    """Return the part of a peer in a run."""
    tokens = tokens_of(status)
    counts = [count for count in tokens.values() if count]
    own = tokens[peer_id]
    given = [row for row in status.contributions if row.peer_id == peer_id]
    return MyPeer(
        peer_id=peer_id,
        status=next((peer for peer in status.peers if peer.peer_id == peer_id), None),
        rank=1 + sum(count > own for count in counts) if own else 0,
        num_ranked=len(counts),
        share=own / sum(counts) if counts else 0.0,
        rounds=sum(row.rounds for row in given),
        missed=sum(row.missed for row in given),
    )


def tokens_of(status: RunStatus) -> Counter[str]:
    """Return the tokens that rounds took of each peer, by PeerID."""
    found: Counter[str] = Counter()
    for row in status.contributions:
        found[row.peer_id] += row.tokens
    return found


def mine_facts(status: RunStatus, peer_id: str, known: dict[str, str]) -> list[tuple[str, str]]:
    """Return what a screen says of a peer: names and values, the most important first."""
    me = mine(status, peer_id)
    if me.status is None and not me.rounds:
        return [("my peer", f"{text.short_id(peer_id)} is not in this run yet")]
    facts = [("my peer", me.name)]
    if me.rank:
        facts.append(("rank", f"{me.rank} of {me.num_ranked}"))
        facts.append(("tokens", text.percent(me.share, decimals=1)))
    facts.append(("in rounds", str(me.rounds)))
    facts.append(("missed", str(me.missed)))
    if me.status is not None:
        facts.append(("sent", text.size(me.status.wire_bytes_sent)))
        if me.status.wire_bytes_received:
            facts.append(("received", text.size(me.status.wire_bytes_received)))
        if me.status.reach:
            facts.append(("link", reached(me.status, known)))
        facts.append(("state", me.status.state))
    return facts
