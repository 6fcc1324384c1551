"""`atoll demo`: train across several peers on this machine and print a report."""

import argparse
import asyncio
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.peer.cli import Subparsers, new_parser, print_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from atoll.coordinator.run.spec import RunSpec
    from atoll.peer.lab.demo import Demo, DemoRun, Feed, Show
    from atoll.peer.lab.summary import Compared

INNER_STEPS = 25  # short windows: the demo is to show rounds
STAGED_STEPS = 10  # the demo of a pipeline has more blocks, and computes each forward pass twice
BYTES = 256  # tokens
SEQUENCES = 16  # of a step
MICROBATCHES = 4  # of a step of a pipeline: while one is further on, a stage computes another
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LINGER_S = 3.0  # the finished dashboard stays this long before the summary


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll demo`."""
    parser = new_parser(
        subparsers,
        "demo",
        description="Start a coordinator and several peers on this machine, train a small model\n"
        "across them, and print a report. Shows the dashboard on a terminal, else a line\n"
        "per round.",
        examples="atoll demo\n"
        "atoll demo --peers 4 --chaos --json\n"
        "atoll demo --stages 3 --peers 6\n"
        "atoll demo --data ~/texts --rounds 40 --baseline --out runs/mine",
    )
    parser.add_argument(
        "--peers", type=_positive, default=4, help="Number of peer processes (default: 4)."
    )
    parser.add_argument(
        "--stages",
        type=_positive,
        default=1,
        help="Number of stages that the model is cut into, each held by other peers; a model of "
        "fewer than two slices a stage gets more blocks (default: 1, every peer holds all of it).",
    )
    parser.add_argument(
        "--rounds", type=_positive, default=12, help="Number of rounds (default: 12)."
    )
    parser.add_argument(
        "--inner-steps",
        type=_positive,
        metavar="H",
        help=f"Inner steps per window (default: {INNER_STEPS}, or {STAGED_STEPS} with --stages).",
    )
    parser.add_argument("--method", default="diloco", help="Outer method (default: diloco).")
    parser.add_argument(
        "--windows",
        default="equal",
        help="Window lengths: equal, or deadline (by each peer's speed) (default: equal).",
    )
    parser.add_argument(
        "--shares",
        type=_shares,
        default=(1.0,),
        metavar="LIST",
        help="Fraction of time each peer trains, e.g. 1,0.5 (default: 1).",
    )
    parser.add_argument(
        "--codec", default="auto", help="Codec of the updates (default: the method's)."
    )
    parser.add_argument("--preset", default="nano", help="Model preset (default: nano).")
    parser.add_argument("--device", default="auto", help="auto, cuda, mps or cpu (default: auto).")
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="Training text (default: the source of Python's standard library).",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="Output folder (default: runs/demo-TIME)."
    )
    parser.add_argument(
        "--chaos", action="store_true", help="Kill a peer in mid-round and restart it."
    )
    parser.add_argument(
        "--baseline",
        action="store_true",
        help="Also train data parallel and one peer alone for the same steps, to compare.",
    )
    parser.add_argument(
        "--plain", action="store_true", help="Print lines instead of the dashboard."
    )
    parser.add_argument(
        "--json", action="store_true", help="Print the report as JSON on the last line."
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo and report."""
    from atoll.peer.extras import extra
    from atoll.peer.lab.demo import Demo, DemoOptions
    from atoll.peer.training.devices import Device

    extra("matplotlib", "the picture of a demo")  # before the demo, not after it
    spec = demo_spec(args)
    Device.choose(args.device)
    out: Path = args.out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    options = DemoOptions(
        spec=spec,
        peers=args.peers,
        out=out,
        device=args.device,
        chaos=args.chaos,
        shares=args.shares,
    )
    plain = args.plain or args.json or not (sys.stdin.isatty() and sys.stdout.isatty())
    if not plain:
        extra("textual", "the dashboard of a demo (--plain prints lines)")
    demo = Demo(options, say=_say)
    whom = "1 peer" if args.peers == 1 else f"{args.peers} peers"
    cut = f" in {args.stages} stages" if args.stages > 1 else ""
    _say(f"{whom}{cut}, {args.rounds} rounds of {spec.outer.inner_steps} steps; in {out}")
    finished, stopped_by = asyncio.run(carry_out(demo, _lines if plain else _dashboard))
    if finished is None:
        _say("stopped")
        return 128 + (stopped_by or signal.SIGINT)
    return report(finished, spec, args, out)


async def carry_out(demo: "Demo", show: "Show") -> "tuple[DemoRun | None, signal.Signals | None]":
    """Run a demo to its end or to a signal; return its result, or the signal that ended it."""
    with heed_signals(demo.kill) as received:
        try:
            return await demo.run(show), None
        except asyncio.CancelledError:
            if not received:
                raise
            return None, received[0]


@contextmanager
def heed_signals(kill: "Callable[[], None]") -> "Iterator[list[signal.Signals]]":
    """Cancel the calling task at the first signal, and call `kill` at each later one.

    Signals that our parent set to be ignored (nohup) stay ignored.
    """
    received: list[signal.Signals] = []
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    heeded = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]

    def note(number: signal.Signals) -> None:
        received.append(number)
        if len(received) > 1:
            kill()
        elif task is not None:
            task.cancel()

    for number in heeded:
        loop.add_signal_handler(number, note, number)
    try:
        yield received
    finally:
        for number in heeded:
            loop.remove_signal_handler(number)


def report(finished: "DemoRun", spec: "RunSpec", args: argparse.Namespace, out: Path) -> int:
    """Print the report; return 1 if replicas differ or a killed peer did not come back."""
    from atoll.peer.lab.summary import Compared, render, summarise

    compared = compare_or_skip(finished, spec, args.device) if args.baseline else Compared()
    summary = summarise(finished, spec, compared, out / "loss.png")
    render(summary, finished)
    if args.json:
        print_json(summary.to_json())
    good = summary.chains_equal is not False and summary.states_equal is not False
    return 0 if good and summary.recovered_peers == int(args.chaos) else 1


def compare_or_skip(finished: "DemoRun", spec: "RunSpec", device: str) -> "Compared":
    """Compare, which takes as long as the run; Ctrl-C skips it and keeps the report."""
    from atoll.peer.lab.summary import Compared

    _say("training data parallel and one peer alone for comparison; press Ctrl-C to skip")
    try:
        return compare(finished, spec, device)
    except KeyboardInterrupt:
        _say("comparison skipped")
        return Compared()


def compare(finished: "DemoRun", spec: "RunSpec", device: str) -> "Compared":
    """Train the same steps on the same data, data parallel and one peer alone."""
    from atoll.coordinator.run.text import loss_text
    from atoll.peer.lab.baseline import BaselinePoint, alone, baseline
    from atoll.peer.lab.summary import Compared
    from atoll.peer.training.opening import open_corpus
    from atoll.peer.training.permission import Allowed

    corpus = open_corpus(spec, Allowed.everything_in(spec))
    ids = [peer.peer_id for peer in finished.status.peers]

    def tell(name: str, point: BaselinePoint) -> None:
        valid = f", held out {loss_text(point.valid_loss)}" if point.valid_loss is not None else ""
        _say(f"{name}: {point.position}/{spec.run.rounds}  loss {loss_text(point.loss)}{valid}")

    return Compared(
        baseline=baseline(
            spec,
            peer_ids=ids,
            device=device,
            corpus=corpus,
            validate_every=2,
            progress=lambda point: tell("data parallel", point),
        ),
        alone=alone(
            spec,
            peer_id=ids[0],
            device=device,
            corpus=corpus,
            validate_every=2,
            progress=lambda point: tell("one peer alone", point),
        ),
    )


def demo_spec(args: argparse.Namespace) -> "RunSpec":
    """Return the spec of the demo's run.

    Raises:
        StagesError: the other options do not allow so many stages.
        SpecError: an option has an impossible value.
        ModelError: the preset does not exist.
        DataError: the data does not exist or holds no text.
    """
    from atoll.coordinator.run.spec import RunSpec
    from atoll.peer.training.models import preset

    blocks = preset(args.preset, vocab_size=BYTES, seq_len=1).num_layers
    _expect_stages(args)
    source = args.data or "stdlib"
    if not source.startswith("hf:"):
        source = _local_source(source)
    is_staged = args.stages > 1
    accumulated = MICROBATCHES if is_staged else 1
    inner_steps = args.inner_steps or (STAGED_STEPS if is_staged else INNER_STEPS)
    return RunSpec.from_dict(
        {
            "run": {"name": "demo", "rounds": args.rounds},
            "model": {"preset": args.preset, "overrides": _more_blocks(args.stages, blocks)},
            "data": {"source": source},
            "outer": {
                "method": args.method,
                "inner_steps": inner_steps,
                "windows": args.windows,
            },
            "inner": {
                "lr": 1e-3,
                "batch_size": SEQUENCES // accumulated,
                "grad_accumulation": accumulated,
                "warmup_steps": min(100, args.rounds * inner_steps // 6),
            },
            "compression": {"codec": args.codec},
            "round": {
                "min_peers": args.peers,
                # All peers share this machine: a busy core must not look like a dead peer.
                "stall_s": 3.0,
                "grace_s": 10.0,
                # Short logs, so that a peer that lost its own also needs the snapshot.
                "snapshot_every": 2,
                "log_mb": 1,
            },
            "topology": {"stages": args.stages},
            "coordinator": {
                "listen": "127.0.0.1:0",
                "dht_listen": "127.0.0.1:0",
                "advertise": "127.0.0.1",
            },
        },
        source="the options of atoll demo",
    )


def _expect_stages(args: argparse.Namespace) -> None:
    from atoll.peer.lab.demo import StagesError

    if args.peers < args.stages:
        raise StagesError(
            f"--stages {args.stages}: each stage needs a peer of its own, got {args.peers} peers; "
            "increase --peers or reduce --stages"
        )
    if args.stages > 1 and args.baseline:
        raise StagesError(
            "--baseline compares with peers that each hold the whole model, which those of a "
            "pipeline do not; omit --baseline or --stages"
        )


def _more_blocks(stages: int, blocks: int) -> dict[str, int]:
    """Return the overrides that give each stage of a pipeline two slices or more."""
    needed = 2 * stages - 1  # the last stage has the head beside a block
    return {"num_layers": needed} if stages > 1 and blocks < needed else {}


def _local_source(source: str) -> str:
    """Return an absolute path to the data, checked to contain text."""
    from atoll.peer.errors import DataError
    from atoll.peer.training.data.load import documents

    if source != "stdlib":
        source = str(Path(source).expanduser().resolve())
    if next(documents(source), None) is None:
        raise DataError(f"{source} holds no text; name a file or folder with text")
    return source


async def _lines(feed: "Feed") -> bool:
    from atoll.coordinator.report.plain import follow

    await follow(feed, lambda line: print(line, flush=True))
    return True


async def _dashboard(feed: "Feed") -> bool:
    from atoll.coordinator.dashboard.app import DashboardApp

    left: list[bool] = []
    app = DashboardApp(feed, title="atoll", on_quit=lambda: left.append(True), linger_s=LINGER_S)
    await app.run_async()
    return not left


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(share) for share in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers such as 1,0.5, got {text!r}") from None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
