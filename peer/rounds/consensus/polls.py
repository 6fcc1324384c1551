"""The questions of a leader to the electors of its position: promises, votes and commits.

One question is out at a time. An elector without a session is asked for its head first: if it is
silent, that costs half a stall and not the time for an answer. Answers are checked here, before the
machine in `round.py` counts them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import end
from atoll.dht.transport import Refused, TransportError
from atoll.optim.log.entry import (
    CertificateInvalid,
    Elector,
    Entry,
    LogError,
    MalformedRecord,
    commit_payload,
    proposal_payload,
    sha256,
    vote_payload,
)
from atoll.optim.log.locks import NO_DIGEST, Decree, SignedPromise, check_lock, check_promise
from atoll.peer.rounds import notices
from atoll.peer.rounds.conduct import Fault
from atoll.peer.rounds.consensus.ballots import Accepted, Place, term_of
from atoll.peer.rounds.consensus.round_events import (
    AskPromises,
    CommitArrived,
    Event,
    Polled,
    Promised,
    SendLock,
    SendProposal,
    VoteArrived,
)
from atoll.peer.rounds.consensus.voter import Voter
from atoll.peer.rounds.context import Context, ask_head, failure_key
from atoll.peer.rounds.entries import named, parsed
from atoll.peer.rounds.messages import (
    AskCommit,
    Ballot,
    Group,
    JustifiedPropose,
    LockedPromise,
    Prepare,
    Promise,
    Propose,
    Reports,
    deflated,
    reports_root,
)
from atoll.peer.rounds.policies import POLL_STALLS

PROBE_S = 1.0  # how often peers that are waited for are asked
ASKED_AGAIN = frozenset({RefusalCode.NO_REPORTS, RefusalCode.UNDER_WAY})
"""Refusals of electors that answer another time: with the reports, or when the term opens."""

Question = AskPromises | SendProposal | SendLock


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
        """Prepare to ask the electors of `place`.

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
        self._reports: dict[bytes, Reports] = {b"": ()}
        """signed reports of the entries that may be proposed, by the digest in them"""
        self._sound: set[bytes] = set()
        """digests of entries that promises named, and that break no rule"""
        self._group: Group | None = None
        """the leader's own"""

    def know_group(self, group: Group) -> None:
        """Keep the group whose entry may be proposed."""
        self._group = group
        self.know(group.reports)

    def know(self, reports: Reports) -> None:
        """Keep the reports of an entry that may be proposed."""
        self._reports[reports_root(reports)] = reports

    def ask(self, question: Question, electorate: Sequence[Elector]) -> None:
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

    async def _run(self, question: Question, electorate: Sequence[Elector]) -> None:
        timeout_s = POLL_STALLS * self._ctx.settings.stall_s
        try:
            async with asyncio.TaskGroup() as group:
                if isinstance(question, AskPromises):
                    record = Prepare(
                        epoch=self._place.epoch,
                        position=self._place.position,
                        attempt=question.attempt,
                    ).encode()
                    for index in range(len(electorate)):
                        asking = self._ask_promise(question, index, electorate, record, timeout_s)
                        group.create_task(asking)
                elif isinstance(question, SendLock):
                    for index, elector in enumerate(electorate):
                        record = self._lock_record(question, index)
                        asking = self._ask_commit(question, index, elector, record, timeout_s)
                        group.create_task(asking)
                else:
                    self._ask_votes(question, electorate, group, question.deadline_s or timeout_s)
        except BaseExceptionGroup as failures:  # the first one is the reason that the term failed
            raise failures.exceptions[0] from None
        self._take(Polled(attempt=question.attempt))

    def _proposals(self, question: SendProposal) -> Proposals:
        """Encode a proposal for electors that have its members with their group, and for others."""
        whole, entry = self._proposal(question), question.entry
        known: dict[str, object] = {"reports": ()}
        if self._group is not None and entry.members == self._group.members:
            known |= {"entry": deflated(entry.without_members()), "group": self._group.digest}
        return Proposals(
            members=frozenset(member.peer_id for member in entry.members),
            brief=whole.model_copy(update=known).encode(),
            whole=whole.encode(),
        )

    def _proposal(self, question: SendProposal) -> Propose:
        payload = proposal_payload(question.entry, question.attempt)
        propose = Propose(
            attempt=question.attempt,
            entry=deflated(question.entry.encode()),
            reports=self._reports.get(question.entry.reports, ()),
            signature=self._ctx.sign(payload),
        )
        if self._ctx.replica.trust == "crash":
            return propose
        return JustifiedPropose(**dict(propose), justification=question.justification)

    def _lock_record(self, question: SendLock, elector: int) -> bytes:
        """An elector that has not voted may lack the entry, which it has to name in promises."""
        entry = b""
        reports: Reports = ()
        if elector not in {vote.elector for vote in question.lock.votes}:
            entry = deflated(question.entry.encode())
            reports = self._reports.get(question.entry.reports, ())
        return AskCommit(
            epoch=self._place.epoch,
            position=self._place.position,
            lock=question.lock,
            entry=entry,
            reports=reports,
        ).encode()

    async def _ask_promise(
        self,
        question: AskPromises,
        index: int,
        electorate: Sequence[Elector],
        record: bytes,
        timeout_s: float,
    ) -> None:
        replica = self._ctx.replica
        decree = Decree(replica.run_id, *self._place, replica.chain)

        async def taken_locked(answer: bytes) -> Promised:
            promise = LockedPromise.decode(answer)
            accepted = None
            if promise.lock is not None:
                entry, record = await self._entry_of(promise, decree)
                check_lock(entry, promise.lock, electorate, self._ctx.verify)
                accepted = Accepted(attempt=promise.lock.attempt, entry=record, lock=promise.lock)
            signed = SignedPromise(
                elector=index,
                locked=accepted.attempt + 1 if accepted else 0,
                digest=sha256(accepted.entry) if accepted else NO_DIGEST,
                signature=promise.signature,
            )
            check_promise(decree, question.attempt, signed, electorate, self._ctx.verify)
            return Promised(
                attempt=question.attempt, elector=index, accepted=accepted, signed=signed
            )

        async def taken(answer: bytes) -> Promised:
            promise = Promise.decode(answer)
            accepted = None
            if promise.entry:
                if promise.accepted_attempt >= question.attempt:
                    raise MalformedRecord("expected an entry of a ballot before the promised one")
                _, record = await self._entry_of(promise, decree)
                accepted = Accepted(attempt=promise.accepted_attempt, entry=record)
            return Promised(attempt=question.attempt, elector=index, accepted=accepted)

        reader = taken_locked if replica.trust == "byzantine" else taken
        peer = electorate[index].peer_id
        # An earlier term may have its time, no longer than this one has.
        until = self._ctx.now() + self._voter.time_s(term_of(question.attempt))
        while await self._ask(peer, "prepare", record, timeout_s, reader) == RefusalCode.UNDER_WAY:
            if self._ctx.now() >= until:
                return
            await asyncio.sleep(PROBE_S)

    async def _entry_of(
        self, promise: Promise | LockedPromise, decree: Decree
    ) -> tuple[Entry, bytes]:
        """Return the entry that a promise names, which this leader may have to propose.

        Raises:
            LogError: it is no entry, did not come with the reports that it names, or breaks a rule.
            Refused: it is of another place, or breaks a rule.
        """
        record, _ = await named(self._ctx.compute, promise.entry)
        entry = await parsed(self._ctx.compute, record)
        if Decree.of(entry) != decree:
            # No fault: peers of two branches must not bar each other before an epoch joins them.
            raise Refused(
                RefusalCode.ELSEWHERE, "the promised entry is of another position or chain"
            )
        if reports_root(promise.reports) != entry.reports:
            raise MalformedRecord("expected the reports that the promised entry names")
        if (digest := sha256(record)) not in self._sound:
            await self._voter.check_promised(entry, promise.reports)
            self._sound.add(digest)
        self.know(promise.reports)
        return entry, record

    def _ask_votes(
        self,
        question: SendProposal,
        electorate: Sequence[Elector],
        group: asyncio.TaskGroup,
        timeout_s: float,
    ) -> None:
        records = self._proposals(question)
        for index, elector in enumerate(electorate):
            group.create_task(self._ask_vote(question, index, elector, records, timeout_s))

    async def _ask_vote(
        self,
        question: SendProposal,
        index: int,
        elector: Elector,
        records: Proposals,
        timeout_s: float,
    ) -> None:
        async def taken(answer: bytes) -> VoteArrived:
            signature = Ballot.decode(answer).signature
            payload = vote_payload(question.entry, question.attempt)
            if not self._ctx.verify(elector.peer_id, payload, signature):
                raise CertificateInvalid("invalid signature on the vote")
            return VoteArrived(attempt=question.attempt, elector=index, signature=signature)

        peer, refused = elector.peer_id, None
        if peer in records.members:
            refused = await self._ask(peer, "propose", records.brief, timeout_s, taken)
        if peer not in records.members or refused == RefusalCode.NO_REPORTS:
            await self._ask(peer, "propose", records.whole, timeout_s, taken)

    async def _ask_commit(
        self, question: SendLock, index: int, elector: Elector, record: bytes, timeout_s: float
    ) -> None:
        async def taken(answer: bytes) -> CommitArrived:
            signature = Ballot.decode(answer).signature
            payload = commit_payload(question.entry, question.attempt)
            if not self._ctx.verify(elector.peer_id, payload, signature):
                raise CertificateInvalid("invalid signature on the commit")
            return CommitArrived(attempt=question.attempt, elector=index, signature=signature)

        await self._ask(elector.peer_id, "lock", record, timeout_s, taken)

    async def _ask(
        self,
        peer: str,
        method: str,
        record: bytes,
        timeout_s: float,
        taken: Callable[[bytes], Awaitable[Event]],
    ) -> RefusalCode | None:
        """Pass on an elector's good answer; return the code that it refused with, if it did."""
        if self._ctx.conduct.is_out(peer):
            return None
        try:
            if peer == self._ctx.me.peer_id:
                answer = await self._voter.answer(peer, method, record)
            # A peer without a session may be gone: a head takes half a stall, a poll up to ten.
            elif self._is_live(peer) or await ask_head(self._ctx, peer) is not None:
                call = self._ctx.transport.call
                answer = await call(peer, method, record, timeout_s=timeout_s)
            else:
                return None
            self._take(await taken(answer))
        except (Refused, LogError) as error:
            if isinstance(error, Refused) and error.code in ASKED_AGAIN:
                return error.code
            if isinstance(error, LogError):
                self._ctx.fault(peer, Fault.BAD_VOTE)
            self._ctx.on_event(
                "warning",
                notices.no_vote(round=self._place.position + 1, peer=peer, reason=str(error)),
                key=("no vote", self._place.position, peer, failure_key(error)),
            )
            return error.code if isinstance(error, Refused) else None
        except TransportError:
            pass
        return None


@dataclass(frozen=True, kw_only=True)
class Proposals:
    """One proposal as two records."""

    members: frozenset[str]
    """PeerIDs of the entry's members"""
    brief: bytes
    """without members and reports: for members, which have them with their group"""
    whole: bytes
