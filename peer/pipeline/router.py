"""Handing outputs over to the next stage, and replacing a peer that was lost on the way.

A hop keeps its output until the return comes. A peer that breaks off, refuses, gives up or is
silent for too long is replaced by another of its stage; the hop before notices nothing. Peers that
had the output may still return it, and the first return counts.

A hop whose output is with a peer for longer than returns usually take asks that peer again, under
the same header. "Known" means that the peer lives and has it in work, or sends its return once
more; then the hop waits on. Only without such an answer does the output go to another peer. So a
queue that grows is no reason to compute anything twice. A peer that answers and never returns
anything is replaced after a share of the time that is left, which is greater the more stages
follow: the hop next to the fault acts before those further up do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from atoll.peer.pipeline.actions import SendFailure, SendPass
from atoll.peer.pipeline.messages import PassAnswer, RefusedPass
from atoll.peer.pipeline.passes import HopRules, Pass, Phase, outward_header, remaining_ms
from atoll.peer.pipeline.wiring import Pace, Wiring

PATIENCE = 3.0  # usual returns: most questions would be in vain before, and later they cost time
LEAST_RETURN_S = 0.5  # of a usual return: below, a hiccup of the machine would count as silence
VACANT_RETRY_S = 1.0  # while a stage has no peer: passes are routed at once when one appears

BANNED_FOR: frozenset[RefusedPass] = frozenset({"protocol", "shape", "origin"})
"""Refusals that every pass of this run would get."""


class Router:
    """The way from this peer to the next stage."""

    def __init__(
        self, *, stage: int, rules: HopRules, wiring: Wiring, numbers: Iterator[int]
    ) -> None:
        """Begin without peers.

        Args:
            stage: of this peer.
            rules: of the run.
            wiring: selects peers.
            numbers: of the hop's sends.
        """
        self._next_stage, self._rules, self.wiring = stage + 1, rules, wiring
        self._stages_after = rules.stages - 1 - stage
        self._numbers = numbers
        self._usual_return = Pace(announced_row_s=math.inf)
        self.resends = 0
        """passes that went to another peer than before, or again to the same one"""

    def hand_over(self, one: Pass, now_s: float) -> SendPass | None:
        """Select a peer for an output; None if none is free now, or no time is left.

        Then `one.due_s` says when to try again.
        """
        self.close(one)
        one.phase, one.due_s = Phase.ROUTING, one.deadline_s
        if not remaining_ms(one.deadline_s, now_s):
            return None
        without = self._without(one, now_s)
        reservation = self.wiring.reserve(rows=one.rows, now_s=now_s, without=without)
        if reservation is None:
            free_s = self.wiring.next_free_s(now_s, without)
            one.due_s = now_s + VACANT_RETRY_S if free_s is None else free_s
            return None
        one.phase, one.due_s = Phase.AWAITED, self._replace_at_s(one, now_s)
        one.replace_at_s, one.reservation = one.due_s, reservation
        self.resends += bool(one.asked_at_s)
        return self._send(one, reservation.peer, now_s)

    def ask(self, one: Pass, now_s: float) -> SendPass:
        """Ask the peer of an output for it, since its return takes long."""
        assert one.send is not None
        if one.reservation is not None:
            # Otherwise a load that grows quickly would have all passes asked for, again and again.
            self._usual_return.add(now_s - one.reservation.at_s)
        one.due_s, one.is_there = one.replace_at_s, False
        return self._send(one, one.send.peer, now_s, asks=True)

    def _send(self, one: Pass, peer: str, now_s: float, *, asks: bool = False) -> SendPass:
        one.send = SendPass(
            number=next(self._numbers),
            peer=peer,
            header=outward_header(one, self._rules, stage=self._next_stage, now_s=now_s),
            payload=one.output,
            asks=asks,
        )
        return one.send

    def delivered(self, one: Pass, now_s: float) -> None:
        """Note that the peer has the output: from now on it has its time to return it."""
        if one.phase is not Phase.AWAITED:
            return
        patience_s = PATIENCE * max(self._usual_return.row_s, LEAST_RETURN_S)
        one.due_s, one.is_there = min(now_s + patience_s, one.replace_at_s), True

    def is_hopeless(self, one: Pass) -> bool:
        """Return whether all peers of the next stage have refused an output or given it up."""
        return bool(self.wiring.peers) and self.wiring.peers <= one.excluded

    def answered(self, one: Pass, answer: PassAnswer, now_s: float) -> bool:
        """Take a peer's answer; return whether it has the output, or will get it."""
        assert one.send is not None and one.reservation is not None
        peer = one.send.peer
        if answer.verdict in ("accepted", "known"):
            self.resends += one.send.asks and answer.verdict == "accepted"
            one.asked_at_s.setdefault(peer, one.reservation.at_s)
            if answer.verdict == "known":
                self.delivered(one, now_s)
            return True
        if answer.verdict == "busy":
            self.wiring.was_busy(one.reservation, answer.retry_ms / 1000, now_s)
            return False
        one.excluded.add(peer)
        if answer.reason in BANNED_FOR:
            self.wiring.was_unreachable(one.reservation, now_s)
        elif answer.reason == "stage":
            self.wiring.left(peer)
        return False

    def failed(self, one: Pass, failure: SendFailure, now_s: float) -> None:
        """Note that the output did not reach its peer."""
        if one.reservation is None:
            return
        if failure == "lost":
            self.wiring.was_lost(one.reservation, now_s)
        elif failure == "unreachable":
            self.wiring.was_unreachable(one.reservation, now_s)
        elif failure == "timed-out":
            self.wiring.was_slow(one.reservation, now_s)

    def was_silent(self, one: Pass, now_s: float) -> None:
        """Note that the return did not come in time."""
        if one.reservation is not None:
            self.wiring.was_slow(one.reservation, now_s)

    def gave_up(self, one: Pass, peer: str, now_s: float) -> bool:
        """Note that a peer gave an output up; return whether it was the one that had it last."""
        one.excluded.add(peer)
        return self.stalled(one, peer, now_s)

    def stalled(self, one: Pass, peer: str, now_s: float) -> bool:
        """Note that a peer did not complete a return; it may begin one again if it is asked again.

        Returns:
            Whether it was the one that had the output last.
        """
        one.asked_at_s.pop(peer, None)
        if one.send is None or one.send.peer != peer:
            return False
        if one.reservation is not None:
            self.wiring.was_slow(one.reservation, now_s)
        return True

    def returned(self, one: Pass, peer: str, now_s: float) -> None:
        """Note that the return has arrived."""
        if one.reservation is not None and one.reservation.peer == peer:
            self.wiring.receipt(one.reservation, now_s)
        if peer in one.asked_at_s:
            self._usual_return.add(now_s - one.asked_at_s[peer])
        self.close(one)
        one.due_s = math.inf

    def close(self, one: Pass) -> None:
        """Expect no return any more from the peer that had the output last."""
        if one.reservation is not None:
            self.wiring.settle(one.reservation)
        one.send = one.reservation = None
        one.is_there = False

    def _without(self, one: Pass, now_s: float) -> set[str]:
        """Return the peers that do not get an output: prefer those that never had it."""
        out = self.wiring.peers & (one.excluded | self.wiring.banned(now_s))
        fresh = self.wiring.peers - out - one.asked_at_s.keys()
        return one.excluded | one.asked_at_s.keys() if fresh else set(one.excluded)

    def _replace_at_s(self, one: Pass, now_s: float) -> float:
        left_s = one.deadline_s - now_s
        share = self._stages_after / (self._stages_after + 1)
        return now_s + max(left_s * share, min(left_s, LEAST_RETURN_S))


def numbered() -> Iterator[int]:
    """Return the numbers of a hop's sends."""
    return itertools.count()
