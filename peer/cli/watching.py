"""Reading an invite and querying the run, shared by `status`, `rounds` and `dashboard`."""

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
        "invite", metavar="INVITE", help="Invite string, or a file that contains it."
    )


def read_invite(text: str) -> "Invite":
    """Parse an invite, or the file that contains one.

    Raises:
        InviteError: `text` is neither.
    """
    from atoll.coordinator.run.invite import MAX_CHARS, Invite, NotAnInvite

    path = Path(text)
    if len(text) > 255 or text.startswith("atoll1") or not path.is_file():
        try:
            return Invite.decode(text)
        except NotAnInvite as error:
            absent = "" if len(text) > 255 or not text.strip() else " (no such file exists)"
            raise NotAnInvite(
                f"{error}; pass that string, or a file that contains it{absent}"
            ) from None
    with path.open("rb") as file:
        raw = file.read(MAX_CHARS + 1)
    try:
        return Invite.decode(raw.decode("ascii"))
    except UnicodeDecodeError:
        raise NotAnInvite(f"{path} does not contain an invite") from None


def look(invite: "Invite", module: str = "") -> "RunStatus":
    """Fetch the run's status from the coordinator once, with the rounds of a module.

    Raises:
        CoordinatorError: no answer, or a refusal.
    """
    return asyncio.run(_look(invite, module))


async def _look(invite: "Invite", module: str) -> "RunStatus":
    async with asking(invite) as client:
        return await client.status(module)


@asynccontextmanager
async def asking(invite: "Invite") -> "AsyncIterator[StatusClient]":
    """Yield a client of the coordinator and close it at the end."""
    from atoll.coordinator.rpc.channel import StatusClient

    client = StatusClient(invite)
    try:
        yield client
    finally:
        await client.close()
