"""The `atoll` command line: one file per subcommand, `main.py` dispatches.

A command module has two functions and imports heavy packages inside the second one:

    add_parser(subparsers) -> None    add the command's arguments (with `new_parser`)
    run(args) -> int                  do the work and return the exit code

`SUMMARIES` lists the commands in the order of `atoll --help` without importing them.
"""

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "SUMMARIES",
    "Subparsers",
    "add_allow_model",
    "add_checkpoint",
    "add_named_files",
    "add_stop_with_stdin",
    "new_parser",
    "print_json",
]

SUMMARIES = {
    "demo": "train across several peers on this machine and print a report",
    "init": "write a commented RUN.toml",
    "plan": "estimate the cost of a run: bytes, time, utilisation, memory",
    "coordinator": "start a run and print its invite",
    "invite": "issue, list or revoke invites of a run",
    "keys": "change the organiser's key of a run that goes on",
    "evict": "remove a peer from a run",
    "run": "pause, resume, stop or change a run that goes on",
    "peer": "join a run and train until stopped",
    "follow": "keep a run's whole log and its checkpoints, without training",
    "service": "start a peer or a coordinator at boot",
    "doctor": "check this machine and its connection to a run",
    "dashboard": "watch a run in the terminal",
    "status": "print the state of a run once",
    "rounds": "list committed rounds",
    "report": "write a page about a run",
    "shards": "tokenise the text of a run once, for fast starts",
    "sample": "generate text from a checkpoint, or through a live pipeline",
    "eval": "measure a checkpoint: bits a byte, or tasks",
    "export": "write a checkpoint as a model of Hugging Face",
    "tokenizer": "train a tokenizer",
    "simulate": "compare methods in one process: loss, bytes and time",
}

Subparsers = Any
"""The result of `argparse.ArgumentParser.add_subparsers`; its class has no public name."""


def new_parser(
    subparsers: Subparsers, name: str, *, description: str, examples: str
) -> argparse.ArgumentParser:
    """Add the parser of one command, with its description and examples."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        description=description,
        epilog="examples:\n" + "\n".join(f"  {line}" for line in examples.strip().splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(refuse_unknown=lambda words: _refuse_unknown(parser, words))
    return parser


def _refuse_unknown(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Exit with 2, and name the option that was probably meant."""
    known = [name for action in parser._actions for name in action.option_strings]
    given = next((word.partition("=")[0] for word in words if word.startswith("--")), "")
    close = difflib.get_close_matches(given, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    parser.error(f"unrecognized arguments: {' '.join(words)}{hint}")


def add_track(parser: argparse.ArgumentParser) -> None:
    """Add the option that names trackers of experiments."""
    parser.add_argument(
        "--track",
        action="append",
        default=[],
        metavar="TRACKER",
        help="Tracker that gets the numbers of each round: tensorboard:DIR, wandb or "
        "wandb:PROJECT; repeatable (default: none). One that fails is left; the run goes on.",
    )


def add_allow_model(parser: argparse.ArgumentParser) -> None:
    """Add the option that allows code of this machine to be named from elsewhere."""
    parser.add_argument(
        "--allow-model",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="Custom model that may run on this machine, spelled exactly; repeatable (default: "
        "none).",
    )
    parser.add_argument(
        "--any-model-source",
        action="store_true",
        help="Accept a custom model whose source differs from the organiser's (default: refuse).",
    )


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add a checkpoint, and the options that allow what it names."""
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="Checkpoint of a run (.safetensors), or a folder: the newest one in it.",
    )
    add_named_files(parser)


def add_named_files(parser: argparse.ArgumentParser) -> None:
    """Add the options that allow what a checkpoint or a run names."""
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="Tokenizer file on this machine, such as tokenizer.json in a peer's state directory. "
        "A path that the checkpoint names is never read.",
    )
    parser.add_argument(
        "--init",
        metavar="PATH",
        help="Folder of the weights with which the run began, if it trained adapters or left "
        "parameters frozen.",
    )
    add_allow_model(parser)


def add_outer_state(
    parser: argparse.ArgumentParser, *, default: str | None = "memory", told: str = "memory"
) -> None:
    """Add the option that says where a process keeps the outer state; `told` names the default."""
    parser.add_argument(
        "--outer-state",
        choices=("memory", "disk"),
        default=default,
        help="Place of the common parameters and the outer momentum: memory, or disk, in files of "
        "the state directory that are mapped into memory, whose pages the system takes back when "
        "it needs them; a round writes about 12 bytes per parameter there "
        f"(default: {told}).",
    )


def add_stop_with_stdin(parser: argparse.ArgumentParser) -> None:
    """Add the option with which a parent process makes sure that its children end with it."""
    parser.add_argument(
        "--stop-with-stdin",
        action="store_true",
        help="Stop when standard input closes, for programs that start this one.",
    )


def print_json(value: object) -> None:
    """Print one line of JSON on stdout; raise ValueError for NaN and infinity."""
    print(json.dumps(value, allow_nan=False), file=sys.stdout, flush=True)
