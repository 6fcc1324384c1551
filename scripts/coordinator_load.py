#!/usr/bin/env python3
"""Peers and watchers of one host, for `bench_coordinator.py`: only their calls are real.

    coordinator_load.py INVITE PEERS WATCHERS SECONDS

Joins with as many peers, prints a line, and waits for a line on stdin. Then each peer reports as
often as the coordinator asks for, each watcher asks for the status once a second, and after so many
seconds a line of JSON tells how long each call took, and what failed.
"""

import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field, replace

from atoll.coordinator.rpc.channel import StatusClient, stub
from atoll.coordinator.rpc.client import CoordinatorClient, Joined
from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.coordinator.rpc.messages import CALL_TIMEOUT_S, pb
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.status import PeerStatus
from atoll.dht.identity import Identity
from atoll.peer.cli.watching import read_invite
from support.status import make_peer

WATCH_S = 1.0  # as the dashboard does
JOIN_APART_S = 0.2  # two calls each: within what one address may make
JOIN_TRIES = 30


@dataclass(kw_only=True)
class Calls:
    """How calls of one kind went."""

    seconds: list[float] = field(default_factory=list)
    failed: int = 0
    reply_bytes: int = 0


class Watcher(StatusClient):
    """Asks for the status, and does not read it: its owner's machine would."""

    async def look(self) -> int:
        """Return the bytes of the answer."""
        request = pb.StatusRequest(token=self.invite.token)

        async def call(channel: object) -> int:
            reply = await stub(channel, "Status")(request, timeout=CALL_TIMEOUT_S)
            return reply.ByteSize()

        return await self._with_channel(call)


async def join(invite: Invite, number: int) -> tuple[CoordinatorClient, Joined, PeerStatus]:
    """Join as a peer of its own."""
    identity = Identity.ephemeral()
    client = CoordinatorClient(invite, identity, version="0.1.0")
    for attempt in range(JOIN_TRIES):
        try:
            joined = await client.join()
            break
        except CoordinatorError:
            if attempt == JOIN_TRIES - 1:
                raise
            await asyncio.sleep(random.uniform(1.0, 3.0))
    status = replace(make_peer(number, position=0), peer_id=identity.peer_id, state="training")
    return client, joined, status


async def report(
    client: CoordinatorClient, status: PeerStatus, every_s: float, until_s: float, calls: Calls
) -> None:
    """Send heartbeats until a time."""
    await asyncio.sleep(random.uniform(0.0, every_s))
    while time.monotonic() < until_s:
        began_s = time.monotonic()
        try:
            every_s = (await client.heartbeat(status)).heartbeat_s
            calls.seconds.append(time.monotonic() - began_s)
        except CoordinatorError as error:
            calls.failed += 1
            print(f"heartbeat: {error}", file=sys.stderr)
        await asyncio.sleep(max(0.0, began_s + every_s - time.monotonic()))


async def watch(invite: Invite, until_s: float, calls: Calls) -> None:
    """Ask for the status until a time."""
    client = Watcher(invite)
    await asyncio.sleep(random.uniform(0.0, WATCH_S))
    while time.monotonic() < until_s:
        began_s = time.monotonic()
        try:
            calls.reply_bytes += await client.look()
            calls.seconds.append(time.monotonic() - began_s)
        except CoordinatorError as error:
            calls.failed += 1
            print(f"status: {error}", file=sys.stderr)
        await asyncio.sleep(max(0.0, began_s + WATCH_S - time.monotonic()))
    await client.close()


async def main(invite: Invite, peers: int, watchers: int, seconds: float) -> None:
    """Join, wait for the word to begin, call, and tell."""
    found = []
    for number in range(peers):
        found.append(await join(invite, number))
        await asyncio.sleep(JOIN_APART_S)
    print("joined", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    until_s = time.monotonic() + seconds
    beats, looks = Calls(), Calls()
    await asyncio.gather(
        *(report(c, status, joined.heartbeat_s, until_s, beats) for c, joined, status in found),
        *(watch(invite, until_s, looks) for _ in range(watchers)),
    )
    print(json.dumps({"beats": vars(beats), "looks": vars(looks)}), flush=True)
    for client, _, _ in found:
        await client.close()


if __name__ == "__main__":
    asyncio.run(main(read_invite(sys.argv[1]), *map(int, sys.argv[2:4]), float(sys.argv[4])))
