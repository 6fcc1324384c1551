"""Taking part in a run by gossip: a state of this peer's own, meetings, and the reducer over them.

There is no log, so nothing has to be replayed. A joiner takes the state of a neighbour; if nobody
is there, the coordinator's newest, and the trainer then loads its own saved one. A state that a
process begins with after the first round has no mass: it may be counted elsewhere already.

The trainer submits and waits; its windows come back settled through one queue, in order, and the
trainer's thread takes them. A window that is in doubt stays on offer: past its deadline training
continues, and the window grows until it is settled.
"""

from __future__ import annotations

import asyncio
import math
import queue
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atoll.coordinator.rpc.client import Beat, Joined
from atoll.coordinator.rpc.client_errors import CoordinatorError, CoordinatorUnreachable, Evicted
from atoll.dht.roster import PeerRecord
from atoll.dht.tasks import together
from atoll.dht.transport import TransportError
from atoll.optim.log.entry import Elector, LogError
from atoll.optim.log.store import StoreHead
from atoll.optim.methods.noloco import PairedMethod
from atoll.optim.reducer import Commit, Contribution, Settle
from atoll.optim.reduction.contribution import work_weight
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState, StateError
from atoll.peer import notices
from atoll.peer.daemon.loop_thread import LoopThread
from atoll.peer.daemon.peer import Environment, Peer
from atoll.peer.daemon.reach.company import Company
from atoll.peer.daemon.reducer import (
    STOP_POLL_S,
    RunReducer,
    TrainerProgress,
    expect_layout,
)
from atoll.peer.daemon.reporting import Heartbeats, Reporter, RoundsView
from atoll.peer.daemon.views import TrainerView
from atoll.peer.gossip.context import GossipContext
from atoll.peer.gossip.engine import Gossip, GossipSettled
from atoll.peer.gossip.meeting import GossipWindow
from atoll.peer.gossip.messages import GossipHead
from atoll.peer.gossip.snapshots import fetch_state
from atoll.peer.rounds.conduct import Conduct
from atoll.peer.rounds.context import RoundSettings

PATIENCE_STALLS = 40  # a meeting that breaks and leaves a doubt takes about thirty
SETTLE_PAUSE_S = 1.0  # between two tries to find a state
LOOKS = 3  # into the roster before a peer believes that it is alone
MAX_LOOKS = 20  # if the roster holds somebody who cannot be reached
FETCH_ERRORS = (TransportError, CoordinatorError, LogError, StateError)


