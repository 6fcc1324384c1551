"""The network process: joins a run for a trainer and takes part in it, until the trainer ends.

The main thread does what the trainer asks, in order; it is the trainer's thread of the reducer. A
second one reads the channel, so that a stop reaches a reducer that waits. A third one shows how far
the peer is, returns memory, and notices the trainer's death where the end of the channel does not
show it: a process that the trainer has forked may hold it open. In a pipeline, a fourth one brings
the trainer its jobs.

The trainer alone decides when to stop: signals of the terminal, or of a service manager, mean it,
and are ignored here.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import queue
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.notice import Notice
from atoll.coordinator.run.phases import RoundPhase
from atoll.coordinator.run.spec import RunSpec
from atoll.optim.ranks.residuals import RemoteResidual, Settlement
from atoll.optim.reducer import Commit, Contribution
from atoll.optim.state.fragments import Difference
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.peer import notices
from atoll.peer.daemon.beside.channel import Channel, ChannelClosed
from atoll.peer.daemon.beside.segments import use_for_vectors
from atoll.peer.daemon.joining import open_peer
from atoll.peer.daemon.loop_thread import LoopThread
from atoll.peer.daemon.membership import FetchTokenizer, Membership
from atoll.peer.daemon.options import LinkRates, PeerOptions, StageMove
from atoll.peer.daemon.peer import Peer
from atoll.peer.daemon.reducer import NetworkReducer, RunReducer
from atoll.peer.daemon.sent_tokenizer import keep_tokenizer
from atoll.peer.daemon.state_directory import note_leaving
from atoll.peer.daemon.tally import Account
from atoll.peer.daemon.views import PeerView, RunFacts, TrainerView
from atoll.peer.errors import SetupError
from atoll.peer.paths import PeerPaths
from atoll.peer.pipeline.placement import StageNeeds

if TYPE_CHECKING:
    from atoll.peer.daemon.pipeline_run import PipelineRun

LOOK_S = 0.1  # so long does memory wait that is no longer used here
JOB_S = 0.2  # how soon the thread that brings jobs notices the end
LEAVE_S = 50.0  # after the trainer's death; a goodbye takes half of it at most

IGNORED = (signal.SIGINT, signal.SIGTERM)
"""The trainer blocks them for the time of this process's start."""

_log = logging.getLogger("atoll")


