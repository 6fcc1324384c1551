"""Taking part in a run by gossip: a state of one's own, meetings, and what people are told.

There is no log, so nothing has to be replayed: a joiner takes the state of a neighbour, or, where
nobody is there, its own saved one, or the coordinator's newest.  What a process begins with after
the first round has no mass.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from atoll.coordinator.rpc.client import Beat, Joined
from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.coordinator.run.phases import RoundPhase
from atoll.dht.roster import PeerRecord, RosterError
from atoll.dht.transport import TransportError
from atoll.optim.log.entry import Elector, LogError
from atoll.optim.log.store import Head
from atoll.optim.methods.paired import PairedMethod
from atoll.optim.state.outer_state import Assembly, OuterState, StateError
from atoll.peer.daemon.contact import Heartbeats
from atoll.peer.daemon.reporting import Reporter, TrainerView
from atoll.peer.gossip.context import GossipContext
from atoll.peer.gossip.engine import Gossip, GossipSettled
from atoll.peer.gossip.messages import Standing
from atoll.peer.gossip.place import GossipStatistics
from atoll.peer.gossip.reducer import GossipReducer
from atoll.peer.gossip.snapshots import fetch_state
from atoll.peer.rounds.context import RoundSettings, short

if TYPE_CHECKING:
    from atoll.peer.daemon.session import Session

PATIENCE_STALLS = 40  # a meeting that breaks and leaves a doubt takes about thirty
SETTLE_PAUSE_S = 1.0
LOOKS = 3  # into the roster before a peer believes that it is alone
MAX_LOOKS = 20  # where somebody is there who cannot be reached
FETCH_ERRORS = (TransportError, CoordinatorError, LogError, StateError)


class GossipContact(Heartbeats):
    """Heartbeats alone: the coordinator fetches what it keeps."""

    def __init__(self, participation: GossipParticipation, session: Session) -> None:
        """Tell ``participation`` when the run begins."""
        super().__init__(
            client=session.client,
            node=session.node,
            reporter=participation.reporter,
            on_joined=session.remember,
            say=session.say,
        )
        self._participation = participation
        self.kept_round = 0
        """of the model that the coordinator has"""

    def note_head(self, head: Head) -> None:
        """What the coordinator has."""
        self.kept_round = head.position

    async def _heed(self, beat: Beat) -> None:
        await super()._heed(beat)
        if beat.epoch:
            self._participation.begin()


class _Place:
    """Where a peer by gossip stands, as ``Reporter`` asks."""

    epoch = 0
    chain = b""

    def __init__(self, participation: GossipParticipation, snapshot_every: int) -> None:
        self._participation = participation
        self.snapshot_every = snapshot_every

    @property
    def ready(self) -> bool:
        return self._participation.state is not None

    @property
    def opened(self) -> object | None:
        return self._participation.begun or None

    @property
    def electorate(self) -> Sequence[Elector]:
        return (self._participation.ctx.me,)

    @property
    def state(self) -> OuterState:
        state = self._participation.state
        if state is None:
            raise RuntimeError("expected a state, got a peer that has none yet")
        return state

    @property
    def position(self) -> int:
        return self._participation.position


class GossipParticipation:
    """See ``atoll.peer.daemon.session.Participation``."""

    epoch = 0

    def __init__(self, session: Session, joined: Joined | None) -> None:
        """Build what needs no state; ``settle`` gives it one."""
        self._session = session
        spec, method = session.spec, session.spec.method()
        assert isinstance(method, PairedMethod)
        self.ctx = GossipContext(
            me=session.me,
            run_id=session.options.invite.run_id,
            transport=session.node.transport,
            roster=session.roster,
            method=method,
            layout=session.membership.layout,
            settings=RoundSettings(stall_s=spec.round.stall_s, grace_s=spec.round.grace_s),
            compute=session.compute,
            on_event=session.say,
            last_round=spec.run.rounds,
            ready_in_s=session.ready_in_s,
        )
        self._gossip: Gossip | None = None
        self.begun = joined is None or bool(joined.epoch)
        self.reporter = Reporter(
            me=session.me,
            name=session.options.name,
            rates=session.options.rates,
            node=session.node,
            replica=_Place(self, spec.round.snapshot_every),
            rounds=self,
            last_round=spec.run.rounds,
            view=session.trainer,
            trains=lambda: self.progress() is not None,
            encode_s=lambda: self.statistics().encode_s,
            compute=session.compute,
            partner=lambda: self.statistics().partner,
        )
        self.contact = GossipContact(self, session)
        self.contact.in_touch = joined is not None
        if joined is not None:
            self.contact.note_head(joined.head)
        self.reducer: GossipReducer

    @property
    def state(self) -> OuterState | None:
        """This peer's own; None before it has one."""
        return self._gossip.state if self._gossip is not None else None

    @property
    def position(self) -> int:
        """The round."""
        return self._gossip.position if self._gossip is not None else 0

    def progress(self) -> TrainerView | None:
        """Of the trainer."""
        return self.reducer.progress() if self._gossip is not None else None

    def statistics(self) -> GossipStatistics:
        """How the rounds go."""
        if self._gossip is not None:
            return self._gossip.statistics()
        return GossipStatistics(phase=RoundPhase.IDLE, last=None, partner="", mass=0.0)

    def begin(self) -> None:
        """The coordinator says that the run has begun."""
        self.begun = True
        if self._gossip is not None and not self._gossip.begun:
            self._gossip.begin()

    # the first state

    async def settle(self, joined: Joined | None) -> None:
        """Take a neighbour's state, or the run's first, or the coordinator's newest."""
        while True:
            with suppress(RosterError, TransportError, TimeoutError, OSError):
                await self._session.publish_record()
            state = await self._from_neighbours()
            if state is None:
                state = await self._from_coordinator(joined)
            if state is not None:
                self._stand_at(state)
                return
            await asyncio.sleep(SETTLE_PAUSE_S)
            joined = joined or await self._session.join_late()

    async def _from_neighbours(self) -> OuterState | None:
        """The state of the furthest neighbour; None where the run has not begun or is empty."""
        for look in range(MAX_LOOKS):
            await self._session.connect_all()
            for peer in await self._furthest_first():
                with suppress(*FETCH_ERRORS):
                    return await self._fetch(peer)
            some = any(record.position for record in self.ctx.seen.values())
            if not self.begun or (look >= LOOKS and not some):
                break
            await asyncio.sleep(SETTLE_PAUSE_S)
        return None

    async def _furthest_first(self) -> list[str]:
        """Neighbours that are beyond the first state."""
        peers = sorted(await self.ctx.trainers())
        rounds = await asyncio.gather(*(self._round_of(peer) for peer in peers))
        ahead = [(at, peer) for at, peer in zip(rounds, peers, strict=True) if at]
        return [peer for _, peer in sorted(ahead, reverse=True)]

    async def _round_of(self, peer: str) -> int:
        timeout_s = 2 * self.ctx.settings.stall_s
        with suppress(TransportError, LogError):
            reply = await self.ctx.transport.call(peer, "gossip-head", b"", timeout_s=timeout_s)
            return Standing.decode(reply).round
        return 0

    async def _fetch(self, peer: str) -> OuterState:
        ctx, began_s = self.ctx, time.monotonic()
        state = await fetch_state(
            ctx.transport,
            peer,
            ctx.layout,
            ctx.method.memory_numel(ctx.layout),
            patience_s=4 * ctx.settings.stall_s,
        )
        self.reporter.recoveries += 1
        self._session.say(
            "info",
            f"recovered the state of round {state.position} from {short(peer)} "
            f"in {time.monotonic() - began_s:.1f} s",
        )
        return state

    async def _from_coordinator(self, joined: Joined | None) -> OuterState | None:
        """The newest state that the coordinator has: the first, or the model of one peer."""
        if joined is None:
            return None
        memory_numel = self.ctx.method.memory_numel(self.ctx.layout)
        client = self._session.client
        try:
            info = await client.fetch_snapshot()
            if not info.position:
                return await self._session.first_state(memory_numel)
            assembly = Assembly(
                layout=self.ctx.layout,
                position=info.position,
                leaf_digests=info.leaf_digests,
                root=info.root,
                memory_numel=memory_numel,
            )
            async for index, leaf in client.fetch_leaves(info.position):
                await self._session.compute(assembly.add, index, leaf)
            state: OuterState = await self._session.compute(assembly.finish)
        except (CoordinatorError, StateError) as error:
            self._session.say("warning", f"no state from the coordinator yet: {error}")
            return None
        self.reporter.recoveries += 1
        text = f"recovered the state of round {state.position} from the coordinator"
        self._session.say("info", text)
        return state

    def _stand_at(self, state: OuterState) -> None:
        spec, settings = self._session.spec, self.ctx.settings
        self._gossip = Gossip(
            self.ctx,
            state,
            mass=0.0 if self.begun else 1.0,
            on_settled=self._on_settled,
            on_phase=self._session.on_phase,
            uplink_mbit_s=self._session.options.rates.uplink_mbit_s,
        )
        self.reducer = GossipReducer(
            loop=asyncio.get_running_loop(),
            ctx=self.ctx,
            gossip=self._gossip,
            spec=spec,
            is_borrowed=state.position > 0,
            patience_s=PATIENCE_STALLS * settings.stall_s + 4 * settings.grace_s,
            close=self._session.on_close,
        )
        if self.begun:
            self._gossip.begin()

    def _on_settled(self, settled: GossipSettled) -> None:
        self.reducer.deliver(settled)
        self.reporter.keep(
            settled.trace,
            epoch=0,
            position=settled.trace.position,
            included=settled.included,
            loss=settled.loss,
            tokens=settled.tokens if settled.included else 0,
        )

    # what goes on

    def serve(self) -> None:
        """Answer neighbours."""
        self._expect_gossip().serve()

    async def run(self) -> None:
        """Meet others."""
        await self._expect_gossip().run()

    def _expect_gossip(self) -> Gossip:
        if self._gossip is None:
            raise RuntimeError("expected settle() first")
        return self._gossip

    async def roster_peers(self) -> dict[str, PeerRecord]:
        """See ``GossipContext.roster_peers``."""
        return await self.ctx.roster_peers()

    def look(self) -> None:
        """Nothing waits for anybody."""

    def stored_all(self) -> bool:
        """Whether the coordinator has a model of the last round."""
        return self.contact.kept_round >= self.position

    async def hand_over(self) -> None:
        """The coordinator fetches what it keeps."""

    async def leave(self) -> None:
        """Meet nobody any more."""
        await self._expect_gossip().close()

    def close(self) -> None:
        """Nothing lies on disk but the trainer's state."""
