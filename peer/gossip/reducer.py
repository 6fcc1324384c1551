"""The reducer of a peer by gossip: the trainer's thread on one side, the loop on the other.

The trainer submits and waits; what its windows came to is taken from one queue, in order, on the
trainer's thread.  A window that is in doubt stays on offer: past its deadline training goes on, and
the window grows until it is settled.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from atoll.coordinator.spec import RunSpec
from atoll.optim.fragments import Fragment
from atoll.optim.layout import Layout, LayoutError
from atoll.optim.methods import Method
from atoll.optim.reducer import Commit, Contribution, Settle
from atoll.optim.state import OuterState
from atoll.optim.weights import work_weight
from atoll.peer.gossip.context import GossipContext
from atoll.peer.gossip.engine import Gossip, GossipSettled
from atoll.peer.gossip.exchange import GossipWindow
from atoll.peer.reporting import TrainerView

POLL_S = 0.2  # how soon a waiting trainer notices that it should stop


class GossipReducer:
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
        self._loop = loop
        self._ctx = ctx
        self._gossip = gossip
        self.spec = spec
        self.peer_id = ctx.me.peer_id
        self._is_borrowed = self._joining = is_borrowed
        self._patience_s = patience_s
        self._close = close
        self._settled: queue.SimpleQueue[GossipSettled] = queue.SimpleQueue()
        self._settle: Settle | None = None
        self._position = 0
        self._number = 0
        self._on_offer: int | None = None
        self._deadline_s = 0.0
        self._tokens = 0
        self._window_s = 0.0
        self._resumed_s: float | None = None
        self.stopping = threading.Event()
        self.encode_s = 0.0

    def deliver(self, settled: GossipSettled) -> None:
        """Hand something to the trainer; called in the loop."""
        self._settled.put(settled)

    # the trainer's side

    def start(self, layout: Layout, params_N: Tensor, settle: Settle) -> Tensor:
        """Join the run; the parameters come from the run, not from the caller.

        Raises:
            LayoutError: the model is not the run's.
        """
        if layout != self._ctx.layout:
            raise LayoutError(
                f"expected the run's model of {self._ctx.layout.numel} parameters, got one of "
                f"{layout.numel}; build it from the run's spec"
            )
        self._settle = settle
        state = self._in_loop(lambda: self._gossip.state)
        self._position = state.position
        self._resumed_s = time.monotonic()
        return state.params_N

    @property
    def method(self) -> Method:
        """The run's method, whose `worker` goes into a training loop."""
        return self._ctx.method

    @property
    def fragments(self) -> Sequence[Fragment]:
        """See `Reducer`."""
        return (self._ctx.fragment,)

    @property
    def position(self) -> int:
        """See `Reducer`."""
        return self._position

    def submit(self, contribution: Contribution) -> None:
        """Offer a contribution to the next partner.

        Raises:
            WorkRefused: its tokens or steps are absurd.
        """
        if self._resumed_s is not None:
            self._window_s = time.monotonic() - self._resumed_s
        self._tokens += contribution.tokens
        weight = work_weight(contribution.tokens, contribution.steps, self._ctx.method.weights)
        if self._joining:
            self._ctx.on_event("info", "joined: the first window counts with weight 0")
            weight, self._joining = 0.0, False
        self._number += 1
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
        self._loop.call_soon_threadsafe(self._gossip.offer, window)

    def progress(self) -> TrainerView | None:
        """What can be told of a trainer that does not tell itself; None before it has started."""
        if self._resumed_s is None:
            return None
        left_s = self._resumed_s + self._window_s - time.monotonic()
        return TrainerView(
            ready_in_s=max(0.0, left_s),
            inner_steps=self.spec.outer.inner_steps,
            tokens=self._tokens,
        )

    def wait(self) -> None:
        """See `Reducer`; ends also when the peer stops or the run is over."""
        while not self._settled.empty():
            self._take(self._settled.get())
        while self._on_offer is not None and not self._is_at_end():
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                return
            try:
                settled = self._settled.get(timeout=min(left_s, POLL_S))
            except queue.Empty:
                continue
            self._take(settled)
        if self._on_offer is None:
            self._resumed_s = time.monotonic()

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

    def close(self) -> None:
        """Leave the run: roster, connections, threads."""
        self.stopping.set()
        self._close()

    # inside

    def _install(self, state: OuterState) -> OuterState:
        self._gossip.install(state)
        return state

    def _is_at_end(self) -> bool:
        return self.stopping.is_set() or 0 < self.spec.run.rounds <= self._position

    def _in_loop(self, function: Callable[[], OuterState]) -> OuterState:
        async def call() -> OuterState:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(timeout=60.0)

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

    def _deliver(self, commit: Commit) -> None:
        if self._settle is None:
            raise RuntimeError("expected start() first")
        self._settle(commit)
