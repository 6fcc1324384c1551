"""Sending returns to the stage before: to the newest peer that asked, else to those before it.

A return is never thrown away for a lost connection: it stays in the ledger until its deadline, and
whoever sends the pass again gets it at once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from atoll.peer.pipeline.actions import Action, SendPass
from atoll.peer.pipeline.ledger import Returned
from atoll.peer.pipeline.messages import PassAnswer
from atoll.peer.pipeline.passes import HopRules, Pass, recount, remaining_ms, return_header
from atoll.peer.pipeline.wiring import MAX_PAUSE_S, MIN_PAUSE_S, Backoff

TRIES = 3  # of one requester: a connection that broke is made again; a dead peer is replaced
FIRST_PAUSE_S, MAX_TRY_PAUSE_S = 0.2, 2.0  # between them


@dataclass(kw_only=True, eq=False)
class _Parcel:
    one: Pass
    result: Returned
    to: str
    others: list[str]
    """requesters before this one, the newest last"""
    pause: Backoff
    send: SendPass | None = None
    due_s: float = inf


class Returns:
    """The returns that are on their way back."""

    def __init__(
        self, *, stage: int, rules: HopRules, rng: random.Random, numbers: Iterator[int]
    ) -> None:
        """Begin without any; the arguments are those of `Router`, and `rng` spreads retries."""
        self._stage_before, self._rules, self._rng = stage - 1, rules, rng
        self._numbers = numbers
        self._parcels: dict[tuple[object, str], _Parcel] = {}

    def __len__(self) -> int:
        return len(self._parcels)

    @property
    def due_s(self) -> float:
        """Return when the next one is tried again."""
        return min((parcel.due_s for parcel in self._parcels.values()), default=inf)

    def start(
        self, one: Pass, result: Returned, requesters: list[str], now_s: float
    ) -> list[Action]:
        """Send a return to the last of these peers; to the others only if that fails."""
        if not requesters or (one.key, requesters[-1]) in self._parcels:
            return []
        *others, to = requesters
        parcel = _Parcel(
            one=one,
            result=result,
            to=to,
            others=others,
            pause=Backoff(first_s=FIRST_PAUSE_S, max_s=MAX_TRY_PAUSE_S),
        )
        self._parcels[one.key, to] = parcel
        return self._try(parcel, now_s)

    def answered(self, send: SendPass, answer: PassAnswer, now_s: float) -> list[Action]:
        """Take a requester's answer."""
        parcel = self._of(send)
        if parcel is None or answer.verdict == "accepted":
            return []
        if answer.verdict == "busy":
            pause_s = min(max(answer.retry_ms / 1000, MIN_PAUSE_S), MAX_PAUSE_S)
            parcel.send, parcel.due_s = None, now_s + pause_s
            return []
        self._end(parcel)
        return [] if answer.verdict == "known" else self._next(parcel, now_s)

    def delivered(self, send: SendPass) -> None:
        """Note that a requester has its return."""
        parcel = self._of(send)
        if parcel is not None:
            self._end(parcel)

    def failed(self, send: SendPass, now_s: float) -> list[Action]:
        """Note that a requester was not reached."""
        parcel = self._of(send)
        if parcel is None:
            return []
        parcel.pause.fail(now_s, self._rng)
        if parcel.pause.failures < TRIES:
            parcel.send, parcel.due_s = None, parcel.pause.until_s
            return []
        self._end(parcel)
        return self._next(parcel, now_s)

    def remaining_ms(self, send: SendPass, now_s: float) -> int:
        """Return the time that a return has left; 0 if it is not to be sent any more."""
        parcel = self._of(send)
        return 0 if parcel is None else remaining_ms(parcel.one.deadline_s, now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Try again what is due."""
        due = [parcel for parcel in self._parcels.values() if parcel.due_s <= now_s]
        return [send for parcel in due for send in self._try(parcel, now_s)]

    def drop(self, one: Pass) -> None:
        """Send no return of a pass any more: its time is over."""
        for parcel in [each for each in self._parcels.values() if each.one is one]:
            self._end(parcel)

    def _next(self, parcel: _Parcel, now_s: float) -> list[Action]:
        """Send to the requester before; if there is none, tell the origin who counted."""
        if parcel.others:
            return self.start(parcel.one, parcel.result, parcel.others, now_s)
        return recount(parcel.one.key, parcel.result.path, self._rules)

    def _try(self, parcel: _Parcel, now_s: float) -> list[Action]:
        one = parcel.one
        if not remaining_ms(one.deadline_s, now_s):
            self._end(parcel)
            return []
        parcel.due_s = inf
        parcel.send = SendPass(
            number=next(self._numbers),
            peer=parcel.to,
            header=return_header(
                one, parcel.result, self._rules, stage=self._stage_before, now_s=now_s
            ),
            payload=parcel.result.payload,
        )
        return [parcel.send]

    def _of(self, send: SendPass) -> _Parcel | None:
        parcel = self._parcels.get((send.key, send.peer))
        if parcel is None or parcel.send is None or parcel.send.number != send.number:
            return None
        return parcel

    def _end(self, parcel: _Parcel) -> None:
        self._parcels.pop((parcel.one.key, parcel.to), None)