class GossipRun:
    """A peer's part in a run by gossip; a `RunKind`, a `Standing` and a `Listener`."""

    # A `Standing` without a log: no epoch voids anything, no chain grows, and a run exists only
    # once it has a state.
    epoch = 0
    chain = b""
    ready = True

    def __init__(
        self,
        env: Environment,
        ctx: GossipContext,
        progress: TrainerProgress,
        state: OuterState,
        *,
        has_begun: bool,
        joined: Joined | None,
    ) -> None:
        """Stand at a state, without mass if the run has begun; use `start`."""
        self.ctx = ctx
        self.progress = progress
        self.snapshot_every = env.spec.round.snapshot_every
        self._env = env
        self._settled: queue.SimpleQueue[GossipSettled] = queue.SimpleQueue()
        self._is_borrowed = state.position > 0
        self.gossip = Gossip(
            ctx,
            state,
            # A neighbour's state counts at the neighbour, whatever the coordinator says: one that
            # was restored from before the begin knows of none.
            mass=0.0 if has_begun or self._is_borrowed else 1.0,
            on_settled=self._on_settled,
            on_phase=env.on_phase,
            uplink_mbit_s=env.options.rates.uplink_mbit_s,
        )
        self.reporter = Reporter(env, self, progress, self._rounds_view)
        self._evicted: Exception | None = None
        self.heartbeats = Heartbeats(
            env,
            self.reporter,
            self,
            in_touch=joined is not None,
            on_evicted=self._note_evicted,
        )
        self._kept_round = joined.head.position if joined is not None else 0
        """Round of the model that the coordinator has."""
        if has_begun:
            self.gossip.begin()

    @classmethod
    async def start(cls, env: Environment, joined: Joined | None) -> GossipRun:
        """Return a run that has a state and answers the others."""
        spec, method = env.spec, env.spec.method()
        assert isinstance(method, PairedMethod)
        progress = TrainerProgress(spec, method, len(method.fragments(env.layout)))
        ctx = GossipContext(
            me=env.me,
            run_id=env.run_id,
            transport=env.node.transport,
            roster=env.neighbours.roster,
            method=method,
            layout=env.layout,
            settings=RoundSettings(stall_s=spec.round.stall_s, grace_s=spec.round.grace_s),
            compute=env.compute,
            on_event=env.report,
            conduct=Conduct(is_evicted=env.client.admissions.is_out),
            last_round=spec.run.rounds,
            ready_in_s=progress.ready_in_s,
        )
        ctx.link.cap(env.options.rates.most_mbit_s)
        env.client.asking = ctx.link.inflow.asking
        if ctx.link.inflow.is_limited:
            env.client.leaves_a_call = 1
        # Without the coordinator nobody says that the run has begun; a peer that has joined before
        # was in it.
        has_begun = joined is None or bool(joined.epoch)
        search = StateSearch(env, ctx, has_begun=has_begun)
        state, joined = await search.run(joined)
        run = cls(env, ctx, progress, state, has_begun=has_begun, joined=joined)
        run.reporter.recoveries = search.recoveries
        run.gossip.serve()
        return run

    def reducer(self, thread: LoopThread[Peer]) -> GossipReducer:
        """Return the trainer's side."""
        settings = self.ctx.settings
        return GossipReducer(
            thread,
            self.ctx,
            self.gossip,
            self.progress,
            self._settled,
            is_borrowed=self._is_borrowed,
            patience_s=PATIENCE_STALLS * settings.stall_s + 4 * settings.grace_s,
            company=self._env.company,
        )

    async def run(self) -> None:
        """Meet others."""
        await self.gossip.run()

    async def roster_peers(self) -> dict[str, PeerRecord]:
        """Return the peers in the run, as far as they were seen."""
        return await self.ctx.roster_peers()

    def _note_evicted(self, error: Exception) -> None:
        self._evicted = error

    def expect_working(self) -> None:
        """Raise the failure after which this peer takes part in nothing, if there is one."""
        if self._evicted is not None:
            raise self._evicted

    async def publish(self) -> None:
        """Put this peer's record into the roster."""
        await self._env.neighbours.publish(self.epoch, self.position, self.progress.view())

    def look(self) -> None:
        """Report nothing: no round waits for a quorum."""

    def stored_all(self) -> bool:
        """Return whether the coordinator has a model of this round."""
        return self._kept_round >= self.position

    def storing(self) -> bool:
        """Return False: the coordinator fetches the model that it keeps."""
        return False

    async def hand_over(self) -> None:
        """Hand over nothing: the coordinator fetches the model that it keeps."""

    async def leave(self) -> None:
        """End all exchanges, and begin no other."""
        await self.gossip.close()

    # the `Standing` of this peer

    @property
    def position(self) -> int:
        """The round."""
        return self.gossip.position

    @property
    def opened(self) -> object | None:
        """True once the run has begun, else None."""
        return self.gossip.begun or None

    @property
    def electorate(self) -> Sequence[Elector]:
        """Return this peer alone: gossip needs no votes."""
        return (self.ctx.me,)

    @property
    def state(self) -> OuterState:
        """This peer's own."""
        return self.gossip.state

    # the coordinator's answers

    def note_head(self, head: StoreHead) -> None:
        """Take which model the coordinator has."""
        self._kept_round = head.position

    async def heed(self, beat: Beat) -> None:
        """Begin when the coordinator opens the run; wait for nobody once another has ended it."""
        if beat.epoch and not self.gossip.begun:
            self.gossip.begin()
        if beat.finished:  # others have left for good, and the last rounds are this peer's alone
            self._env.company.needs_others = False

    def has_retired(self) -> bool:
        """Return False: there are no votes to give up."""
        return False

    # in the loop

    def _on_settled(self, settled: GossipSettled) -> None:
        self._settled.put(settled)
        self.reporter.trace_meeting(
            settled.trace, met=settled.included, loss=settled.loss, tokens=settled.tokens
        )

    def _rounds_view(self) -> RoundsView:
        stats = self.gossip.statistics()
        return RoundsView(
            phase=stats.phase, last=stats.last, encode_s=stats.encode_s, partner=stats.partner
        )


