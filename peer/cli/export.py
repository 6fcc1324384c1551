"""`atoll export`: write a checkpoint as a model of Hugging Face."""

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
        "are merged into their base.",
        examples="atoll export run-00000012.safetensors --format hf --out my-model\n"
        "atoll export run-00000012.safetensors --out my-model --dtype bfloat16\n"
        "atoll export run-00000012.safetensors --init SmolLM2-135M --adapter --out my-adapter",
    )
    add_checkpoint(parser)
    parser.add_argument(
        "--format", choices=["hf"], default="hf", help="Format of the folder: hf (default: hf)."
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="New folder to write."
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
    """Load the checkpoint and write the folder."""
    from atoll.peer.training.hf.export import export
    from atoll.peer.training.trained import load_checkpoint

    trained = load_checkpoint(
        args.checkpoint,
        allow_model=args.allow_model,
        any_source=args.any_model_source,
        tokenizer=args.tokenizer,
        init=args.init,
    )
    export(trained, args.out, dtype=args.dtype, adapter=args.adapter)
    what = "adapters" if args.adapter else "model"
    print(f"{args.out}: {what} after round {trained.position}", file=sys.stderr)
    return 0
