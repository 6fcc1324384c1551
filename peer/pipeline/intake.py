"""A peer's answer to the header of a pass, before it takes any bytes of it."""

from __future__ import annotations

import random

from atoll.optim.log.entry import MalformedRecord
from atoll.peer.pipeline.books import Books
from atoll.peer.pipeline.ledger import PassState
from atoll.peer.pipeline.messages import (
    ACCEPTED,
    KNOWN,
    PIPELINE_PROTOCOL,
    PassAnswer,
    PassHeader,
    RefusedPass,
    busy,
    check_header,
    refused,
)
from atoll.peer.pipeline.passes import HopRules, Pass, Phase
from atoll.peer.pipeline.wiring import Backoff

ARRIVAL_SHARE = 0.25  # of a microbatch's lifetime, for one payload: a stalled one is cut off early
JOB_S = 0.1  # asked of a sender for each job that waits here: a job takes about as long
MAX_BUSY_S = 2.0  # a peer that steps has room again sooner
BROKEN_PAUSE_S, MAX_BROKEN_PAUSE_S = 0.5, 60.0  # of a sender whose payload did not come
MAX_BROKEN = 4096  # such senders remembered; those noted first are forgotten first


class Intake:
    """The passes that one peer lets in."""

    def __init__(self, *, stage: int, rules: HopRules, books: Books, rng: random.Random) -> None:
        """Take the stage that this peer serves, and its books."""
        self._stage, self._rules, self._books, self._rng = stage, rules, books, rng
        self.arrival_s = ARRIVAL_SHARE * rules.lifetime_s
        """for which a payload may take"""
        self._broken: dict[str, Backoff] = {}

    def answer(self, peer: str, header: PassHeader, now_s: float) -> PassAnswer:
        """Answer a header. An accepted pass is entered, or marked as arriving."""
        refusal = self._refusal(header)
        if refusal is not None:
            return refused(refusal)
        if header.is_return:
            return self._answer_return(peer, header, now_s)
        return self._answer_outward(peer, header, now_s)

    def arrived(self, peer: str) -> None:
        """Note that a sender has delivered what it announced."""
        self._broken.pop(peer, None)

    def broke_off(self, peer: str, now_s: float) -> None:
        """Note that a sender has not: it held a place for nothing, and waits before the next."""
        pause = self._broken.pop(peer, None)
        if pause is None:
            pause = Backoff(first_s=BROKEN_PAUSE_S, max_s=MAX_BROKEN_PAUSE_S)
        pause.fail(now_s, self._rng)
        self._broken[peer] = pause
        if len(self._broken) > MAX_BROKEN:
            del self._broken[next(iter(self._broken))]

    def _refusal(self, header: PassHeader) -> RefusedPass | None:
        if header.protocol != PIPELINE_PROTOCOL:
            return "protocol"
        if header.stage != self._stage:
            return "stage"
        try:
            check_header(header, self._rules.shape)
        except MalformedRecord:
            return "shape"
        return None

    def _answer_outward(self, peer: str, header: PassHeader, now_s: float) -> PassAnswer:
        if self._stage == 0:
            return refused("stage")
        if self._stage == 1 and peer != header.origin:
            return refused("origin")
        state = self._books.ledger.look(header.key)
        if state is PassState.NEW:
            return self._admit(peer, header, now_s)
        one = self._books.known(header.key)
        if one is None or state is PassState.SPENT:
            return refused("expired")
        if one.phase is Phase.ARRIVING:
            return busy(JOB_S)  # it is known only once its payload is here
        one.add_requester(peer)
        return KNOWN

    def _admit(self, peer: str, header: PassHeader, now_s: float) -> PassAnswer:
        pause = self._broken.get(peer)
        if pause is not None and now_s < pause.until_s:
            return busy(pause.until_s - now_s)
        must_wait = header.key.trains and self._books.steps.stands_still
        if must_wait or not self._books.has_room(header.key.direction):
            return busy(min(JOB_S * (1 + self._books.jobs.num_waiting), MAX_BUSY_S))
        one = Pass(
            key=header.key,
            deadline_s=now_s + min(header.remaining_ms / 1000, self._rules.lifetime_s),
            phase=Phase.ARRIVING,
            due_s=now_s + self.arrival_s,
            sequences=header.sequences,
            rows=header.rows,
            requesters=[peer],
        )
        return ACCEPTED if self._books.enter(one, sender=peer) else busy(MAX_BUSY_S)

    def _answer_return(self, peer: str, header: PassHeader, now_s: float) -> PassAnswer:
        one = self._books.known(header.key)
        if one is None or not one.may_return(peer):
            return refused("not-asked")
        if (header.rows, header.sequences) != (one.rows, one.sequences):
            return refused("shape")
        if len(header.path) != self._rules.stages - 1 - self._stage or header.path[-1] != peer:
            return refused("shape")
        if one.phase is Phase.OMITTED:
            return refused("expired")
        if not one.phase.waits_for_return:
            return KNOWN
        if one.arriving_from:
            return busy(JOB_S)
        one.arriving_from = peer
        one.arriving_until_s = now_s + self.arrival_s
        return ACCEPTED
