"""Which of the coordinator's two ports joiners have reached from outside, and what to forward.

Joiners come first to the port of gRPC and ask to be dialed back, then p2pd of theirs dials that of
libp2p. So

- a joiner from a public address that is not ours has reached the first port;
- it has reached the second one if there is a connection with it, and nobody can dial it: then the
  connection is not one that we made. One whose way here a relay has shown does not count, because
  a hole in our own router may have let it in;
- it has found the second one closed if it still reports after `WAIT_S` and there is no connection.

A port that anybody has reached is open: what others find says nothing about it, but something
about their own networks. What is known is kept for the next start.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from atoll.coordinator.run.addresses import is_public
from atoll.dht.addresses import ip_of
from atoll.dht.addresses import is_public as is_public_multiaddr

WAIT_S = 30.0  # from the dial-back to a connection: p2pd starts in seconds, and dials again
LOOK_S = 2.0  # between two looks at the connections, while joiners are watched
MAX_WATCHED = 64  # joiners at once; the first few suffice
MAX_NAME = 128  # characters of a PeerID in the file

Found = Literal["untried", "closed", "reached"]


@dataclass(frozen=True, kw_only=True)
class Port:
    """A port, and whether joiners from outside reached it."""

    number: int
    found: Found = "untried"
    by: str = ""
    """PeerID of the joiner that found it"""


@dataclass
class _Joiner:
    asked_s: float
    is_hidden: bool
    """True if it cannot be dialed."""


@dataclass
class Ports:
    """Learns which ports were reached; times are of any steady clock."""

    grpc: Port
    p2p: Port
    own: Collection[str] = ()
    """Our own IP addresses: who comes from them may not have come from outside"""
    path: Path | None = None
    """The file that keeps what is known"""
    _came: dict[str, None] = field(default_factory=dict)
    """Joiners from outside that have not asked to be dialed back"""
    _watched: dict[str, _Joiner] = field(default_factory=dict)

    @classmethod
    def recalled(cls, grpc: int, p2p: int, own: Collection[str], path: Path) -> Ports:
        """Return what an earlier run of the coordinator kept about these ports, if it did."""
        kept: dict[str, object] = {}
        with suppress(OSError, ValueError):
            read = json.loads(path.read_bytes()[:4096])
            kept = read if isinstance(read, dict) else {}
        return cls(
            grpc=_port(kept.get("grpc"), grpc), p2p=_port(kept.get("p2p"), p2p), own=own, path=path
        )

    @property
    def is_watching(self) -> bool:
        """Return whether further connections can show that a port is open."""
        return bool(self._watched)

    def joined(self, peer_id: str, host: str) -> str:
        """Note that a peer joined from an IP address; return the line to log, or nothing."""
        if not is_public(host) or host in self.own:
            return ""
        if len(self._came) >= MAX_WATCHED:  # anyone can join under many keys
            del self._came[next(iter(self._came))]
        self._came[peer_id] = None
        if self.grpc.found == "reached":
            return ""
        self.grpc = Port(number=self.grpc.number, found="reached", by=peer_id)
        if self._is_one:
            self.p2p = self.grpc
        return self._changed()

    def probed(self, peer_id: str, *, is_reached: bool, now_s: float) -> None:
        """Note that a joiner was dialed back: its p2pd starts now."""
        watched = self._watched.get(peer_id)
        if watched is not None and is_reached:  # its router forwards the port since then
            watched.is_hidden = False
        came = peer_id in self._came
        self._came.pop(peer_id, None)
        if came and self.p2p.found != "reached" and len(self._watched) < MAX_WATCHED:
            self._watched[peer_id] = _Joiner(now_s, not is_reached)

    def look(
        self, alive: Collection[str], connected: Mapping[str, Sequence[str]], now_s: float
    ) -> str:
        """Look at the connections.

        Args:
            alive: PeerIDs of the peers that report.
            connected: by PeerID, the addresses from which direct connections come.
            now_s: the time.

        Returns:
            The line to log, or nothing.
        """
        for peer_id, joiner in list(self._watched.items()):
            is_due = now_s - joiner.asked_s >= WAIT_S
            if peer_id in connected:
                # We may have dialed one that can be dialed: its connection proves nothing.
                is_from_outside = any(
                    is_public_multiaddr(each) and ip_of(each) not in self.own
                    for each in connected[peer_id]
                )
                if not joiner.is_hidden or not is_from_outside:
                    del self._watched[peer_id]
                    continue
                self._watched.clear()
                self.p2p = Port(number=self.p2p.number, found="reached", by=peer_id)
                return self._changed()
            if is_due:
                del self._watched[peer_id]
                if peer_id in alive and self.p2p.found == "untried":
                    self.p2p = Port(number=self.p2p.number, found="closed", by=peer_id)
                    return self._changed()
        return ""

    def __str__(self) -> str:
        """Return what is known as a line for the organiser."""
        first, second = self.grpc, self.p2p
        if self._is_one and first.found == "untried":
            return f"no peer has tried port {first.number} from outside yet"
        if self._is_one:
            return f"port {first.number} was reached from outside (by {first.by})"
        if first.found == "untried":
            return f"no peer has tried ports {first.number} and {second.number} from outside yet"
        if second.found == "untried":
            return (
                f"port {first.number} was reached from outside (by {first.by}); of port "
                f"{second.number} this is not known yet"
            )
        if second.found == "reached":
            return (
                f"ports {first.number} and {second.number} were reached from outside (the latter "
                f"by {second.by})"
            )
        return (
            f"{second.by} reached port {first.number} from outside, but not port {second.number}: "
            f"forward TCP port {second.number} to this machine, or start with --one-port"
        )

    @property
    def is_known(self) -> bool:
        """Return whether a joiner has come from outside."""
        return self.grpc.found != "untried"

    @property
    def is_wrong(self) -> bool:
        """Return whether a port must be forwarded."""
        return self.p2p.found == "closed"

    @property
    def _is_one(self) -> bool:
        """True if one port serves both."""
        return self.grpc.number == self.p2p.number

    def _changed(self) -> str:
        if self.path is not None:
            told = {
                name: {"port": port.number, "found": port.found, "by": port.by}
                for name, port in (("grpc", self.grpc), ("p2p", self.p2p))
            }
            partial = self.path.with_name(f".{self.path.name}.new")
            with suppress(OSError):  # a full disk: only the next start knows less
                partial.write_text(json.dumps(told))
                partial.replace(self.path)
        return str(self)


def _port(kept: object, number: int) -> Port:
    """Return what a file holds about a port; nothing if it was another port, or is damaged."""
    if not isinstance(kept, dict) or kept.get("port") != number:
        return Port(number=number)
    found, by = kept.get("found"), kept.get("by")
    if found not in ("closed", "reached") or not isinstance(by, str) or not by.isalnum():
        return Port(number=number)
    return Port(number=number, found=found, by=by[:MAX_NAME])
