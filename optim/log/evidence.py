"""Evidence: two signatures of one peer that no honest peer gives both.

An acceptor votes for one entry at a ballot, a proposer proposes one, and in a run that tolerates
liars an acceptor commits one. They sign the place, the
chain before it and the entry's digest (`ballot_payload`), so two signatures for different digests
at one place prove a lie to everyone, whoever passes them on. The chain is part of the place: after
a fork, a peer that restarted is another acceptor on the other branch, and may vote there honestly.

    Evidence = kind ("vote", "proposal" or "commit"), PeerID, epoch, position, attempt,
               previous chain, the lower digest, its signature, the higher digest, its signature

MUST: the digests are in this order, so that one pair has one record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Self

from pydantic import Field

from atoll.optim.log.entry import (
    BallotKind,
    Certificate,
    Count,
    Digest,
    Elector,
    Entry,
    LogError,
    PeerId,
    Record,
    Signature,
    Trust,
    Verify,
    ballot_payload,
)

MAX_KEPT = 64  # peers: as many as vote at once. More than these cannot lie in one electorate.


class EvidenceInvalid(LogError):
    """A record that proves nothing."""


class Evidence(Record):
    """Two contradicting signatures of one peer."""

    max_bytes: ClassVar[int] = 4096

    kind: BallotKind
    peer_id: PeerId
    epoch: Count
    position: Count
    attempt: Count
    previous_chain: Digest
    lower: Digest
    lower_signature: Signature
    higher: Digest
    higher_signature: Signature

    @classmethod
    def of(
        cls,
        kind: BallotKind,
        peer_id: str,
        entry: Entry,
        attempt: int,
        signed: Sequence[tuple[bytes, bytes]],
    ) -> Self:
        """Return the record of two (digest, signature) pairs at the place of `entry`."""
        (lower, lower_signature), (higher, higher_signature) = sorted(signed)
        return cls(
            kind=kind,
            peer_id=peer_id,
            epoch=entry.epoch,
            position=entry.position,
            attempt=attempt,
            previous_chain=entry.previous_chain,
            lower=lower,
            lower_signature=lower_signature,
            higher=higher,
            higher_signature=higher_signature,
        )

    def check(self, run_id: bytes, verify: Verify) -> None:
        """Check the record by itself.

        Raises:
            EvidenceInvalid: it does not prove that the peer signed two entries.
        """
        if self.lower >= self.higher:
            raise EvidenceInvalid(f"evidence against {self.peer_id}: expected two digests in order")
        for digest, signature in (
            (self.lower, self.lower_signature),
            (self.higher, self.higher_signature),
        ):
            payload = ballot_payload(
                self.kind,
                run_id=run_id,
                epoch=self.epoch,
                position=self.position,
                attempt=self.attempt,
                previous_chain=self.previous_chain,
                digest=digest,
            )
            if not verify(self.peer_id, payload, signature):
                raise EvidenceInvalid(f"evidence against {self.peer_id}: a signature is forged")


class _Kept(Record):
    """The records of an `EvidenceBook`, as they are stored."""

    records: Annotated[tuple[bytes, ...], Field(max_length=MAX_KEPT)]


class EvidenceBook:
    """Verified evidence, one record a peer, at most `MAX_KEPT`: the oldest goes first."""

    def __init__(self) -> None:
        self._records: dict[str, Evidence] = {}

    def add(self, evidence: Evidence) -> bool:
        """Keep a verified record; return False if there is one against its peer already."""
        if evidence.peer_id in self._records:
            return False
        self._records[evidence.peer_id] = evidence
        if len(self._records) > MAX_KEPT:
            del self._records[next(iter(self._records))]
        return True

    def __iter__(self) -> Iterator[Evidence]:
        """Iterate over the records, the oldest first."""
        return iter(self._records.values())

    def at(self, epoch: int, position: int) -> set[str]:
        """Return the peers that lied at a place: none of their votes there says anything."""
        return {e.peer_id for e in self if (e.epoch, e.position) == (epoch, position)}

    def encode(self) -> bytes:
        """Return the records as `restore` reads them."""
        return _Kept(records=tuple(e.encode() for e in self)).encode()

    def restore(self, data: bytes, run_id: bytes, verify: Verify) -> None:
        """Add the records of another process.

        Raises:
            LogError: the bytes are damaged.
        """
        for record in _Kept.decode(data).records:
            evidence = Evidence.decode(record)
            evidence.check(run_id, verify)
            self.add(evidence)


def double_votes(
    entry: Entry,
    certificate: Certificate,
    other: Entry,
    other_certificate: Certificate,
    electorate: Sequence[Elector],
    trust: Trust = "crash",
) -> list[Evidence]:
    """Return the evidence in two valid certificates: electors that signed both entries.

    Empty if they are of different attempts or places: Paxos lets an elector vote again at a later
    attempt, so the lie is in a promise, which nobody signed.
    """
    place, same = ((e.epoch, e.position, e.previous_chain) for e in (entry, other))
    if place != same or certificate.attempt != other_certificate.attempt:
        return []
    if entry.digest == other.digest:
        return []
    votes = {vote.elector: vote.signature for vote in other_certificate.votes}
    return [
        Evidence.of(
            "commit" if trust == "byzantine" else "vote",
            electorate[vote.elector].peer_id,
            entry,
            certificate.attempt,
            [(entry.digest, vote.signature), (other.digest, votes[vote.elector])],
        )
        for vote in certificate.votes
        if vote.elector in votes
    ]
