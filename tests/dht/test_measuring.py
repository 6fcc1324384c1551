"""Rates between two nodes, and the bounds on who may measure how much."""

import asyncio
import struct

import pytest

from atoll.dht import measuring
from atoll.dht.measuring import Allowance, measure
from atoll.dht.refusals import RefusalCode
from atoll.dht.testing.memory import MemoryNetwork, run_virtual
from atoll.dht.transport import Refused

HERE = "/ip4/203.0.113.7/tcp/4001"


async def at_its_router(peer):
    return [HERE]


def two(**rates):
    network = MemoryNetwork()
    one, other = network.transport("a", **rates), network.transport("b")
    measuring.serve(other, at_its_router)
    return network, one


def test_both_directions_and_the_address_are_measured():
    async def main():
        _, one = two(uplink_bytes_s=500_000, downlink_bytes_s=5_000_000)
        return await measure(one, "b")

    found = run_virtual(main())
    assert found.seen_at == HERE
    assert found.up_mbit_s == pytest.approx(4.0, rel=0.25)
    assert found.down_mbit_s == pytest.approx(40.0, rel=0.25)


def test_a_link_on_which_nothing_passes_in_time_has_no_rate():
    async def main():
        _, one = two(uplink_bytes_s=10_000)
        began_s = asyncio.get_running_loop().time()
        found = await measure(one, "b")
        return found, asyncio.get_running_loop().time() - began_s

    found, took_s = run_virtual(main())
    assert found.up_mbit_s is None
    assert took_s <= 4 * measuring.DIRECTION_S


def test_one_peer_gets_a_few_megabytes_in_ten_minutes():
    allowance = Allowance()
    assert allowance.take("a", measuring.OF_ONE_BYTES, 0.0)
    assert not allowance.take("a", 1, 1.0)
    assert allowance.take("b", 1, 1.0)
    assert allowance.take("a", 1, measuring.OF_ONE_S)


def test_many_peers_together_get_a_burst_and_then_a_slow_rate():
    allowance = Allowance()
    taken = [allowance.take(f"p{i}", measuring.OF_ONE_BYTES, 0.0) for i in range(100)]
    assert sum(taken) == measuring.OF_ALL_BYTES // measuring.OF_ONE_BYTES
    assert not allowance.take("q", 2 * int(measuring.OF_ALL_BYTES_S), 1.0)
    assert allowance.take("q", int(measuring.OF_ALL_BYTES_S), 1.0)


def test_what_is_remembered_of_peers_is_bounded():
    allowance = Allowance()
    for i in range(measuring.MAX_PEERS + 10):
        allowance.take(f"p{i}", 1, 0.0)
    assert len(allowance._used) == measuring.MAX_PEERS


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", RefusalCode.BAD_REQUEST),
        (struct.pack(">I", measuring.MAX_WANT_BYTES + 1), RefusalCode.BAD_REQUEST),
        (struct.pack(">I", 0) + bytes(measuring.OF_ONE_BYTES // 4), RefusalCode.BUSY),
    ],
)
def test_a_request_beyond_the_bounds_is_refused(body, code):
    async def main():
        _, one = two()
        with pytest.raises(Refused) as caught:
            for _ in range(5):
                await one.call("b", measuring.METHOD, body, timeout_s=60.0)
        return caught.value.code

    assert run_virtual(main()) == code


def test_a_peer_that_answers_something_else_is_an_error():
    async def lie(remote, body):
        return b"\xff"

    async def main():
        network = MemoryNetwork()
        one, other = network.transport("a"), network.transport("b")
        other.serve(measuring.METHOD, lie)
        with pytest.raises(Refused):
            await measure(one, "b")

    run_virtual(main())
