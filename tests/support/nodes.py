"""Nodes with real p2pd processes on loopback: for the tests beside this file."""

import asyncio
import contextlib
import sys
from dataclasses import replace

from atoll.dht.node import Node
from atoll.dht.refusals import RefusalCode
from atoll.dht.roster import PeerRecord
from atoll.dht.transport import (
    Refused,
)

RUN = "test-run"
TICKET = b"ticket"


def check(remote, credential, use=""):
    if credential != TICKET:
        raise Refused(RefusalCode.NOT_ADMITTED, "expected a ticket")


async def echo(remote, body):
    return remote.encode() + b":" + body


async def echo_stream(remote, stream):
    while (data := await stream.recv(timeout_s=20)) is not None:
        await stream.send(data, timeout_s=20)


async def start(bootstrap=(), **options):
    node = await Node.start(
        options.pop("identity_path", None),
        run_id=RUN,
        bootstrap=bootstrap,
        admission=TICKET,
        check=check,
        **options,
    )
    node.transport.serve("echo", echo)
    node.transport.serve_stream("echo", echo_stream)
    return node


CHILD = """
import asyncio, sys, time
real = time.time
time.time = lambda: real() + 3600  # this machine's clock is an hour ahead
from atoll.dht.node import Node
from atoll.dht.roster import PeerRecord

async def flood(remote, stream):
    await stream.recv(timeout_s=20)
    while True:
        await stream.send(bytes(100_000), timeout_s=20)

async def main():
    run_id, *bootstrap = sys.argv[1:]
    node = await Node.start(
        None, run_id=run_id, admission=b"ticket", bootstrap=bootstrap, clock_offset_s=-3600
    )
    record = PeerRecord(
        peer_id=node.peer_id, addresses=(), incarnation="1" * 32, role="follower", epoch=0,
        position=7, tokens_per_s=0, uplink_mbit_s=0, downlink_mbit_s=0, ready_in_s=0, protocol=1,
    )
    await node.roster.publish(record, 60)
    node.transport.serve_stream("flood", flood)
    print(node.daemon.pid, node.addresses[0], flush=True)
    await asyncio.sleep(120)

asyncio.run(main())
"""


class Swarm:
    """Three nodes, and where a test asks for it, a fourth in a process of its own."""

    def __init__(self):
        self.runner = asyncio.Runner()
        self.nodes = []
        self.child = None
        self.child_daemon_pid = 0
        self.child_address = ""

    def run(self, main, timeout_s=60):
        async def bounded():
            async with asyncio.timeout(timeout_s):
                return await main

        return self.runner.run(bounded())

    async def grow(self, path):
        self.nodes.append(await start(identity_path=path))
        for _ in range(2):
            self.nodes.append(await start(self.nodes[0].addresses))

    async def meet_child(self, node):
        if self.child is None:
            bootstrap = self.nodes[0].addresses
            self.child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", CHILD, RUN, *bootstrap, stdout=asyncio.subprocess.PIPE
            )
            pid, self.child_address = (await self.child.stdout.readline()).decode().split()
            self.child_daemon_pid = int(pid)
        peer = self.child_address.rpartition("/p2p/")[2]
        await node.transport.connect(peer, [self.child_address], timeout_s=10)
        return peer

    async def close(self):
        for node in self.nodes:
            await node.close()
        if self.child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.child.kill()
        await self.child.communicate()


def record(node, **changes):
    plain = PeerRecord(
        peer_id=node.peer_id,
        addresses=tuple(node.addresses),
        incarnation="0" * 32,
        role="trainer",
        epoch=0,
        position=0,
        tokens_per_s=1.0,
        uplink_mbit_s=0.0,
        downlink_mbit_s=0.0,
        ready_in_s=0.0,
        protocol=1,
    )
    return replace(plain, **changes)
