"""`atoll service`: start a peer or a coordinator at boot, and again when it fails."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from atoll.peer.cli import Subparsers, new_parser, print_json
from atoll.peer.cli.coordinator import write_invite
from atoll.peer.cli.watching import read_invite
from atoll.peer.services import ServiceError, Systemd, UserService, manager

COMMANDS = ("peer", "coordinator")
KEPT = ("XDG_STATE_HOME",)  # without it a service would look for its state elsewhere
PROGRAM = (sys.executable, "-P", "-m", "atoll.peer.cli.main")


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll service`."""
    parser = new_parser(
        subparsers,
        "service",
        description="Have the system start a peer or a coordinator at boot, and again 30 s after\n"
        "a failure: a service of this user, by systemd on Linux and by launchd on macOS.\n"
        "It needs no root. An invite is kept in a file that only this user can read.",
        examples="atoll service install peer INVITE --yes --share 0.5\n"
        "atoll service install coordinator RUN.toml --advertise run.example.org\n"
        "atoll service install --print peer INVITE --yes\n"
        "atoll service list\n"
        "atoll service remove peer-1a2b3c4d",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    install = actions.add_parser("install", help="write the service and start it")
    install.add_argument(
        "--name", help="Name of the service (default: of the command and its run)."
    )
    install.add_argument(
        "--print", action="store_true", dest="only_print", help="Print it and change nothing."
    )
    install.add_argument("of", choices=COMMANDS, metavar="COMMAND", help="peer or coordinator.")
    install.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="...", help="Arguments of that command."
    )
    remove = actions.add_parser("remove", help="stop a service and delete it")
    remove.add_argument("name", metavar="NAME", help="As `atoll service list` names it.")
    listing = actions.add_parser("list", help="list the services")
    listing.add_argument("--json", action="store_true", help="Print one line of JSON.")


def run(args: argparse.Namespace) -> int:
    """Install, remove or list services."""
    if args.action == "list":
        names = manager().names()
        if args.json:
            print_json({"services": names})
        else:
            print("\n".join(names) or "none")
        return 0
    if args.action == "remove":
        manager().remove(args.name)
        _invite_file(args.name).unlink(missing_ok=True)
        print(f"removed {args.name}")
        return 0
    return _install(args)


def _install(args: argparse.Namespace) -> int:
    parsed = _parsed(args.of, args.words)
    name = args.name or _name(args.of, parsed)
    words = list(args.words)
    if args.of == "peer":
        _expect_consent(parsed)
        words = _with_invite_file(words, parsed.invite, name)
    service = UserService(
        name=name,
        words=[*PROGRAM, args.of, *words],
        folder=Path.cwd(),
        environment={key: os.environ[key] for key in KEPT if key in os.environ},
    )
    if args.only_print:
        chosen = Systemd(Path()) if sys.platform != "darwin" else manager()
        print(chosen.text(service), end="")
        return 0
    found = manager()
    if args.of == "peer":
        _keep_invite(parsed.invite, name)
    path = found.install(service)
    print(f"{name} runs, and starts at boot: {path}")
    for line in found.advice(name):
        print(line)
    return 0


def _parsed(command: str, words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a command; exit with 2 and its usage if they are wrong."""
    parser = argparse.ArgumentParser(prog="atoll")
    module = importlib.import_module(f"atoll.peer.cli.{command}")
    module.add_parser(parser.add_subparsers())
    return parser.parse_args([command, *words])


def _name(command: str, parsed: argparse.Namespace) -> str:
    """Return a name by the run, so that a second install of it takes the first one's place."""
    if command == "peer":
        return f"peer-{read_invite(parsed.invite).run_id.hex()[:8]}"
    from atoll.coordinator.run.spec import RunSpec

    return f"coordinator-{RunSpec.load(parsed.spec).run.name}".lower()


def _expect_consent(parsed: argparse.Namespace) -> None:
    """Refuse a peer that would have to ask where nobody answers."""
    from atoll.peer.paths import PeerPaths, peer_state_dir

    run_id = read_invite(parsed.invite).run_id.hex()
    paths = PeerPaths(root=parsed.state_dir or peer_state_dir(run_id))
    if not parsed.yes and not paths.consent.exists():
        raise ServiceError(
            "a service cannot ask whether you accept what the run asks for; start `atoll peer "
            "INVITE` once and answer, or pass --yes after INVITE"
        )


def _with_invite_file(words: Sequence[str], invite: str, name: str) -> list[str]:
    """Return the arguments with the file of an invite, which other users must not see."""
    return [str(_kept(invite, name)) if word == invite else word for word in words]


def _kept(invite: str, name: str) -> Path:
    is_file = len(invite) <= 255 and Path(invite).is_file()
    return Path(invite).absolute() if is_file else _invite_file(name)


def _keep_invite(invite: str, name: str) -> None:
    path = _kept(invite, name)
    if path != _invite_file(name):
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_invite(path, invite)


def _invite_file(name: str) -> Path:
    from atoll.peer.paths import state_home

    return state_home() / "services" / f"{name}.invite"
