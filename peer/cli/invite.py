"""`atoll invite`: issue, list and revoke the invites of a run."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.peer.cli import Subparsers, new_parser, print_json
from atoll.peer.cli.organiser_key import add_key
from atoll.peer.cli.watching import read_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.coordinator.run.invite import Invite
    from atoll.coordinator.run.invite_request import ListedInvite
    from atoll.coordinator.run.issued_invite import IssuedInvite, Kind

    Manage = Callable[[IssuedInvite | None, str], list[ListedInvite]]

MAX_ENTRIES = 8  # 90 characters each, in a string that people copy
_UNITS_S = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
ROLES = ("trainer", "follower", "observer", "keeper")


class NoRunDirectory(ValueError):
    """The state directory is not that of a coordinator, or several could be meant."""


class WrongInvite(ValueError):
    """The options contradict each other."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll invite`."""
    parser = new_parser(
        subparsers,
        "invite",
        description="Issue an invite for trainers, followers, observers or keepers, list all, or\n"
        "revoke one. On the coordinator's machine by its state directory, whether it\n"
        "runs or not; from elsewhere by any invite of the run and the organiser's key.\n"
        "It works at once and survives restarts.",
        examples="atoll invite --uses 5 --expires 7d\n"
        "atoll invite --role observer --expires 12h\n"
        "atoll invite INVITE --role follower --key backup/keys.json --json\n"
        "atoll invite RUN_STATE --list\n"
        "atoll invite --uses 5 --entries 3\n"
        "atoll invite --revoke first",
    )
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="State directory of the coordinator, or any invite of the run (default: the only "
        "directory in ~/.local/state/atoll/coordinators).",
    )
    parser.add_argument(
        "--role",
        choices=ROLES,
        default="trainer",
        help="Role of those that use it (default: trainer). A follower reads the log and does not "
        "train. An observer sees status, rounds and report, and nothing else. A keeper leads and "
        'votes and does not train, in runs with electors = "keepers" in [round] of RUN.toml.',
    )
    parser.add_argument(
        "--uses",
        type=_count,
        default=None,
        metavar="N",
        help="Peers that may join, or observers that may look (default: any; 1 for keepers). A "
        "peer that joins again counts once.",
    )
    parser.add_argument(
        "--expires",
        type=duration_s,
        default=0,
        metavar="TIME",
        help="Time until it expires, in m, h, d or w, as in 7d (default: never). A peer that has "
        "joined may return later; an observer may not.",
    )
    parser.add_argument(
        "--entries",
        type=_entries,
        default=0,
        metavar="N",
        help="Peers that others can dial, whose addresses the invite lists beside the "
        f"coordinator's, at most {MAX_ENTRIES} (default: none). They show the way to whoever uses "
        "it after the coordinator has moved. Whoever reads the invite reads their addresses.",
    )
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--list", action="store_true", help="List of the invites and their uses.")
    other.add_argument(
        "--revoke",
        metavar="ID",
        help="Invite to make good for nothing; `first` is the one of `atoll coordinator`. Peers "
        "that joined with it are out at their next heartbeat, until they join with another.",
    )
    add_key(parser)
    parser.add_argument("--json", action="store_true", help="Line of JSON instead of text.")


def run(args: argparse.Namespace) -> int:
    """Do what the arguments ask for."""
    from dataclasses import replace

    from atoll.coordinator.run.invite import MAX_BOOTSTRAP
    from atoll.coordinator.run.issued_invite import new_invite

    given = find_run(None) if args.run is None else read_run(args.run)
    if isinstance(given, Path):
        folder = find_run(given)
        base, manage = (base_invite(folder) if not args.list else None), _by_files(folder)
    else:
        base, manage = given, _by_coordinator(given, args.key)
    if args.list or args.revoke:
        invites = manage(None, args.revoke or "")
        if args.revoke:
            _say(f"invite {args.revoke} is revoked, and with it the peers that joined by it")
        else:
            _show(invites, as_json=args.json)
        return 0
    assert base is not None
    if args.entries:
        entries = _entries_at(given, args.entries)
        base = replace(base, bootstrap=(*base.bootstrap, *entries)[:MAX_BOOTSTRAP])
    kind: Kind = args.role
    # A keeper votes, so an invite that leaks makes no more of them than the organiser meant.
    uses = args.uses or (1 if kind == "keeper" else 0)
    expires_s = time.time() + args.expires if args.expires else 0.0
    issued, token = new_invite(kind=kind, uses=uses, expires_s=expires_s)
    manage(issued, "")
    invite = str(replace(base, token=token))
    if not base.token:
        _say("the run is open (coordinator.invite_only = false): anyone may join without an invite")
    if args.json:
        fields = {"invite": invite, "id": issued.id, "kind": kind, "uses": uses or None}
        print_json(fields | {"expires_s": expires_s or None})
    else:
        _say(f"invite {issued.id}: {_limits(kind, uses, expires_s)}")
        print(invite, flush=True)
    return 0


def _entries_at(given: Invite | Path | None, count: int) -> tuple[str, ...]:
    """Return addresses of peers that the coordinator last knew and others can dial, one of each.

    Raises:
        WrongInvite: there are none.
    """
    from atoll.coordinator.run.files import known_peers
    from atoll.dht.addresses import peer_of, relay_of

    if not isinstance(given, Path):
        raise WrongInvite(
            "--entries reads the coordinator's state directory, got an invite; run this on the "
            "coordinator's machine, or omit it"
        )
    known = known_peers(find_run(given))
    by_peer = {peer_of(address): address for address in reversed(known) if not relay_of(address)}
    found = tuple(reversed(by_peer.values()))[:count]
    if not found:
        raise WrongInvite(
            "--entries: the coordinator knows no peer that others can dial; start a peer or "
            "`atoll follow` on a machine with an open port, or omit it"
        )
    if len(found) < count:
        _say(f"others can dial {len(found)} peers, and {count} were asked for")
    return found


