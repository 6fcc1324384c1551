"""`atoll keys`: change the organiser's key of a run that goes on."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.peer.cli import Subparsers, new_parser, print_json
from atoll.peer.cli.organiser_key import add_key, find_keys, key_in_force
from atoll.peer.cli.run import WAIT_S, give_orders, standing_of, waits
from atoll.peer.cli.watching import add_invite, read_invite

if TYPE_CHECKING:
    from atoll.coordinator.run.invite import Invite
    from atoll.coordinator.run.keys import OrganiserKey


class NoFolder(ValueError):
    """The folder for the new key is none."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll keys`."""
    parser = new_parser(
        subparsers,
        "keys",
        description="Change the organiser's key of a run that goes on. The change is an order,\n"
        "signed by the key of before and decided in the log: from that round on, only\n"
        "the new key can pause, change or stop the run, evict and readmit peers by\n"
        "order, and manage invites from elsewhere.",
        examples="atoll keys rotate INVITE\n"
        "atoll keys rotate INVITE --key backup/keys.json --out ~/organiser --json",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    help_ = (
        "Make a new key and have the run take it. Its file is on the disk before the order is "
        "given; that of the key before is removed once the order is decided, unless it is the "
        "coordinator's keys.json, which the coordinator needs."
    )
    rotate = actions.add_parser("rotate", help="Change the organiser's key.", description=help_)
    add_invite(rotate)
    add_key(rotate)
    rotate.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="Existing folder for the new key (default: that of the present one).",
    )
    rotate.add_argument(
        "--wait",
        type=float,
        default=WAIT_S,
        metavar="SECONDS",
        help=f"Longest wait for the decision (default: {WAIT_S:.0f}).",
    )
    rotate.add_argument("--json", action="store_true", help="Line of JSON instead of text.")


def run(args: argparse.Namespace) -> int:
    """Change the organiser's key."""
    invite = read_invite(args.invite)
    find_keys(invite, args.key)  # before anything is asked
    if args.out is not None and not args.out.is_dir():
        raise NoFolder(f"{args.out}: expected a folder for the new key; create it first")
    return asyncio.run(_rotate(invite, args))


async def _rotate(invite: Invite, args: argparse.Namespace) -> int:
    from atoll.coordinator.orders import misfit
    from atoll.coordinator.rpc.client_errors import CoordinatorError, CoordinatorRefused
    from atoll.coordinator.run.keys import OrganiserKey
    from atoll.optim.log.orders import PauseRun, RotateKey, described
    from atoll.peer.cli.run import WrongOrder

    standing = await standing_of(invite)
    before = key_in_force(invite, args.key, standing.settings)
    # The run may take no orders at all: that is told before a file is written.
    if reason := misfit(standing.spec, PauseRun(), standing.settings):
        raise WrongOrder(reason)
    new = OrganiserKey.create(args.out or before.path.parent, invite.run_id)
    try:
        [(order, is_decided)] = await give_orders(
            invite, args.key, [RotateKey(value=new.public)], args.wait
        )
    except (CoordinatorRefused, WrongOrder):
        new.path.unlink()
        raise
    except CoordinatorError:
        _say(f"the order may have been given: keep {new.path} as well as {before.path}")
        raise
    removed = _remove_old(before) if is_decided else False
    if args.json:
        fields = {"number": order.number, "key": new.public.hex(), "file": str(new.path)}
        gone = str(before.path) if removed else None
        print_json(fields | {"decided": is_decided, "removed": gone})
        return 0
    print(f"{described(order)}{waits(is_decided=is_decided)}", file=sys.stderr, flush=True)
    if not is_decided:
        _say(f"keep {before.path} until then")
    elif removed:
        _say(f"removed {before.path}, whose key counts no more")
    else:
        _say(f"{before.path} stays, as the coordinator needs it; its key signs no orders any more")
    _say("keep this file as safe as the coordinator's keys.json, and a copy elsewhere:")
    print(new.path, flush=True)
    return 0


def _remove_old(key: OrganiserKey) -> bool:
    """Remove the file of a key that counts no more; return whether it may be removed."""
    from atoll.coordinator.run.keys import is_organiser_file

    if not is_organiser_file(key.path):
        return False
    key.path.unlink()
    return True


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
