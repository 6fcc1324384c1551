"""Refusal codes: why one peer refuses another, in one list for transport, rounds and gossip.

A code travels as its value. `docs/protocol.md`, section "Refusal codes", says who gives which one
when, and what the receiver does.
"""

from __future__ import annotations

from enum import StrEnum


class RefusalCode(StrEnum):
    """The reason for programs; a refusal's text is for people."""

    # The transport itself
    UNKNOWN_METHOD = "unknown-method"
    NOT_ADMITTED = "not-admitted"
    BAD_MESSAGE = "bad-message"
    INTERNAL = "internal"
    NO_RELAY = "no-relay"
    BUSY = "busy"
    UNKNOWN = "unknown"
    """A code that this version does not list; also the fallback of `read`."""

    # Participants in rounds, with a log or by gossip
    BARRED = "barred"
    PROTOCOL = "protocol"
    ELSEWHERE = "elsewhere"
    REPLAYED = "replayed"

    # Electors and leaders
    BAD_ELECTORATE = "bad-electorate"
    BAD_PROPOSAL = "bad-proposal"
    BAD_READY = "bad-ready"
    BAD_ROOT = "bad-root"
    BAD_SCALARS = "bad-scalars"
    BAD_WEIGHT = "bad-weight"
    BAD_UNITS = "bad-units"
    CLOSED = "closed"
    DECIDED = "decided"
    FAR_TERM = "far-term"
    LEFT = "left"
    NO_ELECTOR = "no-elector"
    NO_PARTS = "no-parts"
    NO_REPORTS = "no-reports"
    NOT_THE_LEADER = "not-the-leader"
    RETIRED = "retired"
    SUPERSEDED = "superseded"
    UNDER_WAY = "under-way"

    # Members, owners and relays of a group
    BAD_CELL = "bad-cell"
    BAD_HEAD = "bad-head"
    BAD_SUM = "bad-sum"
    LATE_SUMS = "late-sums"
    NO_SEAT = "no-seat"
    NO_SUCH_ROUND = "no-such-round"
    NOT_A_MEMBER = "not-a-member"
    NOT_THE_OWNER = "not-the-owner"
    NOT_THE_RELAY = "not-the-relay"
    NOT_UPFRONT = "not-upfront"
    OTHER_GROUP = "other-group"
    OWNER_LOST = "owner-lost"
    TOO_LONG = "too-long"

    # Lenders of entries, bodies and states
    BAD_REQUEST = "bad-request"
    NOT_HERE = "not-here"

    # Peers invited to a meeting
    AHEAD = "ahead"
    NOT_BEGUN = "not-begun"
    PAIRED = "paired"
    TRAINING = "training"

    @classmethod
    def read(cls, word: str) -> RefusalCode:
        """Return the code that a peer sent, UNKNOWN if this version does not list it."""
        try:
            return cls(word.replace("_", "-"))  # earlier versions wrote `unknown_method`
        except ValueError:
            return cls.UNKNOWN
