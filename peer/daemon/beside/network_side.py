"""The network process: joins a run for a trainer and takes part in it, until the trainer ends.

    python -m atoll.peer.daemon.beside.network_side DESCRIPTOR

The main thread does what the trainer asks, in order; it is the trainer's thread of the reducer. A
second one reads the channel, so that a stop reaches a reducer that waits. A third one returns
memory, and notices the trainer's death where the end of the channel does not show it: a process
that the trainer has forked may hold it open.

The trainer alone decides when to stop: signals of the terminal, or of a service manager, mean it,
and are ignored here.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.phases import RoundPhase
from atoll.optim.ranks.residuals import RemoteResidual, Settlement
from atoll.optim.reducer import Commit, Contribution
from atoll.optim.state.layout import Difference, Layout
from atoll.peer.daemon.beside.channel import Channel, ChannelClosed
from atoll.peer.daemon.beside.segments import use_for_vectors
from atoll.peer.daemon.joining import open_reducer
from atoll.peer.daemon.options import LinkRates, PeerOptions
from atoll.peer.daemon.reducer import NetworkReducer, RunReducer

LOOK_S = 0.1  # so long does memory wait that is no longer used here
LEAVE_S = 50.0  # after the trainer's death; a goodbye takes half of it at most

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
        self._commits: list[Commit] = []
        """Settled while the trainer's last question was answered."""
        self._ledger: deque[Settlement] = deque()
        """Settlements of residuals that the trainer's ranks keep."""
        self._reducer: RunReducer | None = None
        self._answers: dict[str, Callable[..., Any]] = {
            "start": self._start,
            "submit": self._submit,
            "wait": lambda: self.reducer.wait(),
            "state_dict": lambda: self.reducer.state_dict(),
            "load_state_dict": lambda state: self.reducer.load_state_dict(state),
            "fetch_tokenizer": lambda: str(self.reducer.fetch_tokenizer()),
            "leave_residuals": self._leave_residuals,
            "weight_of": lambda *window: self._led.weight_of(*window),
            "await_residuals": lambda: self._led.await_residuals(),
        }
        for work in (self._read, self._look):
            threading.Thread(target=work, name=f"atoll{work.__name__}", daemon=True).start()

    @property
    def reducer(self) -> RunReducer:
        """The trainer's reducer, once this peer has joined."""
        assert self._reducer is not None, "a trainer asks for nothing before"
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
        self._ended.set()
        with suppress(ChannelClosed):
            self._channel.send("left", failure)
        self._channel.shut()

    def serve(self, reducer: RunReducer) -> None:
        """Do what the trainer asks until it closes or is gone, then leave the run."""
        self._reducer, self._stopping = reducer, reducer.stopping
        with closing(reducer):
            facts = {
                "spec": reducer.spec.canonical(),
                "peer_id": reducer.peer_id,
                "position": reducer.position,
                "num_fragments": reducer.progress.num_fragments,
            }
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
            self._stopping.set()
            self._asked.put(None)
        elif kind != "notices":
            self._asked.put((kind, values))

    def _lose_trainer(self) -> None:
        """Leave the run, as nobody is there to train; end at once if that was under way."""
        if not self._ended.is_set():
            if self._closing:
                os._exit(1)  # a second Ctrl-C: the trainer did not want to wait for it
            self._stopping.set()
            self._asked.put(None)
            if not self._ended.wait(LEAVE_S):
                os._exit(1)
        self._channel.close()

    def _look(self) -> None:
        trainer = os.getppid()
        with suppress(ChannelClosed):
            while not self._ended.wait(LOOK_S):
                self._channel.send_notices()
                if os.getppid() != trainer:
                    self._channel.shut()  # the reader does the rest
                    return

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
        progress = self.reducer.progress
        news = {
            "settled": [self._ledger.popleft() for _ in range(len(self._ledger))],
            "commits": self._commits.copy(),
            "position": progress.position,
            "encode_s": progress.encode_s,
        }
        self._commits.clear()
        with suppress(ChannelClosed):  # the reader notices it too
            self._channel.send("answer", number, result, failure, news)
        return True

    # joining

    def _join(self) -> RunReducer:
        asked = self._asked.get()
        if asked is None:  # the trainer was gone, or had closed, before
            raise KeyboardInterrupt
        _, (told,) = asked
        torch.set_num_threads(told["threads"])
        self._send_logs(told["level"])
        reducer = open_reducer(
            options_of(told),
            on_event=self._on_event,
            on_phase=self._on_phase,
            stopping=self._stopping,
            timeout_s=told["timeout_s"],
        )
        reducer.progress.device = told["device"]
        return reducer

    def _on_event(self, level: Level, text: str) -> None:
        with suppress(ChannelClosed):
            self._channel.send("event", level, text)

    def _on_phase(self, phase: RoundPhase, position: int, *, left: int | None = None) -> None:
        with suppress(ChannelClosed):
            self._channel.send("phase", str(phase), position, left)

    def _send_logs(self, level: int) -> None:
        """Let the trainer's process write what is logged here."""
        root = logging.getLogger()
        root.handlers = [_ToTrainer(self._channel)]
        _log.setLevel(level)

    # the reducer

    def _start(self, layout: str) -> Tensor:
        return self.reducer.start(Layout.from_json(layout), torch.empty(0), self._commits.append)

    def _submit(self, fields: Mapping[str, Any], a_F: Tensor, b_F: Tensor | None) -> None:
        delta: Any = a_F
        if b_F is not None:
            delta = Difference(self.reducer.fragments[fields["fragment"]], a_F, b_F)
        self.reducer.submit(Contribution(delta=delta, **fields))

    @property
    def _led(self) -> NetworkReducer:
        """The reducer of a trainer of several ranks, which have a log."""
        assert isinstance(self.reducer, NetworkReducer), "pairs have one process each"
        return self.reducer

    def _leave_residuals(self) -> None:
        self._led.leave_residuals(lambda fragment: RemoteResidual(fragment, self._ledger))


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
        rates=LinkRates(uplink_mbit_s=told["rates"][0], downlink_mbit_s=told["rates"][1]),
        relay_mbit_s=told["relay_mbit_s"],
    )


def main() -> None:
    """Serve the trainer that has started this process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # Not SIG_IGN, which p2pd would inherit.
        signal.signal(number, lambda number, frame: None)
    use_for_vectors()
    NetworkSide(Channel(socket.socket(fileno=int(sys.argv[1])))).run()


if __name__ == "__main__":
    main()
