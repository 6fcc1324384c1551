"""Promises, locks and justifications, as liars would like them to pass."""

import pytest

from atoll.dht.identity import Identity, verify
from atoll.optim.log.entry import CertificateInvalid, Elector, Entry, Vote, vote_payload
from atoll.optim.log.locks import (
    NO_DIGEST,
    Decree,
    Justification,
    Lock,
    SignedPromise,
    Unjustified,
    check_justified,
    check_lock,
    promise_payload,
)

PEERS = [Identity.ephemeral() for i in range(4)]
ELECTORATE = tuple(Elector(peer_id=p.peer_id, incarnation=str(i)) for i, p in enumerate(PEERS))


def entry(lr=0.5, **changes):
    fields = {
        "run_id": b"r" * 32,
        "epoch": 1,
        "position": 7,
        "kind": "null",
        "previous_chain": b"c" * 32,
        "fragment": 0,
        "lr": lr,
        "momentum": 0.0,
        "members": (),
        "parts": (),
        "electorate": ELECTORATE,
    }
    return Entry(**(fields | changes))


A, B = entry(), entry(0.25)


def lock(of, attempt, voters=(0, 1, 2)):
    signed = vote_payload(of, attempt)
    votes = tuple(Vote(elector=i, signature=PEERS[i].sign(signed)) for i in voters)
    return Lock(attempt=attempt, votes=votes)


def promise(elector, attempt, locked=None, *, by=None, at=A):
    """`locked`: (attempt, entry) of the lock that it names."""
    height, digest = (locked[0] + 1, locked[1].digest) if locked else (0, NO_DIGEST)
    signed = promise_payload(Decree.of(at), attempt, height, digest)
    signature = PEERS[elector if by is None else by].sign(signed)
    return SignedPromise(elector=elector, locked=height, digest=digest, signature=signature)


def check(of, attempt, promises, highest=None):
    reason = Justification(promises=tuple(promises), lock=highest)
    assert Justification.decode(reason.encode()) == reason
    check_justified(of, attempt, reason, ELECTORATE, verify)


def free(attempt, electors=(0, 1, 2)):
    return [promise(i, attempt) for i in electors]


def test_the_first_attempt_needs_no_reason():
    check(A, 0, [])


def test_a_quorum_without_a_lock_leaves_the_choice_free():
    check(A, 4, free(4))
    check(B, 4, free(4))


def test_the_entry_of_the_highest_lock_has_to_be_proposed():
    named = [promise(0, 9, (0, B)), promise(1, 9, (4, A)), promise(2, 9)]
    check(A, 9, named, lock(A, 4))
    for of, highest in ((B, lock(B, 0)), (B, lock(A, 4)), (B, None)):
        with pytest.raises(Unjustified, match="the entry that the highest lock names"):
            check(of, 9, named, highest)


@pytest.mark.parametrize(
    "promises",
    [
        [],
        free(4, (0, 1)),
        free(4, (0, 1, 1)),
        free(4, (0, 1, 2, 2)),
    ],
)
def test_less_than_a_quorum_of_distinct_promises_is_no_reason(promises):
    with pytest.raises(Unjustified, match="promises of a quorum"):
        check(A, 4, promises)


@pytest.mark.parametrize(
    "odd",
    [
        promise(2, 4, by=3),
        promise(2, 5),
        promise(2, 4, at=entry(position=8)),
        promise(2, 4, at=entry(epoch=2)),
        promise(2, 4, at=entry(previous_chain=b"d" * 32)),
        promise(2, 4, at=entry(run_id=b"s" * 32)),
        promise(2, 4, (0, B)).model_copy(update={"locked": 0}),
        promise(2, 4, (0, B)).model_copy(update={"digest": NO_DIGEST, "locked": 0}),
    ],
)
def test_a_promise_of_something_else_is_forged(odd):
    with pytest.raises(Unjustified, match="is forged"):
        check(A, 4, [*free(4, (0, 1)), odd])


def test_a_promise_of_nobody_is_refused():
    with pytest.raises(Unjustified, match="one of 4 acceptors"):
        check(A, 4, [*free(4, (0, 1)), promise(2, 4).model_copy(update={"elector": 4})])


def test_a_lock_at_or_above_the_attempt_is_refused():
    with pytest.raises(Unjustified, match="with a lock below"):
        check(A, 4, [*free(4, (0, 1)), promise(2, 4, (4, A))], lock(A, 4))


@pytest.mark.parametrize("highest", [None, lock(A, 1)])
def test_a_lock_that_a_promise_names_has_to_be_shown(highest):
    with pytest.raises(Unjustified, match="the lock of ballot 2"):
        check(A, 4, [*free(4, (0, 1)), promise(2, 4, (2, A))], highest)


@pytest.mark.parametrize("votes", [(0, 1), (0, 1, 1)])
def test_a_lock_without_a_quorum_is_refused(votes):
    with pytest.raises(CertificateInvalid):
        check(A, 4, [*free(4, (0, 1)), promise(2, 4, (2, A))], lock(A, 2, votes))


def test_votes_for_another_entry_or_attempt_are_no_lock():
    check_lock(A, lock(A, 2), ELECTORATE, verify)
    with pytest.raises(CertificateInvalid, match="forged"):
        check_lock(B, lock(A, 2), ELECTORATE, verify)
    with pytest.raises(CertificateInvalid, match="forged"):
        check_lock(A, lock(A, 2).model_copy(update={"attempt": 3}), ELECTORATE, verify)


def test_two_locks_that_one_attempt_cannot_have_are_no_reason():
    with pytest.raises(Unjustified, match="the entry that the highest lock names"):
        check(A, 4, [promise(0, 4), promise(1, 4, (2, A)), promise(2, 4, (2, B))], lock(A, 2))
