"""The reducer of a run by gossip: the seam between the trainer's thread and the peer's loop.

The trainer submits and waits; what became of its windows comes back through one queue, in order,
and the trainer's thread takes it. A window that is in doubt stays on offer: past its deadline
training continues, and the window grows until it is settled.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from atoll.optim.methods import Method
from atoll.optim.reducer import Commit, Contribution, Settle
from atoll.optim.reduction.weights import work_weight
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.optim.workers.timetable import Timetable
from atoll.peer.daemon.loop_thread import LoopThread
from atoll.peer.daemon.progress import TrainerProgress
from atoll.peer.daemon.run_reducer import STOP_POLL_S, expect_layout
from atoll.peer.gossip.context import GossipContext
from atoll.peer.gossip.engine import Gossip, GossipSettled
from atoll.peer.gossip.meeting import GossipWindow

if TYPE_CHECKING:
    from atoll.peer.daemon.peer import Peer


class GossipReducer:
    """A `Reducer` over the meetings of this peer; owns the thread in which the loop runs."""

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
        """
        self.spec = progress.spec
        self.peer_id = ctx.me.peer_id
        self.stopping = thread.stopping
        self.progress = progress
        self._thread = thread
        self._ctx = ctx
        self._gossip = gossip
        self._settled = settled
        self._is_borrowed = self._joining = is_borrowed
        self._patience_s = patience_s
        self._settle: Settle | None = None
        self._on_offer: int | None = None
        self._deadline_s = 0.0

    # the run, as a training loop sees it

    @property
    def peer(self) -> Peer:
        """The peer in the loop's thread; read single attributes only."""
        return self._thread.value

    @property
    def position(self) -> int:
        """The round that the trainer is in."""
        return self.progress.position

    @property
    def method(self) -> Method:
        """The run's method, whose `worker` goes into a training loop."""
        return self._ctx.method

    @property
    def fragments(self) -> Sequence[Fragment]:
        """One: gossip does not cut the model."""
        return (self._ctx.fragment,)

    @property
    def timetable(self) -> Timetable:
        """Steps and windows of the run by round."""
        return self.progress.timetable

    @property
    def finished(self) -> bool:
        """Return whether the run is complete: what is trained from here on reaches nobody."""
        return self.progress.is_over(self.position)

    def close(self) -> None:
        """Leave the run: roster, connections, threads. Idempotent."""
        self.stopping.set()
        self._thread.close()

    # the seam to the trainer

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
            self._ctx.on_event("info", "joined: the first window counts with weight 0")
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
        self._thread.post(self._offer, window)

    def _offer(self, window: GossipWindow) -> None:
        self._gossip.offer(window)
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
            self._ctx.on_event(
                "info",
                f"resuming from round {self.position} of a neighbour; the state saved here is of "
                f"round {state['position']}",
            )
            self._reset(self._thread.ask(lambda: self._gossip.state))
            return
        own = OuterState.genesis(self._ctx.layout, state["params_N"], state["memory_M"])
        own = own.at(max(int(state["position"]), self.position))
        self._thread.ask(lambda: self._install(own))
        self._joining = bool(state["joining"])
        self.progress.position = own.position
        self._deliver(
            Commit(position=own.position, params_N=own.params_N, included=None, members=0)
        )

    # decisions

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

    def _deliver(self, commit: Commit) -> None:
        if self._settle is None:
            raise RuntimeError("expected start() first")
        self.progress.note(commit)
        self._settle(commit)
