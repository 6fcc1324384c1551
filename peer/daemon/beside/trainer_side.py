"""The trainer's side of the network process: starting and ending it, asking it, its reducer.

    NetworkLine       questions and answers
    NetworkProcess    a line to a process of its own, from its start until `close`
    SeatReducer       what a training loop gets for its reducer

A thread reads what the process says; whoever asks waits for the answer. While it joins, it asks
too: for the consent of its owner, and for the first state of the run (`owner_side`). A view of
either process reaches the other one all the time, without a question.

The process is started with a fresh interpreter, so neither threads nor CUDA of this one matter. If
it dies, each question raises `NetworkLost`; if this process dies, it leaves the run and ends.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from atoll.coordinator.run.notice import Notice, Report
from atoll.coordinator.run.phases import OnPhase, RoundPhase
from atoll.coordinator.run.spec import RunSpec
from atoll.optim.ranks.residuals import Settlement
from atoll.optim.reducer import (
    AS_PLANNED,
    Commit,
    Contribution,
    Course,
    Reducer,
    Residual,
    Settle,
)
from atoll.optim.schedules import Timetable, WindowEnd
from atoll.optim.state import vectors
from atoll.optim.state.fragments import Difference, Fragment
from atoll.optim.state.layout import Layout
from atoll.peer.daemon.beside import starting
from atoll.peer.daemon.beside.channel import Channel, ChannelClosed
from atoll.peer.daemon.beside.segments import use_for_vectors
from atoll.peer.daemon.options import PeerOptions
from atoll.peer.daemon.tally import OnAccount
from atoll.peer.daemon.views import PeerView, RunFacts, TrainerView
from atoll.peer.errors import DataError, NetworkLost
from atoll.peer.extras import extra
from atoll.peer.pipeline.workbench import Workbench

if TYPE_CHECKING:
    from atoll.peer.daemon.beside.owner_side import OwnerSide

CLOSE_S = 50.0  # twice what a loop takes to leave, and what surrounds that
STOP_POLL_S = 0.1  # how soon the network process learns that the trainer should stop
VIEW_S = 0.1  # between two views of the trainer, for peers that plan when to meet it
EXIT_S = 10.0  # between the end of a channel and that of its process
ANSWER_S = 60.0  # after a stop, before the network process counts as stuck

_log = logging.getLogger(__name__)


class NetworkLine:
    """The line to a network side, which has joined a run."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        on_event: Report,
        on_phase: OnPhase = lambda phase, position, left=None: None,
        stopping: threading.Event,
    ) -> None:
        """Begin to read; `stopping` ends each wait."""
        self.stopping = stopping
        self.view = PeerView()
        """The peer, as it was when it last showed itself."""
        self.on_view: Callable[[PeerView], None] = lambda view: None
        """Takes each view, in another thread."""
        self.on_account: OnAccount = lambda account: None
        """Takes the peer's account of each round, in another thread."""
        self.bench = Workbench()
        """The jobs that a pipeline has for the trainer."""
        self.bench.report_to(lambda *report: self._send("report", *report))
        self._on_event, self._on_phase = on_event, on_phase
        self._told_to_stop = False
        self._numbers = itertools.count()
        self._joined: Future[RunFacts] = Future()
        self._requests: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        """Questions to the owner; None once there are no more."""
        self._waiting: dict[int, Future[Answer]] = {}
        self._closed = threading.Event()
        self._showing: threading.Thread | None = None
        self._parting: BaseException | None = None
        """Why the other side has left, if it failed."""
        self._lost: BaseException | None = None
        self._channel = Channel(connection)
        self._reader = threading.Thread(target=self._read, name="atoll-beside", daemon=True)
        self._reader.start()

    @property
    def facts(self) -> RunFacts:
        """The facts of the run, once the other side has joined."""
        facts: RunFacts = self._await(self._joined)
        return facts

    def expect_working(self) -> None:
        """Raise the failure, if there is one, after which the peer takes part in nothing."""
        if self._lost is not None:
            raise self._lost
        if self.view.failure is not None:
            raise self.view.failure

    def stored_all(self) -> bool:
        """Return whether the coordinator has all that the peer has to give it."""
        return bool(self.ask("stored_all").result)

    def storing(self) -> bool:
        """Return whether some of it is on its way."""
        return bool(self.ask("storing").result)

    def show(self, view_of: Callable[[], TrainerView]) -> None:
        """Let the other side see the trainer from now on; `view_of` is called in a thread."""
        self._send("trainer", view_of())
        self._showing = threading.Thread(
            target=self._keep_showing, args=(view_of,), name="atoll-view", daemon=True
        )
        self._showing.start()

    @property
    def sees_trainer(self) -> bool:
        """Return whether the other side has been shown a trainer."""
        return self._showing is not None

    def _keep_showing(self, view_of: Callable[[], TrainerView]) -> None:
        shown, is_over = view_of(), False
        with suppress(NetworkLost):
            while not is_over:
                is_over = self._closed.wait(VIEW_S)  # the last one is of the trainer's end
                # Not to a process that is frozen: who stops the trainer has to get through.
                if (view := view_of()) != shown and (is_over or self._channel.has_room):
                    shown = view
                    self._send("trainer", view)

    def ask(self, name: str, *values: Any) -> Answer:  # noqa: ANN401 - what a channel carries
        """Let the other side do something, after all that it was asked before; wait for it.

        Raises:
            NetworkLost: it is gone, or does not answer although it should stop.
        """
        future: Future[Answer] = Future()
        number = next(self._numbers)
        self._waiting[number] = future
        if self._lost is not None:
            raise self._lost
        self._send(name, number, *values)
        answer: Answer = self._await(future)
        return answer

    def close(self) -> None:
        """Let the other side leave the run, and wait until it has. Idempotent.

        Raises:
            Exception: whatever leaving raised.
        """
        self.stopping.set()
        self._closed.set()
        if self._showing is not None:
            self._showing.join()
        with suppress(ChannelClosed):
            self._channel.send("close")
        self._reader.join()
        self._channel.close()
        parting, self._parting = self._parting, None
        if parting is not None and self._joined.exception() is None:
            raise parting

    def _send(self, kind: str, *values: Any) -> None:  # noqa: ANN401 - what a channel carries
        try:
            self._channel.send(kind, *values)
        except ChannelClosed:
            self._reader.join()
            raise (self._lost or self._loss()) from None

    def _attend(self, owner: OwnerSide | None) -> None:
        """Wait until the other side has joined; meanwhile let the owner answer its questions."""
        deadline_s = math.inf
        while not self._joined.done():
            with suppress(queue.Empty):
                request = self._requests.get(timeout=STOP_POLL_S)
                if request is not None:
                    number, name, *values = request
                    self._send("reply", number, getattr(owner, name)(*values))
            deadline_s = self._pass_stop_on(deadline_s)
        self._joined.result()

    def _await(self, future: Future[Any]) -> Any:  # noqa: ANN401 - of the future
        deadline_s = math.inf
        while not futures.wait([future], timeout=STOP_POLL_S).done:
            deadline_s = self._pass_stop_on(deadline_s)
        return future.result()

    def _pass_stop_on(self, deadline_s: float) -> float:
        """Tell the other side of a stop; return until when to wait for it, at most `deadline_s`.

        Raises:
            NetworkLost: the deadline is over.
        """
        if self.stopping.is_set() and not self._told_to_stop:
            self._told_to_stop = True
            self._send("stop")
        now_s = time.monotonic()
        if now_s > deadline_s:
            raise NetworkLost(f"the network process has not answered for {ANSWER_S:.0f} s")
        return min(deadline_s, now_s + ANSWER_S) if self._told_to_stop else deadline_s

    # in the reader's thread

    def _read(self) -> None:
        failure: Exception | None = None
        try:
            while True:
                self._take(*self._channel.receive())
        except ChannelClosed:
            pass
        except Exception as error:  # of whoever takes the events, such as a closed output
            failure = error
            self._channel.shut()
        self._lose(failure)

    def _take(self, kind: str, values: tuple[Any, ...]) -> None:
        if kind == "answer":
            number, result, failure, news = values
            self._waiting.pop(number).set_result(Answer(result, failure, News(**news)))
        elif kind == "event":
            level, *told = values
            self._on_event(level, Notice(*told))
        elif kind == "phase":
            phase, position, left = values
            self._on_phase(RoundPhase(phase), position, left=left)
        elif kind == "account":
            self.on_account(*values)
        elif kind == "view":
            (self.view,) = values
            self.on_view(self.view)
        elif kind == "job":
            self.bench.put(*values)
        elif kind == "log":
            name, level, text = values
            logging.getLogger(name).log(level, "%s", text)
        elif kind == "request":
            self._requests.put(values)
        elif kind == "joined":
            self._joined.set_result(values[0])
            self._requests.put(None)
        elif kind == "left":
            self._parting = values[0]

    def _lose(self, failure: BaseException | None) -> None:
        """Let nobody wait any longer."""
        if not self._joined.done():
            failure = failure or self._parting
        self._lost = failure or self._loss()
        if not self._joined.done():
            self._joined.set_exception(self._lost)
            self._requests.put(None)
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(self._lost)

    def _loss(self) -> NetworkLost:
        """Return how the other side ended."""
        return NetworkLost("the network process of this peer has closed its channel")


