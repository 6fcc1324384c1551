"""The reducer of a networked peer: the trainer's thread on one side, the rounds' loop on the other.

The trainer submits and waits; everything else happens in the loop.  Entries that the loop applies
come back through one queue, in the order of the log, and the trainer's thread moves its parameters
by them.  A third thread encodes what is submitted and settles the residual, in the order in which
it is asked, so that parameters and residual are touched by one thread each.
"""

from __future__ import annotations

import asyncio
import math
import queue
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.spec import RunSpec
from atoll.optim.log.entry import Elector, Entry
from atoll.optim.log.replica import Replica
from atoll.optim.methods import Method
from atoll.optim.reducer import Commit, Contribution, Settle
from atoll.optim.reduction.feedback import Offer
from atoll.optim.reduction.weights import DRIFT_CAP, drift_ratio, work_weight
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.peer.daemon.background import background_threads
from atoll.peer.daemon.trainer_side import POLL_S, TrainerSide
from atoll.peer.rounds.engine import Rounds, Settled
from atoll.peer.rounds.flight import OfferedWindow

FAR_BEHIND = 4  # windows of each fragment; work that is older is dropped (docs/protocol.md, part 3)


@dataclass(frozen=True, kw_only=True)
class Reset:
    """The replica was put somewhere else: drop what belongs to where it was."""

    state: OuterState
    why: str


@dataclass(frozen=True, kw_only=True)
class Offered:
    """A contribution that is not decided yet."""

    number: int
    encoding: Future[OfferedWindow]
    deadline_s: float
    """until when `wait` waits for it, on the monotonic clock"""

    @property
    def offer(self) -> Offer:
        """Its frames, once they are encoded."""
        return self.encoding.result().offer


