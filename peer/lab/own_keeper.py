"""The keeper of `atoll coordinator --keep`: an `atoll peer` process on its machine.

It has a state directory of its own, `keeper` in the coordinator's, and an invite for one keeper,
`keeper.invite` beside that. It ends with the coordinator, and is started again if it fails.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from atoll.coordinator.invites import issue, read_book
from atoll.coordinator.run.invite import Invite, InviteError
from atoll.coordinator.run.issued_invite import token_hash
from atoll.coordinator.service.server import Running
from atoll.peer.lab.children import BAD_INPUT, Child, how
from atoll.peer.paths import PeerPaths

FOLDER, INVITE_FILE, LOG_FILE = "keeper", "keeper.invite", "keeper.log"
POLL_S = 0.5  # until its end is noticed
AGAIN_S = 5.0  # before it is started again: what ended it may last, such as a full disk


async def keep_beside(up: Running, say: Callable[[str], None]) -> None:
    """Run a keeper until the run is complete, or this is cancelled; then stop it."""
    folder = up.state_dir
    arguments = [
        *("peer", str(_write_invite(up)), "--yes", "--name", "coordinator"),
        *("--state-dir", str(folder / FOLDER), "--stop-with-stdin"),
    ]
    while True:
        child = await Child.start("keeper", folder / LOG_FILE, arguments)
        try:
            while child.running:
                await asyncio.sleep(POLL_S)
        finally:
            await child.stop()
        if child.exit_code == 0:  # the run is complete
            return
        if child.exit_code == BAD_INPUT:
            say(f"no keeper runs here: {child.failure()}")
            return
        say(f"the keeper {how(child.exit_code)} and starts again; its output is in {child.log}")
        await asyncio.sleep(AGAIN_S)


def _write_invite(up: Running) -> Path:
    """Write the invite with the present addresses, and with the token of before if it serves."""
    path = up.state_dir / INVITE_FILE
    token = _kept_token(up.state_dir)
    if token is None:
        _, token = issue(up.state_dir, kind="keeper", uses=1)
    partial = path.with_suffix(".new")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(replace(up.invite, token=token).encode() + "\n")
    partial.replace(path)
    return path


def _kept_token(folder: Path) -> bytes | None:
    """Return the token of an earlier start; None if the peer that used it is gone."""
    if not PeerPaths(root=folder / FOLDER).identity.exists():
        return None
    try:
        token = Invite.decode((folder / INVITE_FILE).read_text()).token
    except (OSError, InviteError):
        return None
    current = {i.token_sha256 for i in read_book(folder).invites if not i.revoked}
    return token if token_hash(token) in current else None