class NetworkProcess(NetworkLine):
    """A network side in a process of its own."""

    def __init__(
        self,
        options: PeerOptions,
        *,
        on_event: Report,
        on_phase: OnPhase = lambda phase, position, left=None: None,
        stopping: threading.Event,
        owner: OwnerSide | None = None,
        timeout_s: float = math.inf,
        device: str = "",
    ) -> None:
        """Start it, and return once the peer holds a verified state.

        Args:
            options: what the peer's owner decides.
            on_event: takes what a person may want to read, in another thread.
            on_phase: takes the part of a round that the peer is in, in another thread.
            stopping: ends the wait, and each later one.
            owner: answers for this machine, in this thread; by default starting this is the owner's
                yes, and the first state is fetched.
            timeout_s: seconds for which to try to join.
            device: shown on the dashboard.

        Raises:
            NetworkLost: it has died.
            KeyboardInterrupt: `stopping` was set.
            Exception: as `open_peer`, or whatever the owner's answer raised.
        """
        use_for_vectors()
        ours, self._process = starting.take_ahead() or starting.started()

        def show(phase: RoundPhase, position: int, *, left: int | None = None) -> None:
            if owner is not None and phase is RoundPhase.RECOVER:
                owner.note_recovery()
            on_phase(phase, position, left=left)

        super().__init__(ours, on_event=on_event, on_phase=show, stopping=stopping)
        told = {"timeout_s": timeout_s, "device": device, "asks": owner is not None}
        try:
            self._send("join", _told(options) | told)
            self._attend(owner)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def close(self) -> None:
        """Leave the run and end the process. Idempotent.

        Raises:
            Exception: whatever leaving raised.
        """
        killer = threading.Timer(CLOSE_S, self._process.kill)
        killer.start()
        try:
            super().close()
        finally:
            self._process.wait()
            killer.cancel()

    def _loss(self) -> NetworkLost:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_S)
        code = self._process.returncode
        if code is None:
            how = "has closed its channel"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"has ended with code {code}"
        return NetworkLost(
            f"the network process of this peer {how}; start the peer again: it continues from its "
            "state directory"
        )


