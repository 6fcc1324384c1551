"""A hop's counts about itself, and its trainer's waits by reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, get_args

from atoll.peer.pipeline.messages import Omission, PassAnswer

Wait = Literal["input", "route", "returns", "step", "drain"]
"""For what a trainer without a job waits:

input    nothing is in work here: the stage before sends nothing
route    the next stage takes nothing
returns  all that is in work is further on
step     the step has all its microbatches, and some are still further on
drain    this peer takes nothing new
"""


@dataclass(frozen=True, kw_only=True)
class HopStatistics:
    """One hop since its start."""

    counted: int
    """Microbatches whose gradients were added here."""
    evaluated: int
    steps: int
    omitted: dict[Omission, int]
    """By reason."""
    late_returns: int
    """Returns that came after the microbatch had been given up."""
    resends: int
    """Outputs that were handed over again, because a peer was lost or silent."""
    busy_answers: int
    """Passes that this peer had no room for."""
    double_counts: dict[int, int]
    """By stage, for microbatches that began here: how often one counted at another peer too."""
    waited_s: dict[Wait, float]
    """The trainer's time without a job, by reason."""
    in_flight: int
    """Microbatches in work."""
    queued_jobs: int
    remembered: int
    """Passes in the ledger."""
    held_bytes: int
    rows_per_s: dict[str, float]
    """Of peers of the next stage, as measured here."""


class Tallies:
    """Counts of one hop."""

    def __init__(self) -> None:
        self.counted = self.evaluated = self.late_returns = self.busy_answers = 0
        self.omitted: Counter[Omission] = Counter()
        self.waited_s: dict[Wait, float] = dict.fromkeys(get_args(Wait), 0.0)
        self._waits_for: Wait | None = None
        self._since_s: float | None = None

    def wait(self, reason: Wait | None, now_s: float) -> None:
        """Note for what the trainer waits from now on; None if it has a job."""
        if self._waits_for is not None and self._since_s is not None:
            self.waited_s[self._waits_for] += now_s - self._since_s
        self._waits_for, self._since_s = reason, now_s

    def answered(self, answer: PassAnswer, *, is_return: bool) -> None:
        """Note this peer's answer to a header."""
        self.busy_answers += answer.verdict == "busy"
        self.late_returns += is_return and answer.reason == "expired"
