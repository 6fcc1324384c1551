"""`atoll sample`: generate text from a checkpoint."""

import argparse
import sys
import time
from collections.abc import Iterator

from atoll.peer.cli import Subparsers, add_checkpoint, new_parser, print_json


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll sample`."""
    parser = new_parser(
        subparsers,
        "sample",
        description="Generate a continuation of a prompt with the model of a checkpoint. Custom\n"
        "models run only with --allow-model, and files are read only with --tokenizer\n"
        "and --init. Of a pipeline, name the file of any stage, or the folder with the\n"
        "folders of all stages.",
        examples="atoll sample run-00000012.safetensors --prompt 'def '\n"
        "atoll sample run-00000012.safetensors --prompt 'class ' --temperature 0 --json\n"
        "atoll sample theirs.safetensors --allow-model my_package.models:build",
    )
    add_checkpoint(parser)
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
    parser.add_argument("--json", action="store_true", help="Print one line of JSON when done.")


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation as it is generated."""
    from atoll.coordinator.run.text import clean_lines
    from atoll.peer.training.sampling import SamplingOptions, sample

    options = SamplingOptions(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
    )
    pieces = sample(
        args.checkpoint,
        args.prompt,
        options,
        device=args.device,
        allow_models=args.allow_model,
        any_model_source=args.any_model_source,
        tokenizer=args.tokenizer,
        init=args.init,
    )
    if args.json:
        return _print_json(args.prompt, pieces)
    # A model writes what its trainers chose, escape sequences too; a pipe gets the text as it is.
    shown = clean_lines if sys.stdout.isatty() else str
    print(args.prompt, end="", flush=True)
    for piece in pieces:
        print(shown(piece), end="", flush=True)
    print()
    return 0


def _print_json(prompt: str, pieces: Iterator[str]) -> int:
    start = time.perf_counter()
    text = "".join(pieces)
    print_json({"prompt": prompt, "text": text, "seconds": time.perf_counter() - start})
    return 0
