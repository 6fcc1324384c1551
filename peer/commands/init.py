"""`atoll init`: write a commented RUN.toml."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.peer.commands import Subparsers, new_parser

if TYPE_CHECKING:
    from atoll.coordinator.spec import RunSpec


class ExistsError(ValueError):
    """The file is there already, and is left alone."""


class OneOfTwoError(ValueError):
    """Peers without a rate, or a rate without peers."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll init`."""
    parser = new_parser(
        subparsers,
        "init",
        description="Write a RUN.toml that says what every field means and what it is when left "
        "out.\nWith --peers and --mbit the method, its windows and its codec are chosen for them,\n"
        "from what was measured (`atoll plan` shows it). Never overwrites a file.",
        examples="atoll init\natoll init big-run.toml\n"
        "atoll init RUN.toml --peers 8 --mbit 100 --model 30m --step-ms 120",
    )
    parser.add_argument(
        "path",
        type=Path,
        nargs="?",
        default=Path("RUN.toml"),
        metavar="PATH",
        help="(default: RUN.toml)",
    )
    parser.add_argument("--peers", type=int, metavar="P", help="how many will take part")
    parser.add_argument("--mbit", type=float, metavar="RATE", help="of each link, up and down")
    parser.add_argument("--model", default="nano", help="a preset (default: nano)")
    parser.add_argument(
        "--step-ms",
        type=float,
        default=100.0,
        metavar="MS",
        help="what an inner step takes (default: 100)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the file, or raise ExistsError."""
    from atoll.coordinator.spec import template

    path: Path = args.path
    spec, why = _chosen(args)
    text = template(spec)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ExistsError(
            f"{path} is there already and was left alone; name another file or move it"
        ) from None
    if why:
        print(why)
    print(f"Wrote {path}. Next: atoll coordinator {path}")
    return 0


def _chosen(args: argparse.Namespace) -> "tuple[RunSpec, str]":
    """The spec to write, and what was chosen for the links, if they were told."""
    from atoll.coordinator.spec import RunSpec

    plain = RunSpec.from_dict({"model": {"preset": args.model}})
    if args.peers is None and args.mbit is None:
        return plain, ""
    if args.peers is None or args.mbit is None:
        raise OneOfTwoError("expected --peers and --mbit together: both decide what to take")
    from atoll.peer import advice
    from atoll.peer.plan import Setting, bare_model

    setting = Setting(peers=args.peers, mbit_s=args.mbit, step_s=args.step_ms / 1000)
    option = advice.pick(advice.options(bare_model(plain), setting))
    fields = advice.as_run(option.method, option.prediction.inner_steps)
    chosen = RunSpec.from_dict({"model": {"preset": args.model}, **fields})
    return chosen, advice.reason(option)