@dataclass(frozen=True, kw_only=True)
class News:
    """The outcome of the trainer's work since its last question."""

    settled: Sequence[Settlement]
    """The settlements of residuals that ranks keep."""
    commits: Sequence[Commit]
    position: int
    course: Course
    encode_s: float


@dataclass(frozen=True)
class Answer:
    """The network process's answer to a question."""

    result: Any
    failure: BaseException | None
    news: News


class SeatReducer(Reducer):
    """The reducer of a trainer whose network is beside it; see `RunReducer`."""

    def __init__(self, network: NetworkLine) -> None:
        """Take the run's facts from a network side that has joined; `close` ends it."""
        facts = network.facts
        self.spec = RunSpec.from_json(facts.spec)
        self.peer_id = facts.peer_id
        self.method = self.spec.method()
        """The run's method, whose `worker` goes into a training loop."""
        self.recovers = self.method.logged
        """True if `start` takes the parameters from a log that is stored."""
        self.stopping = network.stopping
        """Set when the peer should stop: the trainer then waits for nothing more."""
        self.network = network
        self.encode_s = 0.0
        """Seconds that encoding the last contribution took."""
        self._num_fragments = facts.num_fragments
        self._position = facts.position
        self.course = AS_PLANNED
        """The course of training at this position."""
        self._fragments: Sequence[Fragment] = ()
        self._settle: Settle | None = None
        self._residuals: Sequence[Residual] = ()
        """Kept by ranks; else the network process keeps them."""
        hides = self.method.hidden_steps(self.spec.outer.inner_steps) > 0
        self._room = vectors.OnceAWindow()
        if not hides and not self.method.every_step:
            vectors.keep_none()

    @property
    def position(self) -> int:
        """Entries of the log that the trainer has taken; by gossip, the round that it is in."""
        return self._position

    @property
    def fragments(self) -> Sequence[Fragment]:
        """The pieces into which the method cuts the run's model; known after `start`."""
        return self._fragments

    @property
    def timetable(self) -> Timetable:
        """Steps and windows of the run by position."""
        return self.spec.timetable(self._num_fragments)

    @property
    def finished(self) -> bool:
        """Return whether the run is complete: what is trained from here on reaches nobody."""
        return 0 < self.course.rounds(self.spec.run.rounds) <= self.position

    def encode_on(self, device: torch.device) -> None:
        """Encode contributions on a device from now on, if this run encodes any."""
        if device.type != "cpu":
            self._ask("encode_on", str(device))

    def start(self, layout: Layout, params_N: Tensor, settle: Settle) -> Tensor:
        """Join the run; the parameters come from the run, not from the caller.

        Raises:
            LayoutError: the model is not the run's.
        """
        self._settle = settle
        synced_N: Tensor = self._ask("start", layout.to_json())
        self._fragments = self.method.fragments(layout)
        return synced_N

    def submit(self, contribution: Contribution) -> None:
        """Offer a contribution at the next position of its fragment, once it is encoded.

        Raises:
            WorkRefused: its tokens or steps are absurd.
            CodecError, OSError, sqlite3.Error: as `wait`, where it waits.
        """
        if self._settle is None:
            raise RuntimeError("expected start() first")
        fields, delta = vars(contribution).copy(), contribution.delta
        del fields["delta"]
        self._room.settle(sum(fragment.numel for fragment in self._fragments))
        if isinstance(delta, Difference):
            self._ask("submit", fields, delta.a_F, delta.b_F, delta.spends)
        else:
            self._ask("submit", fields, delta, None, False)

    def wait(self) -> None:
        """Deliver what is decided, until the contribution that is due is; see `Reducer`.

        Ends also when the peer stops or the run is complete.

        Raises:
            CodecError: what was submitted can't be encoded.
            OSError, sqlite3.Error: the disk is full or failed.
            NetworkLost: the network process has died.
        """
        self._ask("wait")

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a restart needs to continue in the same bits."""
        state: dict[str, Any] = self._ask("state_dict")
        if self._residuals:
            state["feedback"] = [residual.state_dict() for residual in self._residuals]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after a restart, if the log shows what became of this peer's contributions."""
        self._ask("load_state_dict", dict(state))

    def build_model(
        self,
        *,
        allow_model: str | None = None,
        any_source: bool = False,
        tokenizer: str | None = None,
        init: str | None = None,
    ) -> nn.Module:
        """Build the run's model from its spec, on the CPU; joining replaces its weights.

        Args:
            allow_model: the custom model, as `module:function`, if the spec names one. It is code
                on this machine, and runs only if it is named here too.
            any_source: accept a custom model of another source than the run's.
            tokenizer: this machine's copy of the tokenizer, if the spec names a file. One that
                travels with the run is fetched, and kept in the state directory.
            init: this machine's copy of the weights with which the run begins, needed if some of
                them stay frozen.

        Raises:
            ModelError: the model is not allowed, is of another source, or cannot be built.
            DataError: the tokenizer is not named here, is another, did not arrive, or cannot be
                opened.
            TimeoutError: the tokenizer took too long to arrive.
        """
        from atoll.peer.training.data.tokens import BYTES
        from atoll.peer.training.opening import build_model, open_tokenizer
        from atoll.peer.training.permission import Allowed, with_own_files

        named, sent = self.spec.data.tokenizer, None
        if named != BYTES and tokenizer is None and self.spec.data.tokenizer_bytes is not None:
            extra("tokenizers", "the run's tokenizer")
            sent = Path(self._ask("fetch_tokenizer"))
        elif named != BYTES and tokenizer is None:
            raise DataError(
                f"the run's tokenizer is the file {named!r} of the organiser's machine; give the "
                "path of a copy: build_model(tokenizer=PATH)"
            )
        allowed = Allowed(
            models=frozenset({allow_model} if allow_model else ()),
            files=frozenset(name for name in (tokenizer, init) if name is not None),
            sent_tokenizer=sent,
            any_source=any_source,
        )
        spec = with_own_files(
            self.spec, data=None, tokenizer=tokenizer, init=init, sent_tokenizer=sent
        )
        vocab_size = open_tokenizer(spec, allowed).vocab_size
        return build_model(spec, vocab_size, allowed, own_loop=True)

    # what the peer knows of the others

    def validates(self, position: int) -> bool:
        """Return whether it is this peer's turn to validate a position."""
        return bool(self._ask("validates", position))

    def paces_s(self) -> Sequence[float]:
        """Return the seconds a step takes each other trainer that reports them."""
        paces_s: Sequence[float] = self._ask("paces_s")
        return paces_s

    def window_ends(self) -> Sequence[WindowEnd]:
        """Return when the windows of other trainers at this position end."""
        ends: Sequence[WindowEnd] = self._ask("window_ends")
        return ends

    def joins(self) -> bool:
        """Return whether the open window counts nothing, as the first one after joining."""
        return bool(self._ask("joins"))

    # for the ranks of a peer (`atoll.optim.ranks`)

    def leave_residuals(self, keep: Callable[[int], Residual]) -> None:
        """Let `keep(fragment)` keep each residual; contributions then hold an `Offer`."""
        self._ask("leave_residuals")
        self._residuals = [keep(fragment) for fragment in range(self._num_fragments)]

    def weight_of(self, fragment: int, tokens: int, steps: int) -> float:
        """Return the weight at which a contribution has to be encoded now.

        Raises:
            WorkRefused: its tokens or steps are absurd.
        """
        return float(self._ask("weight_of", fragment, tokens, steps))

    def await_residuals(self) -> None:
        """Wait until all that was decided has been settled."""
        self._ask("await_residuals")

    def close(self) -> None:
        """Leave the run: roster, connections, the network process. Idempotent."""
        self.network.close()

    def _ask(self, name: str, *values: Any) -> Any:  # noqa: ANN401 - what a channel carries
        """Ask the network process, deliver what was decided meanwhile, and return the answer."""
        answer = self.network.ask(name, *values)
        news = answer.news
        for entry in news.settled:
            entry.write_to(self._residuals[entry.fragment])
        for commit in news.commits:
            self._position = commit.position
            assert self._settle is not None, "a reducer settles only after start"
            self._settle(commit)
        self._position, self.encode_s = news.position, news.encode_s
        self.course = news.course
        if answer.failure is not None:
            raise answer.failure
        return answer.result


def _told(options: PeerOptions) -> dict[str, Any]:
    """Return what the network process has to know, as a channel carries it."""
    rates = options.rates
    return {
        "invite": str(options.invite),
        "state_dir": str(options.state_dir.absolute()),
        "name": options.name,
        "listen": options.listen,
        "announce": options.announce,
        "rates": (rates.uplink_mbit_s, rates.downlink_mbit_s, rates.most_mbit_s),
        "relay_mbit_s": options.relay_mbit_s,
        "state_on_disk": options.state_on_disk,
        "metrics_listen": options.metrics_listen,
        "moved": options.moved,
        "threads": torch.get_num_threads(),
        "level": logging.getLogger("atoll").getEffectiveLevel(),
    }