class NetworkSide:
    """One peer of one run, for the trainer at the other end of a channel."""

    def __init__(self, channel: Channel) -> None:
        """Begin to read the channel."""
        self._channel = channel
        self._stopping = threading.Event()
        self._closing = False
        """The trainer has asked this process to end."""
        self._ended = threading.Event()
        self._asked: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._requests: dict[int, Future[Any]] = {}
        """Questions to the owner, while this peer joins."""
        self._commits: list[Commit] = []
        """Settled while the trainer's last question was answered."""
        self._ledger: deque[Settlement] = deque()
        """Settlements of residuals that the trainer's ranks keep."""
        self._peer: Peer | None = None
        self._reducer: RunReducer | None = None
        self._trainer: TrainerView | None = None
        """The trainer's last report; None before the first."""
        self._moves: StageMove | None = None
        self._shown = PeerView()
        self._showing = threading.Lock()
        self._answers: dict[str, Callable[..., Any]] = {
            "start": self._start,
            "submit": self._submit,
            "wait": lambda: self.reducer.wait(),
            "state_dict": lambda: self.reducer.state_dict(),
            "load_state_dict": lambda state: self.reducer.load_state_dict(state),
            "encode_on": self._encode_on,
            "fetch_tokenizer": lambda: str(self.reducer.fetch_tokenizer()),
            "leave_residuals": self._leave_residuals,
            "weight_of": lambda *window: self._led.weight_of(*window),
            "await_residuals": lambda: self._led.await_residuals(),
            "validates": lambda position: self.peer.validates(position),
            "paces_s": lambda: self.peer.paces_s(),
            "window_ends": lambda: self.peer.window_ends(),
            "joins": lambda: self.reducer.joins,
            "stored_all": lambda: self.peer.run.stored_all(),
            "storing": lambda: self.peer.run.storing(),
            "open_stage": self._open_stage,
            "serve_texts": self._serve_texts,
        }
        for work in (self._read, self._look):
            threading.Thread(target=work, name=f"atoll{work.__name__}", daemon=True).start()

    @property
    def peer(self) -> Peer:
        """The peer, once it has joined."""
        assert self._peer is not None, "a trainer asks for nothing before"
        return self._peer

    @property
    def reducer(self) -> RunReducer:
        """The trainer's reducer, once this peer has joined; a keeper has none."""
        assert self._reducer is not None, "only a trainer asks for it"
        return self._reducer

    def run(self) -> None:
        """Join, do what the trainer asks until it closes or is gone, and leave."""
        failure: BaseException | None = None
        try:
            self.serve(self._join())
        except BaseException as error:
            failure = error
        self.end(failure)

    def end(self, failure: BaseException | None) -> None:
        """Tell the trainer that this peer has left, and why if it failed."""
        self._show()
        self._ended.set()
        with suppress(ChannelClosed):
            self._channel.send("left", failure)
        self._channel.shut()

    def serve(self, thread: LoopThread[Peer]) -> None:
        """Do what the trainer asks until it closes or is gone, then leave the run."""
        peer, self._stopping = thread.value, thread.stopping
        self._reducer = None if peer.is_keeper else peer.run.reducer(thread)
        self._peer = peer
        with closing(self._reducer or thread):
            peer.run.reporter.tally.watch(self._on_account)
            facts = RunFacts(
                spec=peer.spec.canonical(),
                peer_id=peer.peer_id,
                module=peer.module,
                position=peer.position,
                num_fragments=peer.run.progress.num_fragments,
                is_keeper=peer.is_keeper,
            )
            self._show()
            self._channel.send("joined", facts)
            while self._answer(self._asked.get()):
                pass

    # the channel

    def _read(self) -> None:
        try:
            while True:
                self._take(*self._channel.receive())
        except ChannelClosed:
            self._lose_trainer()

    def _take(self, kind: str, values: tuple[Any, ...]) -> None:
        if kind == "stop":
            self._stopping.set()
        elif kind == "close":
            self._closing = True
            self._stop()
        elif kind == "reply":
            number, result = values
            request = self._requests.pop(number)
            if request.set_running_or_notify_cancel():
                request.set_result(result)
        elif kind == "trainer":
            self._take_trainer(*values)
        elif kind == "report":
            result, given, named = values
            self._staged.bench.report(result, *given, **named)
        elif kind != "notices":
            self._asked.put((kind, values))

    def _take_trainer(self, view: TrainerView) -> None:
        is_first, self._trainer = self._trainer is None, view
        if is_first:
            self.peer.run.progress.watch(lambda: self._trainer or view)

    def _stop(self) -> None:
        """Leave as soon as the trainer's last question is answered; ask the owner nothing more."""
        self._stopping.set()
        self._asked.put(None)
        for request in list(self._requests.values()):
            request.cancel()

    def _lose_trainer(self) -> None:
        """Leave the run, as nobody is there to train; end at once if that was under way."""
        if not self._ended.is_set():
            if self._closing:
                os._exit(1)  # a second Ctrl-C: the trainer did not want to wait for it
            if self._peer is not None:
                with suppress(OSError):  # whoever starts this peer again is then refused
                    note_leaving(self._peer.paths)
            self._stop()
            if not self._ended.wait(LEAVE_S):
                os._exit(1)
        self._channel.close()

    def _look(self) -> None:
        trainer = os.getppid()
        with suppress(ChannelClosed):
            while not self._ended.wait(LOOK_S):
                self._channel.send_notices()
                self._show()
                if os.getppid() != trainer:
                    self._channel.shut()  # the reader does the rest
                    return

    def _show(self) -> None:
        """Show the trainer how far this peer is, if that is news."""
        if self._peer is None:
            return
        with self._showing, suppress(ChannelClosed):
            view = self._view(self._peer)
            if view != self._shown:
                self._shown = view
                self._channel.send("view", view)

    def _view(self, peer: Peer) -> PeerView:
        failure = None
        try:
            peer.run.expect_working()
        except Exception as error:
            failure = error
        return PeerView(
            position=peer.position,
            course=peer.run.progress.ahead(),
            is_complete=bool(peer.module) and self._staged.is_complete,
            moves=self._moves,
            failure=failure,
        )

    def _answer(self, asked: tuple[str, tuple[Any, ...]] | None) -> bool:
        """Do what the trainer asks; return False if that is to end."""
        if asked is None:
            return False
        name, (number, *values) = asked
        result, failure = None, None
        try:
            result = self._answers[name](*values)
        except Exception as error:
            failure = error
        progress = self.peer.run.progress
        news = {
            "settled": [self._ledger.popleft() for _ in range(len(self._ledger))],
            "commits": self._commits.copy(),
            "position": progress.position,
            "course": progress.course,
            "encode_s": progress.encode_s,
        }
        self._commits.clear()
        with suppress(ChannelClosed):  # the reader notices it too
            self._channel.send("answer", number, result, failure, news)
        return True

    # joining

    def _join(self) -> LoopThread[Peer]:
        asked = self._asked.get()
        if asked is None:  # the trainer was gone, or had closed, before
            raise KeyboardInterrupt
        _, (told,) = asked
        torch.set_num_threads(told["threads"])
        _log.setLevel(told["level"])
        options, asks = options_of(told), told["asks"]
        thread = open_peer(
            options,
            on_event=self._on_event,
            on_phase=self._on_phase,
            stopping=self._stopping,
            admit=partial(self._admit, PeerPaths(root=options.state_dir)) if asks else None,
            make_first=self._make_first if asks else None,
            timeout_s=told["timeout_s"],
        )
        thread.value.run.progress.device = told["device"]
        return thread

    async def _admit(
        self, paths: PeerPaths, membership: Membership, fetch_tokenizer: FetchTokenizer
    ) -> None:
        """Let the owner be asked; see `owner_side`."""
        spec, is_keeper = membership.spec, membership.role == "keeper"
        layout = membership.layout.to_json()
        asked = self._ask_owner("admit", spec.canonical(), layout, membership.module, is_keeper)
        if await asyncio.wrap_future(asked):
            await keep_tokenizer(
                spec,
                fetch_tokenizer,
                paths.tokenizer,
                show=partial(self._on_event, "info"),
            )
            await asyncio.wrap_future(self._ask_owner("expect_tokenizer"))

    def _make_first(self, spec: RunSpec, module: str) -> OuterState:
        """Let the trainer's process build the first state, as it has the model's code."""
        made = self._ask_owner("first_state", module).result()
        if made is None:
            raise SetupError("the first state cannot be built on this machine")
        layout, params_N, memory_M = made
        return OuterState.genesis(Layout.from_json(layout), params_N, memory_M)

    def _ask_owner(self, name: str, *values: Any) -> Future[Any]:  # noqa: ANN401 - of a channel
        """Ask the trainer's process; cancelled if it closes."""
        number, future = next(self._numbers), Future[Any]()
        self._requests[number] = future
        if self._stopping.is_set():
            future.cancel()
        self._channel.send("request", number, name, *values)
        return future

    def _on_event(self, level: Level, notice: Notice) -> None:
        self._show()  # first, as what is told is of the position that was reached
        with suppress(ChannelClosed):
            told = Notice.of(notice)
            self._channel.send("event", level, str(told), told.code, told.fields)

    def _on_phase(self, phase: RoundPhase, position: int, *, left: int | None = None) -> None:
        with suppress(ChannelClosed):
            self._channel.send("phase", str(phase), position, left)

    def _on_account(self, account: Account) -> None:
        with suppress(ChannelClosed):
            self._channel.send("account", account)

    # the reducer

    def _start(self, layout: str) -> Tensor:
        return self.reducer.start(Layout.from_json(layout), torch.empty(0), self._commits.append)

    def _submit(
        self, fields: Mapping[str, Any], a_F: Tensor, b_F: Tensor | None, spends: bool
    ) -> None:
        delta: Any = a_F
        if b_F is not None:
            fragment = self.reducer.fragments[fields["fragment"]]
            delta = Difference(fragment, a_F, b_F, spends=spends)
        self.reducer.submit(Contribution(delta=delta, **fields))

    def _encode_on(self, device: str) -> None:
        """Encode on a GPU from now on, in a context of this process, if there is room for one."""
        try:
            torch.zeros(1, device=device)
        except RuntimeError as error:  # it serves one process alone, or is full
            self._on_event("info", notices.cpu_encodes(reason=str(error)))
            return
        self.reducer.encode_on(torch.device(device))

    @property
    def _led(self) -> NetworkReducer:
        """The reducer of a trainer of several ranks, which have a log."""
        assert isinstance(self.reducer, NetworkReducer), "pairs have one process each"
        return self.reducer

    def _leave_residuals(self) -> None:
        self._led.leave_residuals(lambda fragment: RemoteResidual(fragment, self._ledger))

    # a stage of a pipeline

    @property
    def _staged(self) -> PipelineRun:
        assert self.peer.module, "only the trainer of a stage asks for it"
        return cast("PipelineRun", self.peer.run)  # which a whole model's peer does not load

    def _open_stage(
        self, shape: Mapping[str, int], needs: Sequence[StageNeeds], device_bytes: int
    ) -> None:
        from atoll.peer.training.stages import Shape

        run = self._staged
        run.on_move = self._set_out
        threading.Thread(target=self._bring_jobs, name="atoll-jobs", daemon=True).start()
        run.open_stage(Shape(**shape), needs, device_bytes)

    def _bring_jobs(self) -> None:
        with suppress(ChannelClosed):
            while not self._ended.is_set():
                if (job := self._staged.bench.take(JOB_S)) is not None:
                    self._channel.send("job", job)

    def _set_out(self) -> None:
        self._moves = self._staged.moves
        self._show()

    def _serve_texts(self, told: Mapping[str, Any]) -> None:
        from atoll.peer.daemon.beside.texts import open_texts

        open_texts(self._staged, told)


