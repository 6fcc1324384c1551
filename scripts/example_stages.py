"""Cut your own model into stages, and train it as a pipeline.

    python scripts/example_stages.py --stages 3           all stages in this process, no network

To train this model in a run, name it in RUN.toml and start the coordinator from the folder
`scripts`, where it can import the module:

    [model]
    custom = "example_stages:build"

    [topology]
    stages = 3

Each peer, `atoll peer INVITE --allow-model example_stages:build` from the same folder, builds the
slices of one stage and no others.
"""

import argparse
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from atoll.compression.activations import parse_activations
from atoll.optim.inner import build as build_optimizer
from atoll.peer.training.devices import Device
from atoll.peer.training.local_pipeline import LocalPipeline
from atoll.peer.training.models import model
from atoll.peer.training.stage_compute import StageCompute
from atoll.peer.training.stages import slices

SEQ_LEN = 64
BATCH_SIZE = 8
MICROBATCHES = 2  # a step


class Mix(nn.Module):
    """An inner slice: adds what the last eight positions give; keeps the shape of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Conv1d(width, 2 * width, kernel_size=8)
        self.out = nn.Linear(2 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        padded_BDT = nn.functional.pad(self.norm(x_BTD).transpose(1, 2), (7, 0))
        return x_BTD + self.out(nn.functional.gelu(self.mix(padded_BDT).transpose(1, 2)))


class Head(nn.Module):
    """The last slice: gives logits, of which Atoll computes the cross-entropy."""

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.head(self.norm(x_BTD))


@model(slices=True)
def build(
    *, vocab_size: int, seq_len: int, width: int = 64, depth: int = 3, **_: object
) -> list[Callable[[], nn.Module]]:
    """Return what builds each slice, as named by `custom` in RUN.toml; build none yet."""
    first = partial(nn.Embedding, vocab_size, width)
    return [first, *[partial(Mix, width)] * depth, partial(Head, width, vocab_size)]


def text() -> Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:100]
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def train(stages: int, steps: int, codec: str) -> None:
    torch.set_num_threads(1)  # the model is too small for more
    cpu = Device.choose("cpu")
    whole = slices(
        custom="example_stages:build",
        vocab_size=256,
        seq_len=SEQ_LEN,
        allowed={"example_stages:build"},
    )
    computes = []
    for number, indices in enumerate(whole.cut(stages)):
        stage = whole.build(indices, seed=0)
        computes.append(StageCompute(stage, cpu))
        params = sum(param.numel() for param in stage.parameters())
        print(f"stage {number}: the {stage.title}, {params} of {sum(whole.num_params)} parameters")
    packing = parse_activations(codec)
    pipeline = LocalPipeline(
        computes,
        [build_optimizer("adamw", each.model, lr=3e-3) for each in computes],
        forward=packing,
        backward=packing,
    )
    bytes_N, random = text(), torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        starts_MB1 = torch.randint(
            len(bytes_N) - SEQ_LEN - 1, (MICROBATCHES, BATCH_SIZE, 1), generator=random
        )
        loss = pipeline.step(list(bytes_N[starts_MB1 + torch.arange(SEQ_LEN + 1)].long()))
        if step % 10 == 0:
            print(f"step {step:3}  loss {loss:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=3, help="stages (default %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="inner steps (default %(default)s)")
    parser.add_argument(
        "--codec", default="int8", help="codec between the stages (default %(default)s)"
    )
    options = parser.parse_args()
    train(options.stages, options.steps, options.codec)


if __name__ == "__main__":
    main()
