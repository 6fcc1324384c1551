"""`atoll evict`: remove a peer from a run."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from atoll.peer.cli import Subparsers, new_parser
from atoll.peer.cli.invite import find_run


class UnknownPeer(ValueError):
    """No peer, or more than one, has that name."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll evict`."""
    parser = new_parser(
        subparsers,
        "evict",
        description="Remove a peer from a run, on the coordinator's machine. The coordinator\n"
        "refuses it at once, and all other peers do so with their next heartbeat, also\n"
        "after restarts. With a usable invite it could return under a new key: revoke\n"
        "the invite too (`atoll invite --revoke`).",
        examples="atoll evict 12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp\n"
        'atoll evict vnc6iDEp --reason "sends noise"\n'
        "atoll evict laptop-3 --state-dir RUN_STATE",
    )
    parser.add_argument("peer", metavar="PEER", help="PeerID, its last letters, or its name.")
    parser.add_argument(
        "--reason", default="", metavar="TEXT", help="Reason for the peer and the log (optional)."
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="State directory of the coordinator (default: the only one in "
        "~/.local/state/atoll/coordinators).",
    )


def run(args: argparse.Namespace) -> int:
    """Write the eviction; a running coordinator takes it up within a second."""
    from atoll.coordinator.invites import evict

    folder = find_run(args.state_dir)
    peer_id = find_peer(folder, args.peer)
    is_new = evict(folder, peer_id, at_s=time.time(), reason=args.reason)
    done = "was removed from the run" if is_new else "had already been removed from the run"
    print(f"{peer_id} {done}", file=sys.stderr)
    return 0


def find_peer(folder: Path, named: str) -> str:
    """Return the PeerID of a peer that the coordinator knows. Raises UnknownPeer."""
    from atoll.coordinator.history import History

    path = folder / "history.db"
    history = History(path) if path.exists() else None
    peers = history.peers() if history is not None else []
    if history is not None:
        history.close()
    return the_peer({p.peer_id: p.name for p in peers}, named)


def the_peer(names: Mapping[str, str], named: str) -> str:
    """Return the PeerID that a person means, given the names of peers. Raises UnknownPeer."""
    found = [peer for peer in names if peer == named]
    found = found or sorted(peer for peer in names if peer.endswith(named))
    found = found or sorted(peer for peer, name in names.items() if name == named)
    if len(found) == 1:
        return found[0]
    if found:
        raise UnknownPeer(f"{named!r} may be {', '.join(found)}; name the whole PeerID")
    if re.fullmatch(r"[1-9A-HJ-NP-Za-km-z]{46,59}", named):  # whole, of a peer forgotten here
        return named
    raise UnknownPeer(f"no peer of this run is named {named!r}; `atoll status INVITE` lists them")
