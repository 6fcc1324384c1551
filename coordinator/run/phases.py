"""Phases of a peer in its round, for its log, its heartbeats and the dashboard."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol


class RoundPhase(StrEnum):
    """The phase of a peer's round; docs/protocol.md, part "Phases", lists them."""

    IDLE = "idle"
    TRAIN = "train"
    WAIT = "wait"
    REDUCE = "reduce"
    LATE = "late"
    DOUBT = "doubt"
    RECOVER = "recover"


AT_REST = frozenset({RoundPhase.IDLE, RoundPhase.TRAIN})
"""Phases in which no round needs the network: the peer counts as training."""


class RoundStage(StrEnum):
    """A part of a round's time in a trace; docs/protocol.md, part "Phases", lists them."""

    WAIT = "wait"
    ENCODE = "encode"
    SEND = "send"
    REDUCE = "reduce"
    VOTE = "vote"
    APPLY = "apply"


class OnPhase(Protocol):
    """Takes a change of phase."""

    def __call__(self, phase: RoundPhase, position: int, *, left: int | None = None) -> None:
        """Report `phase` at `position`; `left`: entries or leaves still to fetch."""
