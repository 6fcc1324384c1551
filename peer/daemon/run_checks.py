"""What `atoll doctor INVITE` finds on the way to a run; each step has a deadline."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path

from atoll.coordinator.report.text import clean
from atoll.coordinator.report.view import apart, is_gone, label
from atoll.coordinator.rpc.client import CoordinatorClient
from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.coordinator.run.addresses import split_address
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.status import CANNOT_REACH, RunStatus
from atoll.dht.identity import Identity
from atoll.peer.daemon.health import (
    Finding,
    Health,
    clock_finding,
    nat_finding,
    note,
    ok,
    own_addresses,
    port_finding,
    problem,
    rate_finding,
    reach_finding,
)
from atoll.peer.daemon.membership import StateDirectory, StateDirectoryInUse
from atoll.peer.daemon.reach import probe
from atoll.peer.paths import PeerPaths

STEP_S = 20.0  # for one step, such as joining or a transfer
MAX_LEAVES = 4  # of the first state; a small, bounded transfer
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
        report(note("reached", "a peer runs on this state directory", "see its own first lines"))
        return
    with closing(directory):
        client = CoordinatorClient(
            invite, Identity.load_or_create(paths.identity), version=version("atoll")
        )
        try:
            async with asyncio.timeout(3 * STEP_S):
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
    report(clock_finding(joined.clock_offset_s))
    async with asyncio.timeout(STEP_S):
        reach, _ = await probe(client, listen, paths.reach)
    if reach.port:
        report(reach_finding(reach.address, reach.port, is_dialed=reach.is_dialed))
        report(nat_finding(own_addresses(), reach.address))
    for finding in pair_findings(status):
        report(finding)
    began_s, received = time.monotonic(), 0
    with suppress(TimeoutError):
        async with asyncio.timeout(STEP_S):
            async for _, leaf in client.fetch_leaves(0, 0, MAX_LEAVES):
                received += len(leaf)
    report(rate_finding("the coordinator", received, time.monotonic() - began_s))


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
