"""Where a coordinator is that does not answer, asked of nodes of the run before joining it.

An invite may be older than the coordinator's last move, and a peer may have been away for longer
than its admission lasts. Both know multiaddrs of nodes, from the invite or from the last time, and
nodes show the signed relocation to whoever knows the run (`atoll.dht.notices`). Nothing else is
asked, and nothing is believed but the signature of the run's key.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from atoll.coordinator.run.relocation import RelocationInvalid, Whereabouts
from atoll.dht.addresses import peer_of
from atoll.dht.identity import Identity
from atoll.dht.notices import read_notice
from atoll.dht.p2pd import P2pd, P2pdError, P2pdOptions
from atoll.dht.tasks import end
from atoll.dht.transport import TransportError

logger = logging.getLogger(__name__)

LOOK_UP_S = 8.0  # for all nodes together: one that is dead takes its dial's whole time
MAX_ASKED = 32  # an invite's sixteen, and as many that were kept


async def look_up(whereabouts: Whereabouts, addresses: Sequence[str], run_id: str) -> bool:
    """Ask nodes for a record that is newer than the known one; return whether one came.

    The peer's own identity is not shown: it is in use elsewhere, or will be in a moment.

    Args:
        whereabouts: takes the first record that is valid and newer.
        addresses: multiaddrs with PeerIDs, dialed at once.
        run_id: in hex.
    """
    asked = list(dict.fromkeys(addresses))[:MAX_ASKED]
    if not asked:
        return False
    try:
        daemon = await P2pd.start(Identity.ephemeral(), P2pdOptions())
    except P2pdError as error:
        logger.info("cannot ask nodes where the coordinator is: %s", error)
        return False
    tasks = [asyncio.create_task(_ask(daemon, address, run_id)) for address in asked]
    try:
        async with asyncio.timeout(LOOK_UP_S):
            for each in asyncio.as_completed(tasks):
                if _is_news(whereabouts, await each):
                    return True
    except TimeoutError:
        pass
    finally:
        await end(*tasks)
        await daemon.close()
    return False


async def _ask(daemon: P2pd, address: str, run_id: str) -> bytes:
    """Return what the node at an address shows; nothing if it does not."""
    try:
        peer = peer_of(address)
        await daemon.dial(peer, [address], timeout_s=LOOK_UP_S)
        return await read_notice(daemon, peer, run_id, timeout_s=LOOK_UP_S)
    except (TransportError, TimeoutError, OSError, ValueError) as error:
        logger.info("%s does not say where the coordinator is: %s", address, error)
        return b""


def _is_news(whereabouts: Whereabouts, record: bytes) -> bool:
    try:
        return bool(record) and whereabouts.take(record)
    except RelocationInvalid as error:
        logger.info("a node shows no relocation of this run: %s", error)
        return False
