"""`atoll shards`: tokenise the text of a run once."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.peer.cli import Subparsers, new_parser, print_json

if TYPE_CHECKING:
    from atoll.peer.training.data.make_shards import Copied


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll shards`."""
    parser = new_parser(
        subparsers,
        "shards",
        description="Tokenise a run's text, split it into training and validation as the run\n"
        "does, and write the tokens to a folder. A peer with --data DIR maps them into memory\n"
        "instead of reading the text at each start, and draws the same batches. A Hugging Face\n"
        "data set is copied as it is read; the same command continues after an interruption.",
        examples="atoll shards RUN.toml --out shards\n"
        "atoll shards RUN.toml --data ~/texts --tokenizer tokenizer.json --out shards\n"
        "atoll shards RUN.toml --data hf:OWNER/NAME --out shards\n"
        "atoll peer INVITE --data shards",
    )
    parser.add_argument("spec", type=Path, metavar="RUN.toml", help="Description of the run.")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="Folder to write the tokens to."
    )
    parser.add_argument(
        "--data", metavar="PATH", help="Text instead of the run's (default: that of RUN.toml)."
    )
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="Copy of the run's tokenizer (default: the one that RUN.toml names).",
    )
    parser.add_argument("--json", action="store_true", help="Print one line of JSON.")


def run(args: argparse.Namespace) -> int:
    """Write the shards and print what they hold."""
    from atoll.coordinator.run.spec import RunSpec
    from atoll.peer.training.data.make_shards import make_shards
    from atoll.peer.training.permission import with_own_files

    spec = with_own_files(RunSpec.load(args.spec), data=args.data, tokenizer=args.tokenizer)
    summary = make_shards(spec, args.out, tell=_tell)
    if args.json:
        print_json({"folder": str(args.out), **vars(summary)})
        return 0
    count, noun = (summary.files, "files") if summary.files else (summary.documents, "documents")
    print(
        f"{args.out}: {summary.train_tokens:,} training tokens and {summary.valid_tokens:,} for "
        f"validation, of {count:,} {noun}; train on them with --data {args.out}"
    )
    return 0


def _tell(copied: "Copied") -> None:
    """Print on stderr how far the copy of a data set has come."""
    if copied.documents:
        tokens = copied.train_tokens + copied.valid_tokens
        print(
            f"{copied.documents:,} documents, {tokens:,} tokens so far", file=sys.stderr, flush=True
        )
