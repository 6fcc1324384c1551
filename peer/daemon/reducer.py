"""The reducer of a networked peer: the seam between the trainer's thread and the peer's loop.

    RunReducer        what every run's reducer has; gossip's is in `gossip_run`
    TrainerProgress   how far the trainer is: written in its thread, read in the loop
    NetworkReducer    the reducer of a run with a log

The trainer submits and waits; everything else happens in the loop. Entries that the loop applies
come back through one queue, in the order of the log, and the trainer's thread moves its parameters
by them. A third thread encodes what is submitted and settles the residual, in the order in which
it is asked, so that parameters and residual are touched by one thread each.

A training loop that does not report on itself (`connect`) is timed here, by the windows that it
hands in. Rounds are planned by when each peer's next window is expected to end.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.log.electorate import after
from atoll.optim.log.entry import Entry
from atoll.optim.log.orders import read_settings
from atoll.optim.log.replay import with_codec
from atoll.optim.log.units import Range, begins_with, read_units, split
from atoll.optim.methods import Method
from atoll.optim.reducer import (
    AS_PLANNED,
    Commit,
    Contribution,
    Course,
    Reducer,
    Residual,
    Settle,
)
from atoll.optim.reduction.contribution import (
    DRIFT_CAP,
    Offer,
    WorkRefused,
    drift_ratio,
    work_weight,
)
from atoll.optim.schedules import Timetable
from atoll.optim.state import vectors
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.layout import Layout, LayoutError
from atoll.optim.state.outer_state import OuterState
from atoll.peer import notices
from atoll.peer.daemon.background import background_threads
from atoll.peer.daemon.decisions import Decisions, Reset
from atoll.peer.daemon.loop_thread import LoopThread
from atoll.peer.daemon.views import TrainerView
from atoll.peer.rounds.consensus.member import OfferedWindow
from atoll.peer.rounds.context import Context
from atoll.peer.rounds.engine import Rounds, Settled

if TYPE_CHECKING:
    from atoll.peer.daemon.peer import Peer
    from atoll.peer.daemon.reach.company import Company

FETCH_S = 120.0  # for a tokenizer of 4 MiB over a slow link, and the trial of it
STOP_POLL_S = 0.2  # how soon a waiting trainer notices that it should stop
FAR_BEHIND = 4  # windows of each fragment; older work is dropped (docs/protocol.md, part 3)


class TrainerProgress:
    """The trainer's position, its windows and their tokens."""

    def __init__(
        self,
        spec: RunSpec,
        method: Method,
        num_fragments: int,
        *,
        ahead: Callable[[], Course] = lambda: AS_PLANNED,
    ) -> None:
        """Begin before the trainer has started; `ahead` returns the course at the log's head."""
        self.spec = spec
        self.ahead = ahead
        self.position = 0
        """Position of the log, or round by gossip, that the trainer has taken."""
        self.course = AS_PLANNED
        """The course of training at that position."""
        self.number = 0
        """Number of the last contribution."""
        self.encode_s = 0.0
        """Seconds that encoding the last contribution took."""
        self.window_s = 0.0
        """Seconds that the last window took, without waiting."""
        self.leaving = False
        """True once this peer offers nothing more."""
        self.device = ""
        """Name of the device that a training loop of its own reports."""
        self._keeps_left_out = not method.every_step  # else it sends gradients, and keeps none
        self._num_fragments = num_fragments
        self._watched: Callable[[], TrainerView] | None = None
        self._tokens = 0
        """Tokens of all fragments; work that was left out and is offered again counts once."""
        self._on_offer_tokens: dict[int, int] = {}
        self._left_out_tokens: dict[int, int] = {}
        """Both by fragment."""
        self._began_s: float | None = None
        self._waited_s = 0.0
        self._waits_since_s: float | None = None
        self._ended_s = 0.0
        """End of the last window, in seconds of training since the start."""
        self._handed_in: set[int] = set()
        """Numbers of contributions that have not reached the loop yet."""
        self._loss: float | None = None
        """Mean loss of the last window."""

    @property
    def num_fragments(self) -> int:
        """Fragments of the run's method."""
        return self._num_fragments

    @property
    def timetable(self) -> Timetable:
        """Steps and windows of the run by position."""
        return self.spec.timetable(self._num_fragments)

    def is_over(self, position: int) -> bool:
        """Return whether a position is the end of the run, or beyond it."""
        return 0 < self.ahead().rounds(self.spec.run.rounds) <= position

    # in the trainer's thread

    def watch(self, view: Callable[[], TrainerView]) -> None:
        """Report what `view` returns instead of what is seen here; called in the loop."""
        self._watched = view

    def start(self) -> None:
        """Begin the first window."""
        self._began_s = time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave the block's time out of the window: rounds that are hidden take none of it."""
        self._waits_since_s = since_s = time.monotonic()
        try:
            yield
        finally:
            self._waits_since_s = None
            self._waited_s += time.monotonic() - since_s

    def count(self, contribution: Contribution) -> int:
        """End a window; return the number of its contribution, which `arrived` then takes."""
        self.number += 1
        self._handed_in.add(self.number)  # ready from now on, although it is still being encoded
        trained_s = self._trained_s()
        self.window_s, self._ended_s = trained_s - self._ended_s, trained_s
        fragment, tokens = contribution.fragment, contribution.tokens
        self._tokens += max(0, tokens - self._left_out_tokens.pop(fragment, 0))
        self._on_offer_tokens[fragment] = tokens
        self._loss = contribution.loss if math.isfinite(contribution.loss) else None
        return self.number

    def note(self, commit: Commit) -> None:
        """Take a commit: work that no update took stays in the drift, and is offered again."""
        if commit.reset:
            self._on_offer_tokens.clear()
            self._left_out_tokens.clear()
        elif commit.settles:
            tokens = self._on_offer_tokens.pop(commit.fragment, 0)
            included = commit.included is not None and bool(commit.included.any())
            if not included and self._keeps_left_out:
                self._left_out_tokens[commit.fragment] = tokens

    # in the loop

    def arrived(self, number: int) -> None:
        """Note that a contribution has reached the rounds."""
        self._handed_in.discard(number)

    @property
    def started(self) -> bool:
        """Return whether the trainer has; no run begins with a peer whose trainer has not."""
        return self._began_s is not None

    @property
    def hands_in(self) -> bool:
        """True while the contribution of a window that ended is on its way to the rounds."""
        return bool(self._handed_in)

    def ready_in_s(self) -> float | None:
        """Return when the next contribution is expected; None if nobody should wait for one."""
        if self.leaving or not self.started:
            return None
        if self.hands_in:
            return 0.0  # the trainer itself may be in its next window already
        return self.view().ready_in_s

    def view(self) -> TrainerView:
        """Return what the trainer reports, or what its windows show."""
        if self._watched is not None:
            return self._watched()
        return self.measured() or TrainerView()

    def measured(self) -> TrainerView | None:
        """Return what the windows show; None before the trainer has started."""
        if self._began_s is None:
            return None
        trained_s, tokens = self._trained_s(), self._tokens // self._num_fragments
        since_s = max(time.monotonic() - self._began_s, 1e-9)
        # A wait counts once it is over: a run that stands still makes nobody slow.
        until_wait_s = (self._waits_since_s or time.monotonic()) - self._began_s
        return TrainerView(
            ready_at_s=time.monotonic() + self.window_s - (trained_s - self._ended_s),
            inner_steps=self.course.window(self.timetable.window(self.position)),
            tokens=tokens,
            tokens_per_s=tokens / max(until_wait_s, 1e-9),
            loss=self._loss,
            utilisation=min(1.0, trained_s / since_s),
            device=self.device,
        )

    def _trained_s(self) -> float:
        """Seconds since the start in which the trainer did not wait."""
        now_s = time.monotonic()
        waits_s = now_s - (self._waits_since_s or now_s)
        return now_s - (self._began_s or now_s) - self._waited_s - waits_s


