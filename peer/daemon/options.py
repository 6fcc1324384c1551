"""Options of a peer in the network, set by its owner; none of them changes the run.

A module of its own because it loads no torch: the command line checks options with it at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from atoll.coordinator.run.invite import Invite

MAX_NAME_CHARS = 64  # dashboards have narrow columns
LISTEN = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")  # the second only where there is IPv6
TEXT_WAIT_S = 60.0  # for a server of a text: a peer moves to an empty stage within a minute
MIN_CAP_MBIT_S = 5.0  # readers here and the coordinator get enough of it not to give up (`pacing`)
RELAY_MBIT_S = 25.0  # enough for the control streams of hundreds; bodies go through owners


@dataclass(frozen=True, kw_only=True)
class StageMove:
    """A move from one stage of a pipeline to another."""

    module: str
    """Where the peer goes."""
    came_from: str
    has_failed: bool = False
    """True on its way back: it could not serve the stage that it comes from."""


@dataclass(frozen=True, kw_only=True)
class LinkRates:
    """A peer's internet link as its owner declared it; 0 if unknown."""

    uplink_mbit_s: float = 0.0
    downlink_mbit_s: float = 0.0
    most_mbit_s: float = 0.0
    """The most to use of it, each way; 0: all of it."""


@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """Options with which a peer joins a run."""

    invite: Invite
    state_dir: Path
    name: str = ""
    """Name on the dashboard."""
    listen: tuple[str, ...] = LISTEN
    announce: tuple[str, ...] = ()
    """Addresses for others to dial, if they differ from `listen`."""
    rates: LinkRates = field(default_factory=LinkRates)
    relay_mbit_s: float = RELAY_MBIT_S
    """Bandwidth for streams of peers behind NATs, if others can dial this peer; 0: none."""
    state_on_disk: bool = False
    """Keep the outer state in mapped files of the state directory instead of in memory."""
    metrics_listen: str | None = None
    """Address of a Prometheus endpoint, as 'host:port'; None: none."""
    role: Literal["trainer", "follower"] = "trainer"
    """What it joins as; an invite for keepers makes it a keeper all the same."""
    module: str = ""
    """In a pipeline, the stage that it asks for; empty takes that of its last start."""
    moved: StageMove | None = None
    """The move by which it joins, in a pipeline; None takes `module`."""
    logs: Path | None = None
    """Folder of its logs, if not `state_dir`."""

    def __post_init__(self) -> None:
        """Refuse a name that the coordinator would refuse.

        Raises:
            ValueError: the name is too long.
        """
        if len(self.name) > MAX_NAME_CHARS:
            raise ValueError(
                f"expected a name of at most {MAX_NAME_CHARS} characters, got {len(self.name)}"
            )
