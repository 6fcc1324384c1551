"""A peer's own account of its rounds: whether each took its work, and the share that did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atoll.coordinator.run.outcome import TAKEN, WORDS, Outcome
from atoll.coordinator.run.text import count, size
from atoll.optim.log.entry import Elector, Entry


@dataclass(frozen=True, kw_only=True)
class Account:
    """One decided round, and the sums since this process began to train."""

    position: int
    """Entries applied: 1 after the first round."""
    outcome: Outcome
    loss: float | None = None
    """Mean training loss of the work that counted, in nats per token."""
    tokens: int = 0
    """Tokens of the work that counted."""
    rounds_seen: int = 0
    rounds_counted: int = 0
    tokens_counted: int = 0
    wire_bytes_sent: int = 0

    @property
    def is_counted(self) -> bool:
        """Return whether the round took the work, at least in part."""
        return self.outcome in TAKEN

    @property
    def share(self) -> str:
        """Return the running share, for people."""
        plural = "" if self.rounds_seen == 1 else "s"
        return (
            f"counted in {self.rounds_counted} of {self.rounds_seen} round{plural}, "
            f"{count(self.tokens_counted)} tokens, {size(self.wire_bytes_sent)} sent"
        )

    @property
    def verdict(self) -> str:
        """Return what became of the work, with the running share, for people."""
        if self.outcome is Outcome.COUNTED:
            return self.share
        return f"{WORDS[self.outcome]} ({self.share})"


OnAccount = Callable[[Account], None]


class RoundTally:
    """Counts the rounds that took a peer's work."""

    def __init__(self, num_fragments: int = 1) -> None:
        """Begin without a round; a token counts once, although it is in each fragment's work."""
        self.last: Account | None = None
        self.rounds_seen = 0
        self.rounds_counted = 0
        self._num_fragments = num_fragments
        self._tokens = 0
        self._on_account: OnAccount = lambda account: None

    @property
    def tokens_counted(self) -> int:
        """Tokens of the work that counted."""
        return self._tokens // self._num_fragments

    def watch(self, on_account: OnAccount) -> None:
        """Pass each account on from now on; called in the loop."""
        self._on_account = on_account

    def add(
        self,
        position: int,
        outcome: Outcome,
        *,
        loss: float | None,
        tokens: int,
        wire_bytes_sent: int,
    ) -> None:
        """Add a decided round; `loss` and `tokens` are of the work on offer."""
        is_taken = outcome in TAKEN
        self.rounds_seen += 1
        self.rounds_counted += is_taken
        self._tokens += tokens if is_taken else 0
        self.last = Account(
            position=position,
            outcome=outcome,
            loss=loss if is_taken else None,
            tokens=tokens if is_taken else 0,
            rounds_seen=self.rounds_seen,
            rounds_counted=self.rounds_counted,
            tokens_counted=self.tokens_counted,
            wire_bytes_sent=wire_bytes_sent,
        )
        self._on_account(self.last)


def outcome_of(
    entry: Entry,
    me: Elector,
    included: Sequence[bool] | None,
    *,
    is_offered: bool,
    missed: Outcome = Outcome.NOT_IN_GROUP,
) -> Outcome:
    """Return what an entry of the log made of a peer's work.

    Args:
        entry: the decided one.
        me: the peer.
        included: for each cell, whether the entry holds the peer's; None if it is no member.
        is_offered: whether the peer had work on offer when the entry was decided.
        missed: why the peer is no member, as far as it knows.
    """
    if not is_offered:
        return Outcome.NOT_READY
    if entry.kind == "null":
        return Outcome.GIVEN_UP
    if included is None:
        return missed
    if not any(included):
        return Outcome.NOT_RECEIVED
    if not any(m.weight > 0 for m in entry.members if m.elector == me):
        return Outcome.FIRST_WINDOW
    return Outcome.COUNTED if all(included) else Outcome.PART
