"""`atoll report`: a run on one page."""

import argparse
import os
from pathlib import Path

from atoll.peer.cli import Subparsers, new_parser
from atoll.peer.cli.watching import add_others, add_run, look_back_at_all


class ReportFileError(ValueError):
    """The page cannot be written there."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll report`."""
    parser = new_parser(
        subparsers,
        "report",
        description="Write a page about a run: figures, plots of loss, speed, members and bytes,\n"
        "stages, peers and events. It is one HTML file that loads nothing. From the state\n"
        "directory of a coordinator it has all rounds, by an invite the newest 512.\n"
        "With several runs, it compares their figures and losses.",
        examples="atoll report INVITE --out report.html\n"
        "atoll report ~/.local/state/atoll/coordinators/NAME --out report.html\n"
        "atoll report runs/diloco/coordinator runs/ddp/coordinator --out compared.html",
    )
    add_run(parser)
    add_others(parser)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="FILE.html",
        help="File to write (default: report.html).",
    )


def run(args: argparse.Namespace) -> int:
    """Write the page and print its name."""
    from atoll.peer.extras import extra

    extra("matplotlib", "the report")
    _expect_html(args.out)
    records = look_back_at_all(args)
    from atoll.coordinator.report.page import comparison, page

    if args.others:
        text = comparison(records)
    else:
        text = page(records[0].status, records[0].rounds)
    partial = args.out.with_name(f".{args.out.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(args.out)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ReportFileError(
            f"{args.out}: cannot be written: {error.strerror}; choose another file with --out"
        ) from None
    print(args.out)
    return 0


def _expect_html(path: Path) -> None:
    if path.suffix.lower() not in (".html", ".htm"):
        raise ReportFileError(f"{path}: the name must end in .html, the only format")
    if not path.parent.is_dir():
        raise ReportFileError(f"{path.parent}: the folder does not exist; create it first")
