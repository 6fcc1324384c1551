"""`atoll follow`: keep a run's whole log, newest state and checkpoints, without training."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.coordinator.run.notice import Notice, told_fields
from atoll.peer.cli import (
    Subparsers,
    add_named_files,
    add_outer_state,
    add_stop_with_stdin,
    new_parser,
    print_json,
)
from atoll.peer.cli.watching import add_invite, read_invite
from atoll.peer.daemon.options import LISTEN
from atoll.peer.daemon.supervised import stop_with_stdin

if TYPE_CHECKING:
    from atoll.coordinator.run.levels import Level
    from atoll.peer.daemon.follow_exports import ExportOptions
    from atoll.peer.daemon.following import FollowerPlace


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll follow`."""
    parser = new_parser(
        subparsers,
        "follow",
        description="Keep all of a run on this machine without training: every round's entry and\n"
        "update, the newest state, and checkpoints. It needs no GPU, no data and no\n"
        "tokenizer. Joining peers fetch from it too, also while the coordinator is down.\n"
        "Several may follow a run. It ends when the run is complete, or at Ctrl-C or\n"
        "SIGTERM; a restart continues.\n\n"
        "Its folder can be given to `atoll status`, `dashboard`, `report` and `export\n"
        "--round`, and `atoll coordinator --restore` rebuilds a lost coordinator from it\n"
        "with a copy of keys.json.\n\n"
        "Of a pipeline it follows all stages, or those of --stages, with a peer and a port\n"
        "for each; a coordinator can be rebuilt from a follower of all. Runs by gossip\n"
        "cannot be followed.\n\n"
        "--export-every N also writes the model into DIR/exports every N rounds, as `atoll\n"
        "export` does, in a process of low priority beside the follower.",
        examples="atoll follow INVITE\n"
        "atoll follow INVITE --dir /data/archive --checkpoint-every 100\n"
        "atoll follow INVITE --listen /ip4/0.0.0.0/tcp/4001 --json\n"
        "atoll follow INVITE --stages 1,3\n"
        "atoll follow INVITE --export-every 1000 --export-format safetensors\n"
        "atoll coordinator --restore /data/archive --keys backup/keys.json",
    )
    add_invite(parser)
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="Folder of this follower (default: ~/.local/state/atoll/followers/RUN_ID).",
    )
    parser.add_argument(
        "--checkpoint-every",
        type=_rounds,
        metavar="N",
        help="Rounds between two checkpoints in DIR/checkpoints; 0: at the end alone (default: as "
        "the coordinator, checkpoint_every in RUN.toml).",
    )
    parser.add_argument(
        "--stages",
        type=_stages,
        default=(),
        metavar="LIST",
        help="Stages of a pipeline to follow, by number or name: 1,3 or stage-1,stage-3 (default: "
        "all).",
    )
    _add_exports(parser)
    parser.add_argument(
        "--name", type=_name, default="", help="Name on the dashboard (default: of its PeerID)."
    )
    parser.add_argument(
        "--listen",
        action="append",
        metavar="MULTIADDR",
        help="Address to listen on; repeatable (default: any free port). A second stage listens on "
        "the port after it, and so on.",
    )
    parser.add_argument(
        "--announce",
        action="append",
        metavar="MULTIADDR",
        help="Address for others to dial, if it differs; repeatable. Ports as with --listen.",
    )
    add_outer_state(parser, default=None, told="disk in a run with stages, else memory")
    parser.add_argument(
        "--json",
        action="store_true",
        help="Print a line of JSON for each round and event instead of text.",
    )
    add_stop_with_stdin(parser)


def _add_exports(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--export-every",
        type=_some,
        metavar="N",
        help="Rounds between two exports: each of the first checkpoint at or after a multiple of "
        "N, and of the last one (default: no exports).",
    )
    parser.add_argument(
        "--export-format",
        choices=["hf", "safetensors"],
        default="hf",
        help="hf, a folder for `transformers`, or safetensors, one file of the trained parameters "
        "(default: hf).",
    )
    parser.add_argument(
        "--keep-exports",
        type=_some,
        default=3,
        metavar="K",
        help="Exports that stay, the newest ones (default: 3).",
    )
    add_named_files(parser)