class StateSearch:
    """Finds the state that a peer begins with."""

    def __init__(self, env: Environment, ctx: GossipContext, *, has_begun: bool) -> None:
        """Look for the first state only, unless the run has begun."""
        self._env = env
        self._ctx = ctx
        self._has_begun = has_begun
        self._memory_numel = ctx.method.memory_numel(ctx.layout)
        self.recoveries = 0
        """States that were fetched, other than the first."""

    async def run(self, joined: Joined | None) -> tuple[OuterState, Joined | None]:
        """Return a neighbour's state, or the coordinator's, and the newest answer to joining."""
        while True:
            await self._env.neighbours.publish(0, 0, TrainerView())
            state = await self._from_neighbours()
            if state is None and joined is not None:
                state = await self._from_coordinator()
            if state is not None:
                return state, joined
            await asyncio.sleep(SETTLE_PAUSE_S)
            if joined is None:
                with suppress(CoordinatorUnreachable):
                    joined = await self._env.join_again()

    async def _from_neighbours(self) -> OuterState | None:
        """Return the furthest neighbour's state; None if the run has not begun or is empty."""
        for look in range(MAX_LOOKS):
            await self._env.neighbours.connect(self._ctx.roster_peers)
            for peer in await self._furthest_first():
                with suppress(*FETCH_ERRORS):
                    return await self._fetch(peer)
            some = any(record.position for record in self._ctx.seen.values())
            if not self._has_begun or (look >= LOOKS and not some):
                break
            await asyncio.sleep(SETTLE_PAUSE_S)
        return None

    async def _furthest_first(self) -> list[str]:
        """Return neighbours that are beyond the first state."""
        ctx, ahead = self._ctx, []

        async def ask(peer: str) -> None:
            timeout_s = 2 * ctx.settings.stall_s
            with suppress(TransportError, LogError):
                reply = await ctx.transport.call(peer, "gossip-head", b"", timeout_s=timeout_s)
                if at := GossipHead.decode(reply).round:
                    ahead.append((at, peer))

        await together(*map(ask, await ctx.trainers()))
        return [peer for _, peer in sorted(ahead, reverse=True)]

    async def _fetch(self, peer: str) -> OuterState:
        ctx, began_s = self._ctx, time.monotonic()
        state = await fetch_state(
            ctx.transport,
            peer,
            ctx.layout,
            self._memory_numel,
            patience_s=4 * ctx.settings.stall_s,
            inflow=ctx.link.inflow,
        )
        self.recoveries += 1
        recovered = notices.state_from_neighbour(
            round=state.position, peer=peer, seconds=time.monotonic() - began_s
        )
        self._env.report("info", recovered)
        return state

    async def _from_coordinator(self) -> OuterState | None:
        """Return the newest state that the coordinator has: the first, or the model of a peer."""
        try:
            state = await self._env.fetch_state(self._memory_numel)
        except Evicted:
            raise
        except (CoordinatorError, StateError) as error:
            self._env.report("warning", notices.no_state_yet(reason=str(error)))
            return None
        if state.position:
            self.recoveries += 1
            self._env.report("info", notices.state_from_coordinator(round=state.position))
        return state


