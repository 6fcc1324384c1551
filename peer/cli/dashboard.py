"""`atoll dashboard`: watch a run in the terminal."""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.peer.cli import Subparsers, new_parser
from atoll.peer.cli.watching import add_run, feeding, look, read_run

if TYPE_CHECKING:
    from atoll.coordinator.run.invite import Invite
    from atoll.coordinator.run.status import RunStatus


class FormatError(ValueError):
    """A picture format other than SVG."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll dashboard`."""
    parser = new_parser(
        subparsers,
        "dashboard",
        description="Watch a run: peers, tokens/s, loss, traffic, round phases, events. Without a\n"
        "terminal, or with --plain, print a line per round until the run is complete.",
        examples="atoll dashboard INVITE\natoll dashboard INVITE --light\n"
        "atoll dashboard INVITE --plain >> run.log\natoll dashboard INVITE --screenshot run.svg\n"
        "atoll dashboard ~/.local/state/atoll/coordinators/NAME",
    )
    add_run(parser)
    parser.add_argument("--plain", action="store_true", help="Print lines instead of a screen.")
    parser.add_argument("--light", action="store_true", help="Start with the light theme.")
    parser.add_argument(
        "--screenshot", type=Path, metavar="FILE.svg", help="Draw the screen once and exit."
    )


def run(args: argparse.Namespace) -> int:
    """Show the run until the user quits or, in plain text, until it is complete."""
    from atoll.coordinator.rpc.client_errors import CoordinatorUnreachable
    from atoll.peer.extras import extra

    lines = args.plain or not (sys.stdin.isatty() and sys.stdout.isatty())
    if args.screenshot is not None or not lines:
        extra("textual", "the dashboard (--plain prints lines)")
    chosen = read_run(args.invite)
    if args.screenshot is not None:
        asyncio.run(_draw(chosen, _expect_svg(args.screenshot), light=args.light))
        return 0
    try:
        look(chosen)  # fail on a useless invite here, not on the screen
    except CoordinatorUnreachable:
        pass  # it may come back: the screen shows the failure and retries
    if lines:
        asyncio.run(_follow(chosen))
        return 0
    return asyncio.run(_show(chosen, light=args.light))


def _expect_svg(path: Path) -> Path:
    if path.suffix.lower() != ".svg":
        raise FormatError(f"{path}: the name must end in .svg, the only format")
    return path


async def _show(chosen: "Invite | Path", *, light: bool) -> int:
    from atoll.coordinator.dashboard.app import DashboardApp

    async with feeding(chosen) as feed:
        app = DashboardApp(feed, light=light)
        await app.run_async()
    return app.return_code or 0


async def _draw(chosen: "Invite | Path", path: Path, *, light: bool) -> None:
    from atoll.coordinator.dashboard.app import save_screenshot

    async with feeding(chosen) as feed:
        status = await feed()

    async def same() -> "RunStatus":
        return status

    await save_screenshot(same, path, light=light)


async def _follow(chosen: "Invite | Path") -> None:
    from atoll.coordinator.report.plain import follow

    async with feeding(chosen) as feed:
        await follow(feed, _write)


def _write(line: str) -> None:
    print(line, flush=True)
