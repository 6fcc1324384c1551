"""A leader's polls: it asks electors for promises, and for votes, and reports what they answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from atoll.dht.identity import short
from atoll.dht.tasks import end
from atoll.dht.transport import Refused, TransportError
from atoll.optim.log.entry import (
    CertificateInvalid,
    Elector,
    Entry,
    LogError,
    vote_payload,
)
from atoll.peer.rounds.consensus.ballot import Accepted, Place
from atoll.peer.rounds.consensus.round import (
    AskPromises,
    Event,
    Polled,
    Promised,
    SendProposal,
    VoteArrived,
)
from atoll.peer.rounds.consensus.voter import Voter
from atoll.peer.rounds.context import Context, failure_key
from atoll.peer.rounds.deflating import deflated, inflated
from atoll.peer.rounds.messages import Ballot, Head, Known, Prepare, Promise, Propose

HEAD_STALLS = 0.5  # a group should not wait a whole stall for the dead
POLL_STALLS = 10  # a vote before there is a group, which has a deadline of its own


class Polls:
    """Asks the electors of one position, one question at a time."""

    def __init__(
        self,
        ctx: Context,
        voter: Voter,
        place: Place,
        *,
        is_live: Callable[[str], bool],
        take: Callable[[Event], object],
    ) -> None:
        """Nothing is asked yet.

        Args:
            ctx: the leader's.
            voter: the leader's own.
            place: what the polls are about.
            is_live: whether a peer is known to be alive; others are probed before they are asked.
            take: gets the answers.
        """
        self._ctx = ctx
        self._voter = voter
        self._place = place
        self._is_live = is_live
        self._take = take
        self._poll: asyncio.Task[None] | None = None

    def ask(self, question: AskPromises | SendProposal, electorate: Sequence[Elector]) -> None:
        """Ask all electors at once; `Polled` comes after the last answer."""
        self._poll = asyncio.create_task(self._run(question, electorate))

    async def stop(self) -> None:
        """Wait for no more answers."""
        poll, self._poll = self._poll, None
        if poll is not None:
            await end(poll)

    def check(self) -> None:
        """Raise what a poll failed with."""
        if self._poll is not None and self._poll.done():
            self._poll.result()

    async def _run(
        self, question: AskPromises | SendProposal, electorate: Sequence[Elector]
    ) -> None:
        timeout_s = POLL_STALLS * self._ctx.settings.stall_s
        try:
            async with asyncio.TaskGroup() as group:
                if isinstance(question, AskPromises):
                    record = Prepare(
                        epoch=self._place.epoch,
                        position=self._place.position,
                        attempt=question.attempt,
                    ).encode()
                    for index, elector in enumerate(electorate):
                        asking = self._ask_promise(question, index, elector, record, timeout_s)
                        group.create_task(asking)
                else:
                    timeout_s = question.deadline_s or timeout_s
                    entry = deflated(question.entry.encode())
                    record = Propose(attempt=question.attempt, entry=entry).encode()
                    for index, elector in enumerate(electorate):
                        asking = self._ask_vote(question, index, elector, record, timeout_s)
                        group.create_task(asking)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        self._take(Polled(attempt=question.attempt))

    async def _ask_promise(
        self, question: AskPromises, index: int, elector: Elector, record: bytes, timeout_s: float
    ) -> None:
        def taken(answer: bytes) -> Promised:
            promise = Promise.decode(answer)
            accepted = None
            if promise.entry:
                entry = inflated(promise.entry, Entry.max_bytes)
                accepted = Accepted(attempt=promise.accepted_attempt, entry=entry)
            return Promised(attempt=question.attempt, elector=index, accepted=accepted)

        await self._ask(elector.peer_id, "prepare", record, timeout_s, taken)

    async def _ask_vote(
        self, question: SendProposal, index: int, elector: Elector, record: bytes, timeout_s: float
    ) -> None:
        def taken(answer: bytes) -> VoteArrived:
            signature = Ballot.decode(answer).signature
            payload = vote_payload(question.entry, question.attempt)
            if not self._ctx.verify(elector.peer_id, payload, signature):
                raise CertificateInvalid("a vote with a signature of somebody else")
            return VoteArrived(attempt=question.attempt, elector=index, signature=signature)

        await self._ask(elector.peer_id, "propose", record, timeout_s, taken)

    async def _ask(
        self,
        peer: str,
        method: str,
        record: bytes,
        timeout_s: float,
        taken: Callable[[bytes], Event],
    ) -> None:
        """Pass on an elector's answer, if it gives a good one."""
        try:
            if peer == self._ctx.me.peer_id:
                answer = await self._voter.answer(peer, method, record)
            elif self._is_live(peer) or await ask_head(self._ctx, peer) is not None:
                call = self._ctx.transport.call
                answer = await call(peer, method, record, timeout_s=timeout_s)
            else:
                return
            self._take(taken(answer))
        except (Refused, LogError) as error:
            self._ctx.on_event(
                "warning",
                f"round {self._place.position + 1}: no vote of {short(peer)}: {error}",
                key=("no vote", self._place.position, peer, failure_key(error)),
            )
        except TransportError:
            pass


async def ask_head(ctx: Context, peer: str) -> Head | None:
    """Ask a peer where it stands; None if it does not answer soon: then it is frozen or gone."""
    with suppress(TransportError, ValueError):
        timeout_s = HEAD_STALLS * ctx.settings.stall_s
        known, asked_at = Known(epoch=ctx.known_epoch).encode(), ctx.now()
        answer = await ctx.transport.call(peer, "head", known, timeout_s=timeout_s)
        ctx.link.note_round_trip(peer, ctx.now() - asked_at)
        return Head.decode(answer)
    return None
