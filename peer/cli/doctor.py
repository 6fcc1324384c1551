"""`atoll doctor`: check this machine and its connection to a run."""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.dht.addresses import TCP
from atoll.peer.cli import Subparsers, new_parser, print_json
from atoll.peer.cli.watching import read_invite

if TYPE_CHECKING:
    from atoll.peer.daemon.doctor.health import Finding

LISTEN = "/ip4/0.0.0.0/tcp/0"


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll doctor`."""
    parser = new_parser(
        subparsers,
        "doctor",
        description="Check whether this machine can train: Python, torch, device, disk, memory,\n"
        "ports. With an invite, also check the connection to the run: the coordinator's\n"
        "ports, the clock, whether others can dial this machine, the kind of its router,\n"
        "peers that cannot reach each other, and the rates to the coordinator and two\n"
        "peers (at most 7 MB each). Prints one line for each finding (ok, note, problem)\n"
        "with its remedy. Exits with 1 if there is a problem.",
        examples="atoll doctor\natoll doctor INVITE\natoll doctor INVITE --json",
    )
    parser.add_argument(
        "invite",
        metavar="INVITE",
        nargs="?",
        help="Invite string, or a file that contains it (default: check this machine alone).",
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="State directory of the peer (default: ~/.local/state/atoll/peers/RUN_ID).",
    )
    parser.add_argument(
        "--listen",
        metavar="MULTIADDR",
        default=LISTEN,
        help=f"Address that the peer would listen on (default: {LISTEN}).",
    )
    parser.add_argument("--json", action="store_true", help="Print findings as lines of JSON.")


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 1 if there is a problem."""
    place = TCP.fullmatch(args.listen)
    if place is None:
        print(
            f"atoll doctor: expected a multiaddr such as {LISTEN} for --listen, got "
            f"{args.listen!r}",
            file=sys.stderr,
        )
        return 2
    invite = read_invite(args.invite) if args.invite is not None else None
    from atoll.peer.daemon.doctor import health
    from atoll.peer.paths import peer_state_dir, state_home
    from atoll.peer.training.machine import memory_free

    findings: list[health.Finding] = []

    def report(finding: "Finding") -> None:
        findings.append(finding)
        if args.json:
            print_json(finding.fields())
        else:
            print(finding.line, flush=True)

    folder = args.state_dir
    if folder is None:
        folder = peer_state_dir(invite.run_id.hex()) if invite is not None else state_home()
    report(health.python_finding(sys.version_info[:3]))
    report(health.free_disk(folder))
    report(health.memory_finding(memory_free()))
    if control := health.congestion_control():
        report(health.tcp_finding(control))
    report(health.bind_finding(place["host"], int(place["port"])))
    report(health.torch_finding())
    if invite is not None:
        from atoll.dht.addresses import usable
        from atoll.peer.daemon.doctor.run_checks import check_run
        from atoll.peer.daemon.options import LISTEN as DEFAULT

        listen = usable(DEFAULT) if args.listen == LISTEN else (args.listen,)
        asyncio.run(check_run(invite, folder, listen, report))
    return health.exit_code(findings)
