"""What is fetched is checked, and what is asked for is bounded."""

import asyncio
import random
from types import SimpleNamespace

import pytest

from atoll.dht.tasks import end
from atoll.dht.testing.memory import MemoryNetwork, run_virtual
from atoll.dht.transport import PeerUnreachable, Refused
from atoll.optim.log.entry import MalformedRecord, sha256
from atoll.optim.state import vectors
from atoll.optim.state.outer_state import LEAF_BYTES
from atoll.peer.rounds import fetching
from atoll.peer.rounds.bulk import BITS
from atoll.peer.rounds.fetching import Archive, fetch_body, fetch_headers, fetch_leaves, fetch_part
from atoll.peer.rounds.messages import LeavesRequest, Span, deflated, inflated
from atoll.peer.rounds.pacing import DECLARED_SHARE, SPARE_SHARE, Link
from support.strikes import donor_and_reader
from support.swarm import run_swarm


async def body_from(ctx, peer, position, num_bytes):
    body = bytearray(num_bytes)
    await fetch_body(ctx, peer, position, 0, memoryview(body))
    return body


def test_who_gives_way_gets_nothing_while_training_waits_for_a_round(tmp_path):
    async def scenario(swarm):
        donor, asking = await donor_and_reader(swarm)
        name, body = donor.identity.peer_id, donor.replica.store.body(2)
        into = memoryview(bytearray(len(body)))
        newest = max(donor.replica.snapshots)
        donor.rounds.archive._is_awaited = lambda: True
        with pytest.raises(Refused, match="busy"):
            await fetch_body(asking.ctx, name, 2, 0, into, gives_way=True)
        with pytest.raises(Refused, match="busy"):
            async for _ in fetch_leaves(asking.ctx, name, newest, [0], gives_way=True):
                pass
        await fetch_body(asking.ctx, name, 2, 0, into)
        assert into == body
        assert [i async for i, _ in fetch_leaves(asking.ctx, name, newest, [0])] == [0]
        donor.rounds.archive._is_awaited = lambda: False
        assert [
            i async for i, _ in fetch_leaves(asking.ctx, name, newest, [0], gives_way=True)
        ] == [0]

    run_swarm(tmp_path, scenario)


