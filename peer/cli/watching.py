"""Reading an invite and querying the run, for `status`, `rounds`, `dashboard` and `report`.

In the place of an invite they take the state directory of the run's coordinator, which may have
ended long ago.
"""

import argparse
import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.coordinator.recorded import PastRun, Recording
    from atoll.coordinator.report.archive import RunArchive
    from atoll.coordinator.report.feed import Feed
    from atoll.coordinator.rpc.channel import StatusClient
    from atoll.coordinator.run.invite import Invite
    from atoll.coordinator.run.status import RunStatus


MAX_RUNS = 4  # side by side: colours of a plot, and columns of a terminal


class TooManyRuns(ValueError):
    """More runs than can be shown side by side."""


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument INVITE, which may also be a directory (`read_run`)."""
    parser.add_argument(
        "invite",
        metavar="INVITE",
        help="Invite string, a file that contains it, or the state directory of the run's "
        "coordinator, whose records are shown.",
    )


def add_others(parser: argparse.ArgumentParser) -> None:
    """Add further runs, to compare with the one of `add_run`."""
    parser.add_argument(
        "others",
        nargs="*",
        metavar="OTHER",
        help=f"Invites or directories of runs to compare with, at most {MAX_RUNS - 1}.",
    )


def look_back_at_all(args: argparse.Namespace) -> "list[PastRun]":
    """Return the runs of `add_run` and `add_others`, in their order.

    Raises:
        TooManyRuns: there are more than can be shown.
        InviteError, and as `look`.
    """
    if len(args.others) >= MAX_RUNS:
        raise TooManyRuns(f"expected at most {MAX_RUNS} runs, got {1 + len(args.others)}")
    chosen = [read_run(run) for run in (args.invite, *args.others)]
    return [look_back(run) for run in chosen]


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


def read_run(text: str) -> "Invite | Path":
    """Return the invite, or the directory, that an argument of `add_run` names.

    Raises:
        InviteError: `text` is neither an invite, nor a file with one, nor a directory.
    """
    if len(text) <= 255 and not text.startswith("atoll1") and Path(text).is_dir():
        return Path(text)
    return read_invite(text)


def look(run: "Invite | Path", module: str = "") -> "RunStatus":
    """Return the run's status once, with the rounds of a module.

    Raises:
        CoordinatorError: no answer, or a refusal.
        NoRecord: the directory is no coordinator's.
    """
    if isinstance(run, Path):
        return _recorded(run, module)
    return asyncio.run(_look(run, module))


def look_back(run: "Invite | Path") -> "PastRun":
    """Return the run's status and all rounds that a coordinator tells of, or that it recorded.

    Raises:
        As `look`.
    """
    from atoll.coordinator.recorded import PastRun, read

    if isinstance(run, Path):
        return read(run)
    status = look(run)
    return PastRun(status=status, rounds=list(status.history))


def _recorded(state_dir: Path, module: str = "") -> "RunStatus":
    from atoll.coordinator.recorded import read
    from atoll.coordinator.run.status import HISTORY

    return read(state_dir, module=module, newest=HISTORY).status


async def _look(invite: "Invite", module: str) -> "RunStatus":
    async with asking(invite) as client:
        return await client.status(module)


@asynccontextmanager
async def feeding(run: "Invite | Path") -> "AsyncIterator[Feed]":
    """Yield a feed of the run's status."""
    if isinstance(run, Path):

        async def recorded() -> "RunStatus":
            return await asyncio.to_thread(_recorded, run)

        yield recorded
        return
    async with asking(run) as client:
        yield client.status


@asynccontextmanager
async def looking_back(run: "Invite | Path") -> "AsyncIterator[RunArchive]":
    """Yield a run that can be looked back at.

    Raises:
        NoRecord: the directory is no coordinator's.
    """
    if isinstance(run, Path):
        from atoll.coordinator.recorded import Recording

        recording = await asyncio.to_thread(Recording, run)
        try:
            yield _RecordedRun(recording)
        finally:
            recording.close()
        return
    async with asking(run) as client:
        yield _AskedRun(client)


class _RecordedRun:
    """A directory as a `RunArchive`."""

    def __init__(self, recording: "Recording") -> None:
        self._recording = recording

    async def now(self) -> "RunStatus":
        return await asyncio.to_thread(self._recording.refresh)

    async def at(self, position: int) -> "RunStatus":
        return await asyncio.to_thread(self._recording.at, position)


class _AskedRun:
    """A coordinator as a `RunArchive`."""

    def __init__(self, client: "StatusClient") -> None:
        self._client = client

    async def now(self) -> "RunStatus":
        return await self._client.status()

    async def at(self, position: int) -> "RunStatus":
        return await self._client.status(after=position) if position else await self._before()

    async def _before(self) -> "RunStatus":
        from atoll.coordinator.past import before_all

        return before_all(await self._client.status())


def own_peer(run_id: str) -> str:
    """Return the PeerID of this machine's peer in a run; empty if there is none."""
    from atoll.dht.identity import Identity, IdentityError
    from atoll.peer.paths import PeerPaths, peer_state_dir

    key = PeerPaths(root=peer_state_dir(run_id)).identity
    try:
        return Identity.load_or_create(key).peer_id if key.is_file() else ""
    except (IdentityError, OSError):
        return ""


@asynccontextmanager
async def asking(invite: "Invite") -> "AsyncIterator[StatusClient]":
    """Yield a client of the coordinator and close it at the end."""
    from atoll.coordinator.rpc.channel import StatusClient
    from atoll.peer.cli.organiser_key import client_of

    client = client_of(StatusClient, invite)
    try:
        yield client
    finally:
        await client.close()
