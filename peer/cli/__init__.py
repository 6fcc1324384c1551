"""One file per subcommand of `atoll`.

A command module has two functions, and imports what is heavy inside the second:

    add_parser(subparsers) -> None    its arguments; `new_parser` gives them the common look
    run(args) -> int                  does the work and returns the exit code

`SUMMARIES` names the commands in the order that `atoll --help` shows; it imports none of them.
"""

import argparse
import json
import sys
from typing import Any

__all__ = ["SUMMARIES", "Subparsers", "add_stop_with_stdin", "new_parser", "print_json"]

SUMMARIES = {
    "demo": "train across several peers on this machine and report",
    "init": "write a commented RUN.toml",
    "plan": "say what a run will cost: bytes, time, utilisation and memory",
    "coordinator": "start a run and print its invite",
    "peer": "join a run and train, until stopped",
    "dashboard": "watch a run in the terminal",
    "status": "say how a run is, once",
    "rounds": "list the rounds that were committed",
    "sample": "continue a text with a checkpoint",
    "simulate": "compare methods in one process: loss, bytes and time",
}

Subparsers = Any
"""What `argparse.ArgumentParser.add_subparsers` returns; its class has no public name."""


def new_parser(
    subparsers: Subparsers, name: str, *, description: str, examples: str
) -> argparse.ArgumentParser:
    """Add the parser of one command: what it does, its arguments, then examples."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        description=description,
        epilog="examples:\n" + "\n".join(f"  {line}" for line in examples.strip().splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def add_stop_with_stdin(parser: argparse.ArgumentParser) -> None:
    """Add the option by which a program makes sure that what it started ends with it."""
    parser.add_argument(
        "--stop-with-stdin",
        action="store_true",
        help="stop when standard input ends (for programs that start this one)",
    )


def print_json(value: object) -> None:
    """Print one line of JSON on stdout; numbers that JSON cannot carry are a ValueError."""
    print(json.dumps(value, allow_nan=False), file=sys.stdout, flush=True)
