"""The networked reducer for a training loop of one's own.

reducer = connect(invite, state_dir="state")
diloco = DiLoCo(model, inner, reducer, inner_steps=reducer.spec.outer.inner_steps)
while not reducer.finished:
    ...
reducer.close()

Where windows grow (outer.windows = "qsr"), each step begins with what the run's timetable says:

inner_steps = reducer.timetable.window(diloco.next_position)
diloco.resize(inner_steps, delay=reducer.method.hidden_steps(inner_steps))
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.levels import LOGGING, Level
from atoll.peer.daemon.link import Link
from atoll.peer.daemon.run_reducer import RunReducer
from atoll.peer.daemon.session import LinkOptions
from atoll.peer.paths import peer_state_dir

_log = logging.getLogger(__name__)


def connect(
    invite: str,
    *,
    state_dir: str | Path | None = None,
    name: str = "",
    listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",),
) -> RunReducer:
    """Join a run from a loop of one's own.

    Args:
        invite: as ``atoll coordinator`` prints it.
        state_dir: keeps identity and log over restarts; by default one by the run.
        name: what the dashboard calls this peer.
        listen: multiaddrs that others can dial.

    Returns:
        A reducer that holds a verified state; ``close`` leaves the run.

    Raises:
        InviteError: the text is no invite.
        LinkError: the state directory is not usable.
        CoordinatorError: the coordinator refuses this peer.
    """
    parsed = Invite.decode(invite)
    folder = Path(state_dir) if state_dir else peer_state_dir(parsed.run_id.hex())
    options = LinkOptions(invite=parsed, state_dir=folder, name=name, listen=tuple(listen))
    return Link.open(options, on_event=_tell).reducer


def _tell(level: Level, text: str) -> None:
    _log.log(LOGGING[level], text)
