"""`atoll rounds`: the rounds that were committed."""

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from atoll.peer.commands import Subparsers, new_parser, print_json
from atoll.peer.commands.watching import add_invite, look, read_invite

if TYPE_CHECKING:
    from atoll.coordinator.status import RoundSummary


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll rounds`."""
    parser = new_parser(
        subparsers,
        "rounds",
        description="List the newest committed rounds, oldest first: loss, traffic, members, who\n"
        "was left out, and the hash chain that names the history up to there.",
        examples="atoll rounds INVITE\natoll rounds INVITE --last 5\n"
        "atoll rounds INVITE --json | jq '.rounds[].loss'",
    )
    add_invite(parser)
    parser.add_argument(
        "--last", type=int, metavar="N", help="only the N newest (default: all that are told)"
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")


class LastError(ValueError):
    """A number of rounds below one."""


def run(args: argparse.Namespace) -> int:
    """Print the rounds."""
    if args.last is not None and args.last < 1:
        raise LastError(f"expected --last of at least 1, got {args.last}")
    status = look(read_invite(args.invite))
    shown = len(status.history) if args.last is None else args.last
    if args.json:
        told = json.loads(status.to_json())
        print_json({"run_id": status.run_id, "rounds": told["history"][-shown:]})
        return 0
    for line in table(status.history[-shown:]):
        print(line)
    return 0


def table(history: Sequence["RoundSummary"]) -> list[str]:
    """One line a round under a heading; its wall time follows from the round before."""
    if not history:
        return ["no round was committed yet"]
    head = "round  time      loss    valid    tokens  peers  MB sent  seconds  chain"
    before: list[RoundSummary | None] = [None, *history]
    return [head, *map(_line, history, before)]


def _line(row: "RoundSummary", before: "RoundSummary | None") -> str:
    from atoll.coordinator.dashboard import text

    seconds = f"{row.at - before.at:7.1f}" if before is not None else f"{'-':>7}"
    left_out = ", ".join(text.short_id(peer_id) for peer_id in row.left_out)
    fields = (
        f"{row.position:>5}",
        f"{text.clock_time(row.at):<8}",
        f"{text.loss_text(row.loss):<6}",
        f"{text.loss_text(row.valid_loss):<6}",
        f"{text.count(row.tokens):>7}",
        f"{row.members:>5}",
        f"{row.wire_bytes / 1e6:7.2f}",
        seconds,
        row.chain[:16],
    )
    return "  ".join(fields) + (f"  without {left_out}" if left_out else "")
