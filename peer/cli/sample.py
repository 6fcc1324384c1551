"""`atoll sample`: generate text from a checkpoint, or through the stages of a live pipeline."""

import argparse
import asyncio
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.peer.cli import Subparsers, add_named_files, new_parser, print_json
from atoll.peer.cli.watching import read_invite
from atoll.peer.daemon.options import TEXT_WAIT_S

if TYPE_CHECKING:
    from atoll.coordinator.run.invite import Invite
    from atoll.coordinator.run.levels import Level
    from atoll.coordinator.run.notice import Notice, Report
    from atoll.peer.daemon.live_text import LiveOptions
    from atoll.peer.training.sampling import SamplingOptions


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll sample`."""
    parser = new_parser(
        subparsers,
        "sample",
        description="Generate a continuation of a prompt with the model of a checkpoint. Custom\n"
        "models run only with --allow-model, and files are read only with --tokenizer\n"
        "and --init. Of a pipeline, name the file of any stage, or the folder with the\n"
        "folders of all stages.\n\n"
        "With the INVITE of a pipeline, peers that were started with --serve compute the\n"
        "text, each with its stage. They read the prompt. The text is that of the rounds\n"
        "that `positions` in --json names, for each stage.",
        examples="atoll sample run-00000012.safetensors --prompt 'def '\n"
        "atoll sample INVITE --prompt 'def ' --max-tokens 50\n"
        "atoll sample run-00000012.safetensors --prompt 'class ' --temperature 0 --json\n"
        "atoll sample theirs.safetensors --allow-model my_package.models:build",
    )
    parser.add_argument(
        "source",
        metavar="CHECKPOINT|INVITE",
        help="Checkpoint of a run (.safetensors), or a folder: the newest one in it; or the invite "
        "of a live pipeline, or a file that contains it.",
    )
    add_named_files(parser)
    parser.add_argument("--prompt", default="", help="Text to continue (default: none).")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=200,
        metavar="N",
        help="Number of tokens to generate (default: 200).",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="Sampling temperature; 0 is greedy (default: 0.8).",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="Sample from the K most likely tokens; 0 is all (default: 0).",
    )
    parser.add_argument("--seed", type=int, default=0, help="Random seed (default: 0).")
    parser.add_argument(
        "--device", default="auto", help="auto, cuda, cuda:1, mps or cpu (default: auto)."
    )
    parser.add_argument(
        "--wait",
        type=_seconds,
        default=TEXT_WAIT_S,
        metavar="SECONDS",
        help="Longest wait for a peer that serves a stage, with an INVITE (default: "
        f"{TEXT_WAIT_S:g}).",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="Print one line of JSON when done; with an INVITE, events as lines of JSON on stderr.",
    )


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation as it is generated."""
    invite = _invite(args.source)  # before torch is imported, which takes seconds
    from atoll.peer.training.sampling import SamplingOptions

    options = SamplingOptions(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
    )
    return _from_file(args, options) if invite is None else _from_run(args, invite, options)


def _invite(source: str) -> "Invite | None":
    """Return the invite that was given; None for the path of a checkpoint.

    Raises:
        InviteError: it is neither, or a damaged invite.
    """
    from atoll.coordinator.run.invite import NotAnInvite

    path = Path(source)
    if len(source) <= 255 and (path.is_dir() or path.suffix == ".safetensors"):
        return None
    try:
        return read_invite(source)
    except NotAnInvite as error:
        raise NotAnInvite(f"{error}; or name a checkpoint (.safetensors) or its folder") from None


def _from_file(args: argparse.Namespace, options: "SamplingOptions") -> int:
    """Generate on this machine."""
    from atoll.peer.training.sampling import sample

    pieces = sample(
        Path(args.source),
        args.prompt,
        options,
        device=args.device,
        allow_models=args.allow_model,
        any_model_source=args.any_model_source,
        tokenizer=args.tokenizer,
        init=args.init,
    )
    shown = _Shown(args)
    for piece in pieces:
        shown.add(piece)
    shown.end()
    return 0


def _from_run(args: argparse.Namespace, invite: "Invite", options: "SamplingOptions") -> int:
    """Generate through the peers of a run."""
    from atoll.peer.daemon.live_text import LiveOptions
    from atoll.peer.paths import text_state_dir

    live = LiveOptions(
        invite=invite,
        state_dir=text_state_dir(invite.run_id.hex()),
        tokenizer=args.tokenizer,
        allow_models=frozenset(args.allow_model),
        any_model_source=args.any_model_source,
        wait_s=args.wait,
    )
    asyncio.run(_generate(args, live, options))
    return 0


async def _generate(
    args: argparse.Namespace, live: "LiveOptions", options: "SamplingOptions"
) -> None:
    from atoll.peer.daemon.live_text import live_run

    async with live_run(live, _reporter(as_json=args.json)) as run:
        shown = _Shown(args)
        async for piece in run.generate(args.prompt, options):
            shown.add(piece)
        readings = [
            {"token": reading.token, **dict(zip(run.spec.modules, reading.positions, strict=True))}
            for reading in run.readings
        ]
        shown.end(positions=readings)


def _reporter(*, as_json: bool) -> "Report":
    """Return what prints, beside the text, what happens on the way."""
    from atoll.coordinator.run.notice import told_fields
    from atoll.coordinator.run.text import clean

    def report(level: "Level", notice: "Notice") -> None:
        if as_json:
            told = {"kind": "event", "level": level, "time": round(time.time(), 3)}
            line = json.dumps(told | told_fields(notice), allow_nan=False)
        else:
            line = f"{'' if level == 'info' else f'{level}: '}{clean(notice)}"
        print(line, file=sys.stderr, flush=True)

    return report


class _Shown:
    """The prompt and its continuation, as they come; with --json, one line when done."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._prompt, self._as_json = args.prompt, args.json
        self._pieces: list[str] = []
        self._began_s = time.perf_counter()
        if not args.json:
            print(args.prompt, end="", flush=True)

    def add(self, piece: str) -> None:
        """Show a piece of the text."""
        from atoll.coordinator.run.text import clean_lines

        self._pieces.append(piece)
        if not self._as_json:
            # A model writes what its trainers chose, escape sequences too; a pipe gets the text as
            # it is.
            shown = clean_lines if sys.stdout.isatty() else str
            print(shown(piece), end="", flush=True)

    def end(self, **more: object) -> None:
        """End the line, or print all as JSON."""
        if not self._as_json:
            print()
            return
        took_s = time.perf_counter() - self._began_s
        text = "".join(self._pieces)
        print_json({"prompt": self._prompt, "text": text, "seconds": took_s, **more})


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds, got {text!r}")
    return seconds
