"""Attackers in a process of their own, for `scripts/bench attacks --real`.

    python -m support.real_attacks member p3|p5 SWITCH [arguments of `atoll`]
        A peer with our code that lies while the file SWITCH exists.
    python -m support.real_attacks stranger d1|d2|d4 RUN_ID ADDRESS [ADDRESS ...]
        Attacks nodes, until it is ended; prints what it met as a line of JSON now and then.

ADDRESS is a multiaddr of a node with its PeerID. RUN_ID is in hex.
"""

import asyncio
import contextlib
import json
import logging
import sys
from collections import Counter
from pathlib import Path

import msgpack
import pytest

from atoll.dht.bindings import DHTID, P2P, DHTNode, DHTProtocol, PeerID, dht_pb2
from atoll.dht.identity import Identity
from atoll.dht.libp2p import protocol_name
from atoll.dht.p2pd import P2pd, P2pdOptions
from atoll.dht.roster import roster_key, sign_record
from support import attackers
from support.minilibp2p import Stranger
from support.strangers import record

SILENT, STREAMS, KEEP_S = 30, 250, 9.0  # a silent stream was kept for 10 s once
IDS = 24  # places next to the roster's key
RECORDS = 40  # of a call


class WhileThere:
    """Equals this process's peer, or its link, while a file exists: then the attackers strike."""

    __hash__ = None

    def __init__(self, switch):
        self._switch = Path(switch)

    def __eq__(self, other):
        return self._switch.exists()


def lie(attack, switch):
    """Let this process's peer lie."""
    me, patch = WhileThere(switch), pytest.MonkeyPatch()
    if attack == "p3":
        attackers.stop_at(patch, me, "_form")
    else:
        attackers.declare_no_uplink(patch, me)
        attackers.hold(patch, me)


def tell(met):
    print(json.dumps(dict(met)), flush=True)


@contextlib.asynccontextmanager
async def plain_node(addresses):
    """Start a node of hivemind's without an admission, connected to these addresses."""
    daemon = await P2pd.start(Identity.ephemeral(), P2pdOptions())
    p2p = await P2P.replicate(daemon.control_maddr)
    try:
        for address in addresses:
            await daemon.dial(peer_of(address), [address], timeout_s=10)
        yield await DHTNode.create(
            p2p=p2p, initial_peers=addresses, ensure_bootstrap_success=False, strict=False
        )
    finally:
        await p2p.shutdown()
        await daemon.close()


def peer_of(address):
    return address.rpartition("/p2p/")[2]


def swallow(met):
    """D1: take what is stored, and find nothing."""

    async def store(protocol, request: dht_pb2.StoreRequest, context) -> dht_pb2.StoreResponse:
        met["stores swallowed"] += len(request.keys)
        ok = [True] * len(request.keys)
        return dht_pb2.StoreResponse(store_ok=ok, peer=protocol.node_info)

    async def find(protocol, request: dht_pb2.FindRequest, context) -> dht_pb2.FindResponse:
        met["searches misled"] += 1
        none = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
        return dht_pb2.FindResponse(results=[none] * len(request.keys), peer=protocol.node_info)

    DHTProtocol.rpc_store, DHTProtocol.rpc_find = store, find


async def eclipse(run_id, addresses, met):
    """D1: take the places next to the roster's key."""
    swallow(met)
    key = DHTID.generate(source=roster_key(run_id))
    async with plain_node(addresses) as node:
        while True:
            for target in map(PeerID.from_base58, map(peer_of, addresses)):
                for number in range(1, IDS + 1):
                    node_id = DHTID(int(key) ^ number).to_bytes()
                    node.protocol.node_info = dht_pb2.NodeInfo(node_id=node_id)
                    answer = await node.protocol.call_ping(target)
                    met["pings refused" if answer is None else "pings answered"] += 1
            tell(met)
            await asyncio.sleep(1.0)


def forged_record(run_id):
    """D2: return a name, a record that its own key signed, and when it expires."""
    identity = Identity.ephemeral()
    plain = record(identity.peer_id, lasts_s=280.0)
    data = sign_record(plain, identity, run_id=run_id, credential=bytes(300))
    return identity.peer_id, msgpack.packb(data), plain.expires_at


async def store_records(run_id, addresses, met):
    """D2: store records that no admission stands behind."""
    key = DHTID.generate(source=roster_key(run_id))
    async with plain_node(addresses) as node:
        while True:
            records = [forged_record(run_id) for _ in range(RECORDS)]
            subkeys, values, expires = zip(*records, strict=True)
            for target in map(PeerID.from_base58, map(peer_of, addresses)):
                stored = await node.protocol.call_store(
                    target, [key] * RECORDS, list(values), list(expires), subkeys=list(subkeys)
                )
                met["calls refused" if stored is None else "calls answered"] += 1
                met["records stored"] += sum(map(bool, stored or []))
            tell(met)
            await asyncio.sleep(0.1)


async def be_silent(run_id, addresses, met):
    """D4: hold connections with streams that never say anything."""

    async def hold(address):
        _, _, host, _, port, *_ = address.split("/")
        while True:
            each = Stranger()
            with contextlib.suppress(OSError, AssertionError, asyncio.IncompleteReadError):
                await each.open(host, int(port))
                met["connections"] += 1
                while not each._task.done():
                    await each.streams(protocol_name(run_id), STREAMS)
                    met["streams"] += STREAMS
                    await asyncio.sleep(KEEP_S)
            await asyncio.sleep(1.0)

    async with asyncio.TaskGroup() as group:
        for number in range(SILENT):
            group.create_task(hold(addresses[number % len(addresses)]))
        while True:
            await asyncio.sleep(5.0)
            tell(met)


STRANGERS = {"d1": eclipse, "d2": store_records, "d4": be_silent}


def main():
    role, attack, *words = sys.argv[1:]
    if role == "member":
        from atoll.peer.cli.main import main as atoll

        switch, *arguments = words
        lie(attack, switch)
        return atoll(arguments)
    logging.disable(logging.CRITICAL)
    run_id, *addresses = words
    asyncio.run(STRANGERS[attack](run_id, addresses, Counter()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
