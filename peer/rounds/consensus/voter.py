"""The elector's side: promises, votes, the checks before a vote, and the votes of others.

An elector votes for an entry only when it holds all the bytes, has verified them against the
manifest, and finds everything in the entry that follows from rules to follow from them.

In a small electorate a vote goes to everyone. That makes the certificate everywhere half a round
trip after the quorum voted, instead of one and a half by way of the leader, and outlives the
leader. In larger electorates that is too many messages, and the leader's commit brings the
certificate.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal

from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import Tasks, together
from atoll.dht.transport import PeerUnreachable, Refused
from atoll.optim.log.electorate import BadElectorate, check_succession
from atoll.optim.log.entry import (
    Certificate,
    Elector,
    Entry,
    LogError,
    MalformedRecord,
    Part,
    Trust,
    Vote,
    check_follows,
    commit_payload,
    decode_first,
    is_quorum,
    max_liars,
    proposal_payload,
    sha256,
    vote_payload,
)
from atoll.optim.log.evidence import Evidence, EvidenceInvalid
from atoll.optim.log.locks import (
    NO_DIGEST,
    Decree,
    Justification,
    check_justified,
    check_lock,
    promise_payload,
)
from atoll.optim.log.orders import check_settings
from atoll.optim.log.units import check_units
from atoll.optim.reduction.cells import Bytes, UpdateError
from atoll.optim.state import vectors
from atoll.optim.state.updates import Update, joined, numel_of
from atoll.peer.rounds.conduct import Fault
from atoll.peer.rounds.consensus.ballots import Accepted, Ballots, Booth, Place, leader_of, term_of
from atoll.peer.rounds.consensus.turns import Turns
from atoll.peer.rounds.context import HEAD_STALLS, Context, Decoded, ask_head, stands_at
from atoll.peer.rounds.entries import completed, named, parsed
from atoll.peer.rounds.fetching import fetch_part
from atoll.peer.rounds.messages import (
    AskCommit,
    AskCommitHead,
    AskHeard,
    Ballot,
    Heard,
    JustifiedPropose,
    LockedPromise,
    Prepare,
    Promise,
    Propose,
    ProposeHead,
    Reports,
    Voted,
    deflated,
    entry_head,
    reports_root,
)
from atoll.peer.rounds.policies import check_reports, positions_ahead, term_time_s

NOTHING = Justification()
HEARD_S = 0.5  # what electors say of their open terms serves so long, however often leaders ask
MAX_ELECTORS = 8  # of an electorate in which votes go to all: 56 messages of 200 bytes

OnCertified = Callable[[Entry, Certificate], None]


class VoteTally:
    """The votes of one position, as they reach one elector."""

    def __init__(self, ctx: Context, on_certified: OnCertified, *, trust: Trust = "crash") -> None:
        """Call `on_certified` once a quorum has voted for the entry that this peer voted for.

        If the run tolerates liars, votes certify nothing; they only convict electors that sign two.
        """
        self._ctx = ctx
        self._certifies = trust == "crash"
        self._on_certified = on_certified
        self._electorate: tuple[Elector, ...] = ()
        self._votes: dict[int, Voted] = {}
        """the last one of each elector"""
        self._own: tuple[Entry, Voted] | None = None
        self._last: tuple[Entry, Voted] | None = None
        """this peer's last vote, also as a leader's and after a certificate"""
        self._telling = Tasks()

    def turn(self, electorate: Sequence[Elector]) -> None:
        """Forget the votes: another position is decided now."""
        self._electorate = tuple(electorate)
        self._votes.clear()
        self._own = self._last = None

    def know(self, electorate: Sequence[Elector]) -> None:
        """Take the electorate of a position whose electors were not known before."""
        if not self._electorate:
            self._electorate = tuple(electorate)

    def vote(self, entry: Entry, voted: Voted, leader: str) -> None:
        """Send this elector's vote to the others; its leader has it by the answer."""
        self._last = entry, voted
        for other in list(self._votes.values()):
            self._compare_proposals(other)
        if len(self._electorate) > MAX_ELECTORS:
            return
        me = self._ctx.me.peer_id
        others = {elector.peer_id for elector in self._electorate} - {me, leader}
        for peer in sorted(others):
            self._telling.spawn(self._tell(peer, voted))
        if leader != me and self._certifies:  # a leader counts the answers to its proposal instead
            self._own = entry, voted
            self._votes[self._index(me)] = voted
            self._count()

    def take(self, remote: str, voted: Voted) -> None:
        """Take another elector's vote, which counts once this peer has voted too.

        Raises:
            Refused: it is no elector here.
        """
        index = self._index(remote)
        before = self._votes.get(index)
        if before is not None and self._last is not None:
            self._compare("vote", remote, before, voted, before.signature, voted.signature)
        self._votes[index] = voted
        self._compare_proposals(voted)
        self._count()

    def _compare_proposals(self, other: Voted) -> None:
        """Compare the proposal that another elector voted for with the one that came here."""
        if self._last is not None:
            own = self._last[1]
            place = own.position, term_of(own.attempt)
            leader = leader_of(self._electorate, *place).peer_id
            self._compare("proposal", leader, own, other, own.proposal, other.proposal)

    def _compare(
        self,
        kind: Literal["vote", "proposal"],
        signer: str,
        one: Voted,
        other: Voted,
        one_signature: bytes,
        other_signature: bytes,
    ) -> None:
        """Accuse a peer that signed two entries; signatures of another place prove nothing here."""
        if one.attempt != other.attempt or one.entry == other.entry or self._last is None:
            return
        here = self._last[0]
        signed = [(one.entry, one_signature), (other.entry, other_signature)]
        evidence = Evidence.of(kind, signer, here, one.attempt, signed)
        with suppress(EvidenceInvalid):
            evidence.check(here.run_id, self._ctx.verify)
            self._ctx.accuse(evidence)

    async def close(self) -> None:
        """End the calls that are under way."""
        await self._telling.close()

    async def _tell(self, peer: str, voted: Voted) -> None:
        """Send a vote; the leader's commit comes in any case, so a lost one only costs time."""
        timeout_s = self._ctx.settings.stall_s
        await self._ctx.transport.call(peer, "voted", voted.encode(), timeout_s=timeout_s)

    def _index(self, peer: str) -> int:
        for index, elector in enumerate(self._electorate):
            if elector.peer_id == peer:
                return index
        raise Refused(RefusalCode.NO_ELECTOR, "expected a vote of an acceptor of this position")

    def _count(self) -> None:
        """Make the certificate if there is a quorum for what this elector voted for."""
        if self._own is None:
            return
        entry, own = self._own
        liars = self._ctx.evidence.at(entry.epoch, entry.position)
        cast = [
            (index, vote)
            for index, vote in sorted(self._votes.items())
            if self._electorate[index].peer_id not in liars
        ]
        same = [i for i, v in cast if (v.attempt, v.entry) == (own.attempt, own.entry)]
        if is_quorum(same, len(self._electorate)):
            # A signature takes longer to check than to count: only a quorum is worth it.
            valid = [i for i in same if self._is_valid(i, entry)]
            if is_quorum(valid, len(self._electorate)):
                self._own = None
                votes = tuple(Vote(elector=i, signature=self._votes[i].signature) for i in valid)
                self._on_certified(entry, Certificate(attempt=own.attempt, votes=votes))

    def _is_valid(self, index: int, entry: Entry) -> bool:
        vote, peer = self._votes[index], self._electorate[index].peer_id
        if self._ctx.verify(peer, vote_payload(entry, vote.attempt), vote.signature):
            return True
        del self._votes[index]
        self._ctx.fault(peer, Fault.BAD_VOTE)
        return False


