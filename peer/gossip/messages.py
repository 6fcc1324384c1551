"""Messages of gossip peers; docs/protocol.md, part "Gossip", has the rules.

Calls (one message, one reply):

    gossip-head      b""        -> GossipHead      round and readiness; also a liveness check
    gossip-outcome   Question   -> MeetingOutcome  outcome of a meeting that broke
    gossip-snapshot  b""        -> SnapshotMeta    lends the current state to a joiner

Streams (duplex; an empty message is a keepalive):

    gossip           Terms -> ; <- Terms, or Ahead and a refusal ; <-> cells, VectorsSent ;
                     <- PREPARED ; COMMIT -> ; <- end
    gossip-leaves    LeafRequest -> ; <- leaves of a lent state

A message of the stream `gossip` is one byte for its kind, then the record. A message of kind `CELL`
holds a piece of the frames, each preceded by its length (`atoll.optim.reduction.cells`); frames may
begin and end anywhere in it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from atoll.optim.log.entry import Count, Digest, Incarnation, Record

PROTOCOL = 4  # since 4, leaves travel packed

Amount = Annotated[FiniteFloat, Field(ge=0)]
Mass = Annotated[FiniteFloat, Field(ge=0, le=1)]
ExchangeId = Annotated[bytes, Field(min_length=16, max_length=16)]

ALIVE = b""
TERMS, AHEAD, CELL, SENT, PREPARED, COMMIT = b"T", b"A", b"C", b"D", b"P", b"M"


class GossipHead(Record):
    """A peer's round, and whether it can meet."""

    protocol: Count
    round: Count
    ready_in_s: Amount | None
    """Seconds until its window ends; None if it does not train."""
    partner: str
    """PeerID of the partner of a meeting in progress; empty if there is none."""


class Terms(Record):
    """A side's description of itself, before any vectors are sent."""

    protocol: Count
    round: Count
    exchange: ExchangeId
    incarnation: Incarnation
    mass: Mass
    weight: Amount
    """Weight of its pseudo-gradient: 0, or the value that follows from tokens and steps."""
    tokens: Count
    steps: Count
    uplink_mbit_s: Amount
    patience_s: Amount
    """Seconds that it waits for the other side to be ready."""


class Ahead(Record):
    """Round of an invited peer that is ahead; the refusal `ahead` follows."""

    round: Count


class VectorsSent(Record):
    """End of the vectors: the number of bytes sent, including lengths, and their SHA-256."""

    wire_bytes: Count
    digest: Digest


class Question(Record):
    """Question for the outcome of a meeting."""

    exchange: ExchangeId


class MeetingOutcome(Record):
    """Answer of the peer that decided a meeting."""

    incarnation: Incarnation
    decided: Literal["committed", "pending", "not committed"]


def tagged(kind: bytes, record: Record) -> bytes:
    """Return a stream message of a kind."""
    return kind + record.encode()
