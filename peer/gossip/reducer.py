"""The reducer of a peer by gossip: the trainer's thread on one side, the loop on the other.

The trainer submits and waits; what its windows came to is taken from one queue, in order, on the
trainer's thread.  A window that is in doubt stays on offer: past its deadline training goes on, and
the window grows until it is settled.
"""

from __future__ import annotations

import asyncio
import math
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.methods import Method
from atoll.optim.reducer import Commit, Contribution, Settle
from atoll.optim.reduction.weights import work_weight
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.peer.daemon.trainer_side import POLL_S, TrainerSide
from atoll.peer.gossip.context import GossipContext
from atoll.peer.gossip.engine import Gossip, GossipSettled
from atoll.peer.gossip.exchange import GossipWindow


class GossipReducer(TrainerSide):
    """An ``atoll.optim.reducer.Reducer`` over the meetings of this peer."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        ctx: GossipContext,
        gossip: Gossip,
        spec: RunSpec,
        is_borrowed: bool,
        patience_s: float,
        close: Callable[[], None],
    ) -> None:
        """Made by ``GossipParticipation``.

        ``is_borrowed`` says that the state is another peer's: the first window then has weight 0,
        and a saved state of this peer's own is older than it.  ``patience_s`` is the longest wait
        for one meeting, beside a window.
        """
        super().__init__(loop=loop, spec=spec, peer_id=ctx.me.peer_id, close=close)
        self._ctx = ctx
        self._gossip = gossip
        self._is_borrowed = self._joining = is_borrowed
        self._patience_s = patience_s
        self._settled: queue.SimpleQueue[GossipSettled] = queue.SimpleQueue()
        self._on_offer: int | None = None
        self._deadline_s = 0.0

    def deliver(self, settled: GossipSettled) -> None:
        """Hand something to the trainer; called in the loop."""
        self._settled.put(settled)

    # the trainer's side

    def start(self, layout: Layout, params_N: Tensor, settle: Settle) -> Tensor:
        """Join the run; the parameters come from the run, not from the caller.

        Raises:
            LayoutError: the model is not the run's.
        """
        self._begin(self._ctx.layout, layout, settle)
        state = self._in_loop(lambda: self._gossip.state)
        self._position = state.position
        self._start_clock()
        return state.params_N

    @property
    def method(self) -> Method:
        """The run's method, whose `worker` goes into a training loop."""
        return self._ctx.method

    @property
    def fragments(self) -> Sequence[Fragment]:
        """See `Reducer`."""
        return (self._ctx.fragment,)

    def submit(self, contribution: Contribution) -> None:
        """Offer a contribution to the next partner.

        Raises:
            WorkRefused: its tokens or steps are absurd.
        """
        weight = work_weight(contribution.tokens, contribution.steps, self._ctx.method.weights)
        self._count(contribution)
        if self._joining:
            self._ctx.on_event("info", "joined: the first window counts with weight 0")
            weight, self._joining = 0.0, False
        window = GossipWindow(
            number=self._number,
            delta_N=contribution.delta_N,
            weight=weight,
            tokens=contribution.tokens,
            steps=contribution.steps,
            loss=contribution.loss if math.isfinite(contribution.loss) else None,
            inner_lr=contribution.lr,
        )
        self._on_offer = self._number
        self._deadline_s = time.monotonic() + self._patience_s + self._window_s
        self._loop.call_soon_threadsafe(self._offer, window)

    def _offer(self, window: GossipWindow) -> None:
        self._gossip.offer(window)
        self._arrived(window.number)

    def wait(self) -> None:
        """See `Reducer`; ends also when the peer stops or the run is over."""
        while not self._settled.empty():
            self._take(self._settled.get())
        with self._waiting():
            self._await_meeting()

    def _await_meeting(self) -> None:
        while self._on_offer is not None and not self._is_at_end():
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                return
            try:
                settled = self._settled.get(timeout=min(left_s, POLL_S))
            except queue.Empty:
                continue
            self._take(settled)

    def state_dict(self) -> dict[str, Any]:
        """This peer's own state: weights and momentum; its mass ends with the process."""
        state = self._in_loop(lambda: self._gossip.state)
        return {
            "position": state.position,
            "params_N": state.params_N,
            "memory_M": state.memory_M,
            "joining": self._joining,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after a restart: from the state saved, unless a neighbour had a later one.

        Raises:
            StateError: the state does not fit the run's model.
        """
        if self._is_borrowed and int(state["position"]) <= self._position:
            self._ctx.on_event(
                "info", f"saved at round {state['position']}: on from {self._position}"
            )
            self._reset(self._in_loop(lambda: self._gossip.state))
            return
        own = OuterState.genesis(self._ctx.layout, state["params_N"], state["memory_M"])
        own = own.at(max(int(state["position"]), self._position))
        self._in_loop(lambda: self._install(own))
        self._joining = bool(state["joining"])
        self._position = own.position
        self._deliver(
            Commit(position=own.position, params_N=own.params_N, included=None, members=0)
        )

    # inside

    def _install(self, state: OuterState) -> OuterState:
        self._gossip.install(state)
        return state

    def _take(self, settled: GossipSettled) -> None:
        included = None
        if settled.included:
            included = torch.ones(len(self._ctx.fragment.pieces), dtype=torch.bool)
        settles = settled.number == self._on_offer
        if settles:
            self._on_offer = None
        self._position = settled.state.position
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
        self._position, self._on_offer, self._joining = state.position, None, True
        self._deliver(
            Commit(
                position=state.position,
                params_N=state.params_N,
                included=None,
                members=0,
                reset=True,
            )
        )
