"""What a peer says about itself: to the coordinator, and through it to everyone who watches."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.phases import AT_REST
from atoll.coordinator.run.status import (
    NAMED_PEERS,
    Event,
    PeerState,
    PeerStatus,
    RoundTrace,
)
from atoll.dht.node import Node
from atoll.dht.wirecount import WireCounter
from atoll.optim.log.entry import Elector
from atoll.optim.state.outer_state import OuterState
from atoll.peer.daemon.meter import Meter
from atoll.peer.rounds import trace as rounds_trace
from atoll.peer.rounds.engine import Settled

MAX_KEPT = 128  # events and traces that wait for the coordinator to be back
MAX_TEXT = 1000
MAX_REASON = 200
MAX_LEFT_OUT = 512  # PeerIDs; a trace with more would be refused for its length, again and again


@dataclass(frozen=True, kw_only=True)
class TrainerView:
    """What the trainer tells the link about itself."""

    ready_in_s: float = 0.0
    step_s: float = 0.0
    step: int = 0
    inner_steps: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    loss: float | None = None
    valid_loss: float | None = None
    utilisation: float = 1.0
    device: str = ""


@dataclass(frozen=True, kw_only=True)
class LinkRates:
    """A peer's internet link as its owner declared it; 0 where it is not known."""

    uplink_mbit_s: float = 0.0
    downlink_mbit_s: float = 0.0


class Standing(Protocol):
    """Where a peer stands: a replica of the log, or what takes its place by gossip."""

    snapshot_every: int
    epoch: int
    chain: bytes

    @property
    def ready(self) -> bool:
        """Whether there is a state."""
        ...

    @property
    def opened(self) -> object | None:
        """What says that the run has begun; None while nothing does."""
        ...

    @property
    def electorate(self) -> Sequence[Elector]:
        """Nobody while this peer has to recover."""
        ...

    @property
    def state(self) -> OuterState:
        """The present one."""
        ...

    @property
    def position(self) -> int:
        """How far this peer is."""
        ...


class Going(Protocol):
    """How rounds go."""

    @property
    def phase(self) -> str:
        """Part of the round that this peer is in."""
        ...

    @property
    def last(self) -> rounds_trace.RoundTrace | None:
        """Of the last round."""
        ...


class HasRounds(Protocol):
    """Who holds rounds."""

    def statistics(self) -> Going:
        """How they go."""
        ...


class Reporter:
    """Gathers status, events and traces; sends nothing itself."""

    def __init__(
        self,
        *,
        me: Elector,
        name: str,
        rates: LinkRates,
        node: Node,
        replica: Standing,
        rounds: HasRounds,
        last_round: int,
        view: Callable[[], TrainerView],
        trains: Callable[[], bool],
        encode_s: Callable[[], float],
        compute: Callable[..., Awaitable[Any]],
        partner: Callable[[], str] = str,
    ) -> None:
        """``last_round`` is the position at which the run ends, 0 if it does not.

        ``trains`` tells whether the trainer has started: before that no run begins with this peer;
        ``partner`` whom this peer meets by gossip.
        """
        self._partner = partner
        self._me = me
        self._name = name
        self._up = Meter(rates.uplink_mbit_s)
        self._down = Meter(rates.downlink_mbit_s)
        self._node = node
        self._replica = replica
        self._rounds = rounds
        self._last_round = last_round
        self._view = view
        self._trains = trains
        self._encode_s = encode_s
        self._compute = compute
        self._grpc_wire = WireCounter([os.getpid()])
        self._wire_before = (0, 0)
        self._digest: tuple[int, bytes] = (0, b"")
        self.events: deque[Event] = deque(maxlen=MAX_KEPT)
        self.traces: deque[RoundTrace] = deque(maxlen=MAX_KEPT)
        self.recoveries = 0
        self.leaving = False

    def note(self, level: Level, text: str, at_s: float) -> None:
        """Keep an event for the coordinator."""
        self.events.append(Event(at=max(0.0, at_s), level=level, text=text[:MAX_TEXT]))

    def trace(self, settled: Settled) -> None:
        """Keep this peer's account of a round."""
        if settled.trace is None:
            return
        entry = settled.applied.entry
        mine = next((m for m in entry.members if m.elector == self._me), None)
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
        trace: rounds_trace.RoundTrace,
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
        self.traces.append(
            RoundTrace(
                epoch=epoch,
                position=position,
                included=included,
                loss=loss,
                tokens=tokens,
                seconds=self._phases(trace),
                wire_bytes_sent=sent - before[0],
                wire_bytes_received=received - before[1],
                rejected=trace.rejected,
                left_out=sorted(trace.left_out)[:MAX_LEFT_OUT],
                reasons=reasons(trace.left_out),
            )
        )

    def wire_bytes(self) -> tuple[int, int]:
        """Bytes on the wire so far, sent and received: libp2p's daemon and gRPC together."""
        statistics = self._node.transport.statistics()
        grpc = self._grpc_wire.totals()
        sent = statistics.wire_bytes_sent + (grpc.sent if grpc else 0)
        received = statistics.wire_bytes_received + (grpc.received if grpc else 0)
        return sent, received

    async def status(self) -> PeerStatus:
        """How this peer is."""
        view, replica, stats = self._view(), self._replica, self._rounds.statistics()
        sent, received = self.wire_bytes()
        now_s = time.monotonic()
        up, down = self._up.read(sent, now_s), self._down.read(received, now_s)
        position, root = await self._state_digest()
        return PeerStatus(
            peer_id=self._me.peer_id,
            name=self._name,
            incarnation=self._me.incarnation,
            state=self._state(),
            phase=stats.phase,
            epoch=replica.epoch,
            position=replica.position,
            chain=replica.chain.hex(),
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
            phases=self._phases(stats.last) if stats.last else {},
            recoveries=self.recoveries,
            partner=self._partner(),
            device=view.device,
            version=version("atoll"),
        )

    def _state(self) -> PeerState:
        if self.leaving:
            return "leaving"
        if not self._replica.ready:
            return "joining"
        if self._replica.opened is None:
            return "ready" if self._trains() else "joining"
        if not self._replica.electorate:
            return "recovering"
        return "training" if self._rounds.statistics().phase in AT_REST else "syncing"

    async def _state_digest(self) -> tuple[int, bytes]:
        """The root of the newest snapshot, or of the last state of the run."""
        replica = self._replica
        if not replica.ready:
            return self._digest
        state = replica.state
        if state.position % replica.snapshot_every and state.position != self._last_round:
            return self._digest
        if self._digest[0] != state.position or not self._digest[1]:
            self._digest = (state.position, await self._compute(state.root))
        return self._digest

    def _phases(self, trace: rounds_trace.RoundTrace) -> dict[str, float]:
        return {
            "wait": trace.wait_s,
            "encode": self._encode_s(),
            "send": trace.send_s,
            "reduce": trace.reduce_s,
            "vote": trace.vote_s,
            "apply": trace.apply_s,
        }


def reasons(left_out: Mapping[str, str]) -> dict[str, str]:
    """As many and as long as a trace may hold."""
    shown = sorted(left_out.items())[:NAMED_PEERS]
    return {peer: why[:MAX_REASON] for peer, why in shown}


def _amount(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0