def _by_files(folder: Path) -> Manage:
    """Return what changes the files of a coordinator, which reads them at once."""
    from atoll.coordinator.invites import FIRST, keep, listed, revoke
    from atoll.coordinator.run.invite_request import ListedInvite

    def manage(issue: IssuedInvite | None, revoked: str) -> list[ListedInvite]:
        if issue is not None:
            keep(folder, issue)
        if revoked:
            token = base_invite(folder).token if revoked == FIRST else b""
            revoke(folder, revoked, token, at_s=time.time())
        return [ListedInvite.of(invite, joined) for invite, joined in listed(folder)]

    return manage


def _by_coordinator(invite: Invite, key: Path | None) -> Manage:
    """Return what asks a running coordinator, with the organiser's key."""
    from atoll.coordinator.rpc.invites import InvitesClient
    from atoll.peer.cli.organiser_key import client_of, key_in_force
    from atoll.peer.cli.run import patiently, standing_of

    async def ask(issue: IssuedInvite | None, revoked: str) -> list[ListedInvite]:
        organiser = key_in_force(invite, key, (await standing_of(invite)).settings)
        client = client_of(InvitesClient, invite)
        try:
            return await patiently(
                partial(client.manage, organiser.sign, issue=issue, revoke=revoked)
            )
        finally:
            await client.close()

    return lambda issue, revoked: asyncio.run(ask(issue, revoked))


def add_state_dir(parser: argparse.ArgumentParser) -> None:
    """Add the coordinator's state directory as an optional argument."""
    parser.add_argument(
        "state_dir",
        type=Path,
        nargs="?",
        metavar="STATE_DIR",
        help="State directory of the coordinator (default: the only one in "
        "~/.local/state/atoll/coordinators).",
    )


def find_run(given: Path | None) -> Path:
    """Return the coordinator's state directory. Raises NoRunDirectory."""
    from atoll.coordinator.run.keys import KEYS_FILE
    from atoll.peer.paths import coordinator_state_dir

    if given is not None:
        if not (given / KEYS_FILE).exists():
            raise NoRunDirectory(
                f"{given}: expected the state directory of a coordinator, which holds {KEYS_FILE}"
            )
        return given
    parent = coordinator_state_dir("any").parent
    found = sorted(path.parent for path in parent.glob(f"*/{KEYS_FILE}"))
    if len(found) != 1:
        names = ", ".join(str(path) for path in found) or "none"
        raise NoRunDirectory(f"expected one run in {parent}, found {names}; name STATE_DIR")
    return found[0]


def base_invite(folder: Path) -> Invite:
    """Return the first invite of a run. Raises NoRunDirectory."""
    from atoll.coordinator.invites import BASE_FILE
    from atoll.coordinator.run.invite import Invite

    try:
        return Invite.decode((folder / BASE_FILE).read_text())
    except FileNotFoundError:
        raise NoRunDirectory(
            f"{folder}: the addresses of the run are not known yet; start its coordinator once"
        ) from None


def duration_s(text: str) -> int:
    """Return the seconds of a text like 30m, 12h, 7d or 2w."""
    found = re.fullmatch(r"(\d{1,6})([mhdw])", text.strip())
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"expected a time such as 30m, 12h, 7d or 2w, got {text}")
    return int(found[1]) * _UNITS_S[found[2]]


def _entries(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_ENTRIES:
        raise argparse.ArgumentTypeError(f"expected 1 to {MAX_ENTRIES}, got {text}")
    return int(text)


def _count(text: str) -> int:
    from atoll.coordinator.run.issued_invite import MAX_USES

    if not text.isdecimal() or not 1 <= int(text) <= MAX_USES:
        raise argparse.ArgumentTypeError(f"expected 1 to {MAX_USES}, got {text}")
    return int(text)


def _show(invites: list[ListedInvite], *, as_json: bool) -> None:
    for invite in invites:
        uses, expires_s = invite.uses or None, invite.expires_s or None
        if as_json:
            fields = {"id": invite.id, "kind": invite.kind, "revoked": invite.revoked}
            print_json(fields | {"uses": uses, "expires_s": expires_s, "joined": invite.joined})
            continue
        state = " REVOKED" if invite.revoked else ""
        did = "looked" if invite.kind == "observer" else "joined"
        is_counted = uses or (expires_s and invite.kind != "observer") or invite.kind == "keeper"
        count = f", {invite.joined} {did}" if is_counted else ""
        print(f"{invite.id:<10}{_limits(invite.kind, invite.uses, invite.expires_s)}{count}{state}")


def _limits(kind: str, uses: int, expires_s: float) -> str:
    who = "peer" if kind == "trainer" else kind
    whom = f"{uses} {who}{'s' * (uses != 1)}" if uses else f"any number of {who}s"
    until = f"{datetime.fromtimestamp(expires_s, UTC):%Y-%m-%d %H:%M} UTC" if expires_s else ""
    return f"for {whom}, until {until}" if until else f"for {whom}, without expiry"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
