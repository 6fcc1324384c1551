"""`atoll rounds`: list committed rounds."""

import argparse
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from atoll.peer.cli import Subparsers, new_parser, print_json
from atoll.peer.cli.watching import add_run, look, read_run

if TYPE_CHECKING:
    from atoll.coordinator.run.status import Gap, RoundSummary, RunStatus

NOBODY: Mapping[str, str] = MappingProxyType({})


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll rounds`."""
    parser = new_parser(
        subparsers,
        "rounds",
        description="List the newest committed rounds, oldest first, with loss, traffic, members,\n"
        "peers left out, and the hash chain that identifies the history up to that round.",
        examples="atoll rounds INVITE\natoll rounds INVITE --last 5\n"
        "atoll rounds INVITE --round 12\n"
        "atoll rounds INVITE --stage stage-1\n"
        "atoll rounds INVITE --json | jq '.rounds[].loss'",
    )
    add_run(parser)
    parser.add_argument(
        "--last",
        type=int,
        metavar="N",
        help="Number of rounds to list (default: all that the coordinator reports).",
    )
    parser.add_argument(
        "--round",
        type=int,
        metavar="N",
        help="Show one round in detail: phases, bytes, peers left out and why.",
    )
    parser.add_argument(
        "--stage",
        default="",
        metavar="NAME",
        help="Stage of a pipeline whose rounds to list (default: the last one).",
    )
    parser.add_argument("--json", action="store_true", help="Print one line of JSON.")


class RoundsError(ValueError):
    """--last below 1, or a stage or a round that the coordinator does not report."""


def run(args: argparse.Namespace) -> int:
    """Print the rounds."""
    if args.last is not None and args.last < 1:
        raise RoundsError(f"--last must be at least 1, got {args.last}")
    chosen = read_run(args.invite)
    status = look(chosen)
    if args.stage:
        _expect_stage(status, args.stage)
        status = look(chosen, args.stage)
    shown = len(status.history) if args.last is None else args.last
    if args.json:
        told = json.loads(status.to_json())
        rounds = told["history"][-shown:]
        print_json({"run_id": status.run_id, "rounds": rounds, "gaps": told["gaps"]})
        return 0
    from atoll.coordinator.report.view import names

    if args.round is not None:
        lines = trace(_told(status.history, args.round), names(status), status.gaps)
    else:
        lines = table(status.history[-shown:], names(status), status.gaps)
    for line in lines:
        print(line)
    return 0


def _expect_stage(status: "RunStatus", name: str) -> None:
    stages = [module.name for module in status.modules]
    if not stages:
        raise RoundsError("--stage is for a pipeline, and this run has one log; omit it")
    if name not in stages:
        raise RoundsError(f"the run has no stage {name!r}; choose one of {', '.join(stages)}")


def _told(history: Sequence["RoundSummary"], position: int) -> "RoundSummary":
    row = next((row for row in history if row.position == position), None)
    if row is None:
        known = f"{history[0].position} to {history[-1].position}" if history else "none yet"
        raise RoundsError(f"round {position} is not available; available rounds: {known}")
    return row


def table(
    history: Sequence["RoundSummary"],
    names: Mapping[str, str] = NOBODY,
    gaps: Sequence["Gap"] = (),
) -> list[str]:
    """Return a heading and one line per round; wall times are from the round before.

    Args:
        history: consecutive rounds.
        names: names of peers, by PeerID.
        gaps: rounds whose updates the coordinator does not hold.
    """
    if not history:
        return ["no rounds committed yet"]
    head = "round  time      loss    valid    tokens  peers  MB sent  seconds  chain"
    before: list[RoundSummary | None] = [None, *history]
    rows = zip(history, before, strict=False)
    return [head, *(_line(row, previous, names, gaps) for row, previous in rows)]


def trace(
    row: "RoundSummary", names: Mapping[str, str] = NOBODY, gaps: Sequence["Gap"] = ()
) -> list[str]:
    """Return one round in detail: phases, bytes of each peer, peers left out and why."""
    from atoll.coordinator.report import view
    from atoll.coordinator.run import text

    total_s = sum(row.seconds.values())
    phases = [f"  {text.clean(name):<8} {s:8.3f} s" for name, s in row.seconds.items()]
    sent = [
        f"  {_name(peer, names):<8} {wire_bytes / 1e6:8.3f} MB sent"
        for peer, wire_bytes in sorted(row.peer_bytes.items(), key=lambda item: -item[1])
    ]
    without = [f"  {told}" for told in view.without(row, names)]
    held = view.is_held(row, gaps)
    return [
        f"round {row.position}, epoch {row.epoch}: {row.members} members, {row.tokens} tokens",
        *(
            []
            if held
            else ["the coordinator does not hold this update: it missed it, and no peer kept it"]
        ),
        *([f"phases, mean over members ({total_s:.3f} s)", *phases] if phases else []),
        *([f"removed by the robust reducer: norm {row.rejected:.4g}"] if row.rejected else []),
        *(["bytes on the wire", *sent] if sent else []),
        *(["left out, wholly or from some chunk on", *without] if without else []),
    ]


def _name(peer: str, names: Mapping[str, str]) -> str:
    from atoll.coordinator.run import text

    return names.get(peer) or text.short_id(peer)


def _line(
    row: "RoundSummary",
    before: "RoundSummary | None",
    names: Mapping[str, str],
    gaps: Sequence["Gap"],
) -> str:
    from atoll.coordinator.report import view
    from atoll.coordinator.run import text
    from atoll.coordinator.run.status import seconds_between

    gap_s = seconds_between(before, row) if before is not None else None
    absent = "; ".join(view.without(row, names))
    fields = (
        f"{row.position:>5}",
        f"{text.clock_time(None if row.late else row.at):<8}",
        f"{text.loss_text(row.loss):<6}",
        f"{text.loss_text(row.valid_loss):<6}",
        f"{text.count(row.tokens):>7}",
        f"{row.members:>5}",
        f"{row.wire_bytes / 1e6:7.2f}" if row.seconds else f"{text.ABSENT:>7}",
        f"{text.ABSENT:>7}" if gap_s is None else f"{gap_s:7.1f}",
        row.chain[:16],
    )
    notes = [f"without {absent}"] if absent else []
    if not view.is_held(row, gaps):
        notes.append("update not held")
    return "  ".join([*fields, *notes])
