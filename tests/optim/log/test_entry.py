"""Entries, certificates and the chain: what is accepted, and every way to be wrong."""

import random

import msgpack
import pytest

from atoll.dht.identity import Identity, verify
from atoll.optim.log.entry import (
    Certificate,
    CertificateInvalid,
    ChainMismatch,
    Elector,
    Entry,
    Epoch,
    EpochInvalid,
    MalformedRecord,
    Member,
    Part,
    Partial,
    SignedEpoch,
    Vote,
    check_certificate,
    check_follows,
    commit_payload,
    epoch_payload,
    is_quorum,
    leader_order,
    max_liars,
    sha256,
    split_body,
    vote_payload,
)

RUN = b"r" * 32
PEERS = [Identity.ephemeral() for _ in range(4)]
ELECTORATE = tuple(Elector(peer_id=p.peer_id, incarnation="0") for p in PEERS)
BODY = b"a" * 10 + b"b" * 20


def members(count=4):
    return tuple(
        Member(
            peer_id=p.peer_id,
            incarnation="0",
            weight=1.0,
            clip=1.0,
            norm=1.0,
            tokens=100 + i,
            steps=10,
            loss=2.0 + i,
        )
        for i, p in enumerate(PEERS[:count])
    )


def part(start, stop, data, **extra):
    return Part(
        start_cell=start,
        stop_cell=stop,
        owner=0,
        generation=0,
        wire_bytes=len(data),
        digest=sha256(data),
        **extra,
    )


def entry(**changes):
    fields = {
        "run_id": RUN,
        "epoch": 1,
        "position": 7,
        "kind": "update",
        "previous_chain": b"c" * 32,
        "fragment": 0,
        "lr": 0.5,
        "momentum": 0.25,
        "members": members(),
        "parts": (part(0, 2, BODY[:10]), part(2, 5, BODY[10:])),
        "electorate": ELECTORATE,
    }
    return Entry(**(fields | changes))


def certificate(for_entry, voters, attempt=0, payload=vote_payload):
    signed = payload(for_entry, attempt)
    votes = tuple(Vote(elector=i, signature=PEERS[i].sign(signed)) for i in voters)
    return Certificate(attempt=attempt, votes=votes)


def test_an_entry_survives_its_encoding_and_has_one_digest():
    first = entry()
    again = Entry.decode(first.encode())
    assert again == first
    assert again.digest == first.digest
    assert again.chain != first.previous_chain


def test_an_entry_travels_without_its_members_where_they_are_known():
    whole = entry()
    bare = whole.without_members()
    assert len(bare) < len(whole.encode()) - 4 * 100
    assert Entry.with_members(bare, members()) == whole.encode()
    with pytest.raises(MalformedRecord):
        Entry.decode(bare)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", msgpack.packb([]), msgpack.packb({"members": 1}), entry().encode()],
    ids=["empty", "garbage", "a list", "no list of members", "with its members"],
)
def test_what_is_no_entry_without_members_is_malformed(data):
    with pytest.raises(MalformedRecord):
        Entry.with_members(data, members())


def test_the_encoding_is_pinned():
    # A change of this digest is a change of the format: raise VERSION.
    fixed = entry(
        members=(members(1)[0].model_copy(update={"peer_id": "peer"}),),
        electorate=(Elector(peer_id="peer", incarnation="0"),),
    )
    assert fixed.digest.hex() == PINNED_DIGEST


PINNED_DIGEST = "c4c3d6610afe24f419e549ce0eec24bf6dfd8bff3516c3ace0968f87731d3a87"


@pytest.mark.parametrize("voters", [(0, 1, 2), (0, 1), (1, 2, 3), (0, 1, 2, 3)])
def test_a_quorum_certifies(voters):
    check_certificate(entry(), certificate(entry(), voters), ELECTORATE, verify)


@pytest.mark.parametrize("voters", [(0,), (1, 2), (2, 3), ()])
def test_less_than_a_quorum_is_refused(voters):
    with pytest.raises(CertificateInvalid, match="quorum"):
        check_certificate(entry(), certificate(entry(), voters), ELECTORATE, verify)


