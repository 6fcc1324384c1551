"""One module's view of a run's network."""

import asyncio

import pytest

from atoll.dht.refusals import RefusalCode
from atoll.dht.scoped import roster_of, transport_of
from atoll.dht.testing.memory import MemoryNetwork
from atoll.dht.testing.roster import MemoryBoard
from atoll.dht.testing.virtualtime import run_virtual
from atoll.dht.transport import Refused
from support.records import record_of


async def echo(remote, body):
    return remote.encode() + b" " + body


async def repeat(remote, stream):
    while (message := await stream.recv(timeout_s=1)) is not None:
        await stream.send(message, timeout_s=1)


def test_a_dense_run_uses_the_transport_and_roster_as_they_are():
    transport, roster = object(), object()
    assert transport_of("", transport) is transport
    assert roster_of("", roster) is roster


def test_calls_and_streams_reach_the_same_module_alone():
    async def main():
        network = MemoryNetwork()
        ann, ben = network.transport("ann"), network.transport("ben")
        transport_of("stage-1", ben).serve("ask", echo)
        transport_of("stage-1", ben).serve_stream("flow", repeat)
        mine = transport_of("stage-1", ann)
        assert await mine.call("ben", "ask", b"x", timeout_s=1) == b"ann x"
        async with await mine.open("ben", "flow", timeout_s=1) as stream:
            await stream.send(b"y", timeout_s=1)
            assert await stream.recv(timeout_s=1) == b"y"
        for other in (transport_of("stage-2", ann), ann):
            with pytest.raises(Refused) as refused:
                await other.call("ben", "ask", b"x", timeout_s=1)
            assert refused.value.code == RefusalCode.UNKNOWN_METHOD

    run_virtual(main())


def record(peer_id, module):
    return record_of(peer_id, module=module)


def test_a_modules_roster_holds_its_own_peers():
    async def main():
        board = MemoryBoard()
        for peer, module in (("ann", "stage-1"), ("ben", "stage-2"), ("cas", "stage-1")):
            await roster_of(module, board.roster(peer)).publish(record(peer, module), 20.0)
        everybody = board.roster("ann")
        assert set(await everybody.peers()) == {"ann", "ben", "cas"}
        assert set(await roster_of("stage-1", everybody).peers()) == {"ann", "cas"}
        assert set(await roster_of("stage-2", everybody).peers()) == {"ben"}

    run_virtual(main())


def test_the_credential_is_the_transports():
    async def main():
        network = MemoryNetwork()
        ann = network.transport("ann")
        scoped = transport_of("stage-1", ann)
        scoped.admission = b"new"
        assert ann.admission == b"new" == scoped.admission
        assert scoped.peer_id == "ann"
        await scoped.close()
        await asyncio.sleep(0)

    run_virtual(main())
