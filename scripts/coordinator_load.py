#!/usr/bin/env python3
"""Peers and watchers of some addresses, for `bench_coordinator.py`: only their calls are real.

    coordinator_load.py INVITE PEERS WATCHERS SECONDS ADDRESS...

Each client reaches the coordinator by one of the addresses, in turn. They join with as many peers,
print a line, and wait for a line on stdin. Then each peer reports as often as the coordinator asks
for, each watcher asks for the status as often as told, and after so many seconds a line of JSON
tells how long each call took, and what failed. Calls of the first seconds, in which all connect,
are made but do not count.
"""

import asyncio
import gc
import json
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from atoll.coordinator.rpc.channel import StatusClient, stub
from atoll.coordinator.rpc.client import CoordinatorClient, Joined
from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.coordinator.rpc.messages import CALL_TIMEOUT_S, pb
from atoll.coordinator.run.frames import decompress
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.status import MAX_RUN_BYTES, PeerStatus
from atoll.dht.identity import Identity
from atoll.peer.cli.watching import read_invite
from support.status import make_peer

WATCH_S = 1.0  # as the dashboard does
JOIN_APART_S = 0.02
JOIN_TRIES = 30
CONNECTING_S = 10.0


@dataclass(kw_only=True)
class Calls:
    """How calls of one kind went."""

    from_s: float
    seconds: list[float] = field(default_factory=list)
    failed: int = 0
    reply_bytes: int = 0

    def note(self, began_s: float, reply_bytes: int = 0) -> None:
        """Count a call that has just been answered."""
        if began_s >= self.from_s:
            self.seconds.append(time.monotonic() - began_s)
            self.reply_bytes += reply_bytes

    def note_failed(self, error: CoordinatorError) -> None:
        """Count a call that failed, whenever it was made."""
        self.failed += 1
        print(error, file=sys.stderr, flush=True)


class Watcher(StatusClient):
    """Asks for the status, and does not parse it: its owner's machine would."""

    every_s = WATCH_S

    async def look(self) -> int:
        """Return the bytes of the answer, and take from it when to look again."""
        request = pb.StatusRequest(token=self.invite.token)

        async def call(channel: object) -> int:
            reply = await stub(channel, "Status")(request, timeout=CALL_TIMEOUT_S)
            raw = decompress(reply.packed, most_bytes=MAX_RUN_BYTES)
            asked = re.search(rb'"look_every_s":([0-9.]+)', raw)
            self.every_s = max(WATCH_S, float(asked[1]) if asked else 0.0)
            return int(reply.ByteSize())

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
            calls.note(began_s)
        except CoordinatorError as error:
            calls.note_failed(error)
        await asyncio.sleep(max(0.0, began_s + every_s - time.monotonic()))


async def watch(invite: Invite, until_s: float, calls: Calls) -> None:
    """Ask for the status until a time."""
    client = Watcher(invite)
    await asyncio.sleep(random.uniform(0.0, WATCH_S))
    while time.monotonic() < until_s:
        began_s = time.monotonic()
        try:
            calls.note(began_s, await client.look())
        except CoordinatorError as error:
            calls.note_failed(error)
        await asyncio.sleep(max(0.0, began_s + client.every_s - time.monotonic()))
    await client.close()


async def main(
    invite: Invite, peers: int, watchers: int, seconds: float, addresses: Sequence[str]
) -> None:
    """Join, wait for the word to begin, call, and tell."""
    found, ways = [], [replace(invite, addresses=(each,)) for each in addresses]
    for number in range(peers):
        found.append(await join(ways[number % len(ways)], number))
        await asyncio.sleep(JOIN_APART_S)
    gc.collect()
    gc.freeze()  # a search through all of torch would be measured as the coordinator's delay
    print("joined", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    from_s = time.monotonic() + CONNECTING_S
    until_s = from_s + seconds
    beats, looks = Calls(from_s=from_s), Calls(from_s=from_s)
    await asyncio.gather(
        *(report(c, status, joined.heartbeat_s, until_s, beats) for c, joined, status in found),
        *(watch(ways[number % len(ways)], until_s, looks) for number in range(watchers)),
    )
    print(json.dumps({"beats": vars(beats), "looks": vars(looks)}), flush=True)
    for client, _, _ in found:
        await client.close()


if __name__ == "__main__":
    _, invite, peers, watchers, seconds, *addresses = sys.argv
    asyncio.run(main(read_invite(invite), int(peers), int(watchers), float(seconds), addresses))