def run(args: argparse.Namespace) -> int:
    """Follow until the run is complete or a signal stops it."""
    if args.stop_with_stdin:
        stop_with_stdin()
    invite = read_invite(args.invite)
    from atoll.peer.daemon.followed import FollowOptions
    from atoll.peer.daemon.following import run_follower
    from atoll.peer.daemon.options import PeerOptions
    from atoll.peer.paths import follower_dir

    folder: Path = args.dir or follower_dir(invite.run_id.hex())
    shown = FollowerLines(folder, as_json=args.json)
    peer = PeerOptions(
        invite=invite,
        state_dir=folder,
        name=args.name,
        listen=tuple(args.listen or LISTEN),
        announce=tuple(args.announce or ()),
        role="follower",
    )
    options = FollowOptions(
        peer=peer,
        stages=args.stages,
        state_on_disk=None if args.outer_state is None else args.outer_state == "disk",
        checkpoint_every=args.checkpoint_every,
        exports=_exports(args),
    )
    return run_follower(options, on_event=shown.event, on_moved=shown.moved)


def _exports(args: argparse.Namespace) -> ExportOptions | None:
    if args.export_every is None:
        return None
    from atoll.peer.daemon.follow_exports import ExportOptions

    return ExportOptions(
        every=args.export_every,
        form=args.export_format,
        keep=args.keep_exports,
        allowed_models=tuple(args.allow_model),
        any_source=args.any_model_source,
        tokenizer=args.tokenizer,
        init=args.init,
    )


class FollowerLines:
    """Prints what a follower does, for people or for programs."""

    def __init__(self, folder: Path, *, as_json: bool) -> None:
        """Print nothing yet."""
        self._folder = folder
        self._as_json = as_json
        self._is_first = True

    def event(self, level: Level, notice: Notice) -> None:
        """Print an event."""
        if self._as_json:
            told = told_fields(notice)
            print_json({"kind": "event", "level": level, "time": _now_s(), **told})
        else:
            self._say(notice if level == "info" else f"{level}  {notice}")

    def moved(self, place: FollowerPlace) -> None:
        """Print where the follower stands."""
        is_staged = place.modules != ("",)
        if self._as_json:
            kind = "ready" if self._is_first else "round"
            print_json(
                {
                    "kind": kind,
                    "run": place.run_name,
                    "peer_id": place.peer_id,
                    "dir": str(self._folder.absolute()),
                    "position": place.position,
                    **(
                        {"stages": dict(zip(place.modules, place.positions, strict=True))}
                        if is_staged
                        else {}
                    ),
                    "rounds": place.rounds,
                    "whole": place.first_body == 0,
                    "complete": place.is_complete,
                    "time": _now_s(),
                }
            )
        else:
            if self._is_first:
                what = f"{', '.join(place.modules)} of run" if is_staged else "run"
                self._say(f"following {what} {place.run_name} in {self._folder}")
            total = f" of {place.rounds}" if place.rounds else ""
            lacking = f"; updates before round {place.first_body + 1} are still missing"
            rounds = ", ".join(map(str, place.positions))
            self._say(f"round {rounds}{total}" + (lacking if place.first_body else ""))
            if place.is_complete:
                self._say("run complete; everything is on this machine")
        self._is_first = False

    def _say(self, line: str) -> None:
        from atoll.coordinator.run import text

        now = text.clock_time(time.time())
        print(f"{now}  {text.clean(line)}", file=sys.stderr, flush=True)


def _now_s() -> float:
    return round(time.time(), 3)


def _some(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, got {text!r}")
    return int(text)


def _stages(text: str) -> tuple[str, ...]:
    stages = tuple(part.strip() for part in text.split(","))
    if not all(stages):
        raise argparse.ArgumentTypeError(f"expected stages such as 1,3, got {text!r}")
    return stages


def _rounds(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of rounds, got {text!r}")
    return int(text)


def _name(text: str) -> str:
    from atoll.peer.daemon.options import MAX_NAME_CHARS

    if len(text) > MAX_NAME_CHARS:
        raise argparse.ArgumentTypeError(
            f"expected at most {MAX_NAME_CHARS} characters, got {len(text)}"
        )
    return text
