"""Handing outputs over to the next stage, and replacing a peer that was lost on the way.

A hop keeps its output until the return comes. A peer that breaks off, refuses, gives up or is
silent for too long is replaced by another of its stage; the hop before notices nothing. Peers that
had the output may still return it, and the first return counts.

A hop waits for a silent peer for a share of the time that is left, or a multiple of what returns
usually take if that is less. Both are greater the more stages follow, so that the hop next to the
fault replaces it before those further up lose patience with their own neighbours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from atoll.peer.pipeline.actions import SendFailure, SendPass
from atoll.peer.pipeline.messages import PassAnswer, RefusedPass
from atoll.peer.pipeline.passes import HopRules, Pass, Phase, outward_header, remaining_ms
from atoll.peer.pipeline.wiring import Pace, Wiring

PATIENCE = 3.0  # usual returns; doubled for each stage that follows the next: its peers wait too
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
        self._close(one)
        one.phase, one.due_s = Phase.ROUTING, one.deadline_s
        if not remaining_ms(one.deadline_s, now_s):
            return None
        without = self._without(one, now_s)
        reservation = self.wiring.reserve(rows=one.rows, now_s=now_s, without=without)
        if reservation is None:
            free_s = self.wiring.next_free_s(now_s, without)
            one.due_s = now_s + VACANT_RETRY_S if free_s is None else free_s
            return None
        one.phase, one.due_s = Phase.AWAITED, now_s + self._patience_s(one, now_s)
        one.reservation = reservation
        one.send = SendPass(
            number=next(self._numbers),
            peer=reservation.peer,
            header=outward_header(one, self._rules, stage=self._next_stage, now_s=now_s),
            payload=one.output,
        )
        self.resends += bool(one.asked_at_s)
        return one.send

    def is_hopeless(self, one: Pass) -> bool:
        """Return whether all peers of the next stage have refused an output or given it up."""
        return bool(self.wiring.peers) and self.wiring.peers <= one.excluded

    def answered(self, one: Pass, answer: PassAnswer, now_s: float) -> bool:
        """Take a peer's answer; return whether it has the output, or will get it."""
        assert one.send is not None and one.reservation is not None
        peer = one.send.peer
        if answer.verdict in ("accepted", "known"):
            one.asked_at_s.setdefault(peer, one.reservation.at_s)
            return True
        if answer.verdict == "busy":
            self.wiring.was_busy(one.reservation, answer.retry_ms / 1000, now_s)
            return False
        one.excluded.add(peer)
        if answer.reason in BANNED_FOR:
            self.wiring.was_unreachable(one.reservation, now_s)
        elif answer.reason == "stage":
            self.wiring.left(peer)
        else:
            self.wiring.cancel(one.reservation)
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
        else:
            self.wiring.cancel(one.reservation)

    def was_silent(self, one: Pass, now_s: float) -> None:
        """Note that the return did not come in time."""
        if one.reservation is not None:
            self.wiring.was_slow(one.reservation, now_s)
            # Otherwise a load that grows quickly would have all passes sent twice for good.
            self._usual_return.add(now_s - one.reservation.at_s)

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
        self._close(one)
        one.due_s = math.inf

    def _close(self, one: Pass) -> None:
        one.send = one.reservation = None

    def _without(self, one: Pass, now_s: float) -> set[str]:
        """Return the peers that do not get an output: prefer those that never had it."""
        out = self.wiring.peers & (one.excluded | self.wiring.banned(now_s))
        fresh = self.wiring.peers - out - one.asked_at_s.keys()
        return one.excluded | one.asked_at_s.keys() if fresh else set(one.excluded)

    def _patience_s(self, one: Pass, now_s: float) -> float:
        after = self._stages_after
        usual_s = max(self._usual_return.row_s, LEAST_RETURN_S)
        left_s = one.deadline_s - now_s
        most_s = min(left_s * after / (after + 1), PATIENCE * 2.0 ** (after - 1) * usual_s)
        return max(most_s, min(left_s, LEAST_RETURN_S))


def numbered() -> Iterator[int]:
    """Return the numbers of a hop's sends."""
    return itertools.count()