class NetworkReducer(TrainerSide):
    """An ``atoll.optim.reducer.Reducer`` over the rounds of this peer."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        rounds: Rounds,
        replica: Replica,
        me: Elector,
        spec: RunSpec,
        patience_s: float,
        on_event: Callable[[Level, str], None],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """Made by ``session``; ``patience_s`` is the longest wait for one decision."""
        super().__init__(loop=loop, spec=spec, peer_id=me.peer_id, close=close)
        self._rounds = rounds
        self._replica = replica
        self._me = me
        self._patience_s = patience_s
        self._on_event = on_event
        self._replay = replica.replay
        self._decided: queue.SimpleQueue[Settled | Reset] = queue.SimpleQueue()
        self._residuals = [self._replay.residual(f) for f in range(len(self._replay.fragments))]
        self._offers: dict[int, Offered] = {}
        """what is on offer, by fragment"""
        self._encoder = background_threads(1, "atoll-encode")
        """one thread, which reads and changes the residuals in the order in which it is asked"""
        self._settling: deque[Future[None]] = deque()
        self._joining: set[int] = set()
        """fragments of which this peer's next contribution does not count yet"""
        self._hides = self.method.hidden_steps(self.spec.outer.inner_steps) > 0
        self._in_step = False
        """whether the last contribution that was decided counted"""

    # the loop's side

    def deliver(self, settled: Settled | Reset) -> None:
        """Hand something to the trainer; called in the loop."""
        self._decided.put(settled)

    def _offer_unless_over(self, window: OfferedWindow) -> None:
        """Where the fragment has no turn any more in this run, nothing is to be decided of it."""
        here, replay = self._replica.state.position, self._replay
        turns_left = (window.fragment - replay.fragment_at(here)) % len(replay.fragments)
        if not self._is_over(here + turns_left):
            self._rounds.offer(window)
        self._arrived(window.number)

    # the trainer's side

    def start(self, layout: Layout, params_N: Tensor, settle: Settle) -> Tensor:
        """Join the run; the parameters come from the run, not from the caller.

        Raises:
            LayoutError: the model is not the run's.
        """
        self._begin(self._replica.layout, layout, settle)
        state = self._in_loop(self._subscribe)
        self._arrive(state)
        self._start_clock()
        return state.params_N

    @property
    def method(self) -> Method:
        """The run's method, whose `worker` goes into a training loop."""
        return self._replay.method

    @property
    def fragments(self) -> Sequence[Fragment]:
        """See `Reducer`."""
        return self._replay.fragments

    def submit(self, contribution: Contribution) -> None:
        """Offer a contribution at the next position of its fragment, once it is encoded.

        Encoding is another thread's work, so that a trainer that does not wait goes on at once. One
        whose rounds are hidden waits all the same when it is new or its last window was left out.
        Nothing else would bring it in step with the others, who end their windows together and give
        late members `round.grace_s`.

        Raises:
            WorkRefused: its tokens or steps are absurd.
            CodecError, OSError, sqlite3.Error: as `wait`, where it waits.
        """
        if self._settle is None:
            raise RuntimeError("expected start() first")
        fragment, rule = contribution.fragment, self._replay.method.weights
        weight = work_weight(contribution.tokens, contribution.steps, rule)
        self._count(contribution)
        if fragment in self._joining:
            self._on_event("info", "joined: the first window counts with weight 0")
            weight = 0.0
            self._joining.discard(fragment)
        encoding = self._encoder.submit(self._encoded, contribution, weight, self._number)
        self._offers[fragment] = Offered(
            number=self._number,
            encoding=encoding,
            deadline_s=time.monotonic() + self._patience_s,
        )
        encoding.add_done_callback(self._offer_encoded)
        if self._hides and not self._in_step:
            self.wait()

    def _encoded(self, contribution: Contribution, weight: float, number: int) -> OfferedWindow:
        started = time.perf_counter()
        offer = self._residuals[contribution.fragment].offer(contribution.delta, weight)
        self.encode_s = time.perf_counter() - started
        return OfferedWindow(
            number=number,
            fragment=contribution.fragment,
            offer=offer,
            tokens=contribution.tokens,
            steps=contribution.steps,
            loss=contribution.loss if math.isfinite(contribution.loss) else None,
        )

    def _offer_encoded(self, encoding: Future[OfferedWindow]) -> None:
        if encoding.cancelled() or encoding.exception() is not None:
            return  # `wait` raises it
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._offer_unless_over, encoding.result())

    def wait(self) -> None:
        """See `Reducer`; ends also when the peer stops or the run is over.

        Raises:
            CodecError: what was submitted can't be encoded.
            OSError, sqlite3.Error: the disk takes nothing more.
        """
        on_offer = set(self._offers)
        self._raise_failure()
        self._drain()
        with self._waiting():
            self._await_decision_of(on_offer)

    def _await_decision_of(self, on_offer: set[int]) -> None:
        while on_offer <= set(self._offers) and not self._is_at_end():
            self._raise_failure()
            offered = self._waited_for()
            if offered is None:
                break
            if offered.encoding.done():
                offered.encoding.result()
            left_s = offered.deadline_s - time.monotonic()
            if left_s <= 0:
                return
            try:
                decided = self._decided.get(timeout=min(left_s, POLL_S))
            except queue.Empty:
                continue
            self._take(decided)

    def _waited_for(self) -> Offered | None:
        """What is on offer at the position that is decided next."""
        return self._offers.get(self._replay.fragment_at(self._position))

    def state_dict(self) -> dict[str, Any]:
        """The residuals, and where in the log they were taken."""
        self._await_residuals()
        return {
            "position": self._position,
            "feedback": [residual.state_dict() for residual in self._residuals],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after a restart, if the log tells what became of this peer's last contributions."""
        saved, now = int(state["position"]), self._position
        if not 0 <= now - saved <= self._far_behind or self._included_since(saved):
            self._reset(
                self._in_loop(lambda: self._replica.state),
                f"saved at position {saved}, the run is at {now}: starting from the run's state",
            )
            return
        self._joining.clear()
        self._await_residuals()
        for residual, saved_state in zip(self._residuals, state["feedback"], strict=True):
            residual.load_state_dict(saved_state)
        current = self._in_loop(lambda: self._replica.state)
        self._position = current.position
        for fragment in range(len(self._residuals)):
            self._deliver(
                Commit(
                    fragment=fragment,
                    position=current.position,
                    params_N=current.params_N,
                    included=None,
                    members=0,
                )
            )

    def close(self) -> None:
        """Leave the run: roster, connections, threads."""
        for offered in self._offers.values():
            offered.encoding.cancel()
        self._encoder.shutdown(wait=False)
        super().close()

    # inside

    @property
    def _far_behind(self) -> int:
        """Positions beyond which open work is dropped."""
        return FAR_BEHIND * len(self._residuals)

    def _arrive(self, state: OuterState) -> None:
        """Stand at a state that this peer did not follow the log to, with nothing on offer."""
        self._position = state.position
        self._offers.clear()
        self._in_step = False
        self._joining = set(range(len(self._residuals))) if state.position else set()

    def _subscribe(self) -> OuterState:
        while not self._decided.empty():
            self._decided.get()
        return self._replica.state

    def _included_since(self, position: int) -> bool:
        count = self._position - position
        records = self._replica.store.headers(position, count)
        if len(records) < count:
            return True  # unknown: the log here begins later
        entries = (Entry.decode(record.entry) for record in records)
        return any(m.peer_id == self._me.peer_id for e in entries for m in e.members)

    def _drain(self) -> None:
        behind: list[Settled | Reset] = []
        while not self._decided.empty():
            behind.append(self._decided.get())
        if len(behind) > self._far_behind:
            last = behind[-1]
            state = last.state if isinstance(last, Reset) else last.applied.state
            behind = [Reset(state=state, why=f"{len(behind)} positions behind")]
        for decided in behind:
            self._take(decided)

    def _take(self, decided: Settled | Reset) -> None:
        if isinstance(decided, Reset):
            self._reset(decided.state, decided.why)
            return
        entry, state = decided.applied.entry, decided.applied.state
        included, offered = None, self._offers.get(entry.fragment)
        settles = offered is not None and decided.settles == offered.number
        if offered is not None and settles:
            if decided.included is not None:
                included = torch.tensor(decided.included, dtype=torch.bool)
            self._in_step = included is not None and bool(included.any())
            del self._offers[entry.fragment]
        self._settle_later(self._settle_residual, decided, offered, included)
        self._position = state.position
        self._deliver(
            Commit(
                fragment=entry.fragment,
                position=state.position,
                params_N=state.params_N,
                included=included,
                settles=settles,
                members=len(entry.members),
            )
        )
        if offered is not None and settles and (included is None or not included.any()):
            self._drop_what_grew(entry, offered.offer.norm, state)

    def _settle_residual(
        self, decided: Settled, offered: Offered | None, included: Tensor | None
    ) -> None:
        """Take what an entry did with this peer's contribution, and with its part."""
        entry, update_F = decided.applied.entry, decided.applied.update_F
        residual = self._residuals[entry.fragment]
        if offered is not None and included is not None:
            mine = next(m for m in entry.members if m.elector == self._me)
            share = mine.weight * mine.clip
            residual.settle(offered.offer, included, weight=share, update_F=update_F)
        for part, lost_N in decided.credits:
            residual.owner_credit(part, lost_N)

    def _settle_later(self, function: Callable[..., None], *arguments: object) -> None:
        """Do something with a residual after all that was asked of the encoder before."""
        while self._settling and self._settling[0].done():
            self._settling.popleft().result()
        try:
            self._settling.append(self._encoder.submit(function, *arguments))
        except RuntimeError:  # closed: it takes nothing more, but ends what it has
            self._await_residuals()
            function(*arguments)

    def _await_residuals(self) -> None:
        """Return when nothing reads or changes a residual; raises what went wrong."""
        futures.wait([offered.encoding for offered in self._offers.values()])
        while self._settling:
            self._settling.popleft().result()

    def _drop_what_grew(self, entry: Entry, norm: float, state: OuterState) -> None:
        """Drop work that was left out so often that it would outweigh what the others bring."""
        if self.method.every_step:
            return  # sends gradients: nothing was kept for the next one
        ratio = drift_ratio(norm, [m.norm for m in entry.members if m.weight > 0])
        if ratio > DRIFT_CAP:
            why = f"left out of rounds until it had {ratio:.1f} times the median norm"
            self._reset(state, f"{why}, more than {DRIFT_CAP:g} times")

    def _reset(self, state: OuterState, why: str) -> None:
        self._on_event("warning", f"dropped this peer's open work: {why}")
        self._await_residuals()
        for residual in self._residuals:
            residual.reset()
        self._arrive(state)
        self._deliver(
            Commit(
                position=state.position,
                params_N=state.params_N,
                included=None,
                members=0,
                reset=True,
            )
        )