class GossipReducer(RunReducer):
    """A `Reducer` over the meetings of this peer."""

    def __init__(
        self,
        thread: LoopThread[Peer],
        ctx: GossipContext,
        gossip: Gossip,
        progress: TrainerProgress,
        settled: queue.SimpleQueue[GossipSettled],
        *,
        is_borrowed: bool,
        patience_s: float,
        company: Company | None = None,
    ) -> None:
        """Take what became of each window from `settled`.

        Args:
            thread: of the loop.
            ctx: of the peer.
            gossip: of the peer.
            progress: of the trainer.
            settled: filled by the loop.
            is_borrowed: whether the state is another peer's. Its first window then has weight 0,
                and a saved state of this peer's own is older than it.
            patience_s: the longest wait for one meeting, besides a window.
            company: the other trainers; without it, this peer is never alone.
        """
        super().__init__(
            thread,
            progress,
            peer_id=ctx.me.peer_id,
            method=ctx.method,
            fragments=(ctx.fragment,),
        )
        self._ctx = ctx
        self._gossip = gossip
        self._settled = settled
        self._is_borrowed = self._joining = is_borrowed
        self._patience_s = patience_s
        self._company = company
        self._on_offer: int | None = None
        self._deadline_s = 0.0

    # the seam to the trainer

    @property
    def joins(self) -> bool:
        return self._joining

    def start(self, layout: Layout, params_N: Tensor, settle: Settle) -> Tensor:
        """Join the run; the parameters come from the run, not from the caller.

        Raises:
            LayoutError: the model is not the run's.
        """
        expect_layout(self._ctx.layout, layout)
        self._settle = settle
        state = self._thread.ask(lambda: self._gossip.state)
        self.progress.position = state.position
        self.progress.start()
        return state.params_N

    def submit(self, contribution: Contribution) -> None:
        """Offer a contribution to the next partner.

        Raises:
            WorkRefused: its tokens or steps are absurd.
        """
        weight = work_weight(contribution.tokens, contribution.steps, self._ctx.method.weights)
        number = self.progress.count(contribution)
        if self._joining:
            # As in a run with a log, the first window of a joiner weighs nothing.
            self._ctx.on_event("info", notices.first_window())
            weight, self._joining = 0.0, False
        window = GossipWindow(
            number=number,
            delta_N=contribution.delta_N,
            weight=weight,
            tokens=contribution.tokens,
            steps=contribution.steps,
            loss=contribution.loss if math.isfinite(contribution.loss) else None,
            inner_lr=contribution.lr,
        )
        self._on_offer = number
        # Besides the meeting itself, as a partner may be up to a window behind.
        self._deadline_s = time.monotonic() + self._patience_s + self.progress.window_s
        self._thread.post(self._offer_with_others, window)

    def _offer_with_others(self, window: GossipWindow) -> None:
        """Offer, in the loop, once this peer is not alone, as in a run with a log."""
        if self._company is None:
            self._gossip.offer(window)
        else:
            self._company.with_others(0, partial(self._gossip.offer, window))
        self.progress.arrived(window.number)

    def wait(self) -> None:
        """Deliver what is settled, until the window on offer is; see `Reducer`.

        Ends also when the peer stops or the run is complete.
        """
        while not self._settled.empty():
            self._take(self._settled.get())
        with self.progress.waiting():
            self._await_meeting()

    def _await_meeting(self) -> None:
        while self._on_offer is not None and not self.stopping.is_set() and not self.finished:
            if self._company is not None and self._company.is_alone:
                self._deadline_s = time.monotonic() + self._patience_s + self.progress.window_s
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                return
            try:
                settled = self._settled.get(timeout=min(left_s, STOP_POLL_S))
            except queue.Empty:
                continue
            self._take(settled)

    def state_dict(self) -> dict[str, Any]:
        """Return this peer's own weights and momentum; its mass ends with the process."""
        state = self._thread.ask(lambda: self._gossip.state)
        return {
            "position": state.position,
            "params_N": state.params_N,
            "memory_M": state.memory_M,
            "joining": self._joining,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after a restart from the saved state, unless a neighbour had a later one.

        Raises:
            StateError: the state does not fit the run's model.
        """
        if self._is_borrowed and int(state["position"]) <= self.position:
            older = notices.older_state_saved(
                round=self.position, saved_round=int(state["position"])
            )
            self._ctx.on_event("info", older)
            self._reset(self._thread.ask(lambda: self._gossip.state))
            return
        own = OuterState.genesis(self._ctx.layout, state["params_N"], state["memory_M"])
        # The round is a count that peers keep level, so it does not go back with the weights.
        own = own.at(max(int(state["position"]), self.position))
        self._thread.ask(lambda: self._gossip.install(own))
        self._joining = bool(state["joining"])
        self.progress.position = own.position
        self._deliver(
            Commit(position=own.position, params_N=own.params_N, included=None, members=0)
        )

    # decisions

    def _take(self, settled: GossipSettled) -> None:
        included = None
        if settled.included:
            included = torch.ones(len(self._ctx.fragment.pieces), dtype=torch.bool)
        settles = settled.number == self._on_offer
        if settles:
            self._on_offer = None
        self.progress.position = settled.state.position
        self._deliver(
            Commit(
                position=settled.state.position,
                params_N=settled.state.params_N,
                included=included if settles else None,
                settles=settles,
                members=settled.members,
            )
        )

    def _reset(self, state: OuterState) -> None:
        self.progress.position = state.position
        self._on_offer, self._joining = None, True
        self._deliver(
            Commit(
                position=state.position,
                params_N=state.params_N,
                included=None,
                members=0,
                reset=True,
            )
        )
