"""Finds what this machine keeps of a run for commands: its keys, and where its coordinator is.

The key is that of the coordinator's `keys.json` until `atoll keys rotate` has changed it; then it
is in a file of its own beside that one (`atoll.coordinator.run.keys`). Only the one in force
counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from atoll.coordinator.rpc.channel import StatusClient
    from atoll.coordinator.run.invite import Invite
    from atoll.coordinator.run.keys import OrganiserKey
    from atoll.optim.log.orders import RunSettings


class NoRunKey(ValueError):
    """The organiser's key is not on this machine, or the file holds another one."""


def add_key(parser: argparse.ArgumentParser) -> None:
    """Add the option --key."""
    parser.add_argument(
        "--key",
        type=Path,
        metavar="PATH",
        help="File of the organiser's key: keys.json of the run's coordinator, one that `atoll "
        "keys rotate` wrote, or the directory that holds it (default: found in "
        "~/.local/state/atoll/coordinators).",
    )


def find_keys(invite: Invite, given: Path | None) -> list[OrganiserKey]:
    """Return the keys here that may be the organiser's. Raises NoRunKey, KeysError."""
    from atoll.coordinator.run.keys import organiser_keys
    from atoll.peer.paths import coordinator_state_dir

    if given is not None:
        if not given.exists():
            raise NoRunKey(f"{given}: no such file; pass keys.json of the run's coordinator")
        keys = organiser_keys(given, invite.run_key, invite.run_id)
        if not keys:
            raise NoRunKey(f"{given}: expected the key of the invite's run, got that of another")
        return keys
    parent = coordinator_state_dir("any").parent
    folders = sorted(path for path in parent.glob("*") if path.is_dir())
    found = [organiser_keys(each, invite.run_key, invite.run_id) for each in folders]
    keys = [key for each in found for key in each]
    if not keys:
        raise NoRunKey(
            f"the key of this run is not in {parent}; run this on the coordinator's machine, or "
            "pass --key with its keys.json"
        )
    return keys


def key_in_force(invite: Invite, given: Path | None, settings: RunSettings) -> OrganiserKey:
    """Return the organiser's key by the orders so far. Raises NoRunKey, KeysError."""
    wanted = settings.key or invite.run_key
    keys = find_keys(invite, given)
    for key in keys:
        if key.public == wanted:
            return key
    raise NoRunKey(
        f"{keys[0].path}: the organiser's key was changed; expected {wanted.hex()[:16]}, got "
        f"{keys[0].public.hex()[:16]}; pass --key with the file that `atoll keys rotate` wrote"
    )


def viewer(run_id: bytes) -> bytes:
    """Return the secret by which this user is known again as an observer of a run, 16 bytes.

    A new one is kept; where that is impossible, it is forgotten with this process.
    """
    import hashlib
    import secrets
    from contextlib import suppress

    from atoll.coordinator.run.keys import write_private
    from atoll.peer.paths import viewer_file

    path, secret = viewer_file(), secrets.token_bytes(32)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            write_private(path, secret)
        secret = path.read_bytes()[:32]
    # Of each run another one, so that two organisers cannot tell that it is the same user.
    return hashlib.sha256(b"atoll viewer of a run 1" + secret + run_id).digest()[:16]


Client = TypeVar("Client", bound="StatusClient")


def client_of(kind: type[Client], invite: Invite) -> Client:
    """Return a client of an invite's coordinator, wherever it is as far as this machine knows.

    A peer or follower of this user, in its default directory, keeps where the coordinator has moved
    to since the invite was made.
    """
    client = kind(invite, viewer(invite.run_id))
    for record in _kept_places(invite.run_id.hex()):
        client.recall_relocation(record)
    return client


def _kept_places(run_id: str) -> Iterator[bytes]:
    import json
    from contextlib import suppress

    from atoll.peer.paths import PeerPaths, follower_dir, peer_state_dir, text_state_dir

    for folder in (peer_state_dir(run_id), follower_dir(run_id), text_state_dir(run_id)):
        with suppress(OSError, ValueError, KeyError, TypeError):  # it has none that can be read
            fields = json.loads(PeerPaths(root=folder).run.read_bytes())
            yield bytes.fromhex(fields["relocation"])
