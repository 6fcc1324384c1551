"""`atoll status`: print the state of a run once."""

import argparse
import json

from atoll.peer.cli import Subparsers, new_parser, print_json
from atoll.peer.cli.watching import add_run, look, read_run


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll status`."""
    parser = new_parser(
        subparsers,
        "status",
        description="Print the state of a run and its peers, as the coordinator reports it, or as\n"
        "its state directory records it.",
        examples="atoll status INVITE\natoll status INVITE --json | jq .loss\n"
        "atoll status ~/.local/state/atoll/coordinators/NAME",
    )
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="Print everything as one line of JSON.")


def run(args: argparse.Namespace) -> int:
    """Print the state of the run."""
    status = look(read_run(args.invite))
    if args.json:
        print_json(json.loads(status.to_json()))
        return 0
    from atoll.coordinator.report.plain import render_status

    print(render_status(status))
    return 0
