"""D3: dictionaries of many records, which cost seconds to verify, deafen the loop."""

import asyncio

import msgpack
from hivemind.dht.storage import DictionaryDHTValue

from atoll.dht.bindings import DHTProtocol, PeerID
from atoll.dht.identity import Identity
from atoll.dht.kademlia import BURST, MAX_BAD, Budget
from support.strangers import ROSTER_ID, admission, members, signed

NUM = 300  # signing them takes most of the test; 9,000 deafened the loop for 3 s


def dictionary(*, is_admitted):
    """Return a dictionary with a wrong last record, so that nothing of it would be kept."""
    packed = DictionaryDHTValue()
    for _ in range(NUM):
        identity = Identity.ephemeral()
        credential = admission(identity.peer_id) if is_admitted else b""
        peer_id, data, expires_at = signed(identity, credential)
        packed.store(peer_id, msgpack.packb(data), expires_at)
    packed.store("zzz", b"x", expires_at)
    return packed, expires_at


def watched(node):
    """Return a list of the records that a node's validator is asked about from now on."""
    judged = []
    validator = node.dht.protocol.record_validator
    validate = validator.validate
    validator.validate = lambda record: judged.append(record) or validate(record)
    return judged


def test_a_dictionary_is_not_even_read(tmp_path):
    async def main():
        async with members(tmp_path) as (a, b):
            packed, expires_at = dictionary(is_admitted=True)
            judged = watched(a)
            for _ in range(5):
                stored = await DHTProtocol.call_store(
                    b.dht.protocol,
                    PeerID.from_base58(a.peer_id),
                    [ROSTER_ID],
                    [packed],
                    [expires_at],
                )
                assert not any(stored or [])
            assert {record.subkey for record in judged} <= {b""}  # as a whole, by its size

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_dictionary_in_an_answer_is_given_up_soon(tmp_path):
    async def main():
        async with members(tmp_path) as (a, b):
            judged = watched(b)
            protocol = b.dht.protocol
            packed, expires_at = dictionary(is_admitted=False)
            a.dht.protocol.storage.store(ROSTER_ID, packed, expires_at)
            found = await protocol.call_find(PeerID.from_base58(a.peer_id), [ROSTER_ID])
            value, _ = found[ROSTER_ID]
            assert value is None
            assert len(judged) == MAX_BAD

    asyncio.run(asyncio.wait_for(main(), 30))


def test_calls_beyond_the_budget_are_refused():
    async def main():
        budget = Budget(10.0, 100.0)
        assert [budget.spend("a", 4.0) for _ in range(4)] == [True, True, False, False]
        assert budget.spend("b", 4.0)
        await asyncio.sleep(0.05)
        assert budget.spend("a", 4.0)
        assert BURST > 2 * 1000  # two handovers of the largest run that was simulated

    asyncio.run(main())
