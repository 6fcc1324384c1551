"""`atoll tokenizer`: train a tokenizer."""

import argparse
import sys
from pathlib import Path

from atoll.peer.cli import Subparsers, new_parser


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll tokenizer`."""
    parser = new_parser(
        subparsers,
        "tokenizer",
        description="Train a byte-level BPE tokenizer on text, for `tokenizer` in [data] of\n"
        "RUN.toml. The same text and size give the same file.",
        examples="atoll tokenizer --data corpus --vocab-size 32000 --out tokenizer.json\n"
        "atoll tokenizer --data stdlib --vocab-size 4096 --out tokenizer.json",
    )
    parser.add_argument(
        "--data",
        required=True,
        metavar="PATH",
        help="Text: a file, a folder, or stdlib (Python's standard library).",
    )
    parser.add_argument(
        "--text-field",
        default="text",
        metavar="NAME",
        help="Column that holds the text in jsonl and parquet files (default: text).",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        required=True,
        metavar="N",
        help="Number of tokens, with 256 bytes and one end of a document.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="New file.")


def run(args: argparse.Namespace) -> int:
    """Train and write the file."""
    from atoll.peer.errors import DataError
    from atoll.peer.training.data.documents import documents
    from atoll.peer.training.data.tokenizer_training import train_tokenizer

    if args.out.exists():
        raise DataError(f"{args.out} exists and was not changed; choose another name")
    if not args.out.absolute().parent.is_dir():
        raise DataError(f"the folder of {args.out} does not exist; create it first")
    trained = train_tokenizer(
        documents(args.data, text_field=args.text_field),
        args.vocab_size,
        say=say,
        show_progress=sys.stderr.isatty(),
    )
    with args.out.open("x", encoding="utf-8") as file:
        file.write(trained.json)
    fewer = f" (of {args.vocab_size:,}: the text has no more pairs)"
    say(
        f"{args.out}: {trained.vocab_size:,} tokens"
        + fewer * (trained.vocab_size < args.vocab_size)
        + f", {trained.bytes_per_token:.2f} bytes a token; name it as tokenizer in [data]"
    )
    return 0


def say(line: str) -> None:
    """Print a line on stderr."""
    print(line, file=sys.stderr, flush=True)
