"""Whoever is cancelled ends, whatever happens in the same turn of the event loop.

`asyncio.wait_for` of Python 3.11 forgets a cancellation that meets the end of what it waits for; in
a loop that goes on waiting, a peer would never come to its goodbye.
"""

import asyncio
from types import SimpleNamespace

import pytest

from atoll.peer.rounds.allreduce.sides import OwnedPart
from atoll.peer.rounds.consensus.leader import Leadership
from atoll.peer.rounds.consensus.local_stream import stream_pair

TURNS = range(6)  # between the end of what is waited for and the cancellation


async def is_ended_by(work, event, turns):
    task = asyncio.create_task(work)
    for _ in range(3):
        await asyncio.sleep(0)
    await event()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=1.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return bool(done)


@pytest.mark.parametrize("turns", TURNS)
def test_a_leader_that_waits_for_a_change(turns):
    async def main():
        leader = SimpleNamespace(changed=asyncio.Event())

        async def lead():
            while True:
                await Leadership._await_change(leader, 60.0)

        async def change():
            leader.changed.set()

        assert await is_ended_by(lead(), change, turns)

    asyncio.run(main())


@pytest.mark.parametrize("turns", TURNS)
def test_a_reader_of_a_local_stream(turns):
    async def main():
        here, there = stream_pair("me", "round")

        async def listen():
            while True:
                await here.recv(timeout_s=60.0)

        async def send():
            await there.send(b"alive", timeout_s=1.0)

        assert await is_ended_by(listen(), send, turns)

    asyncio.run(main())


@pytest.mark.parametrize("turns", TURNS)
def test_a_sender_that_waits_for_frames(turns):
    async def main():
        reducer = SimpleNamespace(frames=[])
        owned = OwnedPart(reducer=reducer, compute=None, waiting=set())

        async def wait():
            while True:
                await owned.await_frames(0, timeout_s=60.0)

        async def change():
            await owned.notify()

        assert await is_ended_by(wait(), change, turns)

    asyncio.run(main())
