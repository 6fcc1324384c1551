"""P14: readers that take a message now and then hold all slots of a donor, so nobody recovers."""

import asyncio

import pytest

from atoll.dht.testing import memory
from atoll.dht.testing.memory import run_virtual
from atoll.dht.transport import TransportError
from atoll.optim.log.entry import sha256
from atoll.peer.rounds.fetching import FLOOR_BYTES_S, fetch_part
from atoll.peer.rounds.messages import PIECE_BYTES
from atoll.peer.rounds.slots import KEPT_S, MAX_SLOTS, Slots
from support.greedy import BODY, TRICKLE_S, open_part, read_slowly
from support.swarm import run_swarm


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """Let a donor notice after one message that its reader takes none."""
    monkeypatch.setattr(memory, "WINDOW_BYTES", 1)


def attacked(tmp_path, attack):
    """Run an attack on one peer that has a large part."""

    async def scenario(swarm):
        donor, asking, _ = await swarm.start(3, window_s=10_000.0)
        donor.ctx.parts.put(0, sha256(BODY), BODY)
        tasks = []

        def trickle(name, streams):
            transport = swarm.network.transport(name)
            tasks.extend(asyncio.create_task(read_slowly(transport, donor)) for _ in range(streams))

        try:
            await attack(donor, asking, trickle)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    run_swarm(tmp_path, scenario)


async def fetched_s(asking, donor):
    """Return how long a part takes."""
    began_at = asking.ctx.now()
    body = await fetch_part(asking.ctx, [donor.identity.peer_id], sha256(BODY), len(BODY))
    assert body == BODY
    return asking.ctx.now() - began_at


def test_one_peer_cannot_hold_all_slots(tmp_path):
    async def attack(donor, asking, trickle):
        trickle("hog", 3 * MAX_SLOTS)
        await asyncio.sleep(1.0)
        assert donor.rounds.archive.slots.held == {"hog": 6}  # of eight
        assert await fetched_s(asking, donor) < 10.0

    attacked(tmp_path, attack)


def test_a_few_peers_cannot_hold_them_for_long(tmp_path):
    async def attack(donor, asking, trickle):
        for name in ("hog", "boar", "sow"):
            trickle(name, MAX_SLOTS)
        await asyncio.sleep(60.0)
        held = donor.rounds.archive.slots.held
        assert held.total() == MAX_SLOTS - 1
        assert len(held) == 3
        assert await fetched_s(asking, donor) < 5.0, "a slot is kept for a peer that had none"

    attacked(tmp_path, attack)


def test_as_many_peers_as_there_are_slots_cannot_hold_them_for_long(tmp_path):
    async def attack(donor, asking, trickle):
        for number in range(MAX_SLOTS):
            trickle(f"hog{number}", 2)
        await asyncio.sleep(KEPT_S + 1)
        assert donor.rounds.archive.slots.held.total() >= MAX_SLOTS - 1
        assert await fetched_s(asking, donor) < 10.0

    attacked(tmp_path, attack)


def test_peers_that_have_had_slots_for_a_minute_cede_one_to_a_peer_without():
    async def scenario():
        slots, began_s = Slots(3), asyncio.get_running_loop().time()
        taken = []

        async def hold(peer):
            async with slots.turn(peer) as turn:
                while True:
                    await asyncio.sleep(4.0)  # a message at the floor of rates
                    await turn.cede()

        async def come(at_s):
            await asyncio.sleep(at_s)
            async with slots.turn(f"joiner {at_s}"):
                taken.append(asyncio.get_running_loop().time() - began_s)

        hogs = [asyncio.create_task(hold(peer)) for peer in "abc"]
        async with asyncio.TaskGroup() as group:
            for at_s in (10.0, 70.0):
                group.create_task(come(at_s))
        for task in hogs:
            task.cancel()
        await asyncio.gather(*hogs, return_exceptions=True)
        assert KEPT_S <= taken[0] <= KEPT_S + 4.0
        assert taken[1] < 70.1, "the last slot is kept for it now"
        assert not slots.held

    run_virtual(scenario())


def test_a_peer_without_a_slot_for_a_minute_has_the_last_one():
    async def scenario():
        slots = Slots(2)
        order = []

        async def read(peer, seconds):
            async with slots.turn(peer):
                order.append((peer, asyncio.get_running_loop().time()))
                await asyncio.sleep(seconds)

        async with asyncio.TaskGroup() as group:
            for peer, seconds in (("a", 1000.0), ("b", 1.0)):
                group.create_task(read(peer, seconds))
            await asyncio.sleep(2.0)
            group.create_task(read("b", 1.0))  # had one a second ago
            await asyncio.sleep(2.0)
            group.create_task(read("c", 1.0))
        began_s = dict(order[1:])
        assert [peer for peer, _ in order] == ["a", "b", "c", "b"]
        assert began_s["c"] - order[0][1] == pytest.approx(4.0)
        assert KEPT_S <= began_s["b"] - order[0][1] <= KEPT_S + 2.0
        assert not slots.held

    run_virtual(scenario())


def test_a_reader_slower_than_the_floor_loses_its_slot(tmp_path):
    async def attack(donor, asking, trickle):
        stream = await open_part(asking.transport, donor)
        read = 0
        with pytest.raises(TransportError):
            while await stream.recv(timeout_s=60.0) is not None:
                read += 1
                await asyncio.sleep(TRICKLE_S)
        assert read < 10
        assert not donor.rounds.archive.slots.held

    attacked(tmp_path, attack)


def test_a_reader_at_the_floor_keeps_its_slot(tmp_path):
    async def attack(donor, asking, trickle):
        stream = await open_part(asking.transport, donor)
        for _ in range(len(BODY) // PIECE_BYTES):
            assert await stream.recv(timeout_s=60.0)
            await asyncio.sleep(PIECE_BYTES / (1.1 * FLOOR_BYTES_S))
        assert await stream.recv(timeout_s=60.0) is None

    attacked(tmp_path, attack)
