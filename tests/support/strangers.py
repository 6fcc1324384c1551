"""Nodes of a run with admissions, and attackers that speak to them: with and without one."""

import contextlib
import time

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.dht.node import DHTNode as PlainNode

from atoll.coordinator.rpc.messages import SERVICE
from atoll.coordinator.rpc.tls import pinned_channel
from atoll.coordinator.run.admission import Admission, AdmissionCheck
from atoll.dht import clock
from atoll.dht.bindings import DHTID, P2P
from atoll.dht.identity import Identity
from atoll.dht.node import Node
from atoll.dht.p2pd import P2pd, P2pdOptions
from atoll.dht.roster import roster_key, sign_record
from support.records import record_of

RUN = b"r" * 32
KEY = Ed25519PrivateKey.generate()
CHECK = AdmissionCheck(KEY.public_key().public_bytes_raw(), RUN)
ROSTER_ID = DHTID.generate(source=roster_key(RUN.hex()))


def admission(peer_id, lasts_s=3600):
    now_s = int(time.time())
    return Admission(
        peer_id=peer_id, role="trainer", run_id=RUN, issued_s=now_s, expires_s=now_s + lasts_s
    ).sign(KEY)


@contextlib.asynccontextmanager
async def members(folder, count=2):
    """Start admitted nodes, each with the first as its bootstrap peer."""
    async with contextlib.AsyncExitStack() as stack:
        nodes = []
        for index in range(count):
            path = folder / f"member-{index}.key"
            node = await Node.start(
                path,
                run_id=RUN.hex(),
                bootstrap=nodes[0].addresses[:1] if nodes else (),
                admission=admission(Identity.load_or_create(path).peer_id),
                check=CHECK,
            )
            stack.push_async_callback(node.close)
            nodes.append(node)
        yield nodes


@contextlib.asynccontextmanager
async def stranger(address):
    """Start a plain node of hivemind's, which has one address and no admission."""
    daemon = await P2pd.start(Identity.ephemeral(), P2pdOptions())
    p2p = await P2P.replicate(daemon.control_maddr)
    try:
        await daemon.dial(address.rpartition("/p2p/")[2], [address], timeout_s=10)
        node = await PlainNode.create(
            p2p=p2p, initial_peers=[address], ensure_bootstrap_success=False, strict=False
        )
        yield node
        node.is_alive = False
    finally:
        await p2p.shutdown()
        await daemon.close()


def record(peer_id, addresses=("/ip4/127.0.0.1/tcp/1",), lasts_s=60.0):
    return record_of(
        peer_id, addresses=tuple(addresses), protocol=6, expires_at=clock.now_s() + lasts_s
    )


def signed(identity, credential=b"", **changes):
    """Return a PeerID, its signed record, and when it expires."""
    plain = record(identity.peer_id, **changes)
    data = sign_record(plain, identity, run_id=RUN.hex(), credential=credential)
    return identity.peer_id, data, plain.expires_at


async def begin_calls(stack, invite, connections, calls):
    """Begin calls of a coordinator without any message; `stack` ends them."""
    begun = []
    for _ in range(connections):
        channel = await pinned_channel(invite.addresses[0], invite.tls_sha256, timeout_s=5)
        stack.push_async_callback(channel.close)
        begin = channel.stream_unary(f"/{SERVICE}/Heartbeat")
        begun += [begin() for _ in range(calls)]
    return begun
