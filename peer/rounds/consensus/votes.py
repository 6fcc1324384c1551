"""A leader's polls: promises before a later attempt, votes for its entry, and the certificate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from atoll.dht.identity import short
from atoll.dht.tasks import end
from atoll.dht.transport import Refused, TransportError
from atoll.optim.log.entry import (
    Certificate,
    CertificateInvalid,
    Elector,
    Entry,
    LogError,
    Vote,
    is_quorum,
    vote_payload,
)
from atoll.peer.rounds.consensus.ballot import TERM, Accepted, Leads, Place, term_of
from atoll.peer.rounds.consensus.member import AttemptFailed
from atoll.peer.rounds.consensus.voter import Voter
from atoll.peer.rounds.context import Context, failure_key
from atoll.peer.rounds.deflating import deflated, inflated
from atoll.peer.rounds.messages import Ballot, Head, Known, Prepare, Promise, Propose

T = TypeVar("T")

HEAD_STALLS = 0.5  # a group should not wait a whole stall for the dead
POLL_STALLS = 10  # a vote before there is a group, which has a deadline of its own


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A decided position."""

    entry: Entry
    certificate: Certificate


@dataclass(kw_only=True)
class Votes:
    """The polls of one term.  The rules are ``Proposer``'s and the certificate's."""

    ctx: Context
    voter: Voter
    place: Place
    electorate: tuple[Elector, ...]
    leads: Leads
    attempt: int
    """the first of the term"""
    is_live: Callable[[str], bool]
    """whether a peer is known to be alive; others are looked at before they are asked"""

    def __post_init__(self) -> None:
        """Begin the first attempt.

        Raises:
            Refused: it is another elector's, or was led before.
        """
        self.proposer = self.leads.begin(self.place, self.attempt, self.electorate)

    async def try_again(self) -> Entry | None:
        """Begin the term's next attempt, for an entry in place of one that nobody could vote for.

        Returns:
            As ``collect_promises``.

        Raises:
            AttemptFailed: no quorum promised, or the term has no attempt left.
        """
        attempt = self.proposer.attempt + 1
        if term_of(attempt) != term_of(self.attempt):
            raise AttemptFailed(f"{TERM} proposals lost a part")
        self.proposer = self.leads.begin(self.place, attempt, self.electorate)
        return await self.collect_promises()

    async def collect_promises(self) -> Entry | None:
        """The entry that has to be proposed, None where the choice is free.

        Raises:
            AttemptFailed: no quorum promised.
        """
        ask = Prepare(
            epoch=self.place.epoch, position=self.place.position, attempt=self.proposer.attempt
        )

        def take(index: int, answer: bytes) -> None:
            promise = Promise.decode(answer)
            accepted = None
            if promise.entry:
                record = inflated(promise.entry, Entry.max_bytes)
                accepted = Accepted(attempt=promise.accepted_attempt, entry=record)
            self.proposer.promise(index, accepted)

        promised = await self._poll("prepare", ask.encode(), self._default_s, take)
        self._expect_quorum(promised, f"promised attempt {self.proposer.attempt}")
        adopted = self.proposer.adopted()
        return Entry.decode(adopted) if adopted is not None else None

    async def decide(self, own: Entry, deadline_s: float | None) -> Outcome:
        """The certificate of ``own``, or of the entry that the promises bind this leader to.

        Raises:
            AttemptFailed: no quorum voted.
        """
        entry = Entry.decode(self.proposer.choose(own.encode()))
        ask = Propose(attempt=self.proposer.attempt, entry=deflated(entry.encode()))
        payload = vote_payload(entry, self.proposer.attempt)
        signatures: dict[int, bytes] = {}

        def take(index: int, answer: bytes) -> None:
            signature = Ballot.decode(answer).signature
            if not self.ctx.verify(self.electorate[index].peer_id, payload, signature):
                raise CertificateInvalid("a vote with a signature of somebody else")
            signatures[index] = signature

        voted = await self._poll("propose", ask.encode(), deadline_s or self._default_s, take)
        self._expect_quorum(voted, "voted")
        votes = tuple(Vote(elector=i, signature=s) for i, s in sorted(signatures.items()))
        return Outcome(
            entry=entry, certificate=Certificate(attempt=self.proposer.attempt, votes=votes)
        )

    @property
    def _default_s(self) -> float:
        return POLL_STALLS * self.ctx.settings.stall_s

    def _expect_quorum(self, voters: set[int], did: str) -> None:
        if not is_quorum(list(voters), len(self.electorate)):
            raise AttemptFailed(
                f"{len(voters)} of {len(self.electorate)} electors {did}, expected a quorum"
            )

    async def _poll(
        self, method: str, body: bytes, deadline_s: float, take: Callable[[int, bytes], None]
    ) -> set[int]:
        """Ask all electors at once, until a quorum answers well or all are through; who did."""
        asking = {
            asyncio.create_task(self._ask(index, method, body, deadline_s, take)): index
            for index in range(len(self.electorate))
        }
        good: set[int] = set()
        pending = set(asking)
        try:
            while pending and not is_quorum(list(good), len(self.electorate)):
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                good |= {asking[task] for task in done if task.result()}
        finally:
            await end(*pending)
        return good

    async def _ask(
        self,
        index: int,
        method: str,
        body: bytes,
        timeout_s: float,
        take: Callable[[int, bytes], None],
    ) -> bool:
        """Whether the elector of this index gave a good answer."""
        peer = self.electorate[index].peer_id
        try:
            if peer == self.ctx.me.peer_id:
                answer = await self.voter.answer(peer, method, body)
            elif self.is_live(peer) or await ask_head(self.ctx, peer) is not None:
                answer = await self.ctx.transport.call(peer, method, body, timeout_s=timeout_s)
            else:
                return False
            take(index, answer)
            return True
        except (Refused, LogError) as error:
            self.ctx.on_event(
                "warning",
                f"round {self.place.position + 1}: no vote of {short(peer)}: {error}",
                key=("no vote", self.place.position, peer, failure_key(error)),
            )
        except TransportError:
            pass
        return False


async def ask_head(ctx: Context, peer: str) -> Head | None:
    """Where a peer stands; None if it does not say so soon: then it is frozen or gone."""
    with suppress(TransportError, ValueError):
        timeout_s = HEAD_STALLS * ctx.settings.stall_s
        known, asked_at = Known(epoch=ctx.known_epoch).encode(), ctx.now()
        answer = await ctx.transport.call(peer, "head", known, timeout_s=timeout_s)
        ctx.link.note_round_trip(peer, ctx.now() - asked_at)
        return Head.decode(answer)
    return None