class Voter:
    """Answers `prepare` and `propose` for the position that this peer stands at."""

    def __init__(
        self,
        ctx: Context,
        *,
        reach: Callable[[int], Awaitable[None]],
        on_certified: OnCertified,
        ballots: Ballots | None = None,
    ) -> None:
        """Answer at no position until one begins.

        Args:
            ctx: this peer's.
            reach: waits a moment until this peer stands at a position.
            on_certified: called with a certificate that the votes of others made here.
            ballots: remembers where this elector may have voted.
        """
        self._ctx = ctx
        self._reach = reach
        self._trust = ctx.replica.trust
        self._booth = Booth(ctx.me, ballots, self._trust)
        self._turns = Turns((), 0, first_term=0, now=0.0)
        self._hearing: asyncio.Task[dict[str, int | None]] | None = None
        self._heard_at = -math.inf
        self._tasks = Tasks()
        self._tally = VoteTally(ctx, on_certified, trust=self._trust)
        self._verified: dict[bytes, Update | None] = {}
        self._reports: Reports = ()
        """of the members of the entry that this peer voted for last"""
        self._locked_reports: Reports = ()
        """of those of the entry that it is locked on"""
        self._asked: dict[tuple[str, int], asyncio.Task[bool]] = {}
        """by elector that was asked and position: whether it answered"""

    @property
    def term(self) -> int:
        """The term below which nothing is accepted at this position."""
        self._turn()
        return term_of(self._booth.promised)

    @property
    def open_term(self) -> int:
        """The newest term that this elector may have promised at this position."""
        return max(self.term, self._turns.open_term)

    def time_s(self, term: int) -> float:
        """Return how long this elector leaves a term of this position."""
        return self._turns.time_s(term, self._base_s(term))

    def _base_s(self, term: int) -> float:
        stall_s, grace_s = self._ctx.settings.stall_s, self._ctx.settings.grace_s
        last_s = self._ctx.replica.stood_s
        return term_time_s(term, grace_s=grace_s, stall_s=stall_s, last_s=last_s)

    def give_up(self, place: Place, term: int) -> None:
        """Leave a term that this peer led no more time; the others hear of it."""
        self._turn()
        if place == self._booth.here:
            self._turns.give_up(term, self._ctx.now())

    def expect_near(self, term: int) -> None:
        """Raise Refused at a term that no honest peer can have come to at this position."""
        self._turn()
        self._booth.expect_near(term)

    @property
    def retired(self) -> bool:
        """Return whether this elector has resigned; see `Booth.retired`."""
        self._turn()
        return self._booth.retired

    async def retire(self) -> None:
        """Begin no more votes; wait until what this peer voted for last is decided."""
        self._booth.retire()
        while not self.retired:
            await self._ctx.replica.moved()

    async def answer(self, remote: str, method: str, body: bytes) -> bytes:
        """The reply to a call.

        Raises:
            Refused: with the reason.
        """
        self._ctx.expect_unbarred(remote)
        try:
            if method == "propose":
                await self._expect_leader(remote, body)
            if method == "prepare":
                return (await self._prepare(remote, Prepare.decode(body))).encode()
            if self._trust == "crash":
                return (await self._propose(remote, Propose.decode(body), NOTHING)).encode()
            if method == "lock":
                await self._expect_elector(remote, body)
                return (await self._commit(remote, AskCommit.decode(body))).encode()
            ask = JustifiedPropose.decode(body)
            return (await self._propose(remote, ask, ask.justification)).encode()
        except (LogError, UpdateError) as error:
            self._ctx.fault(remote, Fault.BAD_PROPOSAL)
            raise Refused(RefusalCode.BAD_PROPOSAL, str(error)) from error

    async def _expect_leader(self, remote: str, body: bytes) -> None:
        """Refuse a proposal of anyone but the leader of its attempt, by its head alone."""
        head = decode_first(ProposeHead, body)
        entry = entry_head(head.entry)
        place = Place(entry.epoch, entry.position)
        await self._come_to(place)
        self._booth.check(remote, place, head.attempt)
        if entry.previous_chain != self._ctx.replica.chain:
            # No fault: peers of two branches must not bar each other before an epoch joins them.
            raise Refused(RefusalCode.ELSEWHERE, "the entry is on another branch of the log")
        # With trust = "crash" a proposal shows no promises, and ends the terms before it as well.
        if self._trust == "crash" and self._ctx.usurpers.is_known(remote, place.position):
            await self._expect_turn(place, term_of(head.attempt), of=remote)
            self._turn()

    async def _expect_elector(self, remote: str, body: bytes) -> None:
        """Refuse a lock of anyone but an elector, by its head; its attempt is further inside."""
        head = decode_first(AskCommitHead, body)
        place = Place(head.epoch, head.position)
        await self._come_to(place)
        if remote not in {elector.peer_id for elector in self._ctx.replica.electorate}:
            raise Refused(RefusalCode.NOT_THE_LEADER, f"expected an acceptor of {tuple(place)}")

    async def _come_to(self, place: Place) -> None:
        """Wait for a leader's last entry if it is on the way: the leader may propose at once."""
        replica = self._ctx.replica
        near = replica.position + positions_ahead(len(self._ctx.replay.fragments)) + 1
        if place.epoch == replica.epoch and replica.position < place.position <= near:
            await self._reach(place.position)
        self._turn()

    def _turn(self) -> None:
        replica = self._ctx.replica
        place, before = Place(replica.epoch, replica.position), self._booth.here
        furthest = self._booth.furthest
        moved = self._booth.turn(place, replica.electorate, replica.first_term)
        if self._booth.furthest != furthest:  # else what was voted for is named after a detour
            self._reports = self._locked_reports = ()
        if moved:
            self._verified.clear()
            is_new = place.epoch != before.epoch
            for key in [key for key in self._asked if is_new or key[1] < place.position]:
                del self._asked[key]
            self._turns = Turns(
                replica.electorate,
                place.position,
                first_term=replica.first_term,
                now=self._ctx.now(),
            )
            self._hearing = None
            self._tally.turn(replica.electorate)
            self._ctx.parts.decided_up_to(place.position)
            if place.epoch != before.epoch:
                self._ctx.parts.clear()
        self._tally.know(replica.electorate)

    async def _prepare(self, remote: str, ask: Prepare) -> Promise | LockedPromise:
        place = Place(ask.epoch, ask.position)
        await self._come_to(place)
        if self._trust == "byzantine" and max_liars(len(self._ctx.replica.electorate)):
            self._booth.check(remote, place, ask.attempt)
            await self._expect_turn(place, term_of(ask.attempt))
            self._turn()  # that may take a while
        elif self._ctx.usurpers.is_known(remote, place.position):
            self._booth.check(remote, place, ask.attempt)
            await self._expect_turn(place, term_of(ask.attempt), of=remote)
            self._turn()
        is_early = self._ends_own_term(remote, place, term_of(ask.attempt))
        accepted = self._booth.prepare(remote, place, ask.attempt)
        if is_early:
            self._ctx.note_usurper(remote, place.position)
        if self._trust == "byzantine":
            return self._locked_promise(ask, accepted)
        return Promise(
            attempt=ask.attempt,
            accepted_attempt=accepted.attempt if accepted else 0,
            entry=deflated(accepted.entry) if accepted else b"",
            reports=self._reports if accepted else (),
        )

    def _ends_own_term(self, remote: str, place: Place, term: int) -> bool:
        """Return whether another peer's term would end one of this peer's before its time.

        With `trust = "byzantine"` a term that is promised has had its turn.
        """
        me = self._ctx.me.peer_id
        if self._trust == "byzantine" or remote == me or place != self._booth.here:
            return False
        return self._turns.ends_early(
            term,
            me,
            since=self.term,
            now=self._ctx.now(),
            base_s=self._base_s(self.open_term),
            skipped=self._ctx.skipped_terms(place.position),
        )

    async def _expect_turn(self, place: Place, term: int, *, of: str = "") -> None:
        """Raise Refused as long as an earlier term has its time, whatever `of` says about it."""
        if term <= self.open_term:
            return
        told = {peer: at for peer, at in (await self._hear(place)).items() if peer != of}
        if place != self._booth.here:
            return  # decided meanwhile
        now, open_term = self._ctx.now(), self.open_term
        self._turns.open(open_term, now)
        self._turns.advance(
            term,
            self._ctx.me.peer_id,
            now=now,
            base_s=self._base_s(open_term),
            told=told,
            skipped=self._ctx.skipped_terms(place.position),
        )
        if term > self.open_term:
            raise Refused(
                RefusalCode.UNDER_WAY,
                f"term {self.open_term} is still active; retry term {term} later",
            )

    async def _hear(self, place: Place) -> dict[str, int | None]:
        """Ask the other electors for their open terms; the answers serve all callers a while."""
        now = self._ctx.now()
        if self._hearing is None or now >= self._heard_at + HEARD_S:
            self._hearing = self._tasks.spawn(self._open_terms(place))
            self._heard_at = now
        return await asyncio.shield(self._hearing)

    async def _open_terms(self, place: Place) -> dict[str, int | None]:
        """Return the open terms of others at a place, as `Turns.advance` takes them."""
        others = [e for e in self._ctx.replica.electorate if e != self._ctx.me]
        heads = await together(*(ask_head(self._ctx, e.peer_id) for e in others))
        told: dict[str, int | None] = {}
        for elector, head in zip(others, heads, strict=True):
            told[elector.peer_id] = None
            if head is not None and stands_at(elector, head, place):
                is_here = (head.epoch, head.position) == place
                told[elector.peer_id] = head.open_term if is_here else 0
        return told

    def _locked_promise(self, ask: Prepare, locked: Accepted | None) -> LockedPromise:
        replica = self._ctx.replica
        decree = Decree(replica.run_id, ask.epoch, ask.position, replica.chain)
        height = locked.attempt + 1 if locked else 0
        digest = sha256(locked.entry) if locked else NO_DIGEST
        return LockedPromise(
            lock=locked.lock if locked else None,
            entry=deflated(locked.entry) if locked else b"",
            signature=self._ctx.sign(promise_payload(decree, ask.attempt, height, digest)),
            reports=self._locked_reports if locked else (),
        )

    async def _commit(self, remote: str, ask: AskCommit) -> Ballot:
        """Keep the lock of an entry, with or without its bytes: honest electors voted for it."""
        place = Place(ask.epoch, ask.position)
        await self._come_to(place)
        self._booth.check(remote, place, ask.lock.attempt)
        accepted, reports = self._booth.acceptor.accepted, self._reports
        if ask.entry:
            record, _ = await named(self._ctx.compute, ask.entry)
            reports = ask.reports
        elif accepted is not None and accepted.attempt == ask.lock.attempt:
            record = accepted.entry
        else:
            raise Refused(RefusalCode.SUPERSEDED, "this peer has since voted on another ballot")
        entry = await parsed(self._ctx.compute, record)
        self._turn()  # that may take a while
        self._booth.check(remote, place, ask.lock.attempt)
        self._check_follows(entry)
        check_lock(entry, ask.lock, self._ctx.replica.electorate, self._ctx.verify)
        if reports_root(reports) != entry.reports:
            raise MalformedRecord(f"entry {entry.position}: expected the reports that it names")
        locked = Accepted(attempt=ask.lock.attempt, entry=record, lock=ask.lock)
        self._booth.commit(remote, place, locked)
        self._locked_reports = reports
        return Ballot(signature=self._ctx.sign(commit_payload(entry, locked.attempt)))

    async def _propose(self, remote: str, ask: Propose, reason: Justification) -> Ballot:
        record = await self._record_of(ask)
        entry = await parsed(self._ctx.compute, record)
        place = Place(entry.epoch, entry.position)
        await self._come_to(place)
        self._booth.check(remote, place, ask.attempt)
        if not self._ctx.verify(remote, proposal_payload(entry, ask.attempt), ask.signature):
            raise MalformedRecord("expected a proposal that its leader signed")
        dropped = self._check_derived(entry)
        self._check_root(entry)
        if self._trust == "byzantine":
            electorate = self._ctx.replica.electorate
            check_justified(entry, ask.attempt, reason, electorate, self._ctx.verify)
        if not self._booth.has_accepted(record):
            # They may have come back since this peer voted for it. Were it refused now, the leaders
            # that have to adopt it would propose it without success.
            await self._expect_silent(dropped, entry.position)
        reports = self._reports_of(entry, ask.reports)
        await self._check_reports(entry, reports)
        body = await self.gather(entry, remote)
        await self._verify(entry, body)
        self._turn()  # gathering takes a while: the position may have been decided meanwhile
        is_early = self._ends_own_term(remote, place, term_of(ask.attempt))
        self._booth.accept(remote, place, ask.attempt, record)
        if is_early:
            self._ctx.note_usurper(remote, place.position)
        self._reports = reports
        signature = self._ctx.sign(vote_payload(entry, ask.attempt))
        voted = Voted(
            epoch=entry.epoch,
            position=entry.position,
            attempt=ask.attempt,
            entry=entry.digest,
            signature=signature,
            proposal=ask.signature,
        )
        self._tally.vote(entry, voted, remote)
        return Ballot(signature=signature)

    async def _record_of(self, ask: Propose) -> bytes:
        """Return the proposed entry's bytes, with the members of the group that it refers to.

        Raises:
            MalformedRecord: it is no entry, or too long.
            Refused: the group did not begin here.
        """
        if not ask.group:
            record, _ = await named(self._ctx.compute, ask.entry)
            return record
        group = self._ctx.parts.group(ask.group)
        if group is None:
            raise Refused(RefusalCode.NO_REPORTS, "this peer never joined the entry's group")
        return await completed(self._ctx.compute, ask.entry, group.members)

    async def take_vote(self, remote: str, voted: Voted) -> None:
        """Take the vote of another elector.

        Raises:
            Refused: not here, or it is no elector.
        """
        place = Place(voted.epoch, voted.position)
        await self._come_to(place)
        if place == self._booth.here:
            self._tally.take(remote, voted)

    async def close(self) -> None:
        """Send no more votes to others."""
        await self._tally.close()
        await self._tasks.close()

    async def gather(self, entry: Entry, source: str) -> Bytes:
        """Return the body of an entry, from the parts in hand and from `source` for the rest."""
        body = vectors.joined_bytes([await self._body(entry, part, source) for part in entry.parts])
        whole, start = memoryview(body), 0
        for part in entry.parts:
            stop = start + part.wire_bytes
            self._ctx.parts.lay(entry.position, part.digest, whole[start:stop])
            start = stop
        return body

    async def _body(self, entry: Entry, part: Part, source: str) -> Bytes:
        """A part's bytes: in hand, or as they come, or of others; nobody may have them all yet."""
        held = self._ctx.parts
        while (body := held.body(part.digest)) is None:
            arriving = held.arriving.get(entry.position)
            comes = arriving is not None and await arriving.arrival(part.start_cell, part.stop_cell)
            if held.body(part.digest) is not None:
                continue
            try:
                fetched = await self._fetch(entry, part, source)
            except PeerUnreachable:
                if not comes:
                    raise
                continue
            # Not before it is decoded: what this peer holds, it proposes when it leads.
            await self._keep(entry, part, fetched)
        if len(body) != part.wire_bytes:
            # The owner's lie, not the leader's, which may propose before it has the bytes.
            raise PeerUnreachable(f"no peer has {part.wire_bytes} bytes of this digest")
        if held.decoded(entry.position, part.digest, (part.start_cell, part.stop_cell)) is None:
            await self._keep(entry, part, body)  # an owner may name the bytes of another part
        return body

    async def _keep(self, entry: Entry, part: Part, body: Bytes) -> None:
        """Keep a part if it decodes to its cells; PeerUnreachable if it does not.

        A follower neither votes nor proposes: a quorum has decoded what it gathers, and its ledger
        decodes a body while it applies it. Values of all parts would take as much as parameters.
        """
        if self._ctx.replica.is_ledger:
            self._ctx.parts.put(entry.position, part.digest, body)
            return
        values = await self._decode(entry, part, body)
        decoded = Decoded(part.start_cell, part.stop_cell, values)
        self._ctx.parts.put(entry.position, part.digest, body, decoded)

    async def _decode(self, entry: Entry, part: Part, body: Bytes) -> Update:
        """Decode a part. A body that does not decode is its owner's lie, not the leader's."""
        cells, where = self._ctx.replay.cells_at(entry.position), (part.start_cell, part.stop_cell)
        if part.stop_cell > len(cells):
            raise UpdateError(f"expected parts of {len(cells)} chunks, got {part.stop_cell}")
        try:
            update: Update = await self._ctx.compute(
                cells.decode_part, body, len(entry.members), *where
            )
        except UpdateError as error:
            raise PeerUnreachable(f"no peer has a part that decodes: {error}") from error
        return update

    async def _fetch(self, entry: Entry, part: Part, source: str) -> Bytes:
        """Fetch from `source`, else from any peer that votes on the entry or took part in it."""
        electors = [e.peer_id for e in self._ctx.replica.electorate]
        members = [m.peer_id for m in entry.members]
        peers = await self._direct_first([source, *electors, *members])
        return await fetch_part(self._ctx, peers, part.digest, part.wire_bytes)

    async def _direct_first(self, peers: Sequence[str]) -> list[str]:
        """Put those last that this peer reaches through a relay, which is several times slower."""
        records = await self._ctx.roster_peers()
        behind = {peer for peer, record in records.items() if not record.is_dialed}
        return sorted(peers, key=lambda peer: self._ctx.me.peer_id in behind and peer in behind)

    async def update(self, entry: Entry) -> Update | None:
        """Return the update of an entry as it was decoded for the vote; None if it was not."""
        if came := self._decoded(entry):
            joined_F: Update = await self._ctx.compute(joined, came)
            return joined_F
        return self._verified.get(entry.digest)

    async def _verify(self, entry: Entry, body: Bytes) -> None:
        """Decode the body, unless all its parts were decoded as they came."""
        if entry.digest in self._verified:
            return
        update_N = None
        if entry.kind == "update" and not self._decoded(entry):
            ctx = self._ctx
            update_N = await ctx.compute(ctx.replay.decode, entry, body, ctx.replica.allocate)
        self._verified[entry.digest] = update_N

    def _decoded(self, entry: Entry) -> list[Update]:
        """All parts of an entry, if all were decoded as they came."""
        cells = self._ctx.replay.cells_at(entry.position)
        came: list[Update] = []
        for part in entry.parts:
            values = cells.values(part.start_cell, part.stop_cell)
            where = part.start_cell, part.stop_cell
            update = self._ctx.parts.decoded(entry.position, part.digest, where)
            if update is None or numel_of(update) != values.stop - values.start:
                return []
            came.append(update)
        return came

    def _reports_of(self, entry: Entry, sent: Reports) -> Reports:
        """Return the reports that an entry names: sent with it, or of a group that began here.

        Raises:
            MalformedRecord: others were sent.
            Refused: none were sent, and they are not here.
        """
        if sent and reports_root(sent) != entry.reports:
            raise MalformedRecord(f"entry {entry.position}: expected the reports that it names")
        kept = sent or self._ctx.parts.reports(entry.reports)
        if kept is None:
            raise Refused(RefusalCode.NO_REPORTS, "this peer lacks the reports of this entry")
        return kept

    async def _check_reports(self, entry: Entry, reports: Reports) -> None:
        """Check that all members are as they reported, and weigh what follows from that."""
        replica, method = self._ctx.replica, self._ctx.replay.method
        check = partial(
            check_reports,
            run_id=replica.run_id,
            rule=method.weights,
            clip_at=method.clip_at,
            carried=self._ctx.carried_norm(entry.position),
            verify=self._ctx.verify,
        )
        # Off the loop: a thousand signatures take 0.15 s.
        await self._ctx.compute(check, entry.members, reports, (entry.epoch, entry.position))

    async def take_silence(self, remote: str, ask: AskHeard) -> Heard:
        """Tell another elector which electors answer, of those that do not answer it.

        Raises:
            Refused: of a position that is not near, or it is no elector, or asks about others.
        """
        self._turn()
        replica = self._ctx.replica
        ahead = ask.position - replica.position
        is_near = 0 <= ahead <= positions_ahead(len(self._ctx.replay.fragments)) + 1
        electors = {e.peer_id: e for e in replica.electorate}
        if not is_near or ask.epoch != replica.epoch or not {remote, *ask.peers} <= electors.keys():
            raise Refused(RefusalCode.ELSEWHERE, "expected a question about acceptors of this log")
        return Heard(peers=await self.heard([electors[peer] for peer in ask.peers], ask.position))

    async def heard(self, electors: Sequence[Elector], position: int) -> tuple[str, ...]:
        """Return the PeerIDs of those electors that answer; each is asked once a position.

        What this peer has told a leader, its votes keep. And a liar that asks again and again would
        at last find each of the others silent for a moment, and could drop them.
        """
        answers = await together(*(self._answers(elector, position) for elector in electors))
        return tuple(e.peer_id for e, is_heard in zip(electors, answers, strict=True) if is_heard)

    async def _answers(self, elector: Elector, position: int) -> bool:
        if elector == self._ctx.me:
            return True
        key = elector.peer_id, position
        if key not in self._asked:
            self._asked[key] = self._tasks.spawn(self._ask_whether_it_answers(elector))
        return await asyncio.shield(self._asked[key])

    async def _ask_whether_it_answers(self, elector: Elector) -> bool:
        """Wait half as long as leaders do, to hear of none that they missed."""
        head = await ask_head(self._ctx, elector.peer_id, HEAD_STALLS / 2)
        return stands_at(elector, head, (self._ctx.replica.epoch, self._ctx.replica.position))

    async def _expect_silent(self, dropped: Sequence[Elector], position: int) -> None:
        """Refuse an entry that drops an elector which answers this one."""
        for peer in await self.heard(dropped, position):
            raise Refused(
                RefusalCode.BAD_ELECTORATE, f"{peer} is online and must remain an acceptor"
            )

    def _check_follows(self, entry: Entry) -> None:
        replica = self._ctx.replica
        check_follows(
            entry,
            run_id=replica.run_id,
            epoch=replica.epoch,
            position=replica.position,
            chain=replica.chain,
        )

    async def check_promised(self, entry: Entry, reports: Reports) -> None:
        """Check an entry that an acceptor names: nobody votes without what is checked here.

        Electors that came back, bytes that are gone and state roots are left to the vote.

        Raises:
            LogError: it breaks a rule.
            Refused: likewise, or the position has been decided meanwhile.
        """
        replica = self._ctx.replica
        if (entry.epoch, entry.position) != (replica.epoch, replica.position):
            raise Refused(
                RefusalCode.ELSEWHERE, "the position of the promised entry is already decided"
            )
        self._check_derived(entry)
        await self._check_reports(entry, reports)

    def _check_derived(self, entry: Entry) -> list[Elector]:
        """Check all that follows from the log alone; the electors that the entry drops."""
        replica = self._ctx.replica
        self._check_follows(entry)
        try:
            dropped = check_succession(entry, replica.voters, self._ctx.settings.electors)
        except BadElectorate as error:
            raise Refused(RefusalCode.BAD_ELECTORATE, str(error)) from error
        if (entry.lr, entry.momentum) != self._ctx.scalars(entry.position):
            raise Refused(RefusalCode.BAD_SCALARS, f"expected {self._ctx.scalars(entry.position)}")
        check_settings(entry, replica.standing.settings, replica.open_order)
        check_units(entry, replica.standing.units, replica.module.units)
        self._ctx.replay.check(entry)  # lengths too: no leader makes a voter take memory
        return dropped

    def _check_root(self, entry: Entry) -> None:
        """A root may be absent: a leader that was started again has no state but the newest.

        Were that refused, its own vote for such an entry would bind the leaders after it.
        """
        got, scheduled = entry.state_root, self._ctx.replica.root_scheduled(entry.position)
        if got is None:
            return
        if got.position != scheduled:
            raise Refused(RefusalCode.BAD_ROOT, f"expected the root of state {scheduled}")
        due = self._ctx.replica.root_due(entry.position)
        if due is not None and got.root != due[1]:
            raise Refused(
                RefusalCode.BAD_ROOT,
                f"expected root {due[1].hex()[:12]} of state {due[0]}, got another",
            )