def test_over_a_cap_a_body_comes_whole_if_a_round_begins_meanwhile(tmp_path, monkeypatch):
    async def scenario(swarm):
        donor, asking = await donor_and_reader(swarm)
        body = donor.replica.store.body(2)
        into = memoryview(bytearray(len(body)))
        monkeypatch.setattr(fetching, "LEAF_BYTES", len(body) // 3)
        asking.ctx.link.inflow.limit(100.0)
        in_round = iter([False])
        donor.rounds.archive._is_awaited = lambda: next(in_round, True)
        await fetch_body(asking.ctx, donor.identity.peer_id, 2, 0, into, gives_way=True)
        assert into == body

    run_swarm(tmp_path, scenario)


def test_a_part_of_other_bytes_is_taken_from_nobody(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(3, window_s=1000.0)
        liar, honest, asking = peers
        digest = sha256(b"part")
        liar.ctx.parts.put(0, digest, b"lies")
        names = [p.identity.peer_id for p in (liar, honest)]
        with pytest.raises(PeerUnreachable):
            await fetch_part(asking.ctx, names, digest, 4)
        honest.ctx.parts.put(0, digest, b"part")
        assert await fetch_part(asking.ctx, names, digest, 4) == b"part"

    run_swarm(tmp_path, scenario)


def test_one_request_is_answered_with_so_many_entries_and_no_more(tmp_path, monkeypatch):
    async def scenario(swarm):
        donor, asking = await donor_and_reader(swarm)
        name = donor.identity.peer_id
        monkeypatch.setattr(fetching, "MAX_SPAN", 2)
        assert len(await fetch_headers(asking.ctx, name, 0, 4)) == 2
        stream = await asking.transport.open(name, "headers", timeout_s=2.0)
        await stream.send(Span(start=0, stop=2**62).encode(), timeout_s=2.0)
        count = 0
        while await stream.recv(timeout_s=5.0) is not None:
            count += 1
        assert count == 2

    run_swarm(tmp_path, scenario)


def test_a_body_that_the_disk_has_spoiled_is_refused_and_told(tmp_path):
    async def scenario(swarm):
        donor, asking = await donor_and_reader(swarm)
        name, body = donor.identity.peer_id, donor.replica.store.body(2)
        assert await body_from(asking.ctx, name, 2, len(body)) == body
        rotten = bytes([body[0] ^ 1]) + body[1:]
        donor.replica.store.drop_bodies([2])
        donor.replica.store.add_body(2, rotten)
        with pytest.raises(Refused, match="not-here"):
            await body_from(asking.ctx, name, 2, len(body))
        assert any("entry 2 was damaged" in text for text in donor.events)
        assert donor.replica.store.first_with_bodies() == 3  # nobody is sent here for it again

    run_swarm(tmp_path, scenario)


@pytest.mark.parametrize("capped", ["donor", "reader"])
def test_a_cap_of_the_donor_or_of_the_reader_bounds_what_is_fetched(tmp_path, capped):
    async def scenario(swarm):
        donor, reader = await swarm.start(2, window_s=1000.0)
        part = bytes(4 << 20)
        donor.ctx.parts.put(0, sha256(part), part)
        loop, took_s = asyncio.get_running_loop(), []
        for most_mbit_s in (0.0, 30.0):
            (donor if capped == "donor" else reader).ctx.link.cap(most_mbit_s)
            began_s = loop.time()
            await fetch_part(reader.ctx, [donor.identity.peer_id], sha256(part), len(part))
            took_s.append(loop.time() - began_s)
        share = SPARE_SHARE if capped == "donor" else 1.0
        due_s = len(part) * BITS / (30.0 * share)
        assert took_s[0] < 0.1 * due_s
        assert 0.9 * due_s < took_s[1] < 1.3 * due_s

    run_swarm(tmp_path, scenario)


@pytest.mark.parametrize("uplink_mbit_s", [10.0, 100.0])
def test_joiners_read_beside_rounds_that_fill_their_windows(monkeypatch, uplink_mbit_s):
    """A reader gives up on a donor below 64 kB/s, and after four stalls without a message."""

    async def main():
        net = MemoryNetwork(latency_s=0.025)
        names, piece = ("donor", "reader", "member"), random.Random(1).randbytes(2 << 20)
        ctxs = {name: bare_context(net, name, uplink_mbit_s, piece) for name in names}
        donor, reader, member = ctxs.values()
        monkeypatch.setattr(fetching, "checked_body", pieces_of)
        Archive(donor, is_awaited=lambda: False).serve()
        sent = [0]

        async def sink(remote, stream):
            while await stream.recv(timeout_s=1000.0) is not None:
                pass

        async def fill():
            async with await donor.transport.open("member", "fill", timeout_s=5.0) as stream:
                while True:
                    await donor.link.pacer.turn(1 << 16, (0,))
                    await stream.send(bytes(1 << 16), timeout_s=1000.0)
                    sent[0] += 1 << 16

        member.transport.serve_stream("fill", sink)
        donor.link.declare(uplink_mbit_s)
        donor.link.watch(donor.transport)
        filling = asyncio.create_task(fill())
        await asyncio.sleep(3.0)
        before = sent[0]
        into = [vectors.buffer(len(piece)) for _ in range(6)]
        await asyncio.gather(*(fetch_body(reader, "donor", 7, 0, each) for each in into))
        await end(filling, *donor.link._tasks._tasks)
        assert all(each == piece for each in into)
        assert sent[0] > before  # nor did the round stand still

    run_virtual(main())


def pieces_of(body, position, start, stop):
    for first in range(start, stop, 1 << 20):
        yield body[first : min(first + (1 << 20), stop)]


def bare_context(net, name, uplink_mbit_s, body):
    """Return the attributes that an archive and a reader need, with one body at each position."""

    async def at_once(function, *arguments):
        return function(*arguments)

    return SimpleNamespace(
        transport=net.transport(name, uplink_bytes_s=uplink_mbit_s / BITS),
        link=Link(),
        settings=SimpleNamespace(stall_s=1.5),
        compute=at_once,
        replica=SimpleNamespace(store=body),
        fault=lambda *_: None,
        reading_door=lambda peer: None,
        on_event=print,
        roster=None,
        known_epoch=None,
    )


class Donor:
    """A transport and a stream to a donor that sends at once, as into libp2p's buffers."""

    def __init__(self):
        self.asked = []

    async def open(self, peer, method, *, timeout_s):
        return self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    async def send(self, message, *, timeout_s):
        request = LeavesRequest.decode(message)
        at_s = asyncio.get_running_loop().time()
        self.asked.append((at_s, request.start, request.stop))

    async def recv(self, *, timeout_s):
        return bytes(LEAF_BYTES)


@pytest.mark.parametrize("most_mbit_s", [0.0, 10.0])
def test_over_a_link_with_a_cap_no_leaf_is_asked_for_before_its_time(most_mbit_s):
    """Megabytes that a donor has sent wait in this peer's libp2p: they have been received."""

    async def main():
        link, donor = Link(), Donor()
        link.cap(most_mbit_s)
        settings = SimpleNamespace(stall_s=2.0)
        ctx = SimpleNamespace(link=link, transport=donor, settings=settings)
        for first in (0, 4):  # of two donors, or of one twice
            found = [i async for i, _ in fetch_leaves(ctx, "donor", 7, range(first, first + 4))]
            assert found == [*range(first, first + 4)]
        return donor.asked

    asked = run_virtual(main())
    if not most_mbit_s:
        assert asked == [(0.0, 0, 4), (0.0, 4, 8)]
        return
    leaf_s = LEAF_BYTES * BITS / (DECLARED_SHARE * most_mbit_s)
    assert [(start, stop) for _, start, stop in asked] == [(i, i + 1) for i in range(8)]
    assert [at_s for at_s, _, _ in asked] == pytest.approx([leaf_s * (i + 1) for i in range(8)])


def test_over_a_link_with_a_cap_a_body_is_asked_for_piece_by_piece(tmp_path, monkeypatch):
    async def scenario(swarm):
        donor, asking = await donor_and_reader(swarm)
        name, body = donor.identity.peer_id, donor.replica.store.body(2)
        monkeypatch.setattr(fetching, "LEAF_BYTES", len(body) // 3)
        asked, send = [], fetching._open

        async def note(ctx, peer, method, request):
            asked.append((request.start, request.stop))
            return await send(ctx, peer, method, request)

        monkeypatch.setattr(fetching, "_open", note)
        assert await body_from(asking.ctx, name, 2, len(body)) == body
        asking.ctx.link.cap(10.0)
        assert await body_from(asking.ctx, name, 2, len(body)) == body
        third = len(body) // 3
        assert asked[:3] == [(0, len(body)), (0, third), (third, 2 * third)]

    run_swarm(tmp_path, scenario)


def test_a_donor_that_sends_more_of_a_body_than_was_asked_for():
    async def main():
        settings = SimpleNamespace(stall_s=2.0)
        ctx = SimpleNamespace(link=Link(), transport=Donor(), settings=settings)
        into = vectors.buffer(LEAF_BYTES + 1)
        with pytest.raises(MalformedRecord, match=f"expected {LEAF_BYTES + 1} bytes"):
            await fetch_body(ctx, "donor", 7, 0, into)

    run_virtual(main())


def test_a_deflated_record_is_read_up_to_its_limit():
    assert inflated(deflated(b"x" * 1000), 1000) == b"x" * 1000
    with pytest.raises(MalformedRecord):
        inflated(deflated(b"x" * 1001), 1000)
    with pytest.raises(MalformedRecord):
        inflated(deflated(b"x" * 10) + b"more", 1000)
    with pytest.raises(MalformedRecord):
        inflated(deflated(b"x" * 10)[:-1], 1000)