class RunReducer(Reducer):
    """A `Reducer` that knows its run and can be left; owns the thread in which the loop runs."""

    def __init__(
        self,
        thread: LoopThread[Peer],
        progress: TrainerProgress,
        *,
        peer_id: str,
        method: Method,
        fragments: Sequence[Fragment],
    ) -> None:
        """Take part as `peer_id`, with what a training loop needs of the run."""
        self.spec = progress.spec
        self.peer_id = peer_id
        self.method = method
        """The run's method, whose `worker` goes into a training loop."""
        self.stopping = thread.stopping
        """Set when the peer should stop: the trainer then waits for nothing more."""
        self.progress = progress
        self._thread = thread
        self._fragments = fragments
        self._settle: Settle | None = None

    @property
    def peer(self) -> Peer:
        """The peer in the loop's thread; read single attributes only."""
        return self._thread.value

    @property
    def position(self) -> int:
        """Entries of the log that the trainer has taken; by gossip, the round that it is in."""
        return self.progress.position

    @property
    def course(self) -> Course:
        """Return the course of training at this position."""
        return self.progress.course

    @property
    def joins(self) -> bool:
        """Return whether the open window counts nothing, as the first one after joining."""
        return False

    @property
    def fragments(self) -> Sequence[Fragment]:
        """The pieces into which the method cuts the run's model; one by gossip."""
        return self._fragments

    @property
    def timetable(self) -> Timetable:
        """Steps and windows of the run by position."""
        return self.progress.timetable

    @property
    def finished(self) -> bool:
        """Return whether the run is complete: what is trained from here on reaches nobody."""
        return self.progress.is_over(self.position)

    def encode_on(self, device: torch.device) -> None:
        """Encode contributions on a device from now on, if this run encodes any."""

    def fetch_tokenizer(self) -> Path:
        """Return where the tokenizer is that travels with the run; fetch it if it is not here.

        Raises:
            DataError: it did not arrive, or cannot be parsed.
            TimeoutError: it took too long to arrive.
        """
        return self._thread.run(self.peer.fetch_tokenizer(), timeout_s=FETCH_S)

    def close(self) -> None:
        """Leave the run: roster, connections, threads. Idempotent."""
        self.stopping.set()
        self._thread.close()

    def _deliver(self, commit: Commit) -> None:
        if self._settle is None:
            raise RuntimeError("expected start() first")
        self.progress.note(commit)
        self._settle(commit)


