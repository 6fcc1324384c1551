"""The networked reducer for a training loop of your own.

    reducer = connect(invite, state_dir="state")
    diloco = DiLoCo(model, inner, reducer, inner_steps=reducer.spec.outer.inner_steps)
    while not reducer.finished:
        ...
    reducer.close()

If windows grow (outer.windows = "qsr"), begin each step with what the run's timetable gives:

    inner_steps = reducer.timetable.window(diloco.next_position)
    diloco.resize(inner_steps, delay=reducer.method.hidden_steps(inner_steps))
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from atoll.coordinator.report.text import clean
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.levels import LOGGING, Level
from atoll.coordinator.run.phases import OnPhase
from atoll.coordinator.run.spec import RunSpec
from atoll.peer.daemon.gossip_run import GossipRun
from atoll.peer.daemon.log_run import LogRun
from atoll.peer.daemon.loop_thread import LoopThread
from atoll.peer.daemon.membership import Membership
from atoll.peer.daemon.options import PeerOptions
from atoll.peer.daemon.peer import Admit, Peer, StartRun
from atoll.peer.daemon.reducer import RunReducer
from atoll.peer.paths import peer_state_dir


class WrongRole(ValueError):  # noqa: N818
    """The invite is for another role than the one that is asked for."""


_log = logging.getLogger(__name__)


def connect(
    invite: str,
    *,
    state_dir: str | Path | None = None,
    name: str = "",
    listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",),
) -> RunReducer:
    """Join a run from a training loop of your own.

    The model and the data are the caller's: nothing that the run's spec names is run or read. What
    builds them from `reducer.spec` (`Trainer`, `build_model`, `open_corpus`) takes an `Allowed`.

    Args:
        invite: as `atoll coordinator` prints it.
        state_dir: keeps identity and log over restarts; by default one for each run.
        name: shown on the dashboard.
        listen: multiaddrs that others can dial.

    Returns:
        A reducer that holds a verified state; `close` leaves the run.

    Raises:
        InviteError: the text is no invite.
        StateDirectoryError: the state directory is not usable.
        CoordinatorError: the coordinator refuses this peer.
    """
    parsed = Invite.decode(invite)
    folder = Path(state_dir) if state_dir else peer_state_dir(parsed.run_id.hex())
    options = PeerOptions(invite=parsed, state_dir=folder, name=name, listen=tuple(listen))
    return open_reducer(options, on_event=_log_event)


def open_reducer(
    options: PeerOptions,
    *,
    on_event: Callable[[Level, str], None],
    on_phase: OnPhase = lambda phase, position, left=None: None,
    stopping: threading.Event | None = None,
    admit: Admit | None = None,
) -> RunReducer:
    """Join and recover; return once the peer holds a verified state.

    Args: as `open_peer`.

    Raises:
        WrongRole: the invite is for keepers, which do not train.
        Exception: as `open_peer`.
    """
    thread = open_peer(
        options, on_event=on_event, on_phase=on_phase, stopping=stopping, admit=admit
    )
    try:
        if thread.value.is_keeper:
            raise WrongRole(
                "the invite is for keepers, which do not train; start `atoll peer` with it, and "
                "ask the organiser for an invite for trainers"
            )
        return thread.value.run.reducer(thread)
    except BaseException:
        thread.close()
        raise


def open_peer(
    options: PeerOptions,
    *,
    on_event: Callable[[Level, str], None],
    on_phase: OnPhase = lambda phase, position, left=None: None,
    stopping: threading.Event | None = None,
    admit: Admit | None = None,
) -> LoopThread[Peer]:
    """Join and recover; return the peer in its thread once it holds a verified state.

    Args:
        options: what the peer's owner decides.
        on_event: takes what a person may want to read, in several threads.
        on_phase: takes the part of a round that this peer is in, and its position.
        stopping: ends the wait, from another thread or a signal handler.
        admit: returns if the owner wants this run; by default calling this is the owner's yes.

    Raises:
        StateDirectoryError: the state directory is not usable.
        CoordinatorError: the coordinator refuses this peer.
        PortInUse: the peer cannot listen where it should.
        KeyboardInterrupt: `stopping` was set.
    """
    peer = Peer.open(
        options, _kind_of, admit=admit or _admit_all, on_event=on_event, on_phase=on_phase
    )
    return LoopThread(peer, stopping)


async def _admit_all(membership: Membership) -> None:
    pass


def _kind_of(spec: RunSpec) -> StartRun:
    return GossipRun.start if spec.method().reduction == "pairs" else LogRun.start


def _log_event(level: Level, text: str) -> None:
    _log.log(LOGGING[level], clean(text))  # the caller's handlers may print it as it is
