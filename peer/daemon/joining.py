"""Joining a run: the peer in its loop.

This is what the network process does for a trainer (`beside`).
"""

from __future__ import annotations

import math
import threading

from atoll.coordinator.run.notice import Report
from atoll.coordinator.run.phases import OnPhase
from atoll.coordinator.run.spec import RunSpec
from atoll.peer.daemon.log_run import LogRun
from atoll.peer.daemon.loop_thread import LoopThread
from atoll.peer.daemon.membership import FetchTokenizer, Membership
from atoll.peer.daemon.options import PeerOptions
from atoll.peer.daemon.peer import Admit, MakeFirst, Peer, StartRun


def open_peer(
    options: PeerOptions,
    *,
    on_event: Report,
    on_phase: OnPhase = lambda phase, position, left=None: None,
    stopping: threading.Event | None = None,
    admit: Admit | None = None,
    make_first: MakeFirst | None = None,
    timeout_s: float = math.inf,
) -> LoopThread[Peer]:
    """Join and recover; return the peer in its thread once it holds a verified state.

    Args:
        options: what the peer's owner decides.
        on_event: takes what a person may want to read, in several threads.
        on_phase: takes the part of a round that this peer is in, and its position.
        stopping: ends the wait, from another thread or a signal handler.
        admit: returns if the owner wants this run; by default calling this is the owner's yes.
        make_first: builds the run's first state, which is fetched otherwise.
        timeout_s: seconds for which to try.

    Raises:
        StateDirectoryError: the state directory is not usable.
        CoordinatorError: the coordinator refuses this peer.
        PortInUse: the peer cannot listen where it should.
        KeyboardInterrupt: `stopping` was set.
        TimeoutError: joining took longer.
    """
    peer = Peer.open(
        options,
        _kind_of,
        admit=admit or _admit_all,
        make_first=make_first,
        on_event=on_event,
        on_phase=on_phase,
    )
    return LoopThread(peer, stopping, timeout_s=timeout_s)


async def _admit_all(membership: Membership, fetch: FetchTokenizer) -> None:
    pass


def _kind_of(spec: RunSpec) -> StartRun:
    """Load the kind of a run, which takes longer the more there are."""
    if spec.method().reduction == "pairs":
        from atoll.peer.daemon.gossip_run import GossipRun

        return GossipRun.start
    if spec.topology.num_stages > 1:
        from atoll.peer.daemon.pipeline_run import PipelineRun

        return PipelineRun.start
    return LogRun.start
