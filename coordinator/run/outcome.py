"""Outcomes: what became of a peer's work in one round, for its log, its heartbeats and people."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """Whether a round took a peer's work, or why not."""

    COUNTED = "counted"
    PART = "part"
    NOT_READY = "not_ready"
    NOT_IN_GROUP = "not_in_group"
    NOT_RECEIVED = "not_received"
    FIRST_WINDOW = "first_window"
    GIVEN_UP = "given_up"
    NO_PARTNER = "no_partner"


TAKEN = frozenset({Outcome.COUNTED, Outcome.PART})
"""Outcomes in which the round took at least some of the work."""

WORDS = {
    Outcome.COUNTED: "counted",
    Outcome.PART: "counted in part: the rest did not reach its owners and stays in the next "
    "contribution",
    Outcome.NOT_READY: "not counted: its window had not ended yet",
    Outcome.NOT_IN_GROUP: "not counted: the round closed its group without this peer; the work "
    "stays in the next contribution",
    Outcome.NOT_RECEIVED: "not counted: none of it reached the other peers; the work stays in the "
    "next contribution",
    Outcome.FIRST_WINDOW: "not counted: the first window after joining has weight 0",
    Outcome.GIVEN_UP: "not counted: the round was given up; the work stays in the next "
    "contribution",
    Outcome.NO_PARTNER: "not counted: no partner was reached; the work stays here",
}
"""For people; programs read the values."""
