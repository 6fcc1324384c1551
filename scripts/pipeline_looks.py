#!/usr/bin/env python3
"""Print what the coordinator knows of a pipeline's peers, once a second, for `bench_pipeline.py`.

    pipeline_looks.py INVITE

One line of JSON a look. `at` is the coordinator's time, and `heard_at` that of a peer's own report.
"""

import asyncio
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.coordinator.run.status import PeerStatus, RunStatus
from atoll.peer.cli.watching import asking, read_invite

LOOK_S = 1.0  # peers report as often
FIELDS = ("name", "incarnation", "module", "state", "phase", "position", "chain", "tokens_total")


def look(status: RunStatus) -> Mapping[str, Any]:
    """Return what the bench needs of a status."""
    return {"at": status.now, "peers": [of_peer(each, status.now) for each in status.peers]}


def of_peer(peer: PeerStatus, now_s: float) -> Mapping[str, Any]:
    """Return what the bench needs of a peer; `flow` is None before it trains."""
    told = {name: getattr(peer, name) for name in FIELDS}
    flow = None if peer.flow is None else asdict(peer.flow)
    return told | {"heard_at": now_s - peer.last_seen_s, "flow": flow}


async def watch(invite: str) -> None:
    """Print looks until this process is ended."""
    async with asking(read_invite(invite)) as client:
        while True:
            with suppress(CoordinatorError):
                print(json.dumps(look(await client.status())), flush=True)
            await asyncio.sleep(LOOK_S)


if __name__ == "__main__":
    asyncio.run(watch(sys.argv[1]))
