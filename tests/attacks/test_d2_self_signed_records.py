"""D2: records that are signed by keys of which the run knows nothing fill the DHT."""

import asyncio
from uuid import uuid4

import msgpack
import pytest

from atoll.dht.bindings import PeerID, p2pd_pb2
from atoll.dht.identity import Identity
from atoll.dht.kademlia import MAX_ITEMS, _answer_calls, node_id_of
from atoll.dht.roster import MAX_RECORD_BYTES, RecordError, open_record, sign_record
from support.strangers import (
    CHECK,
    ROSTER_ID,
    RUN,
    admission,
    members,
    record,
    signed,
    stranger,
)


async def store(node, target, some):
    """Store records from `node`, as an attacker with its own signature would."""
    return await node.protocol.call_store(
        PeerID.from_base58(target.peer_id),
        [ROSTER_ID] * len(some),
        [msgpack.packb(data) for _, data, _ in some],
        [expires_at for _, _, expires_at in some],
        subkeys=[peer_id for peer_id, _, _ in some],
    )


def test_a_stranger_can_neither_store_nor_read_nor_enter_the_table(tmp_path):
    async def main():
        async with members(tmp_path) as (a, b), stranger(a.addresses[0]) as plain:
            await b.roster.publish(record(b.peer_id), 30)
            target = PeerID.from_base58(a.peer_id)
            assert await plain.protocol.call_ping(target) is None
            assert await store(plain, a, [signed(Identity.ephemeral())]) is None
            assert await plain.protocol.call_find(target, [ROSTER_ID]) is None
            assert await plain.get("anything", latest=True) is None
            for node in (a, b):
                assert set(await node.roster.peers()) == {b.peer_id}
                assert plain.peer_id not in node.dht.protocol.routing_table

    asyncio.run(asyncio.wait_for(main(), 30))


def test_records_without_an_admission_are_refused_one_by_one(tmp_path):
    """A member sends them, so that they reach the validator."""

    async def main():
        async with members(tmp_path) as (a, b):
            other, elsewhere = Identity.ephemeral(), Identity.ephemeral()
            some = [
                signed(Identity.ephemeral()),
                signed(Identity.ephemeral(), credential=b"x" * 300),
                signed(elsewhere, credential=admission(other.peer_id)),
                signed(elsewhere, credential=admission(elsewhere.peer_id, lasts_s=-30)),
                signed(other, credential=admission(other.peer_id)),
            ]
            assert await store(b.dht, a, some) == [False, False, False, False, True]
            assert set(await b.roster.peers()) == {other.peer_id}

    asyncio.run(asyncio.wait_for(main(), 30))


def test_more_records_than_a_call_may_have_are_refused(tmp_path):
    async def main():
        async with members(tmp_path) as (a, b):
            other = Identity.ephemeral()
            one = signed(other, credential=admission(other.peer_id))
            assert await store(b.dht, a, [one] * (MAX_ITEMS + 1)) is None

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_fat_record_is_refused():
    identity = Identity.ephemeral()
    credential = admission(identity.peer_id)
    addresses = [f"/ip4/10.0.0.{i}/tcp/4000/p2p/{identity.peer_id}" for i in range(16)]
    _, data, _ = signed(identity, credential, addresses=addresses)
    kept = open_record(data, run_id=RUN.hex(), check=CHECK).addresses
    assert len(data) <= MAX_RECORD_BYTES
    assert 4 <= len(kept) < 16
    assert list(kept) == addresses[: len(kept)]
    with pytest.raises(RecordError, match="at most"):
        open_record(data + bytes(MAX_RECORD_BYTES), run_id=RUN.hex())
    with pytest.raises(RecordError, match="at most"):
        sign_record(
            record(identity.peer_id), identity, run_id=RUN.hex(), credential=bytes(MAX_RECORD_BYTES)
        )


def test_a_node_hands_its_records_over_one_by_one(tmp_path):
    """A new node gets what it should hold, although dictionaries are refused as a whole."""

    async def main():
        async with members(tmp_path, count=1) as (a,):
            await a.roster.publish(record(a.peer_id), 30)
            async with members(tmp_path / "later", count=1) as (late,):
                await late.daemon.dial(a.peer_id, a.addresses, timeout_s=10)
                await late.dht.protocol.call_ping(PeerID.from_base58(a.peer_id))
                while late.dht.protocol.storage.get(ROSTER_ID) is None:
                    await asyncio.sleep(0.02)
                assert late.dht.protocol.node_id == node_id_of(late.peer_id)

    (tmp_path / "later").mkdir()
    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize("size", [100, 1000])
def test_an_answer_that_is_too_long_leaks_nothing(size):
    class Control:
        persistent_conn_max_msg_size = 500

        def __init__(self):
            self._handler_tasks, self._pending_messages = {}, asyncio.Queue()
            self.unary_handlers = {"find": self.find}

        async def find(self, data, remote):
            return bytes(size)

    class Client:
        control = Control()

    class Pipe:
        _client = Client()

    async def main():
        _answer_calls(Pipe)
        control, call_id = Pipe._client.control, uuid4()
        peer = PeerID.from_base58(Identity.ephemeral().peer_id).to_bytes()
        request = p2pd_pb2.CallUnaryRequest(peer=peer, proto="find", data=b"")
        task = asyncio.create_task(control._handle_persistent_request(call_id, request))
        control._handler_tasks[call_id] = task
        await task
        assert control._handler_tasks == {}
        answer = control._pending_messages.get_nowait().unaryResponse
        if size == 100:
            assert answer.response == bytes(100)
        else:
            assert b"too long" in answer.error

    asyncio.run(main())
