"""`atoll init`: write a commented RUN.toml."""

import argparse
from pathlib import Path

from atoll.peer.commands import Subparsers, new_parser


class ExistsError(ValueError):
    """The file is there already, and is left alone."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll init`."""
    parser = new_parser(
        subparsers,
        "init",
        description="Write a RUN.toml that says what every field means and what it is when left "
        "out.\nNever overwrites a file.",
        examples="atoll init\natoll init big-run.toml",
    )
    parser.add_argument("path", type=Path, nargs="?", default=Path("RUN.toml"), metavar="PATH")


def run(args: argparse.Namespace) -> int:
    """Write the file, or raise ExistsError."""
    from atoll.coordinator.spec import template

    path: Path = args.path
    text = template()
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ExistsError(
            f"{path} is there already and was left alone; name another file or move it"
        ) from None
    print(f"Wrote {path}. Next: atoll coordinator {path}")
    return 0
