"""Outcomes: what became of a peer's work in one round, for its log, its heartbeats and people."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """The outcome of a peer's work in a round."""

    COUNTED = "counted"
    PART = "part"
    NOT_READY = "not_ready"
    LATE = "late"
    """the leader had closed the group when this peer reported"""
    LEADER_LOST = "leader_lost"
    """the last leader that this peer reported to was not reached, or fell silent"""
    LEFT_OUT = "left_out"
    """the peer was in a group, and its leader continued without it"""
    NOT_IN_GROUP = "not_in_group"
    """decided by others; nothing here shows why"""
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
    Outcome.LATE: "not counted: this peer reported after the group had closed; the work stays in "
    "the next contribution; if it repeats, ask the organiser for a longer round.grace_s, or for "
    'outer.windows = "deadline" if windows are equal',
    Outcome.LEADER_LOST: "not counted: the round's leader was not reached, or fell silent; the "
    "work stays in the next contribution; if it repeats, run `atoll doctor INVITE`",
    Outcome.LEFT_OUT: "not counted: the leader left this peer out, as slow or silent; the work "
    "stays in the next contribution; if it repeats, check the link with `atoll doctor INVITE`",
    Outcome.NOT_IN_GROUP: "not counted: the others decided the round without this peer; the work "
    "stays in the next contribution; if it repeats, run `atoll doctor INVITE`",
    Outcome.NOT_RECEIVED: "not counted: none of it reached the other peers; the work stays in the "
    "next contribution",
    Outcome.FIRST_WINDOW: "not counted: the first window after joining has weight 0",
    Outcome.GIVEN_UP: "not counted: the round was given up; the work stays in the next "
    "contribution",
    Outcome.NO_PARTNER: "not counted: no partner was reached; the work stays here",
}
"""For people; programs read the values."""

ABSENCES = {
    Outcome.LATE: "reported after the group had closed",
    Outcome.LEADER_LOST: "did not reach the leader",
    Outcome.LEFT_OUT: "left out as slow or silent",
}
"""The words of a peer that was absent, in its report of a round."""
