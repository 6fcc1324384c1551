"""The processes of a peer of several ranks: starting them, and starting them again.

`atoll peer --gpus` starts a process a GPU, and watches them. When one is killed or lost, the others
are of no use: all end, and start again from the state that they have saved. torchrun does
the same with `--max-restarts`, and across machines.

    launcher      starts and watches; holds a pipe at whose end the ranks stop, however it ends
    rank 0        joins the run, trains, and decides when all stop
    other ranks   train, and follow rank 0

A rank that lost another one, or its network process, exits with `LOST`. What rank 0 exits with
otherwise is final: a run that is complete, a refusal, an error that a restart would not cure.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from atoll.coordinator.run.notice import Notice
from atoll.optim.ranks import RanksError
from atoll.peer import notices
from atoll.peer.daemon.consent import Ask
from atoll.peer.daemon.process import (
    OK,
    OnPeerEvent,
    PeerEvent,
    RunOptions,
    follow,
    run_peer,
    stop_on_signals,
)
from atoll.peer.daemon.shifts import Rule, Shifts
from atoll.peer.daemon.supervised import stop_with_stdin
from atoll.peer.errors import NetworkLost
from atoll.peer.training.learner import StartSmaller
from atoll.peer.training.ranks import STORE, is_one_of_several, several_ranks

LOST = 75  # EX_TEMPFAIL of sysexits.h: another try may succeed
SMALLER = 76  # of a rank that was out of memory: the next try takes smaller pieces of a batch
PIPE = "ATOLL_RANKS_PIPE"  # environment variable: a pipe whose other end the launcher holds
POLL_S = 0.2
END_S = 30.0  # ranks notice the loss of one at their next meeting; then they are killed
SOON_S = 120.0  # a rank that dies sooner may do so each time
MAX_SOON = 3  # such starts in a row


def follow_launcher() -> None:
    """Stop when the launcher has ended; without one, as under torchrun, do nothing."""
    if (pipe := os.environ.get(PIPE)) is not None:
        stop_with_stdin(int(pipe))


def run_rank(options: RunOptions, *, on_event: OnPeerEvent, ask: Ask | None) -> int:
    """Run this process as one rank of a peer; return the exit code.

    Raises:
        Exception: as `join_and_train`, or `follow`.
    """
    if not is_one_of_several():
        return run_peer(options, on_event=on_event, ask=ask)
    try:
        with several_ranks(options.device) as (ranks, device):
            options = replace(options, ranks=ranks, device=device)
            if ranks.leads:
                return run_peer(options, on_event=on_event, ask=ask)
            # The first rank gets the same signals, and tells all when they stop.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            follow(options)
            return OK
    except (NetworkLost, RanksError) as error:
        text = notices.rank_failed(rank=os.environ["RANK"], reason=str(error))
        on_event(PeerEvent(kind="event", position=0, text=text, level="warning"))
        return SMALLER if isinstance(error, StartSmaller) else LOST


def launch(
    arguments: Sequence[str], ranks: int, *, on_event: OnPeerEvent, rules: Sequence[Rule] = ()
) -> int:
    """Run a peer of several ranks on this machine; return the exit code.

    Args:
        arguments: of the command `atoll`, for each rank.
        ranks: their number.
        on_event: takes what happens to them.
        rules: of the owner, when to train.
    """
    crew: Crew | None = None
    stopped = threading.Event()
    shifts = Shifts(rules=rules, tell=partial(_tell, on_event))

    def stop() -> None:
        stopped.set()
        if crew is not None:
            crew.stop(received[-1])

    soon = 0
    with stop_on_signals(stop) as received, tempfile.TemporaryDirectory() as folder:
        while shifts.await_next(stopped):
            began_s = time.monotonic()
            crew = Crew(arguments, ranks, Path(folder))
            if received:  # while they were started
                crew.stop(received[-1])
            with shifts.watching(partial(crew.stop, signal.SIGTERM)) as closed:
                codes = crew.wait()
            if closed.is_set() and codes[0] == OK and not received:
                continue  # a run that is complete ends at the beginning of the next shift
            if not is_lost(codes) or received:
                return codes[0] if codes[0] >= 0 else 128 - codes[0]
            if SMALLER not in codes:  # pieces end at single sequences
                soon = soon + 1 if time.monotonic() - began_s < SOON_S else 0
            if soon == MAX_SOON:
                text = notices.ranks_given_up(times=MAX_SOON)
                on_event(PeerEvent(kind="event", position=0, text=text, level="error"))
                return 1
            text = notices.rank_lost(ranks=ranks)
            on_event(PeerEvent(kind="event", position=0, text=text, level="warning"))
        return 128 + received[-1]


def is_launched() -> bool:
    """Return whether this process is a rank that `launch` has started."""
    return PIPE in os.environ


def _tell(on_event: OnPeerEvent, text: Notice) -> None:
    on_event(PeerEvent(kind="event", position=0, text=text))


def is_lost(codes: Sequence[int]) -> bool:
    """Return whether starting again may help: a rank was killed, or the first one lost another.

    Args:
        codes: what the ranks exited with, the first one first; below 0 if a signal has ended them,
            `SMALLER` if it was out of memory.
    """
    return codes[0] == LOST or SMALLER in codes or any(code < 0 for code in codes)


class Crew:
    """The processes of one start."""

    def __init__(self, arguments: Sequence[str], ranks: int, folder: Path) -> None:
        """Start them."""
        descriptor, store = tempfile.mkstemp(dir=folder)  # a new one each time: it holds addresses
        os.close(descriptor)
        os.unlink(store)
        pipe, self._held = os.pipe()
        try:
            self._processes = [
                start_rank(
                    arguments,
                    environment(rank, ranks, store=store, pipe=pipe),
                    pipe,
                    leads=rank == 0,
                )
                for rank in range(ranks)
            ]
        finally:
            os.close(pipe)

    def stop(self, number: int) -> None:
        """Pass a signal on to rank 0, which ends the training; the others follow it."""
        with suppress(ProcessLookupError):
            self._processes[0].send_signal(number)

    def wait(self) -> list[int]:
        """Wait until all have ended; return what they exited with, by rank.

        When one has ended, the others have `END_S` to do so; then they are killed, which counts as
        `LOST`.
        """
        while all(process.poll() is None for process in self._processes):
            time.sleep(POLL_S)
        deadline_s = time.monotonic() + END_S
        codes = []
        for process in self._processes:
            try:
                codes.append(process.wait(max(0.0, deadline_s - time.monotonic())))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                codes.append(LOST)
        os.close(self._held)
        return codes


def start_rank(
    arguments: Sequence[str], variables: dict[str, str], pipe: int, *, leads: bool
) -> subprocess.Popen[bytes]:
    """Start the command `atoll` as a rank that inherits one end of a pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", "atoll.peer.cli.main", *arguments],
        env=variables,
        pass_fds=(pipe,),
        stdin=None if leads else subprocess.DEVNULL,
        start_new_session=True,  # one Ctrl-C reaches rank 0 once: through us
    )


def environment(rank: int, ranks: int, *, store: str, pipe: int) -> dict[str, str]:
    """Return a rank's environment variables: those of torchrun, and ours."""
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        STORE: store,
        PIPE: str(pipe),
    }
    given = {
        # All ranks are here: nothing has to listen on another address.
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
    }
    return given | os.environ | own
