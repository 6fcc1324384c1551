"""What two peers that meet say to each other.  Rules: `docs/protocol.md`, part "Gossip".

Calls (one message, one reply)::

    gossip-head      b""        -> Standing      where a peer is; also the test whether it is alive
    gossip-outcome   Question   -> Outcome       what became of an exchange that broke
    gossip-snapshot  b""        -> SnapshotMeta  lends the present state to a joiner

Streams (duplex; an empty message is a sign of life)::

    gossip           Terms -> ; <- Terms, or Ahead and a refusal ; <-> cells, Sent ; <- PREPARED ;
                     COMMIT -> ; <- end
    gossip-leaves    LeafRequest -> ; <- leaves of a state that was lent

A message of the stream `gossip` is one byte naming the kind, then the record; for cells the kind
`CELL` and whole frames, each with its length before it (`atoll.optim.reduction.cells`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from atoll.optim.log.entry import Count, Digest, Incarnation, Record

PROTOCOL = 2  # a refusal `ahead` follows a record with the round

Amount = Annotated[FiniteFloat, Field(ge=0)]
Mass = Annotated[FiniteFloat, Field(ge=0, le=1)]
ExchangeId = Annotated[bytes, Field(min_length=16, max_length=16)]

ALIVE = b""
TERMS, AHEAD, CELL, SENT, PREPARED, COMMIT = b"T", b"A", b"C", b"D", b"P", b"M"


class Standing(Record):
    """Where a peer is, and what it is doing."""

    protocol: Count
    round: Count
    ready_in_s: Amount | None
    """until its window ends; None where it does not train"""
    partner: str
    """PeerID of whom it is meeting; empty for nobody"""


class Terms(Record):
    """What one of the two says of itself before vectors travel."""

    protocol: Count
    round: Count
    exchange: ExchangeId
    incarnation: Incarnation
    mass: Mass
    weight: Amount
    """of its pseudo-gradient: 0, or what follows from tokens and steps"""
    tokens: Count
    steps: Count
    uplink_mbit_s: Amount
    patience_s: Amount
    """how long it waits for the other to be ready"""


class Ahead(Record):
    """The invited peer is in a later round; the refusal `ahead` follows."""

    round: Count


class Sent(Record):
    """All frames are sent: their bytes, lengths included, and the SHA-256 of these."""

    wire_bytes: Count
    digest: Digest


class Question(Record):
    """What became of an exchange?"""

    exchange: ExchangeId


class Outcome(Record):
    """The answer of who decided."""

    incarnation: Incarnation
    decided: Literal["committed", "pending", "not committed"]


def tagged(kind: bytes, record: Record) -> bytes:
    """A stream message."""
    return kind + record.encode()