def test_a_vote_for_another_entry_is_refused():
    votes = certificate(entry(position=8), (0, 1, 2))
    with pytest.raises(CertificateInvalid, match="forged"):
        check_certificate(entry(), votes, ELECTORATE, verify)


def test_a_vote_of_another_attempt_is_refused():
    moved = certificate(entry(), (0, 1, 2)).model_copy(update={"attempt": 1})
    with pytest.raises(CertificateInvalid, match="forged"):
        check_certificate(entry(), moved, ELECTORATE, verify)


def test_one_voter_counted_twice_is_refused():
    votes = certificate(entry(), (0, 0, 0))
    with pytest.raises(CertificateInvalid, match="distinct"):
        check_certificate(entry(), votes, ELECTORATE, verify)


def test_a_voter_outside_of_the_electorate_is_refused():
    votes = certificate(entry(), (0, 1, 3))
    with pytest.raises(CertificateInvalid, match="distinct acceptors below 3"):
        check_certificate(entry(), votes, ELECTORATE[:3], verify)


def test_two_disjoint_groups_never_both_have_a_quorum():
    for electors in range(1, 7):
        for mask in range(2**electors):
            one = [i for i in range(electors) if mask >> i & 1]
            other = [i for i in range(electors) if not mask >> i & 1]
            assert not (is_quorum(one, electors) and is_quorum(other, electors))


def test_two_quorums_with_liars_share_an_honest_elector():
    for electors in range(1, 8):
        liars = max_liars(electors)
        assert electors >= 3 * liars + 1
        quorums = [
            {i for i in range(electors) if mask >> i & 1}
            for mask in range(2**electors)
            if is_quorum([i for i in range(electors) if mask >> i & 1], electors, "byzantine")
        ]
        assert min(map(len, quorums)) == electors - liars  # so honest electors are one
        assert all(len(one & other) > liars for one in quorums for other in quorums)


def test_commits_certify_with_liars_and_votes_do_not():
    votes = certificate(entry(), (0, 1, 2))
    commits = certificate(entry(), (0, 1, 2), payload=commit_payload)
    check_certificate(entry(), commits, ELECTORATE, verify, "byzantine")
    with pytest.raises(CertificateInvalid, match="forged"):
        check_certificate(entry(), votes, ELECTORATE, verify, "byzantine")
    with pytest.raises(CertificateInvalid, match="forged"):
        check_certificate(entry(), commits, ELECTORATE, verify)


def test_half_of_the_electors_certify_nothing_with_liars():
    commits = certificate(entry(), (0, 1), payload=commit_payload)
    with pytest.raises(CertificateInvalid, match="quorum"):
        check_certificate(entry(), commits, ELECTORATE, verify, "byzantine")


def test_repeated_voters_do_not_make_a_quorum():
    assert not is_quorum([1, 1, 1], 4)
    assert not is_quorum([1, 1, 1], 4, "byzantine")


@pytest.mark.parametrize(
    "changes",
    [{"epoch": 2}, {"position": 8}, {"previous_chain": b"d" * 32}, {"run_id": b"s" * 32}],
)
def test_an_entry_that_does_not_follow_is_refused(changes):
    with pytest.raises(ChainMismatch, match="expected"):
        check_follows(entry(**changes), run_id=RUN, epoch=1, position=7, chain=b"c" * 32)


@pytest.mark.parametrize(
    "changes",
    [
        {"parts": ()},
        {"kind": "null"},
        {"parts": (part(1, 2, b"x"),)},
        {"parts": (part(0, 2, b"x"), part(3, 4, b"x"))},
        {"lr": 0.1},
        {"lr": float("nan")},
        {"electorate": ()},
        {"electorate": (ELECTORATE[0], ELECTORATE[0])},
        {"members": members(1) * 2},
        {"position": -1},
        {"run_id": b"short"},
        {"parts": (part(0, 2, b"x", partial=(Partial(member=9, cells=1),)),)},
    ],
)
def test_an_entry_that_makes_no_sense_cannot_be_made(changes):
    with pytest.raises(ValueError):
        entry(**changes)


