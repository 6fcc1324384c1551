"""`atoll peer`: join a run and train."""

import argparse
import json
import logging
import math
import os
import re
import select
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.coordinator.run.notice import told_fields
from atoll.peer import notices
from atoll.peer.cli import (
    Subparsers,
    add_allow_model,
    add_outer_state,
    add_stop_with_stdin,
    add_track,
    new_parser,
)
from atoll.peer.cli.limits import add_limits, mbit, rates_of, rules_of, rules_of_one
from atoll.peer.cli.watching import read_invite
from atoll.peer.daemon.beside.starting import loading, started_ahead
from atoll.peer.daemon.options import LISTEN, RELAY_MBIT_S
from atoll.peer.daemon.supervised import STDIN, stop_with_stdin

if TYPE_CHECKING:
    from atoll.coordinator.run.invite import Invite
    from atoll.coordinator.run.notice import Notice
    from atoll.peer.daemon.process import OnPeerEvent, PeerEvent

SERVE_SHARE = 0.2  # of the time: training keeps four fifths of a contended core
MAX_RANKS = 1024  # on one machine; torchrun connects several
ASK_S = 0.1  # how soon a question in the terminal notices a stop
_PEER_ID = re.compile(r"\b12D3KooW[1-9A-HJ-NP-Za-km-z]{44}\b")  # libp2p's errors contain it in full


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll peer`."""
    parser = new_parser(
        subparsers,
        "peer",
        description="Join a run by its invite and train until the run is complete or a signal\n"
        "stops the peer (Ctrl-C or SIGTERM). The peer reconnects automatically; after\n"
        "a restart it resumes from its state directory.\n\n"
        "With an invite for keepers the peer leads and votes instead of training: it\n"
        "needs no model, no data and no device.\n\n"
        "At the first start it shows what the run asks for (model, parameters, data,\n"
        "tokenizer, disk, traffic) and asks once; the answer is kept in the state\n"
        "directory. It exits with 1 if you decline, and with 2 without a terminal.\n"
        "Custom models run only with --allow-model, and files are read only with\n"
        "--data, --tokenizer and --init.",
        examples="atoll peer INVITE\n"
        "atoll peer INVITE --yes\n"
        "atoll peer INVITE --allow-model my_package.models:build --data /data/corpus\n"
        "atoll peer INVITE --gpus all\n"
        "atoll peer INVITE --serve\n"
        "atoll peer INVITE --hours 22-8 --max-mbit 10 --yield-gpu\n"
        "atoll peer INVITE --device cuda:1 --state-dir /data/atoll/gpu1\n"
        "atoll peer INVITE --data /data/corpus --name attic --json",
    )
    parser.add_argument(
        "invite", metavar="INVITE", help="Invite string, or a file that contains it."
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="State directory (default: ~/.local/state/atoll/peers/RUN_ID).",
    )
    parser.add_argument(
        "--device", default="auto", help="auto, cuda, cuda:1, mps or cpu (default: auto)."
    )
    several = parser.add_mutually_exclusive_group()
    several.add_argument(
        "--gpus",
        type=_gpus,
        metavar="NUMBER",
        help="Number of GPUs that train together as one peer, or all (default: the one of "
        "--device). A model that is too large for one is cut over them.",
    )
    several.add_argument(
        "--ranks",
        type=_ranks,
        metavar="NUMBER",
        help="Number of processes that train together as one peer on the CPU (default: 1).",
    )
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="Training text: a file or folder on this machine, or hf:OWNER/NAME[@CONFIG]. A path "
        "that the run names is never read.",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="Copy of the run's tokenizer file (default: the one that travels with the run, if it "
        "does). A path that the run names is never read.",
    )
    parser.add_argument(
        "--init",
        metavar="PATH",
        help="Copy of the folder of weights with which the run begins (default: the first state "
        "comes from the coordinator). A path that the run names is never read.",
    )
    add_allow_model(parser)
    parser.add_argument(
        "--yes",
        action="store_true",
        help="Accept the run's terms without asking (still printed).",
    )
    parser.add_argument("--name", type=_name, help="Name of this peer on the dashboard.")
    parser.add_argument(
        "--listen",
        type=_multiaddr,
        action="append",
        metavar="MULTIADDR",
        help=f"Address to listen on; repeatable (default: {' and '.join(LISTEN)}).",
    )
    parser.add_argument(
        "--announce",
        type=_dialed,
        action="append",
        metavar="MULTIADDR",
        help="Address for others to dial, if it differs from --listen; repeatable.",
    )
    parser.add_argument(
        "--uplink",
        type=mbit,
        default=0.0,
        metavar="MBIT",
        help="Upload speed in Mbit/s (default: measured).",
    )
    parser.add_argument(
        "--downlink",
        type=mbit,
        default=0.0,
        metavar="MBIT",
        help="Download speed in Mbit/s (default: measured).",
    )
    parser.add_argument(
        "--relay-mbit",
        type=mbit,
        metavar="MBIT",
        help="Bandwidth in Mbit/s for peers that cannot reach each other, if others can dial this "
        f"one; 0 relays nothing (default: {RELAY_MBIT_S:g}; 0 with --max-mbit).",
    )
    add_limits(parser)
    add_outer_state(parser)
    parser.add_argument(
        "--share",
        type=_share,
        default=1.0,
        metavar="FRACTION",
        help="Fraction of time to spend training (default: 1.0).",
    )
    parser.add_argument(
        "--serve",
        type=_share,
        nargs="?",
        const=SERVE_SHARE,
        default=0.0,
        metavar="FRACTION",
        help="In a pipeline, compute texts of whoever holds the invite (`atoll sample INVITE`), "
        f"for up to this fraction of the time; {SERVE_SHARE:g} without a number (default: none).",
    )
    parser.add_argument(
        "--json", action="store_true", help="Print events as lines of JSON on stdout."
    )
    parser.add_argument(
        "--no-view",
        action="store_true",
        help="Print lines alone in a terminal too, instead of two that change at its foot.",
    )
    parser.add_argument(
        "--metrics-listen",
        type=_address,
        metavar="HOST:PORT",
        help="Address of a Prometheus endpoint; 127.0.0.1:9701 is for this machine alone "
        "(default: none).",
    )
    add_track(parser)
    add_stop_with_stdin(parser)


def run(args: argparse.Namespace) -> int:
    """Run the peer until the run is complete or a signal stops it."""
    if args.stop_with_stdin:
        stop_with_stdin()
    if is_rank := "RANK" in os.environ:  # as torchrun sets it, or the launcher below
        from atoll.peer.daemon.launching import follow_launcher

        follow_launcher()
    elif count := _number_of_ranks(args):
        from atoll.peer.daemon.launching import launch

        on_ranks: OnPeerEvent = _as_json if args.json else _as_text
        rules = rules_of(args, partial(_warn, on_ranks), gpus=0 if args.ranks else count)
        return launch(sys.argv[1:], count, on_event=on_ranks, rules=rules)
    logging.raiseExceptions = False  # a log that cannot be written must not fill the terminal
    invite = read_invite(args.invite)  # before torch is imported, which takes seconds
    if is_rank and os.environ["RANK"] != "0":
        return _run(args, invite, is_rank=True)
    _say_starting(f"run {invite.run_id.hex()[:12]} of {invite.addresses[0]}", as_json=args.json)
    with started_ahead():
        return _run(args, invite, is_rank=is_rank)


def _run(args: argparse.Namespace, invite: "Invite", *, is_rank: bool) -> int:
    from atoll.peer.daemon.options import PeerOptions

    with loading():
        from atoll.peer.daemon.process import RunOptions, run_peer
    from atoll.peer.paths import peer_state_dir
    from atoll.peer.tracking import check as check_tracker
    from atoll.peer.tracking import tracked

    rates, relay_mbit_s = rates_of(args)
    options = RunOptions(
        peer=PeerOptions(
            invite=invite,
            state_dir=args.state_dir or peer_state_dir(invite.run_id.hex()),
            name=args.name or "",
            listen=tuple(args.listen or LISTEN),
            announce=tuple(args.announce or ()),
            rates=rates,
            relay_mbit_s=relay_mbit_s,
            state_on_disk=args.outer_state == "disk",
            metrics_listen=args.metrics_listen,
        ),
        device="cpu" if args.ranks else args.device,
        data=args.data,
        tokenizer=args.tokenizer,
        init=args.init,
        allow_models=frozenset(args.allow_model),
        any_model_source=args.any_model_source,
        yes=args.yes,
        share=args.share,
        serve=args.serve,
    )
    _expect_device(options.device)
    _expect_data(args.data)
    _expect_tokenizer(args.tokenizer)
    _expect_weights(args.init)
    for told in args.track:
        check_tracker(told)
    shown: OnPeerEvent = _as_json if args.json else _as_text
    # With --json it is read by a program, which cannot show anybody what the run asks for.
    is_here = sys.stdin.isatty() and sys.stderr.isatty() and not args.stop_with_stdin
    ask = _ask if is_here and not args.json else None
    if is_rank and os.environ["RANK"] != "0":
        args.track = []  # the first one tells of all
    run_id = invite.run_id.hex()[:8]
    is_seen = sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    with ExitStack() as stack:
        if is_seen and not (args.json or args.no_view or is_rank):
            from atoll.peer.cli.small_view import small_view

            shown = stack.enter_context(small_view(run_id, shown))
        options = replace(options, rules=rules_of_one(args, partial(_warn, shown)))
        name = f"{args.name or 'peer'}-{run_id}"
        track = stack.enter_context(
            tracked(args.track, name=name, on_trouble=partial(_warn, shown))
        )

        def on_event(event: "PeerEvent") -> None:
            shown(event)
            if event.account is not None and args.track:
                track(event.account.position, numbers_of(event))

        if is_rank:
            from atoll.peer.daemon.launching import run_rank

            return run_rank(options, on_event=on_event, ask=ask)
        return run_peer(options, on_event=on_event, ask=ask)


def _warn(shown: "OnPeerEvent", notice: "Notice") -> None:
    from atoll.peer.daemon.process import PeerEvent

    shown(PeerEvent(kind="event", position=0, text=notice, level="warning"))


def numbers_of(event: "PeerEvent") -> dict[str, float | None]:
    """Return what a tracker gets of a round."""
    account = event.account
    assert account is not None
    shares = event.time_shares or {}
    return {
        "loss": account.loss,
        "counted": float(account.is_counted),
        "tokens": account.tokens,
        "tokens_per_s": event.tokens_per_s,
        "utilisation": event.utilisation,
        "rounds_counted": account.rounds_counted,
        "tokens_counted": account.tokens_counted,
        "wire_bytes_sent": account.wire_bytes_sent,
        **{f"time/{use}": share for use, share in shares.items()},
    }


def _number_of_ranks(args: argparse.Namespace) -> int:
    """Return the number of processes to start; 0 to train in this one."""
    from atoll.peer.errors import DeviceError

    if args.gpus is not None:
        from atoll.peer.training.devices import number_of_gpus

        return number_of_gpus(args.gpus, device=args.device)
    if args.ranks and args.device not in ("auto", "cpu"):
        raise DeviceError(
            f"expected --ranks or --device {args.device}, got both: they are processes on the CPU; "
            "for GPUs use --gpus"
        )
    return args.ranks or 0


def _say_starting(what: str, *, as_json: bool) -> None:
    """Print a first line at once: what is imported next takes seconds."""
    now_s, line = time.time(), notices.starting(what=what)
    if as_json:
        fields = {"kind": "event", "position": 0, "level": "info", "time": round(now_s, 3)}
        print(json.dumps(fields | told_fields(line)), flush=True)
    else:
        clock = time.strftime("%H:%M:%S", time.localtime(now_s))
        print(f"{clock}  {line}", file=sys.stderr, flush=True)


def _name(text: str) -> str:
    from atoll.peer.daemon.options import MAX_NAME_CHARS

    if len(text) > MAX_NAME_CHARS:
        raise argparse.ArgumentTypeError(
            f"expected at most {MAX_NAME_CHARS} characters, got {len(text)}"
        )
    return text


def _address(text: str) -> str:
    from atoll.coordinator.run.addresses import split_address

    try:
        split_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, got {text!r}") from None
    return text


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"expected a fraction above 0, up to 1, got {text!r}")
    return share


def _gpus(text: str) -> int:
    if text == "all":
        return 0
    return _ranks(text)


def _ranks(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_RANKS:
        raise argparse.ArgumentTypeError(f"expected a number of 1 to {MAX_RANKS}, got {text!r}")
    return int(text)


def _multiaddr(text: str) -> str:
    from atoll.dht.bindings import Multiaddr

    try:
        Multiaddr(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a multiaddr such as /ip4/0.0.0.0/tcp/4001, got {text!r}"
        ) from None
    return text


def _dialed(text: str) -> str:
    # Before the import of libp2p's parser, which takes seconds.
    if not re.search(r"/tcp/[1-9]\d*(/|$)", text):
        raise argparse.ArgumentTypeError(
            f"expected an address with a port such as /ip4/203.0.113.7/tcp/4001, got {text!r}"
        )
    return _multiaddr(text)


def _expect_device(name: str) -> None:
    """Refuse a missing device at once, not after joining."""
    from atoll.peer.training.devices import Device

    Device.choose(name)


def _expect_data(source: str | None) -> None:
    """Refuse missing data at once, not after joining."""
    from atoll.peer.errors import DataError
    from atoll.peer.training.data.documents import STDLIB

    if source is None or source == STDLIB or source.startswith("hf:"):
        return
    if not Path(source).expanduser().exists():
        raise DataError(
            f"--data {source!r} does not exist; name a file or a folder on this machine"
        )


def _expect_tokenizer(path: str | None) -> None:
    """Refuse a missing tokenizer at once, not after joining."""
    from atoll.peer.errors import DataError
    from atoll.peer.training.data.tokens import BYTES, tokenizer_file

    if path is not None and path != BYTES and not tokenizer_file(path).is_file():
        raise DataError(f"--tokenizer {path!r} does not exist; name a tokenizers JSON file")


def _expect_weights(path: str | None) -> None:
    """Refuse missing weights at once, not after joining."""
    from atoll.peer.training.hf.folder import WeightFolder

    if path is not None:
        WeightFolder(path)


def _ask(stopping: threading.Event) -> bool:
    """Ask the owner in the terminal; an end of input is a no."""
    print("Take part in this run on this machine? [y/N] ", end="", file=sys.stderr, flush=True)
    while not select.select([STDIN], [], [], ASK_S)[0]:  # input() would not notice a stop
        if stopping.is_set():
            raise KeyboardInterrupt
    line = os.read(STDIN, 4096)  # a terminal hands over whole lines
    return line.strip().lower() in (b"y", b"yes")


def _as_text(event: "PeerEvent") -> None:
    """Print an event; control characters from others never reach the terminal."""
    from atoll.coordinator.run import text
    from atoll.dht.identity import short

    if event.kind == "phase":
        return
    level = "" if event.level == "info" else f"{event.level}  "
    told = _PEER_ID.sub(lambda found: short(found[0]), text.clean(event.text))
    line = f"{text.clock_time(time.time())}  {level}{told}"
    print(line, file=sys.stderr, flush=True)


def _as_json(event: "PeerEvent") -> None:
    fields: dict[str, object] = {
        "kind": event.kind,
        "position": event.position,
        "level": event.level,
        "time": round(time.time(), 3),
    }
    if event.phase is not None:
        fields["phase"] = event.phase
    if event.left is not None:
        fields["left"] = event.left
    if event.account is not None:
        fields |= _account_fields(event)
    print(json.dumps(fields | told_fields(event.text)), flush=True)


def _account_fields(event: "PeerEvent") -> dict[str, object]:
    """Return what became of a round's work; the numbers are null if they are not known."""
    account = event.account
    assert account is not None
    return {
        "round": account.position,
        "counted": account.is_counted,
        "reason": account.outcome,
        "loss": account.loss,
        "tokens": account.tokens,
        "tokens_per_s": event.tokens_per_s,
        "utilisation": event.utilisation,
        "time_shares": event.time_shares,
        "rounds_seen": account.rounds_seen,
        "rounds_counted": account.rounds_counted,
        "tokens_counted": account.tokens_counted,
        "wire_bytes_sent": account.wire_bytes_sent,
    }
