"""`atoll dashboard`: watch a run in the terminal."""

import argparse
import asyncio
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.peer.cli import Subparsers, new_parser, print_json
from atoll.peer.cli.watching import add_run, feeding, look, looking_back, own_peer, read_run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.coordinator.dashboard.app import DashboardApp
    from atoll.coordinator.dashboard.replay import ReplayApp
    from atoll.coordinator.report.archive import RunArchive
    from atoll.coordinator.run.invite import Invite
    from atoll.coordinator.run.status import RunStatus


MAX_NAMED = 12  # peers in a message


class FormatError(ValueError):
    """A picture format other than SVG."""


class ReplayError(ValueError):
    """A replay without a screen, or of a run without a round."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll dashboard`."""
    parser = new_parser(
        subparsers,
        "dashboard",
        description="Watch a run: peers, tokens/s, loss, traffic, round phases, events. Without a\n"
        "terminal, or with --plain, print a line per round until the run is complete.\n\n"
        "With --replay it shows the run as it was after any round, from the first one on:\n"
        "who took part, with what work, and what happened. Keys play, step and jump.",
        examples="atoll dashboard INVITE\natoll dashboard INVITE --light\n"
        "atoll dashboard INVITE --plain >> run.log\natoll dashboard INVITE --screenshot run.svg\n"
        "atoll dashboard ~/.local/state/atoll/coordinators/NAME\n"
        "atoll dashboard --replay INVITE\n"
        "atoll dashboard --replay ~/.local/state/atoll/coordinators/NAME --from 1200\n"
        "atoll dashboard INVITE --me attic",
    )
    add_run(parser)
    parser.add_argument(
        "--replay",
        action="store_true",
        help="Show earlier rounds, and a bar to move through them.",
    )
    parser.add_argument(
        "--from",
        dest="first",
        type=int,
        default=0,
        metavar="ROUND",
        help="With --replay, round to begin after (default: 0, before the first).",
    )
    parser.add_argument(
        "--me",
        metavar="NAME",
        help="Name or PeerID of your own peer (default: this machine's, if it has one in the run).",
    )
    parser.add_argument("--plain", action="store_true", help="Print lines instead of a screen.")
    parser.add_argument(
        "--json",
        action="store_true",
        help="Print a line of JSON for each round, event and change of state instead of a screen.",
    )
    parser.add_argument("--light", action="store_true", help="Start with the light theme.")
    parser.add_argument(
        "--screenshot", type=Path, metavar="FILE.svg", help="Draw the screen once and exit."
    )


def run(args: argparse.Namespace) -> int:
    """Show the run until the user quits or, in plain text, until it is complete."""
    from atoll.coordinator.rpc.client_errors import CoordinatorUnreachable
    from atoll.peer.extras import extra

    lines = args.plain or args.json or not (sys.stdin.isatty() and sys.stdout.isatty())
    picture = None if args.screenshot is None else _expect_svg(args.screenshot)
    if args.replay and lines and picture is None:
        raise ReplayError(
            "--replay needs a terminal; `atoll rounds` lists the rounds, and --screenshot draws one"
        )
    if picture is not None or not lines:
        extra("textual", "the dashboard (--plain prints lines)")
    chosen = read_run(args.invite)
    if picture is not None:
        asyncio.run(_draw(chosen, picture, args))
        return 0
    try:
        status = look(chosen)  # fail on a useless invite here, not on the screen
    except CoordinatorUnreachable:
        if args.replay:
            raise
        status = None  # it may come back: the screen shows the failure and retries
    if args.me and status is not None:
        _expect_peer(status, args.me)
    if lines:
        asyncio.run(_record(chosen) if args.json else _follow(chosen))
        return 0
    return asyncio.run(_show(chosen, args))


def _expect_svg(path: Path) -> Path:
    if path.suffix.lower() != ".svg":
        raise FormatError(f"{path}: the name must end in .svg, the only format")
    return path


def _expect_peer(status: "RunStatus", wanted: str) -> None:
    from atoll.coordinator.report.mine import NoSuchPeer, find_peer
    from atoll.coordinator.report.view import names

    if not find_peer(status, wanted):
        known = ", ".join(sorted(names(status).values())[:MAX_NAMED]) or "none yet"
        raise NoSuchPeer(f"--me {wanted!r}: no peer, or several, have that name; peers: {known}")


def _me(chosen: "Invite | Path", args: argparse.Namespace, run_id: str = "") -> str:
    if args.me:
        return str(args.me)
    return own_peer(run_id if isinstance(chosen, Path) else chosen.run_id.hex())


async def _show(chosen: "Invite | Path", args: argparse.Namespace) -> int:
    async with _app(chosen, args) as app:
        await app.run_async()
    return app.return_code or 0


async def _draw(chosen: "Invite | Path", path: Path, args: argparse.Namespace) -> None:
    from atoll.coordinator.dashboard.app import save_screen

    async with _app(chosen, args, is_still=True) as app:
        await save_screen(app, path)


@asynccontextmanager
async def _app(
    chosen: "Invite | Path", args: argparse.Namespace, *, is_still: bool = False
) -> "AsyncIterator[DashboardApp]":
    """Yield the app; with `is_still` one that has a status to draw, and reads no other."""
    if args.replay:
        async with looking_back(chosen) as archive:
            yield _replay(chosen, args, archive, await archive.now(), is_still=is_still)
        return
    from atoll.coordinator.dashboard.app import DashboardApp

    async with feeding(chosen) as feed:
        if not is_still:
            run_id = (await feed()).run_id if isinstance(chosen, Path) else ""
            yield DashboardApp(feed, light=args.light, me=_me(chosen, args, run_id))
            return
        status = await feed()
        if args.me:
            _expect_peer(status, args.me)

        async def same() -> "RunStatus":
            return status

        me = _me(chosen, args, status.run_id)
        yield DashboardApp(same, interval_s=None, light=args.light, me=me)


def _replay(
    chosen: "Invite | Path",
    args: argparse.Namespace,
    archive: "RunArchive",
    now: "RunStatus",
    *,
    is_still: bool,
) -> "ReplayApp":
    from atoll.coordinator.dashboard.replay import ReplayApp, last_round
    from atoll.coordinator.dashboard.tape import SCREENS_PER_S

    total = last_round(now)
    if not 0 <= args.first <= total:
        raise ReplayError(f"--from must be a round of 0 to {total}, got {args.first}")
    if args.me:
        _expect_peer(now, args.me)
    return ReplayApp(
        archive,
        now,
        interval_s=None if is_still else 1 / SCREENS_PER_S,
        light=args.light,
        me=_me(chosen, args, now.run_id),
        first=args.first,
    )


async def _follow(chosen: "Invite | Path") -> None:
    from atoll.coordinator.report.plain import follow

    async with feeding(chosen) as feed:
        await follow(feed, _write)


async def _record(chosen: "Invite | Path") -> None:
    from atoll.coordinator.report.records import follow

    async with feeding(chosen) as feed:
        await follow(feed, print_json)


def _write(line: str) -> None:
    print(line, flush=True)
