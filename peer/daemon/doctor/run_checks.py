"""The checks of `atoll doctor INVITE` on the way to a run; each step has a deadline."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from atoll.coordinator.report.view import apart, is_gone, label, names
from atoll.coordinator.rpc.client import CoordinatorClient, Joined
from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.coordinator.run.addresses import split_address
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.notice import CANNOT_REACH
from atoll.coordinator.run.status import RunStatus
from atoll.coordinator.run.text import clean, size
from atoll.dht.addresses import peer_of, relay_of
from atoll.dht.identity import Identity, short
from atoll.dht.measuring import PathRates, measure
from atoll.dht.node import Node
from atoll.dht.roster import RosterError
from atoll.dht.transport import TransportError
from atoll.dht.upnp import Forwarding
from atoll.optim.log.module import WHOLE
from atoll.peer.daemon.consent import NoRoom, expect_room, needs_of, round_bytes
from atoll.peer.daemon.doctor.health import (
    Finding,
    Health,
    clock_finding,
    link_finding,
    nat_finding,
    note,
    ok,
    own_addresses,
    port_finding,
    problem,
    rate_finding,
    reach_finding,
    upnp_finding,
)
from atoll.peer.daemon.membership import StateDirectory
from atoll.peer.daemon.reach.reachability import probe
from atoll.peer.daemon.state_directory import StateDirectoryInUse
from atoll.peer.paths import PeerPaths
from atoll.peer.training.devices import gpu_memory
from atoll.peer.training.resources import Resources

STEP_S = 20.0  # for one step, such as joining or a transfer
CHECK_S = 120.0  # all steps that need the coordinator
MAX_LEAVES = 4  # of the first state; a small, bounded transfer
PEERS = 2  # measured, besides the coordinator
CONNECT_S = 7.0  # libp2p does not dial again for 5 s after a failure
MAX_PAIRS = 4  # named; more pairs say the same
_DHT = re.compile(r"/(?:ip[46]|dns[46]?)/(?P<host>[^/]+)/tcp/(?P<port>\d+)/p2p/(?P<peer>[^/]+)")

Report = Callable[[Finding], None]


async def check_run(invite: Invite, state_dir: Path, listen: Sequence[str], report: Report) -> None:
    """Report what is found on the way to a run; raise nothing because there is no network.

    Args:
        invite: as `atoll coordinator` prints it.
        state_dir: the peer's; its identity joins, so an invite for one use is not used up.
        listen: multiaddrs that the peer would listen on.
        report: takes each finding as it comes.

    Raises:
        StateDirectoryError: the state directory is not usable.
    """
    places = [split_address(address) for address in invite.addresses]
    coordinator = await port_finding("coordinator", places)
    report(coordinator)
    report(await port_finding("dht", coordinator_dht(invite.bootstrap)))
    if coordinator.health is Health.PROBLEM:
        return
    paths = PeerPaths(root=state_dir)
    try:
        directory = StateDirectory(paths, invite.run_id)
    except StateDirectoryInUse:
        report(note("reached", "a peer runs on this state directory", "read its first lines"))
        return
    with closing(directory):
        client = CoordinatorClient(
            invite, Identity.load_or_create(paths.identity), version=version("atoll")
        )
        try:
            async with asyncio.timeout(CHECK_S):
                await _ask(client, paths, listen, report)
        except CoordinatorError as error:
            report(problem("run", clean(str(error)), "ask the organiser for a current invite"))
        except (TimeoutError, OSError) as error:
            fact = f"the coordinator stopped answering: {clean(str(error)) or 'no reply in time'}"
            report(problem("run", fact, "try again; the link may lose packets"))
        finally:
            with suppress(Exception):
                await client.close()


async def _ask(
    client: CoordinatorClient, paths: PeerPaths, listen: Sequence[str], report: Report
) -> None:
    async with asyncio.timeout(STEP_S):
        joined = await client.join()
        status = await client.status()
    report(run_finding(status))
    if joined.role != "keeper":
        needs = needs_of(joined.spec, joined.layout)
        report(room_finding(needs, paths.root, module=joined.module))
    report(clock_finding(joined.clock_offset_s))
    async with asyncio.timeout(STEP_S):
        forwarding = Forwarding()
        try:
            reach, listen = await probe(client, listen, paths.reach, forwarding)
        finally:
            await forwarding.close()
    if reach.port:
        report(reach_finding(reach.address, reach.port, is_dialed=reach.is_dialed))
    if reach.by_upnp or forwarding.refusal:
        report(upnp_finding(is_used=reach.by_upnp, refusal=forwarding.refusal))
    for finding in pair_findings(status):
        report(finding)
    links = await measured_links(client, joined, paths, listen, status)
    seen = [link.measured.seen_at for link in links if link.measured is not None]
    report(nat_finding(own_addresses(), reach.address, list(filter(None, seen))))
    traffic = round_bytes(joined.spec, joined.layout)
    for link in links:
        report(link.finding(traffic))
    if not any(link.measured for link in links):
        await _time_transfer(client, report)


def room_finding(needs: Resources, folder: Path, *, module: str = WHOLE) -> Finding:
    """Judge whether the run, or its stage of that name, fits into this machine."""
    try:
        expect_room(needs, folder, module=module, gpu_bytes=gpu_memory("auto"))
    except NoRoom as error:
        fact, _, remedy = str(error).partition("; ")
        return problem("room", fact, remedy)
    disk, memory = needs.peer_disk + needs.peer_disk_free, needs.host_memory(on_gpu=False)
    moved = memory - needs.host_memory(on_gpu=False, state_on_disk=True)
    return ok(
        "room",
        f"{module or 'the run'} needs {size(memory)} of memory, of which --outer-state "
        f"disk moves {size(moved)} to files, and {size(disk)} of disk",
    )


async def _time_transfer(client: CoordinatorClient, report: Report) -> None:
    """Time a small transfer over the coordinator's own port, if its node cannot be measured."""
    began_s, received = time.monotonic(), 0
    with suppress(TimeoutError):
        async with asyncio.timeout(STEP_S):
            async for _, leaf in client.fetch_leaves(0, 0, MAX_LEAVES):
                received += len(leaf)
    report(rate_finding("the coordinator", received, time.monotonic() - began_s))


