"""What `status`, `rounds` and `dashboard` share: an invite, and one look at the run."""

import argparse
import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.coordinator.rpc.channel import StatusClient
    from atoll.coordinator.run.invite import Invite
    from atoll.coordinator.run.status import RunStatus


def add_invite(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument INVITE."""
    parser.add_argument(
        "invite", metavar="INVITE", help="the string, or the name of a file that holds it"
    )


def read_invite(text: str) -> "Invite":
    """Read an invite, or the file with one.

    Raises:
        InviteError: it is neither.
    """
    from atoll.coordinator.run.invite import MAX_CHARS, Invite, NotAnInvite

    path = Path(text)
    if len(text) > 255 or text.startswith("atoll1") or not path.is_file():
        try:
            return Invite.decode(text)
        except NotAnInvite as error:
            absent = "" if len(text) > 255 or not text.strip() else ", and no such file is here"
            raise NotAnInvite(f"{error}, or name a file that holds it{absent}") from None
    with path.open("rb") as file:
        raw = file.read(MAX_CHARS + 1)
    try:
        return Invite.decode(raw.decode("ascii"))
    except UnicodeDecodeError:
        raise NotAnInvite(f"{path}: expected a file with an invite, got other bytes") from None


def look(invite: "Invite") -> "RunStatus":
    """Ask the coordinator once how the run is.

    Raises:
        CoordinatorError: no answer, or one that says no.
    """
    return asyncio.run(_look(invite))


async def _look(invite: "Invite") -> "RunStatus":
    async with asking(invite) as client:
        return await client.status()


@asynccontextmanager
async def asking(invite: "Invite") -> "AsyncIterator[StatusClient]":
    """Give a client of the coordinator, and close it in the end."""
    from atoll.coordinator.rpc.channel import StatusClient

    client = StatusClient(invite)
    try:
        yield client
    finally:
        await client.close()
