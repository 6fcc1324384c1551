"""`atoll eval`: measure a checkpoint on text, or on tasks."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.peer.cli import Subparsers, add_checkpoint, new_parser, print_json

if TYPE_CHECKING:
    from atoll.peer.training.trained import Trained

REPORT_S = 10.0  # between two lines of progress


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll eval`."""
    parser = new_parser(
        subparsers,
        "eval",
        description="Measure the model of a checkpoint: bits a byte of the text that its run\n"
        "holds out, or of --data; with --tasks, tasks of lm-evaluation-harness. Of a\n"
        "pipeline, name the file of any stage, or the folder with the folders of all stages.",
        examples="atoll eval run-00000012.safetensors\n"
        "atoll eval run-00000012.safetensors --data other.txt --json\n"
        "atoll eval run-00000012.safetensors --tasks hellaswag,arc_easy --limit 200",
    )
    add_checkpoint(parser)
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="Text to measure. Of the run's own text, which its digest tells, only the part that "
        "the run holds out (default: the run's text, if it is stdlib or a public data set).",
    )
    parser.add_argument(
        "--tokens",
        type=_count,
        default=65_536,
        metavar="N",
        help="Tokens to measure, spread evenly over the text (default: 65536).",
    )
    parser.add_argument(
        "--tasks",
        metavar="NAMES",
        help="Tasks of lm-evaluation-harness instead of text, separated by commas.",
    )
    parser.add_argument(
        "--task-path",
        type=Path,
        metavar="DIR",
        help="Folder with the YAML files of more tasks.",
    )
    parser.add_argument(
        "--limit", type=_count, metavar="N", help="Examples of each task (default: all)."
    )
    parser.add_argument(
        "--device", default="auto", help="auto, cuda, cuda:1, mps or cpu (default: auto)."
    )
    parser.add_argument("--json", action="store_true", help="Print one line of JSON.")


def run(args: argparse.Namespace) -> int:
    """Load the checkpoint, measure it and print the result."""
    from atoll.coordinator.checkpoints import after_rounds
    from atoll.peer.errors import SetupError
    from atoll.peer.training.devices import Device
    from atoll.peer.training.trained import load_checkpoint

    if args.tasks is None and (args.limit is not None or args.task_path is not None):
        raise SetupError("--limit and --task-path are for tasks; give --tasks, or omit them")
    if args.tasks is not None and args.data is not None:
        raise SetupError("--tasks and --data exclude each other; omit one of them")
    trained = load_checkpoint(
        args.checkpoint,
        allow_model=args.allow_model,
        any_source=args.any_model_source,
        tokenizer=args.tokenizer,
        init=args.init,
    )
    device = Device.choose(args.device, trained.spec.inner.precision)
    if args.tasks is not None:
        from atoll.peer.training.harness import evaluate

        names = [name for name in args.tasks.split(",") if name]
        results = evaluate(trained, names, device=device, limit=args.limit, folder=args.task_path)
        if args.json:
            print_json(_rounds(trained) | {"tasks": results})
        else:
            for task, metrics in results.items():
                for name, value in metrics.items():
                    print(f"{task}  {name}  {value:.4f}")
        return 0
    from atoll.peer.training.bits import held_out, measure

    text = held_out(trained, data=args.data, tokenizer=args.tokenizer, tokens=args.tokens)
    found = measure(
        trained.model,
        trained.tokenizer,
        text.batches,
        device=device,
        on_batch=_reporter(len(text.batches)),
    )
    if args.json:
        print_json(_rounds(trained) | {"text": text.name, **vars(found)})
    else:
        print(
            f"{found.bits_per_byte:.4f} bits a byte, {found.loss:.4f} nats per token "
            f"{after_rounds(trained.positions)}; {found.num_tokens:,} tokens, "
            f"{found.num_bytes:,} bytes, {text.name}"
        )
    return 0


def _rounds(trained: "Trained") -> dict[str, Any]:
    """Return after which round the model is; of a pipeline, for each stage too."""
    if len(trained.positions) == 1:
        return {"round": trained.position}
    stages = dict(zip(trained.spec.modules, trained.positions, strict=True))
    return {"round": trained.position, "rounds": stages}


def _reporter(batches: int) -> Callable[[int], None]:
    """Return what prints a line on stderr now and then, given the batches done."""
    said_s = [time.monotonic()]

    def report(done: int) -> None:
        if done < batches and time.monotonic() - said_s[0] >= REPORT_S:
            said_s[0] = time.monotonic()
            print(f"measured {done} of {batches} batches", file=sys.stderr, flush=True)

    return report


def _count(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return number
