"""`atoll invite`: issue, list and revoke the invites of a run."""

from __future__ import annotations

import argparse
import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.peer.cli import Subparsers, new_parser, print_json

if TYPE_CHECKING:
    from atoll.coordinator.invites import Kind
    from atoll.coordinator.run.invite import Invite

_UNITS_S = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class NoRunDirectory(ValueError):
    """The state directory is not that of a coordinator, or several could be meant."""


class WrongInvite(ValueError):
    """The options contradict each other."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll invite`."""
    parser = new_parser(
        subparsers,
        "invite",
        description="Issue an invite for trainers, keepers or watchers, on the coordinator's\n"
        "machine. It works at once, even while the coordinator runs, and survives\n"
        "restarts. Each new peer counts as one use; a peer that has joined may return,\n"
        "also after the expiry.",
        examples="atoll invite --uses 5 --expires 7d\n"
        "atoll invite --role keeper --expires 1d\n"
        "atoll invite --watch --expires 12h\n"
        "atoll invite RUN_STATE --list\n"
        "atoll invite --revoke first",
    )
    add_state_dir(parser)
    parser.add_argument(
        "--uses",
        type=_count,
        default=None,
        metavar="N",
        help="Peers that may join (default: any; 1 for keepers).",
    )
    parser.add_argument(
        "--role",
        choices=("trainer", "keeper", "watcher"),
        help="Role of the peers that join (default: trainer). A keeper leads and votes and does "
        'not train, in runs with electors = "keepers" in [round] of RUN.toml.',
    )
    parser.add_argument(
        "--expires",
        type=duration_s,
        default=0,
        metavar="TIME",
        help="Time until it expires, in m, h, d or w, as in 7d (default: never).",
    )
    parser.add_argument(
        "--watch", action="store_true", help="Short for --role watcher: status only, no joining."
    )
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--list", action="store_true", help="List of the invites and their uses.")
    other.add_argument(
        "--revoke",
        metavar="ID",
        help="Invite to make unusable; `first` is the one of `atoll coordinator`. "
        "Peers that joined with it stay: see `atoll evict`.",
    )
    parser.add_argument("--json", action="store_true", help="Line of JSON instead of text.")


def run(args: argparse.Namespace) -> int:
    """Do what the arguments ask for."""
    from dataclasses import replace

    from atoll.coordinator.invites import issue, revoke

    folder = find_run(args.state_dir)
    if args.list:
        return _list(folder, as_json=args.json)
    base = base_invite(folder)
    if args.revoke:
        revoke(folder, args.revoke, base.token)
        _say(f"invite {args.revoke} is revoked; `atoll evict PEER` removes a peer that used it")
        return 0
    if args.watch and args.role not in (None, "watcher"):
        raise WrongInvite(f"--watch and --role {args.role} cannot be combined; give one of them")
    kind: Kind = "watcher" if args.watch else args.role or "trainer"
    if kind == "watcher" and args.uses:
        raise WrongInvite("--watch and --uses cannot be combined: watching takes no use")
    # A keeper votes, so an invite that leaks makes no more of them than the organiser meant.
    uses = args.uses or (1 if kind == "keeper" else 0)
    expires_s = time.time() + args.expires if args.expires else 0.0
    name, token = issue(folder, kind=kind, uses=uses, expires_s=expires_s)
    invite = str(replace(base, token=token))
    limits = _limits(kind, uses, expires_s)
    if not base.token:
        _say("the run is open (coordinator.invite_only = false): anyone may join without an invite")
    if args.json:
        fields = {"invite": invite, "id": name, "kind": kind, "uses": uses or None}
        print_json(fields | {"expires_s": expires_s or None})
    else:
        _say(f"invite {name}: {limits}")
        print(invite, flush=True)
    return 0


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


def _count(text: str) -> int:
    from atoll.coordinator.invites import MAX_USES

    if not text.isdecimal() or not 1 <= int(text) <= MAX_USES:
        raise argparse.ArgumentTypeError(f"expected 1 to {MAX_USES}, got {text}")
    return int(text)


def _list(folder: Path, *, as_json: bool) -> int:
    from atoll.coordinator.invites import FIRST, IssuedInvite, read_book, read_uses

    book, used = read_book(folder), read_uses(folder)
    invites = list(book.invites)
    if not any(invite.id == FIRST for invite in invites):
        invites.insert(0, IssuedInvite(id=FIRST, kind="trainer", token_sha256=""))
    for invite in invites:
        joined = len(used.get(invite.id, []))
        if as_json:
            fields = {"id": invite.id, "kind": invite.kind, "revoked": invite.revoked}
            limits = {"uses": invite.uses or None, "expires_s": invite.expires_s or None}
            print_json(fields | limits | {"joined": joined})
            continue
        state = " REVOKED" if invite.revoked else ""
        is_counted = invite.uses or invite.expires_s or invite.kind == "keeper"
        count = f", {joined} joined" if is_counted else ""
        print(f"{invite.id:<10}{_limits(invite.kind, invite.uses, invite.expires_s)}{count}{state}")
    return 0


def _limits(kind: str, uses: int, expires_s: float) -> str:
    peer = "keeper" if kind == "keeper" else "peer"
    peers = f"{uses} {peer}{'s' * (uses != 1)}" if uses else f"any number of {peer}s"
    whom = "watching only" if kind == "watcher" else peers
    until = f"{datetime.fromtimestamp(expires_s, UTC):%Y-%m-%d %H:%M} UTC" if expires_s else ""
    return f"for {whom}, until {until}" if until else f"for {whom}, without expiry"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
