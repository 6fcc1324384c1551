"""`atoll status`: print the state of a run once, or of several side by side."""

import argparse
import json

from atoll.peer.cli import Subparsers, new_parser, print_json
from atoll.peer.cli.watching import add_others, add_run, look, look_back_at_all, read_run


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll status`."""
    parser = new_parser(
        subparsers,
        "status",
        description="Print the state of a run and its peers, as the coordinator reports it, or as\n"
        "its state directory records it. With several runs, print their figures side by\n"
        "side, as `atoll report` compares them.",
        examples="atoll status INVITE\natoll status INVITE --json | jq .loss\n"
        "atoll status ~/.local/state/atoll/coordinators/NAME\n"
        "atoll status INVITE runs/ddp/coordinator\n"
        "atoll status INVITE runs/ddp/coordinator --json | jq '.[].loss'",
    )
    add_run(parser)
    add_others(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        help="Print everything as one line of JSON: an object, or of several runs a list of them.",
    )


def run(args: argparse.Namespace) -> int:
    """Print the state of the run, or of the runs."""
    from atoll.coordinator.report.plain import render_comparison, render_status

    if args.others:
        runs = look_back_at_all(args)
        if args.json:
            print_json([json.loads(each.status.to_json()) for each in runs])
        else:
            print(render_comparison(runs))
        return 0
    status = look(read_run(args.invite))
    if args.json:
        print_json(json.loads(status.to_json()))
    else:
        print(render_status(status))
    return 0
