"""`atoll export`: write a checkpoint as a model of Hugging Face, or as one file of parameters."""

import argparse
import sys
from pathlib import Path

from atoll.peer.cli import Subparsers, add_checkpoint, new_parser


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
        "Of a pipeline, name the file of any stage, or the folder with the folders of all\n"
        "stages. Slices of a custom model are written by --format safetensors alone.",
        examples="atoll export run-00000012.safetensors --format hf --out my-model\n"
        "atoll export run-00000012.safetensors --out my-model --dtype bfloat16\n"
        "atoll export run-00000012.safetensors --init SmolLM2-135M --adapter --out my-adapter\n"
        "atoll export state/checkpoints --format safetensors --out parameters.safetensors",
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


def run(args: argparse.Namespace) -> int:
    """Find the checkpoint and write it."""
    from atoll.coordinator.checkpoint_sets import find
    from atoll.coordinator.checkpoints import after_rounds
    from atoll.peer.training.hf.export import export, export_stages
    from atoll.peer.training.one_file import ExportError, export_parameters
    from atoll.peer.training.trained import load_checkpoint

    found = find(args.checkpoint)
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
    print(f"{args.out}: {what} {after_rounds(found.positions)}", file=sys.stderr)
    return 0
