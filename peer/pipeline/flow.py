"""The way of a pass through one peer: each change of its phase, and what follows from it."""

from __future__ import annotations

import random
from math import inf

from atoll.peer.pipeline.actions import Action, JobKind, MicrobatchEnded, SendPass, SettleHeld
from atoll.peer.pipeline.books import Books
from atoll.peer.pipeline.intake import Intake
from atoll.peer.pipeline.ledger import Returned
from atoll.peer.pipeline.messages import (
    NOTHING,
    Microbatch,
    Omission,
    PassHeader,
    PassKey,
    Payload,
)
from atoll.peer.pipeline.origins import CountedBy, Settlements
from atoll.peer.pipeline.passes import HopRules, Pass, Phase, omit_note, recount
from atoll.peer.pipeline.returns import Returns
from atoll.peer.pipeline.router import Router, numbered
from atoll.peer.pipeline.tallies import Tallies
from atoll.peer.pipeline.wiring import Wiring

# Of the lifetime, after the deadline: the origin has computed its own gradient last and then
# settles. A held pass blocks a step for as long.
SETTLE_SHARE = 0.25


class Flow:
    """The passes of one peer in motion. What it asks for is collected in `actions`."""

    def __init__(
        self, *, me: str, stage: int, rules: HopRules, rng: random.Random, books: Books
    ) -> None:
        """Begin without passes; the arguments are those of `Hop`."""
        numbers = numbered()
        self._me, self._rules, self._books = me, rules, books
        self._is_first, self._is_last = stage == 0, stage == rules.stages - 1
        self._holds = rules.exact and not self._is_first
        self.intake = Intake(stage=stage, rules=rules, books=books, rng=rng)
        self.router = Router(stage=stage, rules=rules, wiring=Wiring(rng), numbers=numbers)
        self.returns = Returns(stage=stage, rules=rules, rng=rng, numbers=numbers)
        self.counted_by = CountedBy(rules.stages)
        self.settlements = Settlements(rng)
        self.tallies = Tallies()
        self.actions: list[Action] = []

    # Inputs and returns that arrive.

    def take_input(self, one: Pass, peer: str, payload: Payload) -> None:
        """Take the payload of an input."""
        if one.phase is not Phase.ARRIVING or one.requesters != [peer]:
            return
        self.intake.arrived(peer)
        one.phase, one.due_s, one.received = Phase.QUEUED, inf, payload
        kind: JobKind = "forward"
        if self._is_last:
            kind = "loss" if one.key.trains else "evaluate"
        self._books.jobs.add(one.key, kind)

    def lose_input(self, one: Pass, now_s: float) -> None:
        """Forget a pass whose payload did not come; its sender waits before the next."""
        self.intake.broke_off(one.requesters[0], now_s)
        self._books.forget(one)

    def take_return(
        self, one: Pass, peer: str, header: PassHeader, payload: Payload, now_s: float
    ) -> None:
        """Take the return of an output."""
        if one.arriving_from != peer or not one.phase.waits_for_return:
            return
        self.router.returned(one, peer, now_s)
        one.arriving_from, one.returned_by = "", peer
        one.path, one.loss, one.output = header.path, header.loss, NOTHING
        self.counted_by.note(one.key.microbatch, one.path)
        if not one.key.trains:
            self.end_evaluation(one, now_s)
            return
        one.phase, one.gradient = Phase.RETURNED, payload.frame
        self._books.jobs.add(one.key, "backward")

    def lose_return(self, one: Pass, peer: str, now_s: float) -> None:
        """Note that a return broke off."""
        if one.arriving_from != peer:
            return
        one.arriving_from = ""
        if one.phase is Phase.ROUTING:
            self.route(one, now_s)

    def known(self, peer: str, header: PassHeader, now_s: float) -> None:
        """Follow up a header that was answered with "known"."""
        one = self._books.known(header.key)
        assert one is not None
        result = self._books.ledger.result(one.key)
        if header.is_return and peer != one.returned_by:
            self._not_needed(one, header.path)
        elif not header.is_return and result is not None:
            self.actions += self.returns.start(one, result, [peer], now_s)

    def _not_needed(self, one: Pass, path: tuple[str, ...]) -> None:
        if self._is_first:
            self.counted_by.note(one.key.microbatch, path)
        else:
            self.actions += recount(one.key, path, self._rules)

    # Outputs on their way on, and returns on their way back.

    def send_on(self, one: Pass, output: Payload, now_s: float) -> None:
        """Take an output that is computed."""
        one.output = output
        if not one.key.trains:
            one.received = NOTHING
        self.route(one, now_s)

    def route(self, one: Pass, now_s: float) -> None:
        """Hand an output over, or let it wait for a free peer; omit it if no peer takes it."""
        if one.arriving_from:  # its return comes from an earlier peer
            one.phase, one.due_s = Phase.ROUTING, one.arriving_until_s
            one.is_there = False
        elif self.router.is_hopeless(one):
            self.omit(one, "no-peer")
        elif (send := self.router.hand_over(one, now_s)) is not None:
            self.actions.append(send)

    def at_peer(self, send: SendPass) -> Pass | None:
        """Return the pass of a hand-over that still counts."""
        one = self._books.open(send.key)
        if one is None or one.send is None or one.send.number != send.number:
            return None
        return one

    def lose_peer(self, peer: str, now_s: float) -> None:
        """Hand over again what a peer of the next stage had."""
        for one in self._books:
            if one.send is not None and one.send.peer == peer:
                self.route(one, now_s)

    def doubt(self, peer: str, now_s: float) -> None:
        """Ask a peer of the next stage for all that it has, since something failed there."""
        for one in self._books:
            if one.is_there and one.send is not None and one.send.peer == peer:
                one.due_s = min(one.due_s, now_s)

    def given_up(self, peer: str, key: PassKey, now_s: float) -> None:
        """Take the word of a peer of the next stage that it gives a pass up."""
        one = self._books.open(key)
        if one is None or not one.phase.waits_for_return or not one.may_return(peer):
            return
        if self.router.gave_up(one, peer, now_s) or self.router.is_hopeless(one):
            self.route(one, now_s)

    def send_back(self, one: Pass, gradient: Payload, now_s: float) -> None:
        """Take the gradient of an input, before that of the weights."""
        self._cache(one, gradient)
        one.received, one.gradient = NOTHING, b""
        self._start_return(one, now_s)

    def end_evaluation(self, one: Pass, now_s: float) -> None:
        """End an evaluation whose loss is known."""
        self.tallies.evaluated += 1
        if self._is_first:
            self._end_at_origin(one, None)
        else:
            self._cache(one, NOTHING)
            self._start_return(one, now_s)
        self._books.close(one, Phase.DONE)

    def _cache(self, one: Pass, payload: Payload) -> None:
        assert one.loss is not None
        path = (*one.path, self._me)
        self._books.ledger.cache(one.key, Returned(payload=payload, path=path, loss=one.loss))

    def _start_return(self, one: Pass, now_s: float) -> None:
        result = self._books.ledger.result(one.key)
        if result is not None:  # else the deadline has passed while it was computed
            self.actions += self.returns.start(one, result, one.requesters, now_s)

    # The ends of passes.

    def finish(self, one: Pass) -> None:
        """Take the word of the trainer that all gradients of a pass are computed."""
        if not self._holds:
            self._count(one)
        elif one.is_settled:
            self._settle(one, counts=True)
        else:
            one.phase = Phase.HELD
            one.due_s = one.deadline_s + SETTLE_SHARE * self._rules.lifetime_s

    def _count(self, one: Pass) -> None:
        self.tallies.counted += 1
        if self._is_first:
            self._end_at_origin(one, None)
            if self._rules.exact:
                until_s = one.deadline_s + SETTLE_SHARE * self._rules.lifetime_s
                self.actions += self.settlements.settle(
                    one.key.microbatch, one.path, until_s=until_s
                )
        self._books.close(one, Phase.DONE)

    def _end_at_origin(self, one: Pass, omission: Omission | None) -> None:
        self.actions.append(
            MicrobatchEnded(
                microbatch=one.key.microbatch,
                trains=one.key.trains,
                rows=one.rows,
                loss=one.loss if omission is None else None,
                omission=omission,
            )
        )

    def settled(self, peer: str, name: Microbatch) -> None:
        """Take the word of an origin that a microbatch counts."""
        one = self._books.open(PassKey(name, "forward"))
        if one is None or peer != name.origin:
            return
        if one.phase is Phase.HELD:
            self._settle(one, counts=True)
        elif self._books.adds_gradients(one):
            one.is_settled = True

    def _settle(self, one: Pass, *, counts: bool) -> None:
        self.actions.append(SettleHeld(key=one.key, counts=counts))
        if counts:
            self._count(one)
        else:
            self.omit(one, "late")

    def omit(self, one: Pass, reason: Omission) -> None:
        """Give a pass up, and tell the peers that sent it."""
        self.tallies.omitted[reason] += 1
        self.returns.drop(one)
        self.router.close(one)
        if self._is_first:
            self._end_at_origin(one, reason)
        self.actions += [omit_note(one.key, reason, peer) for peer in one.requesters]
        self._books.close(one, Phase.OMITTED)

    def give_up(self, one: Pass, reason: Omission) -> None:
        """Omit a pass, unless its gradients are being added up."""
        if one.phase is Phase.HELD:
            self._settle(one, counts=False)
        elif not self._books.adds_gradients(one):
            self.omit(one, reason)

    def expire(self, one: Pass) -> None:
        """End a pass at its deadline; one that is held waits for the origin a little longer."""
        self.returns.drop(one)
        if one.phase.is_open and one.phase is not Phase.HELD:
            self.give_up(one, "late")

    def due(self, one: Pass, now_s: float) -> None:
        """Do what follows when a phase takes too long."""
        if one.phase is Phase.ARRIVING:
            self.lose_input(one, now_s)
        elif one.phase is Phase.HELD:
            self._settle(one, counts=False)
        elif one.arriving_from and now_s < one.arriving_until_s:
            one.due_s = one.arriving_until_s
        else:
            self._replace(one, now_s)

    def _replace(self, one: Pass, now_s: float) -> None:
        """Ask for an output that takes long, or hand it over again."""
        if one.arriving_from:
            self.router.stalled(one, one.arriving_from, now_s)
            one.arriving_from = ""
        elif one.phase is Phase.AWAITED and one.is_there and now_s < one.replace_at_s:
            self.actions.append(self.router.ask(one, now_s))
            return
        elif one.phase is Phase.AWAITED:
            self.router.was_silent(one, now_s)
        self.route(one, now_s)
