"""P10: a donor claims to be far ahead, so is asked first, and sends an entry every five seconds."""

import asyncio
from contextlib import suppress

import pytest

from atoll.dht.transport import TransportError
from atoll.peer.rounds.messages import Decided, LeafRequest, SnapshotMeta, Span
from support.swarm import claim, reached, run_swarm


def trickle(liar, what):
    """Send one message every few seconds: what it holds, so that each is right by itself."""
    serve = liar.transport.serve_stream

    async def headers(remote, stream):
        span = Span.decode(await stream.recv(timeout_s=5))
        for position in range(span.start, span.stop):
            row = liar.replica.store.get(min(position, liar.replica.position - 1))
            decided = Decided(entry=row.entry, certificate=row.certificate)
            await stream.send(decided.encode(), timeout_s=20)
            await asyncio.sleep(5)

    async def leaves(remote, stream):
        request = LeafRequest.decode(await stream.recv(timeout_s=5))
        state = liar.replica.lease(request.position)
        meta = SnapshotMeta(position=request.position, leaves=b"".join(state.leaves()))
        await stream.send(meta.encode(), timeout_s=20)
        for _ in range(10_000):
            await stream.send(b"", timeout_s=20)
            await asyncio.sleep(5)

    async def body(remote, stream):
        await stream.recv(timeout_s=5)
        for _ in range(10_000):
            await stream.send(b"x", timeout_s=20)
            await asyncio.sleep(5)

    handler = {"headers": headers, "leaves": leaves, "body": body}[what]

    async def until_it_is_left(remote, stream):
        with suppress(TransportError):
            await handler(remote, stream)

    serve(what, until_it_is_left)


async def joined_within_s(swarm, limit_s=600.0):
    joiner = swarm.add()
    began = swarm.now()
    task = asyncio.create_task(joiner.start())
    await swarm.until(
        lambda: joiner.replica.ready and bool(joiner.replica.electorate), timeout_s=limit_s
    )
    await task
    return swarm.now() - began


@pytest.mark.parametrize("what", ["headers", "leaves", "body"])
def test_a_joiner_waits_for_no_trickling_donor(tmp_path, monkeypatch, what):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 4))
        without_s = await joined_within_s(swarm)
        liar = peers[3]
        claim(monkeypatch, liar, position=1 << 60)
        trickle(liar, what)
        assert await joined_within_s(swarm) <= without_s + 10.0  # a page's patience, and a spare
        # It is left alone from then on.
        at = max(p.replica.position for p in peers)
        await swarm.until(lambda: reached(swarm.peers, at + 3))

    run_swarm(tmp_path, scenario, codec="int8")