def expect_layout(expected: Layout, got: Layout) -> None:
    """Check that a trainer has the run's model.

    Raises:
        LayoutError: it has another one.
    """
    if got != expected:
        raise LayoutError(
            f"expected the run's model of {expected.numel:,} parameters, got one of {got.numel:,}; "
            f"the first that differs: {expected.difference(got)}. The run's model is what "
            "reducer.build_model() returns (docs/library.md); with `atoll peer`, check --tokenizer"
        )


@dataclass(frozen=True, kw_only=True)
class Offered:
    """A contribution that is not decided yet."""

    number: int
    encoding: Future[OfferedWindow]
    deadline_s: float
    """Time until which `wait` waits for it, on the monotonic clock."""
    hidden_until_s: float = math.inf
    """The same for a trainer that is in step and whose rounds are hidden; set at the first wait."""

    @property
    def until_s(self) -> float:
        """Time until which `wait` waits for it, whatever the reason."""
        return min(self.deadline_s, self.hidden_until_s)

    @property
    def offer(self) -> Offer:
        """Its frames, once they are encoded."""
        return self.encoding.result().offer

    @property
    def done_units(self) -> int:
        """Units that it has done, once it is encoded."""
        return self.encoding.result().units


class NetworkReducer(RunReducer):
    """A `Reducer` over the rounds of this peer."""

    recovers = True  # `start` takes the parameters from the log

    def __init__(
        self,
        thread: LoopThread[Peer],
        ctx: Context,
        rounds: Rounds,
        progress: TrainerProgress,
        decisions: Decisions,
        *,
        patience_s: float,
        hidden_s: float = math.inf,
        company: Company | None = None,
    ) -> None:
        """Wait at most `patience_s` for one decision; past that the trainer continues.

        One whose rounds are hidden loses nothing if it trains on. If its last window counted it
        waits `hidden_s` at most, else `patience_s`, which brings it in step with the others. With a
        `hidden_s` of 0 it never waits. A trainer that waits for `company` offers nothing, and does
        not continue.
        """
        replay = ctx.replay
        super().__init__(
            thread,
            progress,
            peer_id=ctx.me.peer_id,
            method=replay.method,
            fragments=replay.fragments,
        )
        self._ctx = ctx
        self._rounds = rounds
        self._decisions = decisions
        self._patience_s, self._hidden_s = patience_s, hidden_s
        self._company = company
        self._replica = ctx.replica
        self._replay = replay
        self._residuals: list[Residual] = [
            replay.residual(fragment) for fragment in range(len(replay.fragments))
        ]
        self._room = vectors.OnceAWindow()
        self._offers: dict[int, Offered] = {}
        """Contributions on offer, by fragment."""
        self._encoder = background_threads(1, "atoll-encode", short_calls=True)
        """One thread, which reads and changes the residuals in the order in which it is asked."""
        self._settling: deque[Future[None]] = deque()
        self._codec: str | None = None
        """The codec that an order has set and that is in use here."""
        self._joining: set[int] = set()
        """Fragments of which this peer's next contribution does not count yet."""
        self._hides = self.method.hidden_steps(self.spec.outer.inner_steps) > 0
        self._in_step = False
        """True if the last decided contribution counted."""
        self._held: list[Range] | None = None
        """The units that this peer held after the last entry; None if that is not known."""

    def close(self) -> None:
        """Leave the run: roster, connections, threads. Idempotent."""
        self.stopping.set()
        for offered in self._offers.values():
            offered.encoding.cancel()
        self._encoder.shutdown(wait=False)
        super().close()

    # the seam to the trainer

    def start(self, layout: Layout, params_N: Tensor, settle: Settle) -> Tensor:
        """Join the run; the parameters come from the run, not from the caller.

        Raises:
            LayoutError: the model is not the run's.
        """
        expect_layout(self._replica.layout, layout)
        self._settle = settle
        state, course = self._thread.ask(self._subscribe)
        self._arrive(state, course)
        self.progress.start()
        return state.params_N

    def submit(self, contribution: Contribution) -> None:
        """Offer a contribution at the next position of its fragment, once it is encoded.

        Another thread encodes, so that a trainer that does not wait continues at once. A trainer
        whose rounds are hidden still waits when it is new or its last window was left out, unless
        windows are by deadline. Nothing else would bring it in step with the others, which end
        their windows together and give late members `round.grace_s`.

        Raises:
            WorkRefused: its tokens or steps are absurd.
            CodecError, OSError, sqlite3.Error: as `wait`, where it waits.
        """
        if self._settle is None:
            raise RuntimeError("expected start() first")
        if self._counts_units and contribution.tokens and not contribution.units:
            raise WorkRefused(
                "the run hands out its rows (data.once), and this loop draws its own; train with "
                "atoll.peer's Trainer, or `atoll peer`"
            )
        fragment, steps = contribution.fragment, contribution.steps
        if isinstance(contribution.delta, Offer):
            weight = contribution.delta.weight
        else:
            weight = self.weight_of(fragment, contribution.tokens, steps)
        number = self.progress.count(contribution)
        if fragment in self._joining and weight == 0.0:
            self._ctx.on_event("info", notices.first_window())
        self._joining.discard(fragment)
        encoding = self._encoder.submit(self._encode, contribution, weight, number, self._codec)
        self._offers[fragment] = Offered(
            number=number,
            encoding=encoding,
            deadline_s=time.monotonic() + self._patience_s,
        )
        encoding.add_done_callback(self._offer_encoded)
        if self._hides and self._awaits_step:
            self.wait()

    @property
    def joins(self) -> bool:
        return bool(self._joining) and not self._reaches_nobody

    def weight_of(self, fragment: int, tokens: int, steps: int) -> float:
        """Return the weight at which a contribution has to be encoded now.

        Raises:
            WorkRefused: its tokens or steps are absurd.
        """
        weight = work_weight(tokens, steps, self._replay.method.weights)
        # docs/protocol.md: the first window of each fragment of a joiner weighs nothing.
        joins = fragment in self._joining and not self._reaches_nobody
        return 0.0 if joins else weight

    def leave_residuals(self, keep: Callable[[int], Residual]) -> None:
        """Let `keep(fragment)` keep each residual; contributions then hold an `Offer`."""
        self._residuals = [keep(fragment) for fragment in range(len(self._residuals))]

    def encode_on(self, device: torch.device) -> None:
        for residual in self._residuals:
            residual.encode_on(device)

    def _use_codec(self, codec: str | None) -> None:
        """Encode in the codec that orders have set, after all that was asked before."""
        if codec == self._codec:
            return
        self._codec, chosen = codec, with_codec(self.method, codec).codec
        with suppress(RuntimeError):  # closed: nothing more is encoded
            for residual in self._residuals:
                self._settling.append(self._encoder.submit(residual.use_codec, chosen))

    def _encode(
        self, contribution: Contribution, weight: float, number: int, codec: str | None
    ) -> OfferedWindow:
        started = time.perf_counter()
        self._room.trim(self._replay.layout.numel)
        offer = self._residuals[contribution.fragment].offer(contribution.delta, weight)
        self.progress.encode_s = time.perf_counter() - started
        return OfferedWindow(
            number=number,
            fragment=contribution.fragment,
            offer=offer,
            tokens=contribution.tokens,
            steps=contribution.steps,
            loss=contribution.loss if math.isfinite(contribution.loss) else None,
            codec=codec,
            units=contribution.units,
        )

    def _offer_encoded(self, encoding: Future[OfferedWindow]) -> None:
        if encoding.cancelled() or encoding.exception() is not None:
            return  # `wait` raises it
        with suppress(RuntimeError):  # the loop has ended
            self._thread.post(self._offer_with_others, encoding.result())

    def _offer_with_others(self, window: OfferedWindow) -> None:
        """Offer, in the loop, once this peer is not alone (docs/protocol.md, part 2, "Alone")."""
        if self._company is None:
            self._offer_unless_over(window)
        else:
            offer = partial(self._offer_unless_over, window)
            self._company.with_others(window.fragment, offer)
            self.progress.arrived(window.number)  # on offer or waiting, but no longer on its way

    @property
    def _reaches_nobody(self) -> bool:
        return self._company is not None and self._company.reaches_nobody

    def _offer_unless_over(self, window: OfferedWindow) -> None:
        """Offer, in the loop, unless the run ends before the fragment's next turn."""
        here, replay = self._replica.state.position, self._replay
        turns_left = (window.fragment - replay.fragment_at(here)) % len(replay.fragments)
        # The trainer gives up what is encoded in a codec that the run has left when it hears of it.
        is_current = window.codec == self._replica.settings.codec
        if is_current and not self.progress.is_over(here + turns_left):
            self._rounds.offer(window)
        self.progress.arrived(window.number)

    def wait(self) -> None:
        """Deliver what is decided, until the contribution that is due is; see `Reducer`.

        Ends also when the peer stops or the run is complete.

        Raises:
            CodecError: what was submitted can't be encoded.
            OSError, sqlite3.Error: the disk is full or failed.
        """
        on_offer = set(self._offers)
        self._decisions.expect_none_failed()
        self._take_all()
        with self.progress.waiting():
            self._await_decision_of(on_offer)

    def _await_decision_of(self, on_offer: set[int]) -> None:
        while on_offer <= set(self._offers) and not self.stopping.is_set() and not self.finished:
            self._decisions.expect_none_failed()
            fragment = self._replay.fragment_at(self.position)
            offered = self._offers.get(fragment)
            if offered is None:
                return  # the fragment whose turn it is has nothing on offer here
            if offered.encoding.done():
                offered.encoding.result()
            self._offers[fragment] = offered = self._waited_for(offered)
            left_s = offered.until_s - time.monotonic()
            if left_s <= 0:
                return
            decided = self._decisions.next(timeout_s=min(left_s, STOP_POLL_S))
            if decided is not None:
                self._take(decided)

    def _waited_for(self, offered: Offered) -> Offered:
        """Return a contribution with the times until which it is waited for from now on."""
        now_s = time.monotonic()
        is_alone = self._company is not None and self._company.is_alone
        if is_alone or self.progress.ahead().is_paused:
            return replace(offered, deadline_s=now_s + self._patience_s, hidden_until_s=math.inf)
        if self._hides and not self._awaits_step and offered.hidden_until_s == math.inf:
            return replace(offered, hidden_until_s=now_s + self._hidden_s)
        return offered

    @property
    def _awaits_step(self) -> bool:
        return not self._in_step and self._hidden_s > 0

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals, and the position of the log at which they were taken."""
        self.await_residuals()
        units = {} if self._held is None else {"units": [list(pair) for pair in self._held]}
        return {
            "position": self.position,
            "feedback": [residual.state_dict() for residual in self._residuals],
            **units,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after a restart, if the log shows what became of this peer's contributions."""
        saved, now = int(state["position"]), self.position
        # A contribution that was included since the save is still in the saved drift, and would
        # count twice.
        units = self._thread.ask(self._units_here)
        lost = "units" in state and not begins_with(_ranges(units), [*map(tuple, state["units"])])
        is_near = 0 <= now - saved <= self._far_behind
        if not is_near or lost or self._included_since(saved):
            why = f"saved at position {saved}, the run is at {now}: starting from the run's state"
            here, course = self._thread.ask(self._here)
            self._reset(Reset(state=here, why=why, course=course))
            return
        self._joining.clear()
        self.await_residuals()
        for residual, saved_state in zip(self._residuals, state["feedback"], strict=True):
            residual.load_state_dict(saved_state)
        current, self.progress.course = self._thread.ask(self._here)
        self.progress.position = current.position
        self._use_codec(self.progress.course.codec)
        # Each fragment moves by what the others decided since the save.
        for fragment in range(len(self._residuals)):
            self._deliver(
                Commit(
                    fragment=fragment,
                    position=current.position,
                    params_N=current.params_N,
                    included=None,
                    members=0,
                    course=self.progress.course,
                    units=units,
                )
            )
        self._held = _ranges(units) if self._counts_units else None

    # decisions

    @property
    def _counts_units(self) -> bool:
        return self.spec.data.num_units > 0

    def _units_here(self) -> tuple[int, ...]:
        return self._units_of(self._replica.standing.units or b"") if self._counts_units else ()

    def _units_of(self, stored: bytes) -> tuple[int, ...]:
        """Return the pass and this peer's units, as `Commit.units`; empty without `data.once`."""
        if not self._counts_units:
            return ()
        table = read_units(stored)
        held = table.held_by(self._ctx.me.peer_id)
        return (table.number, *(bound for pair in held for bound in pair))

    @property
    def _far_behind(self) -> int:
        """Positions behind the log beyond which open work is dropped."""
        return FAR_BEHIND * len(self._residuals)

    def _arrive(self, state: OuterState, course: Course) -> None:
        """Stand at a state that this peer did not reach by the log, with nothing on offer."""
        self.progress.position, self.progress.course = state.position, course
        self._offers.clear()
        self._use_codec(course.codec)
        self._in_step = False
        self._held = None
        self._joining = set(range(len(self._residuals))) if state.position else set()

    def _subscribe(self) -> tuple[OuterState, Course]:
        self._decisions.subscribe()
        return self._here()

    def _here(self) -> tuple[OuterState, Course]:
        return self._replica.state, self._replica.settings.course

    def _included_since(self, position: int) -> bool:
        count = self.position - position
        records = self._replica.store.headers(position, count)
        if len(records) < count:
            return True  # unknown: the log here begins later
        entries = (Entry.decode(record.entry) for record in records)
        return any(m.peer_id == self._ctx.me.peer_id for e in entries for m in e.members)

    def _take_all(self) -> None:
        behind = self._decisions.take_all()
        # A trainer that was suspended for so long takes the newest state at once.
        if len(behind) > self._far_behind:
            behind = [_leap_to(behind[-1], why=f"{len(behind)} positions behind")]
        for decided in behind:
            self._take(decided)

    def _take(self, decided: Settled | Reset) -> None:
        if isinstance(decided, Reset):
            self._reset(decided)
            return
        entry, state = decided.applied.entry, decided.applied.state
        included, offered = None, self._offers.get(entry.fragment)
        course = read_settings(entry.settings).course
        settles = offered is not None and (
            decided.settles == offered.number or course.codec != self._codec
        )
        if offered is not None and settles:
            if decided.included is not None:
                included = torch.tensor(decided.included, dtype=torch.bool)
            self._in_step = included is not None and bool(included.any())
            del self._offers[entry.fragment]
        self._settle_later(decided, offered, included)
        self._use_codec(course.codec)
        position = entry.position + 1  # the state may be of a later one
        self.progress.position, self.progress.course = position, course
        self._deliver(
            Commit(
                fragment=entry.fragment,
                position=position,
                params_N=state.params_N,
                included=included,
                settles=settles,
                members=len(entry.members),
                course=self.progress.course,
                units=self._units_of(entry.units),
            )
        )
        if offered is not None and settles and (included is None or not included.any()):
            self._drop_what_grew(decided, offered.offer.norm)
        if self._counts_units:
            done = offered is not None and included is not None and bool(included.any())
            self._follow_units(decided, offered.done_units if offered and done else 0)

    def _follow_units(self, decided: Settled, done: int) -> None:
        """Keep up with the units that this peer holds; drop its work if others got some of them."""
        before, self._held = self._held, _ranges(self._units_of(decided.applied.entry.units))
        if before is not None and not begins_with(self._held, split(before, done)[1]):
            self._reset(_leap_to(decided, why="its units of the run's rows were given to others"))
        elif before and not self._held:
            self._ctx.on_event("info", notices.no_rows_free())

    def _settle_later(
        self, decided: Settled, offered: Offered | None, included: Tensor | None
    ) -> None:
        """Settle the residual in the encoder's thread, after all that it was asked before."""
        while self._settling and self._settling[0].done():
            self._settling.popleft().result()
        try:
            settling = self._encoder.submit(self._settle_residual, decided, offered, included)
            self._settling.append(settling)
        except RuntimeError:  # closed: it takes nothing more, but ends what it has
            self.await_residuals()
            self._settle_residual(decided, offered, included)

    def _settle_residual(
        self, decided: Settled, offered: Offered | None, included: Tensor | None
    ) -> None:
        """Keep what an entry did not take of this peer's contribution, and of the part it owned."""
        entry, update_F = decided.applied.entry, decided.applied.update_F
        residual = self._residuals[entry.fragment]
        if offered is not None and included is not None:
            mine = next(m for m in entry.members if m.elector == self._ctx.me)
            share = mine.weight * mine.clip
            residual.settle(offered.offer, included, weight=share, update_F=update_F)
        for part, lost_N in decided.credits:
            residual.owner_credit(part, lost_N)

    def await_residuals(self) -> None:
        """Wait until nothing reads or changes a residual; raise what went wrong."""
        futures.wait([offered.encoding for offered in self._offers.values()])
        while self._settling:
            self._settling.popleft().result()

    def _drop_what_grew(self, decided: Settled, norm: float) -> None:
        """Drop work that was left out so often that it would outweigh the others' work."""
        entry = decided.applied.entry
        if self.method.every_step:
            return  # sends gradients: nothing was kept for the next one
        others = [m.norm for m in entry.members if m.weight > 0]
        ratio = drift_ratio(norm, others, after(entry).norm(entry.fragment))
        if ratio > DRIFT_CAP:
            why = f"it was left out of rounds and reached {ratio:.1f} times the median norm"
            self._reset(_leap_to(decided, why=f"{why}, more than {DRIFT_CAP:g} times"))

    def _reset(self, leap: Reset) -> None:
        state = leap.state
        self._ctx.on_event("warning", notices.work_dropped(reason=leap.why))
        self.await_residuals()  # the encoder may still be at work on them
        for residual in self._residuals:
            residual.reset()
        self._arrive(state, leap.course)
        self._deliver(
            Commit(
                position=state.position,
                params_N=state.params_N,
                included=None,
                members=0,
                reset=True,
                course=leap.course,
            )
        )


def _leap_to(decided: Settled | Reset, *, why: str) -> Reset:
    """Return what puts the trainer at the state that was decided, without its open work."""
    if isinstance(decided, Reset):
        return replace(decided, why=why)
    course = read_settings(decided.applied.entry.settings).course
    return Reset(state=decided.applied.state, why=why, course=course)


def _ranges(units: Sequence[int]) -> list[Range]:
    """Return the units of `Commit.units` as ranges."""
    return list(zip(units[1::2], units[2::2], strict=True))
