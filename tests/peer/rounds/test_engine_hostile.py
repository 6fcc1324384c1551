"""Bytes of strangers against every call and stream of a peer: refused by name, the run goes on."""

import random

import pytest

from atoll.dht.identity import Identity
from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused
from atoll.peer.rounds.conduct import Conduct
from atoll.peer.rounds.messages import (
    REDUCE,
    Announced,
    BodyRequest,
    LeafRequest,
    LeavesRequest,
    PartRequest,
    Prepare,
    Propose,
    Reduce,
    Span,
    deflated,
    tagged,
)
from support.streams import send
from support.swarm import ready_of, run_swarm

CALLS = ("prepare", "propose", "commit", "group", "seals")
STREAMS = ("round", "reduce", "part", "headers", "body", "digests", "leaves")
GARBAGE = (b"", b"\x00", b"R", b"H\xc1", b"\x91" * 5000, b"\xdd\xff\xff\xff\xff", b"x" * 100_000)


def attacked(tmp_path, attack):
    """Run three peers and a stranger that attacks; the peers must commit more rounds after it."""

    async def scenario(swarm):
        peers = await swarm.start(3)
        await swarm.until(lambda: all(p.replica.position >= 2 for p in peers))
        stranger = swarm.network.transport(STRANGER.peer_id)
        await attack(stranger, peers[0])
        before = peers[0].replica.position
        await swarm.until(lambda: all(p.replica.position >= before + 2 for p in peers))
        assert swarm.same_bits(peers)

    run_swarm(tmp_path, scenario, codec="int8")


STRANGER = Identity.ephemeral()


async def ask(stranger, peer, method, body):
    with pytest.raises(Refused) as refusal:
        await stranger.call(peer.identity.peer_id, method, body, timeout_s=30.0)
    return refusal.value


def test_garbage_is_refused_by_every_call_and_stream(tmp_path):
    async def attack(stranger, peer):
        rng = random.Random(3)
        noise = [rng.randbytes(rng.randrange(1, 300)) for _ in range(20)]
        for data in (*GARBAGE, *noise):
            for method in CALLS:
                peer.ctx.conduct = Conduct()  # the third one would bar the stranger from some calls
                assert (await ask(stranger, peer, method, data)).code in (
                    RefusalCode.BAD_MESSAGE,
                    RefusalCode.BAD_PROPOSAL,
                )
            for method in STREAMS:
                refusal = await send(stranger, peer, method, data)
                assert refusal is None or refusal.code.startswith(("bad", "not-the", "no-"))

    attacked(tmp_path, attack)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"protocol": 99}, RefusalCode.PROTOCOL),
        ({"weight": 1e12, "tokens": 10, "steps": 1}, RefusalCode.BAD_WEIGHT),
        ({"tokens": 2**60, "steps": 1}, RefusalCode.BAD_MESSAGE),
        ({"chain": b"z" * 32}, RefusalCode.ELSEWHERE),
        ({"epoch": 7}, RefusalCode.ELSEWHERE),
        ({"position": 0}, RefusalCode.DECIDED),
    ],
)
def test_a_ready_that_is_not_true_is_refused_by_name(tmp_path, changes, code):
    async def attack(stranger, peer):
        refusal = await send(stranger, peer, "round", ready_of(STRANGER, peer, **changes))
        assert refusal is not None
        assert refusal.code == code

    attacked(tmp_path, attack)


def test_a_stream_for_a_part_of_no_group_is_refused(tmp_path):
    async def attack(stranger, peer):
        head = Reduce(position=10**9, group=b"g" * 32, part=0, generation=0, sums=False)
        refusal = await send(stranger, peer, "reduce", tagged(REDUCE, head), b"C" + b"x" * 1000)
        assert refusal is not None
        assert refusal.code == RefusalCode.NO_SUCH_ROUND

    attacked(tmp_path, attack)


def test_a_proposal_of_one_who_does_not_lead_is_refused(tmp_path):
    async def attack(stranger, peer):
        position = peer.replica.position
        last = peer.replica.store.get(position - 1)
        prepare = Prepare(epoch=1, position=position, attempt=5).encode()
        assert (await ask(stranger, peer, "prepare", prepare)).code == RefusalCode.NOT_THE_LEADER
        signed = bytes(64)
        old = Propose(attempt=0, entry=deflated(last.entry), signature=signed).encode()
        assert (await ask(stranger, peer, "propose", old)).code == RefusalCode.ELSEWHERE

    attacked(tmp_path, attack)


def test_an_entry_with_a_certificate_of_another_is_not_applied(tmp_path):
    async def attack(stranger, peer):
        position = peer.replica.position
        older, last = (peer.replica.store.get(position - n) for n in (2, 1))
        replayed = Announced(
            entry=deflated(last.entry), certificate=older.certificate, tell=()
        ).encode()
        assert await stranger.call(peer.identity.peer_id, "commit", replayed, timeout_s=5.0) == b""
        assert peer.replica.position >= position

    attacked(tmp_path, attack)


def body_request(position, start, stop):
    return BodyRequest(position=position, start=start, stop=stop, gives_way=False)


def leaves_request(position):
    return LeavesRequest(position=position, start=0, stop=2**40, gives_way=False)


def test_requests_for_what_is_not_there_are_refused_without_work(tmp_path):
    async def attack(stranger, peer):
        for method, request in (
            ("part", PartRequest(digest=b"q" * 32, wire_bytes=2**40)),
            ("body", body_request(10**9, 0, 2**40)),
            ("body", body_request(0, 2**40, 2**41)),
            ("body", body_request(0, 2, 1)),
            ("digests", LeafRequest(position=10**9, start=0, stop=2**40)),
            ("digests", LeafRequest(position=2, start=0, stop=2**40)),
            ("leaves", leaves_request(10**9)),
            ("leaves", leaves_request(2)),
        ):
            refusal = await send(stranger, peer, method, request.encode())
            assert refusal is not None
            assert refusal.code == RefusalCode.NOT_HERE
        assert await send(stranger, peer, "headers", Span(start=0, stop=2**62).encode()) is None

    attacked(tmp_path, attack)
