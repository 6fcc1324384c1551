"""Locks: what electors sign so that no position is decided twice, even if some of them lie.

A run with `trust = "byzantine"` tolerates f lying electors of n >= 3f + 1. A quorum is n - f, so
that two of them share an honest elector. One phase of votes does not suffice then: a proposer that
lies shows each elector another past. So every attempt has two phases, as in PBFT (Castro and
Liskov, 1999), and who proposes after attempt 0 proves that it may:

    a vote         an elector votes for one entry at an attempt
    a lock         the votes of a quorum: no other entry has one at this attempt
    a commit       an elector keeps the lock, then signs; a quorum of commits certifies the entry
    a promise      = sign("atoll promise 1" | run_id | epoch | position | attempt | chain |
                          1 + the attempt of the highest lock kept, or 0 | its entry's digest, or
                          32 zero bytes)
    justification  the promises of a quorum, and the highest lock that they name: the proposal is
                   its entry; without a lock among them the choice is free

The argument for safety is in docs/protocol.md, part 2.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, NamedTuple, Self

from pydantic import Field

from atoll.optim.log.entry import (
    MAX_ELECTORS,
    Count,
    Elector,
    Entry,
    LogError,
    Record,
    Signature,
    Verify,
    Vote,
    check_signatures,
    is_quorum,
    vote_payload,
)

NO_DIGEST = bytes(32)  # of a promise that names no lock


class Unjustified(LogError):
    """A proposal that does not follow from the promises of a quorum."""


class Lock(Record):
    """A quorum's votes for one entry at one attempt."""

    attempt: Count
    votes: Annotated[tuple[Vote, ...], Field(max_length=MAX_ELECTORS)]


class SignedPromise(Record):
    """An elector's promise to refuse attempts below one, without the entry of its lock."""

    elector: Count
    locked: Count
    """1 + the attempt of the highest lock that it keeps; 0 without one"""
    digest: Annotated[bytes, Field(min_length=32, max_length=32)] = NO_DIGEST
    """of the entry of that lock"""
    signature: Signature


class Justification(Record):
    """The reason why a leader may propose an entry; empty at attempt 0."""

    promises: Annotated[tuple[SignedPromise, ...], Field(max_length=MAX_ELECTORS)] = ()
    lock: Lock | None = None
    """the highest that they name"""


class Decree(NamedTuple):
    """The place that is decided, and the chain before it: the same for all that is signed there."""

    run_id: bytes
    epoch: int
    position: int
    previous_chain: bytes

    @classmethod
    def of(cls, entry: Entry) -> Self:
        """Return the place of an entry."""
        return cls(entry.run_id, entry.epoch, entry.position, entry.previous_chain)


def promise_payload(decree: Decree, attempt: int, locked: int, digest: bytes) -> bytes:
    """Return what an elector signs to promise an attempt, naming its highest lock."""
    place = struct.pack(">QQQ", decree.epoch, decree.position, attempt)
    lock = struct.pack(">Q", locked) + digest
    return b"atoll promise 1" + decree.run_id + place + decree.previous_chain + lock


def check_lock(entry: Entry, lock: Lock, electorate: Sequence[Elector], verify: Verify) -> None:
    """Raise CertificateInvalid unless a quorum voted for `entry` at the attempt of the lock."""
    signed = vote_payload(entry, lock.attempt)
    check_signatures(entry, signed, lock.votes, electorate, verify, "byzantine")


def check_promise(
    decree: Decree,
    attempt: int,
    promise: SignedPromise,
    electorate: Sequence[Elector],
    verify: Verify,
) -> None:
    """Raise Unjustified unless an elector promised this attempt, and locked below it."""
    if promise.elector >= len(electorate) or promise.locked > attempt:
        raise Unjustified(
            f"ballot {attempt}: expected a promise of one of {len(electorate)} acceptors with a "
            f"lock below, got acceptor {promise.elector}, lock {promise.locked - 1}"
        )
    payload = promise_payload(decree, attempt, promise.locked, promise.digest)
    peer_id = electorate[promise.elector].peer_id
    if not verify(peer_id, payload, promise.signature):
        raise Unjustified(f"ballot {attempt}: the promise of {peer_id} is forged")


def check_justified(
    entry: Entry,
    attempt: int,
    reason: Justification,
    electorate: Sequence[Elector],
    verify: Verify,
) -> None:
    """Raise a LogError unless a leader may propose `entry` at `attempt`."""
    if attempt == 0:
        return  # no lock is older
    promised = {promise.elector for promise in reason.promises}
    if len(promised) != len(reason.promises) or not is_quorum(
        list(promised), len(electorate), "byzantine"
    ):
        raise Unjustified(
            f"ballot {attempt}: expected promises of a quorum of {len(electorate)} acceptors, "
            f"got {len(promised)}"
        )
    for promise in reason.promises:
        check_promise(Decree.of(entry), attempt, promise, electorate, verify)
    highest = max(promise.locked for promise in reason.promises)
    if not highest:
        return
    digests = {promise.digest for promise in reason.promises if promise.locked == highest}
    if digests != {entry.digest}:
        raise Unjustified(f"ballot {attempt}: expected the entry that the highest lock names")
    if reason.lock is None or reason.lock.attempt != highest - 1:
        raise Unjustified(f"ballot {attempt}: expected the lock of ballot {highest - 1}")
    check_lock(entry, reason.lock, electorate, verify)
