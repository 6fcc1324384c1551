"""The networked reducer for a training loop of your own.

    reducer = connect(invite, state_dir="state")
    diloco = DiLoCo(model, inner, reducer, inner_steps=reducer.spec.outer.inner_steps)
    while not reducer.finished:
        ...
    reducer.close()

If windows grow (outer.windows = "qsr"), begin each step with what the run's timetable gives:

    inner_steps = reducer.timetable.window(diloco.next_position)
    diloco.resize(inner_steps, delay=reducer.method.hidden_steps(inner_steps))

docs/library.md explains the rest: models, methods, mixed precision, checkpoints, errors.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Sequence
from pathlib import Path

from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.levels import LOGGING, Level
from atoll.coordinator.run.text import clean
from atoll.peer.daemon.beside.trainer_side import NetworkProcess, SeatReducer
from atoll.peer.daemon.options import LISTEN, PeerOptions
from atoll.peer.daemon.views import RunFacts
from atoll.peer.errors import WrongRole
from atoll.peer.paths import peer_state_dir

_log = logging.getLogger(__name__)

_ADDRESS = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/[^/]+/(?:tcp|udp)/\d{1,5}(?:/.+)?")


def connect(
    invite: str | Path,
    *,
    state_dir: str | Path | None = None,
    name: str = "",
    device: str = "",
    timeout_s: float | None = None,
    listen: str | Sequence[str] = LISTEN,
    announce: str | Sequence[str] = (),
) -> SeatReducer:
    """Join a run from a training loop of your own.

    The model and the data are the caller's: nothing that the run's spec names is run or read. What
    builds them from `reducer.spec` (`Trainer`, `build_model`, `open_corpus`) takes an `Allowed`.

    Args:
        invite: as `atoll coordinator` prints it, or the `Path` of a file that contains it.
        state_dir: keeps identity and log over restarts; by default one for each run. Each peer of
            a machine needs its own.
        name: shown on the dashboard.
        device: shown on the dashboard, such as "cuda:0"; the model may be anywhere.
        timeout_s: seconds for which to try to join; None to try until it succeeds, as after a
            reboot at which this machine is up before the coordinator.
        listen: multiaddrs to listen on; by default all of IPv4, and of IPv6 where there is any.
        announce: multiaddrs for others to dial, if they differ, as behind a forwarded port.

    Returns:
        A reducer that holds a verified state; `close` leaves the run.

    Raises:
        ValueError: an address is none, or the name is too long.
        OSError: the file with the invite cannot be read.
        InviteError: the text is no invite.
        StateDirectoryError: the state directory is not usable.
        CoordinatorError: the coordinator refuses this peer.
        WrongRole: the invite is for keepers.
        TimeoutError: this peer could not join in time.
        NetworkLost: the network process has died; later, its reducer raises this too.
    """
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"expected a timeout_s above 0, or None, got {timeout_s}")
    text = invite.read_text(encoding="utf-8") if isinstance(invite, Path) else invite
    parsed = Invite.decode(text)
    folder = Path(state_dir) if state_dir else peer_state_dir(parsed.run_id.hex())
    options = PeerOptions(
        invite=parsed,
        state_dir=folder,
        name=name,
        listen=_addresses("listen", listen),
        announce=_addresses("announce", announce),
    )
    reports: list[str] = []

    def on_event(level: Level, text: str) -> None:
        if level != "info":
            reports[:] = [text]
        _log_event(level, text)

    try:
        network = NetworkProcess(
            options,
            on_event=on_event,
            stopping=threading.Event(),
            timeout_s=math.inf if timeout_s is None else timeout_s,
            device=device,
        )
    except TimeoutError:
        if timeout_s is None:
            raise
        why = f"; the last report: {clean(reports[0])}" if reports else ""
        raise TimeoutError(
            f"could not join within {timeout_s:g} s{why}; check with `atoll status INVITE` that "
            "the coordinator is up, or wait longer with timeout_s"
        ) from None
    try:
        _expect_whole_model(network.facts)
    except WrongRole:
        network.close()
        raise
    return SeatReducer(network)


def _expect_whole_model(facts: RunFacts) -> None:
    """Raise WrongRole if a training loop of one's own has nothing to do here."""
    if facts.is_keeper:
        raise WrongRole(
            "the invite is for keepers, which do not train; start `atoll peer` with it, and ask "
            "the organiser for an invite for trainers"
        )
    if facts.module:
        raise WrongRole(
            "the run is a pipeline, whose peers hold a stage of the model each; join with "
            "`atoll peer`"
        )


def _addresses(option: str, given: str | Sequence[str]) -> tuple[str, ...]:
    """Return multiaddrs; one may be given as a string.

    Raises:
        ValueError: one of them is none, or has no port.
    """
    addresses = (given,) if isinstance(given, str) else tuple(given)
    for address in addresses:
        if not _ADDRESS.fullmatch(address):
            raise ValueError(
                f"{option}: expected a multiaddr with a port, such as /ip4/1.2.3.4/tcp/7701, got "
                f"{address!r}"
            )
    return addresses


def _log_event(level: Level, text: str) -> None:
    _log.log(LOGGING[level], clean(text))  # the caller's handlers may print it as it is
