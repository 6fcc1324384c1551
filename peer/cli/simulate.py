"""`atoll simulate`: compare methods by loss, bytes and time in one process."""

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
        description="Train several workers in this process with each of several methods on real\n"
        "text, and compare loss, bytes and time. Results are kept in a folder: an\n"
        "interrupted simulation resumes, and a finished one is only printed.",
        examples="atoll simulate --methods ddp,diloco,sparseloco --workers 8 --tokens 2000000\n"
        "atoll simulate --methods 'diloco(codec=int4),streaming(tau=2)' --seeds 3 --plot loss.png\n"
        "atoll simulate --methods diloco --drop 0.2 --speeds 1,2,4 --split-data --join-at 0.25",
    )
    parser.add_argument(
        "--methods",
        default=DEFAULT_METHODS,
        metavar="LIST",
        help=f"Comma-separated method specs (default: {DEFAULT_METHODS}).",
    )
    parser.add_argument(
        "--workers", type=int, default=4, metavar="W", help="Number of workers (default: 4)."
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=1_000_000,
        metavar="N",
        help="Training tokens of all workers together (default: 1000000).",
    )
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="S", help="Number of seeds (default: 1)."
    )
    parser.add_argument(
        "--inner-steps",
        type=int,
        default=30,
        metavar="H",
        help="Inner steps per window (default: 30).",
    )
    parser.add_argument(
        "--growth",
        type=float,
        default=0.0,
        metavar="ALPHA",
        help="Grow windows from H to (ALPHA / learning rate)^2 steps as the rate falls (QSR).",
    )
    parser.add_argument(
        "--max-inner-steps",
        type=int,
        default=0,
        metavar="H",
        help="Upper bound with --growth (default: 10 H).",
    )
    parser.add_argument("--model", default="nano", help="Model preset (default: nano).")
    parser.add_argument(
        "--set",
        nargs="*",
        default=[],
        metavar="FIELD=N",
        help="Integer overrides of the model's configuration, e.g. num_layers=4.",
    )
    parser.add_argument(
        "--source", default="stdlib", help="Data source, as in RUN.toml (default: stdlib)."
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=8,
        metavar="B",
        help="Sequences per worker and step (default: 8).",
    )
    parser.add_argument(
        "--seq-len", type=int, default=128, metavar="T", help="Tokens per sequence (default: 128)."
    )
    parser.add_argument(
        "--lr",
        type=float,
        default=1.5e-3,
        help="Peak learning rate of the inner optimizer (default: 0.0015).",
    )
    parser.add_argument(
        "--inner",
        default="",
        metavar="NAME",
        help="Inner optimizer: adamw, muon, lion or sgd (default: the method's).",
    )
    _add_churn(parser)
    parser.add_argument(
        "--step-ms",
        type=float,
        default=50.0,
        metavar="MS",
        help="Time of an inner step in the simulated wall time (default: 50).",
    )
    parser.add_argument("--device", default="cpu", help="auto, cuda, mps or cpu (default: cpu).")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("simulation"),
        help="Folder of results (default: ./simulation).",
    )
    parser.add_argument(
        "--rerun", action="store_true", help="Train again even if there is a result."
    )
    parser.add_argument("--plot", type=Path, metavar="PNG", help="Write a plot of the loss curves.")
    parser.add_argument("--json", action="store_true", help="Print one line of JSON when done.")


def _add_churn(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drop",
        type=float,
        default=0.0,
        metavar="FRACTION",
        help="Fraction of rounds each worker misses (0-1); its work counts in a later round.",
    )
    parser.add_argument(
        "--speeds",
        default="",
        metavar="LIST",
        help="Relative speeds, e.g. 1,2,4; windows are scaled so that they end together.",
    )
    parser.add_argument(
        "--split-data", action="store_true", help="Give each worker its own part of the text."
    )
    parser.add_argument(
        "--join-at",
        type=float,
        default=0.0,
        metavar="FRACTION",
        help="Fraction of the run after which the last worker joins.",
    )


def run(args: argparse.Namespace) -> int:
    """Simulate, then print the table."""
    from atoll.peer.errors import SetupError
    from atoll.peer.extras import extra
    from atoll.peer.lab import simulation_report
    from atoll.peer.lab.simulate import Bench, Folder, parse_methods, simulate

    if args.plot is not None and not args.plot.absolute().parent.is_dir():
        raise SetupError(f"{args.plot}: the folder does not exist; create it first")
    if args.plot is not None:
        extra("matplotlib", "--plot")  # before an hour of simulation, not after it
    settings = _settings(args)
    if args.seeds < 1 or not args.step_ms > 0:
        raise SetupError(
            f"expected --seeds >= 1 and --step-ms > 0, got {args.seeds} and {args.step_ms:g}"
        )
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
        raise SetupError(f"expected numbers such as 1,2,4 in --speeds, got {text!r}") from None


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
