"""`atoll dashboard`: watch a run in the terminal."""

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING

from atoll.peer.commands import Subparsers, new_parser
from atoll.peer.commands.watching import add_invite, look, read_invite

if TYPE_CHECKING:
    from atoll.coordinator.invite import Invite


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll dashboard`."""
    parser = new_parser(
        subparsers,
        "dashboard",
        description="Watch a run: peers, tokens/s, loss, traffic, round phases, events.\n"
        "Without a terminal, or with --plain, a line per round until the run has finished.",
        examples="atoll dashboard INVITE\natoll dashboard INVITE --light\n"
        "atoll dashboard INVITE --plain >> run.log",
    )
    add_invite(parser)
    parser.add_argument("--plain", action="store_true", help="lines instead of a screen")
    parser.add_argument("--light", action="store_true", help="begin with the light theme")


def run(args: argparse.Namespace) -> int:
    """Show the run until the user leaves or, in plain text, it has finished."""
    from atoll.coordinator.client_errors import CoordinatorUnreachable

    invite = read_invite(args.invite)
    try:
        look(invite)  # an invite that is of no use should fail here, not on the screen
    except CoordinatorUnreachable:
        pass  # it may come back: the screen says so and goes on asking
    if args.plain or not (sys.stdin.isatty() and sys.stdout.isatty()):
        asyncio.run(_follow(invite))
        return 0
    return _show(invite, light=args.light)


def _show(invite: "Invite", *, light: bool) -> int:
    from atoll.coordinator.client import CoordinatorClient
    from atoll.coordinator.dashboard.app import DashboardApp

    app = DashboardApp(CoordinatorClient(invite).status, light=light)
    app.run()
    return app.return_code or 0


async def _follow(invite: "Invite") -> None:
    from atoll.coordinator.client import CoordinatorClient
    from atoll.coordinator.dashboard.plain import follow

    client = CoordinatorClient(invite)
    try:
        await follow(client.status, _write)
    finally:
        await client.close()


def _write(line: str) -> None:
    print(line, flush=True)
