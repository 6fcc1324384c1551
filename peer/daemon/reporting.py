"""What a peer reports about itself: to the coordinator, and through it to everyone who watches."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Protocol

from atoll.coordinator.run.phases import AT_REST, RoundPhase
from atoll.coordinator.run.status import NAMED_PEERS, PeerState, PeerStatus, RoundReport
from atoll.dht.wirecount import WireCounter
from atoll.optim.log.entry import Elector
from atoll.optim.state.outer_state import OuterState
from atoll.peer.daemon.environment import Environment
from atoll.peer.daemon.meter import Meter
from atoll.peer.daemon.progress import TrainerProgress
from atoll.peer.rounds.engine import Settled
from atoll.peer.rounds.trace import RoundTrace

MAX_REASON = 200
MAX_LEFT_OUT = 512  # PeerIDs; a trace with more would be refused for its length, again and again


class Standing(Protocol):
    """Where a peer stands: its replica of the log, or its own run by gossip."""

    @property
    def snapshot_every(self) -> int:
        """Positions between two snapshots."""
        ...

    @property
    def epoch(self) -> int:
        """The epoch that this peer is in; 0 by gossip."""
        ...

    @property
    def chain(self) -> bytes:
        """The hash of the log up to here; empty by gossip."""
        ...

    @property
    def ready(self) -> bool:
        """Return whether there is a state."""
        ...

    @property
    def opened(self) -> object | None:
        """The record that opened the run; None before the run has begun."""
        ...

    @property
    def electorate(self) -> Sequence[Elector]:
        """The electors of the position; empty while this peer must recover."""
        ...

    @property
    def state(self) -> OuterState:
        """The present state."""
        ...

    @property
    def position(self) -> int:
        """Entries applied; by gossip, the round."""
        ...


@dataclass(frozen=True, kw_only=True)
class RoundsView:
    """How rounds go, by log or by gossip."""

    phase: RoundPhase
    """part of the round that this peer is in"""
    last: RoundTrace | None
    encode_s: float
    """what encoding the last contribution took"""
    partner: str = ""
    """PeerID of the peer that this one meets or met last, by gossip"""


class Reporter:
    """Gathers status and accounts of rounds; sends nothing itself."""

    def __init__(
        self,
        env: Environment,
        standing: Standing,
        progress: TrainerProgress,
        rounds: Callable[[], RoundsView],
    ) -> None:
        """Read everything anew at each `status`."""
        self._env = env
        self._standing = standing
        self._progress = progress
        self._rounds = rounds
        rates = env.options.rates
        self._up, self._down = Meter(rates.uplink_mbit_s), Meter(rates.downlink_mbit_s)
        self._grpc_wire = WireCounter([os.getpid()])
        self._wire_before = (0, 0)
        self._digest: tuple[int, bytes] = (0, b"")
        self.recoveries = 0
        self.leaving = False

    def trace(self, settled: Settled) -> None:
        """Keep this peer's account of a round by log."""
        if settled.trace is None:
            return
        entry = settled.applied.entry
        mine = next((m for m in entry.members if m.elector == self._env.me), None)
        self.keep(
            settled.trace,
            epoch=entry.epoch,
            position=entry.position,
            included=settled.included is not None and all(settled.included),
            loss=mine.loss if mine else None,
            tokens=mine.tokens if mine else 0,
        )

    def keep(
        self,
        trace: RoundTrace,
        *,
        epoch: int,
        position: int,
        included: bool,
        loss: float | None,
        tokens: int,
    ) -> None:
        """Keep a round's account, with the bytes since the last one."""
        sent, received = self.wire_bytes()
        before, self._wire_before = self._wire_before, (sent, received)
        self._env.outbox.traces.append(
            RoundReport(
                epoch=epoch,
                position=position,
                included=included,
                loss=loss,
                tokens=tokens,
                seconds=_phases(trace, self._rounds().encode_s),
                wire_bytes_sent=sent - before[0],
                wire_bytes_received=received - before[1],
                rejected=trace.rejected,
                left_out=sorted(trace.left_out)[:MAX_LEFT_OUT],
                reasons=reasons(trace.left_out),
            )
        )

    def wire_bytes(self) -> tuple[int, int]:
        """Return bytes on the wire so far, sent and received: p2pd and gRPC together."""
        statistics = self._env.node.transport.statistics()
        grpc = self._grpc_wire.totals()
        sent = statistics.wire_bytes_sent + (grpc.sent if grpc else 0)
        received = statistics.wire_bytes_received + (grpc.received if grpc else 0)
        return sent, received

    async def status(self) -> PeerStatus:
        """Return how this peer is."""
        view, standing, rounds = self._progress.view(), self._standing, self._rounds()
        sent, received = self.wire_bytes()
        now_s = time.monotonic()
        up, down = self._up.read(sent, now_s), self._down.read(received, now_s)
        position, root = await self._state_digest()
        return PeerStatus(
            peer_id=self._env.me.peer_id,
            name=self._env.options.name,
            incarnation=self._env.me.incarnation,
            state=self._state(),
            phase=rounds.phase,
            epoch=standing.epoch,
            position=standing.position,
            chain=standing.chain.hex(),
            state_digest=root.hex(),
            state_position=position,
            tokens_per_s=_amount(view.tokens_per_s),
            tokens_total=view.tokens,
            loss=view.loss,
            valid_loss=view.valid_loss,
            step=view.step,
            inner_steps=view.inner_steps,
            wire_bytes_sent=sent,
            wire_bytes_received=received,
            uplink_mbit_s=up.capacity_mbit_s,
            downlink_mbit_s=down.capacity_mbit_s,
            uplink_use=up.use,
            downlink_use=down.use,
            utilisation=_amount(view.utilisation),
            phases=_phases(rounds.last, rounds.encode_s) if rounds.last else {},
            recoveries=self.recoveries,
            partner=rounds.partner,
            device=view.device,
            version=version("atoll"),
        )

    def _state(self) -> PeerState:
        if self.leaving:
            return "leaving"
        if not self._standing.ready:
            return "joining"
        if self._standing.opened is None:
            return "ready" if self._progress.started else "joining"
        if not self._standing.electorate:
            return "recovering"
        return "training" if self._rounds().phase in AT_REST else "syncing"

    async def _state_digest(self) -> tuple[int, bytes]:
        """Return the root of the newest snapshot, or of the last state of the run.

        Peers compare them to find a replica that went another way. Each takes seconds for a large
        model, so other positions keep the digest before.
        """
        standing = self._standing
        if not standing.ready:
            return self._digest
        state = standing.state
        is_last = state.position == self._env.spec.run.rounds
        if state.position % standing.snapshot_every and not is_last:
            return self._digest
        if self._digest[0] != state.position or not self._digest[1]:
            self._digest = (state.position, await self._env.compute(state.root))
        return self._digest


def _phases(trace: RoundTrace, encode_s: float) -> dict[str, float]:
    return {
        "wait": trace.wait_s,
        "encode": encode_s,
        "send": trace.send_s,
        "reduce": trace.reduce_s,
        "vote": trace.vote_s,
        "apply": trace.apply_s,
    }


def reasons(left_out: Mapping[str, str]) -> dict[str, str]:
    """Return as many reasons as a trace may hold, each no longer than it may be."""
    shown = sorted(left_out.items())[:NAMED_PEERS]
    return {peer: why[:MAX_REASON] for peer, why in shown}


def _amount(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0
