"""Two signatures that contradict each other convict their signer; nothing less does."""

import pytest

from atoll.dht.identity import verify
from atoll.dht.transport import Refused
from atoll.optim.log.entry import (
    Certificate,
    Elector,
    Entry,
    LogError,
    Vote,
    proposal_payload,
    vote_payload,
)
from atoll.optim.log.evidence import (
    MAX_KEPT,
    Evidence,
    EvidenceBook,
    EvidenceInvalid,
    double_votes,
)
from atoll.peer.rounds.conduct import MAX_FAULTS, Conduct, Fault
from support.swarm import RUN_ID, identity_of, reached, run_swarm

LIAR, OTHER = identity_of(1), identity_of(2)
ELECTORATE = tuple(Elector(peer_id=i.peer_id, incarnation="0") for i in (LIAR, OTHER))


def entry(lr=1.0, position=3, chain=bytes(32), electorate=ELECTORATE):
    return Entry(
        run_id=RUN_ID,
        epoch=1,
        position=position,
        kind="null",
        previous_chain=chain,
        fragment=0,
        lr=lr,
        momentum=0.0,
        members=(),
        parts=(),
        electorate=electorate,
    )


def lie(identity=LIAR, kind="vote", **options):
    payload = vote_payload if kind == "vote" else proposal_payload
    pair = [entry(1.0, **options), entry(2.0, **options)]
    signed = [(e.digest, identity.sign(payload(e, 0))) for e in pair]
    return Evidence.of(kind, identity.peer_id, pair[0], 0, signed)


@pytest.mark.parametrize("kind", ["vote", "proposal"])
def test_two_signatures_at_one_place_are_proof(kind):
    Evidence.decode(lie(kind=kind).encode()).check(RUN_ID, verify)


def forged():
    true, later = lie(), lie(position=4)
    yield "another peer", {"peer_id": OTHER.peer_id}
    yield "wrong signature", {"higher_signature": OTHER.sign(b"anything")}
    yield "a vote as proposal", {"kind": "proposal"}
    yield "other place", {"position": 4}
    yield "other attempt", {"attempt": 4}
    yield "other epoch", {"epoch": 2}
    yield "other branch", {"previous_chain": b"c" * 32}
    yield (
        "two places",
        {"higher": later.higher, "higher_signature": later.higher_signature},
    )
    yield "equal", {"higher": true.lower, "higher_signature": true.lower_signature}
    yield (
        "wrong order",
        {
            "lower": true.higher,
            "lower_signature": true.higher_signature,
            "higher": true.lower,
            "higher_signature": true.lower_signature,
        },
    )


@pytest.mark.parametrize("changes", [c for _, c in forged()], ids=[name for name, _ in forged()])
def test_forged_evidence_is_refused(changes):
    with pytest.raises(EvidenceInvalid):
        lie().model_copy(update=changes).check(RUN_ID, verify)


def test_evidence_of_another_run_is_refused():
    with pytest.raises(EvidenceInvalid):
        lie().check(b"x" * 32, verify)


def test_a_sender_of_forged_evidence_is_at_fault_and_its_victim_is_not(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(3)
        await swarm.until(lambda: reached(peers, 1))
        sender, victim, receiver = peers
        fake = lie(identity_of(99), electorate=tuple(p.ctx.me for p in peers))
        fake = fake.model_copy(update={"peer_id": victim.identity.peer_id})
        for _ in range(MAX_FAULTS):
            with pytest.raises(Refused):
                await sender.transport.call(
                    receiver.identity.peer_id, "evidence", fake.encode(), timeout_s=5
                )
        now = swarm.now()
        assert receiver.ctx.conduct.barred(sender.identity.peer_id, now).why is Fault.BAD_MESSAGE
        assert receiver.ctx.conduct.barred(victim.identity.peer_id, now) is None

    run_swarm(tmp_path, scenario)


def test_lies_of_keys_without_a_vote_are_not_kept(tmp_path):
    """Keys are free: else a stranger could fill the book with lies of its own."""

    async def scenario(swarm):
        peers = await swarm.start(3)
        await swarm.until(lambda: reached(peers, 4))
        record = lie(identity_of(99)).encode()
        await peers[0].transport.call(peers[1].identity.peer_id, "evidence", record, timeout_s=5)
        assert list(peers[1].ctx.evidence) == []

    run_swarm(tmp_path, scenario)


def test_a_book_keeps_one_record_a_peer_and_survives_a_restart():
    book = EvidenceBook()
    assert book.add(lie())
    assert not book.add(lie(position=9))
    restored = EvidenceBook()
    restored.restore(book.encode(), RUN_ID, verify)
    assert list(restored) == list(book)
    assert restored.at(1, 3) == {LIAR.peer_id}
    assert restored.at(1, 4) == set()
    with pytest.raises(LogError):
        EvidenceBook().restore(book.encode()[:-1], RUN_ID, verify)


def test_a_book_is_bounded():
    book = EvidenceBook()
    for number in range(MAX_KEPT + 2):
        book.add(lie(identity_of(number)))
    assert len(list(book)) == MAX_KEPT
    EvidenceBook().restore(book.encode(), RUN_ID, verify)


def test_a_bar_for_good_does_not_end():
    conduct = Conduct()
    conduct.bar_for_good("liar", Fault.EQUIVOCATION)
    assert conduct.is_out("liar")
    assert "banned permanently" in str(conduct.barred("liar", 1e12))


def certificate(one, attempt, *voters):
    votes = [
        Vote(elector=i, signature=identity.sign(vote_payload(one, attempt)))
        for i, identity in voters
    ]
    return Certificate(attempt=attempt, votes=tuple(votes))


def test_two_certificates_convict_those_that_are_in_both():
    one, other = entry(1.0), entry(2.0)
    both, liar = [(0, LIAR), (1, OTHER)], [(0, LIAR)]
    found = double_votes(
        one, certificate(one, 0, *both), other, certificate(other, 0, *liar), ELECTORATE
    )
    assert [e.peer_id for e in found] == [LIAR.peer_id]
    found[0].check(RUN_ID, verify)
    later = certificate(other, 4, *liar)
    assert double_votes(one, certificate(one, 0, *both), other, later, ELECTORATE) == []
    elsewhere = entry(2.0, chain=b"c" * 32)
    assert double_votes(
        one, certificate(one, 0, *both), elsewhere, certificate(elsewhere, 0, *liar), ELECTORATE
    ) == []  # fmt: skip