@dataclass(frozen=True, kw_only=True)
class CheckedLink:
    """A node of the run, and what was measured to it; else why nothing was."""

    what: str
    measured: PathRates | None = None
    error: str = ""

    def finding(self, traffic: int) -> Finding:
        """Judge the link by the bytes of a round."""
        if self.measured is None:
            return note(
                "rate",
                f"not measured, {self.what}: {self.error}",
                "nothing to do if other lines of 'rate' have numbers; otherwise try again later",
            )
        up, down = self.measured.up_mbit_s, self.measured.down_mbit_s
        return link_finding(self.what, up, down, traffic)


async def measured_links(
    client: CoordinatorClient,
    joined: Joined,
    paths: PeerPaths,
    listen: Sequence[str],
    status: RunStatus,
) -> list[CheckedLink]:
    """Measure the coordinator's node and two peers, one after the other, from the peer's own port.

    Nothing is published: no peer learns of this node but by its calls.
    """
    invite, bootstrap = client.invite, joined.bootstrap
    try:
        node = await Node.start(
            paths.identity,
            run_id=invite.run_id.hex(),
            listen_maddrs=listen,
            bootstrap=bootstrap,
            admission=joined.admission,
            check=client.admissions,
            clock_offset_s=client.clock_offset_s,
        )
    except (TransportError, TimeoutError, OSError) as error:
        return [CheckedLink(what="this machine", error=f"p2pd does not start: {clean(str(error))}")]
    try:
        called = {peer_of(address): "the coordinator" for address in bootstrap[:1]}
        called = names(status) | called
        return [
            await _link(node, peer, addresses, called.get(peer, short(peer)))
            for peer, addresses in await _to_measure(node, bootstrap)
        ]
    finally:
        await node.close()


async def _link(node: Node, peer: str, addresses: Sequence[str], name: str) -> CheckedLink:
    what = f"{name} through a relay" if any(map(relay_of, addresses)) else name
    try:
        async with asyncio.timeout(STEP_S):
            await node.transport.connect(peer, addresses, timeout_s=CONNECT_S)
            return CheckedLink(what=what, measured=await measure(node.transport, peer))
    except (TransportError, TimeoutError, OSError, ValueError) as error:
        return CheckedLink(what=what, error=clean(str(error)) or "no answer in time")


async def _to_measure(node: Node, bootstrap: Sequence[str]) -> list[tuple[str, Sequence[str]]]:
    """Return the coordinator's node and `PEERS` trainers, those first that everybody can dial."""
    found: list[tuple[str, Sequence[str]]] = []
    if bootstrap:
        first = peer_of(bootstrap[0])
        found.append((first, [each for each in bootstrap if peer_of(each) == first]))
    with suppress(RosterError, TransportError, TimeoutError, OSError):
        async with asyncio.timeout(STEP_S):
            records = await node.roster.peers()
            others = [r for r in records.values() if r.peer_id != node.peer_id]
            others.sort(key=lambda r: (r.role != "trainer", not r.is_dialed, r.peer_id))
            found += [(r.peer_id, r.addresses) for r in others[:PEERS]]
    return found


def coordinator_dht(bootstrap: Sequence[str]) -> list[tuple[str, int]]:
    """Return host and port of the run's first DHT node, the coordinator's, at each address."""
    found = [match for match in map(_DHT.match, bootstrap) if match is not None]
    first = found[0]["peer"] if found else ""
    return [(m["host"], int(m["port"])) for m in found if m["peer"] == first]


def run_finding(status: RunStatus) -> Finding:
    """Return what the run is and who is in it."""
    here = [peer for peer in status.peers if not is_gone(peer) and peer.role == "trainer"]
    goal = f" of {status.rounds_total}" if status.rounds_total else ""
    return ok(
        "run",
        f"{clean(status.run_name)}: {status.state}, round {status.position}{goal}, {len(here)} "
        f"trainer{'' if len(here) == 1 else 's'} online (starts with {status.min_peers})",
    )


def pair_findings(status: RunStatus) -> list[Finding]:
    """Return the pairs of peers that cannot reach each other, and how many are behind routers."""
    found = [
        note("peers", f"{label(one)} and {label(other)} cannot reach each other", REMEDY)
        for one, other in apart(status)[:MAX_PAIRS]
    ]
    here = [peer for peer in status.peers if not is_gone(peer)]
    hidden = [peer for peer in here if peer.reach not in ("", "direct")]
    if found or not here:
        return found
    routed = f", {len(hidden)} of them behind routers" if hidden else ""
    return [ok("peers", f"{len(here)} in the run reach each other{routed}")]


REMEDY = CANNOT_REACH.partition("; ")[2]