@pytest.mark.parametrize(
    "partial",
    [
        (Partial(member=0, cells=2),),
        (Partial(member=1, cells=0), Partial(member=0, cells=0)),
        (Partial(member=1, cells=0), Partial(member=1, cells=1)),
    ],
)
def test_partial_inclusions_are_short_sorted_and_single(partial):
    with pytest.raises(ValueError):
        part(0, 2, b"x", partial=partial)


def test_bytes_that_are_no_entry_are_refused():
    good = entry().encode()
    rng = random.Random(5)
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        data = bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
        if data == good:
            continue
        try:
            decoded = Entry.decode(data)
        except MalformedRecord:
            continue
        assert decoded.encode() == data
        assert decoded.digest != entry().digest


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93\x01\x02\x03",
        msgpack.packb({"a": 1}),
        msgpack.packb([[[[[[]]]]]] * 100),
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
        entry().encode() + b"\x00",
        msgpack.packb(dict(reversed(entry().model_dump().items()))),
        msgpack.packb(entry().model_dump() | {"extra": 1}),
        b"x" * (17 << 20),
    ],
    ids=lambda data: f"{len(data)}-bytes-{data[:2].hex()}",
)
def test_hostile_bytes_are_refused_without_harm(data):
    with pytest.raises(MalformedRecord):
        Entry.decode(data)


def test_a_body_is_split_and_checked():
    assert [bytes(p) for p in split_body(entry(), BODY)] == [BODY[:10], BODY[10:]]
    with pytest.raises(MalformedRecord, match="expected 30 bytes, got 29"):
        split_body(entry(), BODY[:-1])
    with pytest.raises(MalformedRecord, match="part 1"):
        split_body(entry(), BODY[:-1] + b"x")


def test_a_partial_member_is_included_by_its_prefix():
    parts = (
        part(0, 2, BODY[:10]),
        part(2, 5, BODY[10:], partial=(Partial(member=1, cells=1),)),
    )
    partly = entry(parts=parts)
    assert partly.included_cells(PEERS[1].peer_id, "0") == [True, True, True, False, False]
    assert partly.included_cells(PEERS[2].peer_id, "0") == [True] * 5
    assert partly.included_cells(PEERS[1].peer_id, "another incarnation") is None


def test_the_loss_of_an_entry_is_weighed_by_tokens():
    expected = (100 * 2 + 101 * 3 + 102 * 4 + 103 * 5) / 406
    assert entry().loss == pytest.approx(expected)


def test_a_loss_that_nobody_measured_is_none_and_not_a_number():
    known, *others = members(4)
    unknown = tuple(m.model_copy(update={"loss": None}) for m in others)
    some = entry(members=(known, *unknown))
    assert some.loss == known.loss
    assert Entry.decode(some.encode()).members[1].loss is None
    assert entry(members=(known.model_copy(update={"loss": None}), *unknown)).loss is None


def test_every_elector_leads_in_an_order_that_changes_with_the_position():
    orders = {tuple(leader_order(ELECTORATE, position)) for position in range(50)}
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert len(orders) > 10


def test_an_epoch_opens_only_under_the_key_of_the_run():
    key, other = Identity.ephemeral(), Identity.ephemeral()
    record = Epoch(
        run_id=RUN, epoch=1, base_position=0, base_chain=b"c" * 32, electorate=ELECTORATE
    )
    raw = record.encode()
    signed = SignedEpoch(epoch=raw, signature=key.sign(epoch_payload(raw)))
    again = SignedEpoch.decode(signed.encode())
    assert again.open(lambda data, sig: verify(key.peer_id, data, sig)) == record
    with pytest.raises(EpochInvalid):
        again.open(lambda data, sig: verify(other.peer_id, data, sig))


def test_a_record_that_is_too_long_is_refused_before_it_is_parsed():
    with pytest.raises(MalformedRecord, match="expected at most"):
        Vote.decode(bytes(Vote.max_bytes + 1))
