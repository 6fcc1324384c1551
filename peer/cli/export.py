"""`atoll export`: write a checkpoint as a model of Hugging Face, or as one file of parameters."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from atoll.peer.cli import Subparsers, add_checkpoint, new_parser

if TYPE_CHECKING:
    from atoll.coordinator.checkpoint_sets import CheckpointSet


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of `atoll export`."""
    parser = new_parser(
        subparsers,
        "export",
        description="Write the model of a checkpoint as a folder that `transformers` loads:\n"
        "config.json, model.safetensors and the tokenizer. The built-in model becomes a\n"
        "LlamaForCausalLM; a custom model must be of a class of `transformers`. Adapters\n"
        "are merged into their base. --format safetensors writes what the run has trained\n"
        "as one file, whatever the model.\n\n"
        "--round N writes the model after any round that the coordinator's log still has,\n"
        "computed from a snapshot and the updates after it: name its state directory.\n\n"
        "Of a pipeline, name the file of any stage, or the folder with the folders of all\n"
        "stages. Slices of a custom model are written by --format safetensors alone.\n\n"
        "--push OWNER/NAME also uploads the result to the Hugging Face hub, into a private\n"
        "repository unless --public is given: with the hub's library and your login there.",
        examples="atoll export run-00000012.safetensors --format hf --out my-model\n"
        "atoll export run-00000012.safetensors --out my-model --dtype bfloat16\n"
        "atoll export run-00000012.safetensors --init SmolLM2-135M --adapter --out my-adapter\n"
        "atoll export STATE_DIR --round 7 --out my-model\n"
        "atoll export state/checkpoints --format safetensors --out parameters.safetensors\n"
        "atoll export run-00000012.safetensors --out my-model --push me/my-model",
    )
    add_checkpoint(parser)
    parser.add_argument(
        "--format",
        choices=["hf", "safetensors"],
        default="hf",
        help="hf, a folder for `transformers`, or safetensors, one file of the trained parameters "
        "(default: hf).",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="PATH", help="New folder, or file, to write."
    )
    parser.add_argument(
        "--round",
        type=int,
        metavar="N",
        help="Export the model after round N, from the log of the coordinator's state directory "
        "(default: a checkpoint).",
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="Number format of the weights: float32, bfloat16 or float16 (default: float32).",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="Write the adapters alone, for peft and the same base, instead of merging them.",
    )
    parser.add_argument(
        "--push", metavar="OWNER/NAME", help="Also upload it to this repository of the hub."
    )
    parser.add_argument(
        "--public",
        action="store_true",
        help="Make the repository of --push public if it does not exist (default: private).",
    )


def run(args: argparse.Namespace) -> int:
    """Find the checkpoint, or compute it from a log, and write it."""
    from atoll.coordinator.checkpoint_sets import find
    from atoll.peer.training.one_file import ExportError

    if args.public and args.push is None:
        raise ExportError("--public is for the repository of --push; pass --push, or omit it")
    if args.push is not None:
        from atoll.peer.training.hf.hub import expect_can_push

        expect_can_push(args.push)
    if args.round is None:
        return _export(args, find(args.checkpoint))
    from atoll.coordinator.checkpoints import save_checkpoint
    from atoll.coordinator.past_states import run_folder, state_after

    past = state_after(run_folder(args.checkpoint), args.round)
    # On the disk that takes the result: it is as large as a checkpoint.
    with TemporaryDirectory(dir=_parent(args.out), prefix=".atoll-export-") as folder:
        path = Path(folder) / f"{past.spec.run.name}-{past.position:08d}.safetensors"
        save_checkpoint(path, past)
        del past
        return _export(args, find(path))


def _parent(out: Path) -> Path:
    """Return the folder that will hold the result. Raises ExportError."""
    from atoll.peer.training.one_file import ExportError

    if not out.absolute().parent.is_dir():
        raise ExportError(f"{out}: the folder does not exist; create it first")
    return out.absolute().parent


def _export(args: argparse.Namespace, found: CheckpointSet) -> int:
    from atoll.coordinator.checkpoints import after_rounds
    from atoll.peer.training.hf.export import export, export_stages
    from atoll.peer.training.one_file import ExportError, export_parameters
    from atoll.peer.training.trained import load_checkpoint

    if args.adapter and (args.format != "hf" or found.spec.model.lora is None):
        raise ExportError("--adapter is for a run with [model.lora] and --format hf; omit it")
    if args.format == "safetensors":
        export_parameters(found, args.out, dtype=args.dtype)
    elif found.is_pipeline:
        export_stages(found, args.out, dtype=args.dtype, tokenizer=args.tokenizer)
    else:
        trained = load_checkpoint(
            found.read(found.headers[0]),
            allow_model=args.allow_model,
            any_source=args.any_model_source,
            tokenizer=args.tokenizer,
            init=args.init,
        )
        export(trained, args.out, dtype=args.dtype, adapter=args.adapter)
    what = "adapters" if args.adapter else "model"
    text = f"{what} {after_rounds(found.positions)}"
    print(f"{args.out}: {text}", file=sys.stderr)
    if args.push is not None:
        from atoll.peer.training.hf.hub import push

        message = f"{found.headers[0].spec.run.name}: {text}"
        where = push(args.out, args.push, message=message, is_public=args.public)
        print(f"uploaded: {where}", file=sys.stderr)
    return 0