class _ToTrainer(logging.Handler):
    """Sends records to the trainer's process as text."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(ChannelClosed):
            self._channel.send("log", record.name, record.levelno, self.format(record))


def options_of(told: Mapping[str, Any]) -> PeerOptions:
    """Return the options that a trainer has sent."""
    return PeerOptions(
        invite=Invite.decode(told["invite"]),
        state_dir=Path(told["state_dir"]),
        name=told["name"],
        listen=told["listen"],
        announce=told["announce"],
        rates=LinkRates(
            uplink_mbit_s=told["rates"][0],
            downlink_mbit_s=told["rates"][1],
            most_mbit_s=told["rates"][2],
        ),
        relay_mbit_s=told["relay_mbit_s"],
        state_on_disk=told["state_on_disk"],
        metrics_listen=told["metrics_listen"],
        moved=told["moved"],
    )


def serve(connection: socket.socket) -> None:
    """Be the network process of the trainer at the other end of a connection."""
    for number in IGNORED:
        # Not SIG_IGN, which p2pd would inherit.
        signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    use_for_vectors()
    channel = Channel(connection)
    # The trainer's process writes what is logged here: one file has one writer.
    logging.getLogger().handlers = [_ToTrainer(channel)]
    NetworkSide(channel).run()
    gc.freeze()  # the interpreter's last search for garbage, in all of torch, takes a second
