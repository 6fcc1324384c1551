"""`atoll simulate`: what methods cost in loss, in bytes and in time, in one process."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.peer.cli import Subparsers, new_parser, print_json

if TYPE_CHECKING:
    from atoll.peer.lab.simulation_settings import Settings

DEFAULT_METHODS = "ddp,diloco,streaming"


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll simulate`."""
    parser = new_parser(
        subparsers,
        "simulate",
        description="Train several workers in this process by each of several methods, on real\n"
        "text, and compare loss, bytes and time. Results are kept in a folder: a simulation that\n"
        "was interrupted goes on, and one that is finished is only shown.",
        examples="atoll simulate --methods ddp,diloco,sparseloco --workers 8 --tokens 2000000\n"
        "atoll simulate --methods 'diloco(codec=int4),streaming(tau=2)' --seeds 3 --plot loss.png\n"
        "atoll simulate --methods diloco --drop 0.2 --speeds 1,2,4 --split-data --join-at 0.25",
    )
    parser.add_argument(
        "--methods",
        default=DEFAULT_METHODS,
        metavar="LIST",
        help=f"specs, separated by commas (default: {DEFAULT_METHODS})",
    )
    parser.add_argument("--workers", type=int, default=4, metavar="W", help="(default: 4)")
    parser.add_argument(
        "--tokens",
        type=int,
        default=1_000_000,
        metavar="N",
        help="of all workers together (default: 1000000)",
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="S", help="(default: 1)")
    parser.add_argument(
        "--inner-steps", type=int, default=30, metavar="H", help="of a window (default: 30)"
    )
    parser.add_argument(
        "--growth",
        type=float,
        default=0.0,
        metavar="ALPHA",
        help="let windows grow from H as the rate falls, to (ALPHA / rate)^2 steps (QSR)",
    )
    parser.add_argument(
        "--max-inner-steps", type=int, default=0, metavar="H", help="to at most (default: 10 H)"
    )
    parser.add_argument("--model", default="nano", help="a preset of RUN.toml (default: nano)")
    parser.add_argument(
        "--set",
        nargs="*",
        default=[],
        metavar="FIELD=N",
        help="whole numbers in the model's configuration, as num_layers=4",
    )
    parser.add_argument("--source", default="stdlib", help="text, as in RUN.toml")
    parser.add_argument(
        "--batch-size",
        type=int,
        default=8,
        metavar="B",
        help="sequences of a worker and step (default: 8)",
    )
    parser.add_argument("--seq-len", type=int, default=128, metavar="T", help="(default: 128)")
    parser.add_argument(
        "--lr",
        type=float,
        default=1.5e-3,
        help="peak rate of the inner optimizer (default: 0.0015)",
    )
    parser.add_argument(
        "--inner",
        default="",
        metavar="NAME",
        help="adamw, muon, lion or sgd (default: the method's)",
    )
    _add_churn(parser)
    parser.add_argument(
        "--step-ms",
        type=float,
        default=50.0,
        metavar="MS",
        help="what an inner step takes, for the simulated time (default: 50)",
    )
    parser.add_argument("--device", default="cpu", help="auto, cpu, cuda, mps (default: cpu)")
    parser.add_argument(
        "--folder", type=Path, default=Path("simulation"), help="of the results (./simulation)"
    )
    parser.add_argument("--rerun", action="store_true", help="train again what is there already")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the curves")
    parser.add_argument("--json", action="store_true", help="one line of JSON when done")


def _add_churn(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drop",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the rounds that go on without a worker; its work counts in a later one",
    )
    parser.add_argument(
        "--speeds",
        default="",
        metavar="LIST",
        help="relative speeds, as 1,2,4: windows get longer or shorter, and end together",
    )
    parser.add_argument(
        "--split-data", action="store_true", help="give each worker its own part of the text"
    )
    parser.add_argument(
        "--join-at",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the run after which the last worker joins",
    )


def run(args: argparse.Namespace) -> int:
    """Simulate, then print the table."""
    from atoll.peer.errors import SetupError
    from atoll.peer.extras import extra
    from atoll.peer.lab import simulation_report
    from atoll.peer.lab.simulate import Bench, Folder, parse_methods, simulate

    if args.plot is not None and not args.plot.absolute().parent.is_dir():
        raise SetupError(f"{args.plot}: expected an existing folder to draw it in, got none")
    if args.plot is not None:
        extra("matplotlib", "--plot")  # before an hour of simulation, not after it
    settings = _settings(args)
    if args.seeds < 1 or not args.step_ms > 0:
        raise SetupError("expected at least one seed and a step time above 0")
    chosen = parse_methods(args.methods, settings)
    bench = Bench(settings, args.device)
    folder = Folder(args.folder, settings)
    results = [
        simulate(bench, method, seed=seed, folder=folder, rerun=args.rerun, say=_say)
        for method in chosen
        for seed in range(args.seeds)
    ]
    step_s = args.step_ms / 1000
    if args.plot is not None:
        from atoll.peer.lab import simulation_plot

        simulation_plot.draw(results, settings, args.plot, step_s=step_s)
    if args.json:
        print_json([vars(row) for row in simulation_report.rows(results, settings)])
        return 0
    for line in simulation_report.table(results, settings, step_s=step_s):
        print(line)
    if settings.churn:
        print(settings.churn)
    return 0


def _settings(args: argparse.Namespace) -> "Settings":
    from atoll.peer.lab.simulation_settings import Settings

    return Settings(
        workers=args.workers,
        tokens=args.tokens,
        inner_steps=args.inner_steps,
        growth=args.growth,
        max_inner_steps=args.max_inner_steps,
        batch_size=args.batch_size,
        seq_len=args.seq_len,
        model=args.model,
        overrides=_overrides(args.set),
        source=args.source,
        lr=args.lr,
        inner=args.inner,
        drop=args.drop,
        speeds=_speeds(args.speeds),
        split_data=args.split_data,
        join_at=args.join_at,
    )


def _speeds(text: str) -> tuple[float, ...]:
    from atoll.peer.errors import SetupError

    try:
        return tuple(float(speed) for speed in text.split(",") if speed)
    except ValueError:
        raise SetupError(f"expected numbers in --speeds, as 1,2,4, got {text!r}") from None


def _overrides(items: list[str]) -> dict[str, Any]:
    from atoll.peer.errors import SetupError

    overrides: dict[str, Any] = {}
    for item in items:
        name, _, value = item.partition("=")
        if not value.isdecimal():
            raise SetupError(f"expected FIELD=N in --set, got {item!r}")
        overrides[name] = int(value)
    return overrides


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
