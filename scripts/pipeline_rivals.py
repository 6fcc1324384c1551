#!/usr/bin/env python3
"""One host of a pipeline of `torch.distributed.pipelining` over gloo, for `bench_pipeline.py`.

    pipeline_rivals.py RANK ADDRESS_OF_RANK_0 SECONDS

Runs 1F1B with fixed wiring: ranks 0, 1 and 2 are the stages of one chain, 3, 4 and 5 those of
another, and the chains exchange nothing. The slices are those of `paced.py` in the current folder.
Between stages travels bfloat16, since gloo has no codec. Prints the seconds of each step; the first
one opens connections.
"""

import os
import sys
import time
from datetime import timedelta

import torch
from pipeline_lab import BATCH, ROWS, SEQ_LEN, WIDTH
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

VOCAB, STAGES, CHAINS, MICROBATCHES = 256, 3, 2, 32
LEARNING_RATE = 1e-3


class Narrow(nn.Module):
    """A slice whose input and output travel as bfloat16."""

    def __init__(self, inner: nn.Module, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.inner, self.is_first, self.is_last = inner, is_first, is_last

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits at the last stage, else activations."""
        output: Tensor = self.inner(inputs if self.is_first else inputs.float())
        return output if self.is_last else output.bfloat16()


def stage_of(number: int) -> nn.Module:
    """Return a stage of the bench's model."""
    sys.path.insert(0, os.getcwd())
    from paced import build  # type: ignore[import-not-found]

    slices = build(vocab_size=VOCAB, seq_len=SEQ_LEN, width=WIDTH, stages=STAGES)
    return Narrow(slices[number](), is_first=number == 0, is_last=number == STAGES - 1)


def loss_of(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def main() -> None:
    """Take steps until the time is over."""
    rank, address, seconds = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    device = next(name for name in os.listdir("/sys/class/net") if name != "lo")
    os.environ["GLOO_SOCKET_IFNAME"] = device
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:29500",
        rank=rank,
        world_size=STAGES * CHAINS,
        timeout=timedelta(seconds=120),
    )
    chains = [[chain * STAGES + n for n in range(STAGES)] for chain in range(CHAINS)]
    groups = [distributed.new_group(ranks) for ranks in chains]
    chain, number = divmod(rank, STAGES)
    model = stage_of(number)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    stage = PipelineStage(model, number, STAGES, torch.device("cpu"), group=groups[chain])
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    tokens_BT = torch.randint(VOCAB, (MICROBATCHES * BATCH, SEQ_LEN))
    until_s = time.monotonic() + seconds
    while True:
        began_s = time.monotonic()
        if number == 0:
            schedule.step(tokens_BT)
        elif number == STAGES - 1:
            schedule.step(target=tokens_BT, losses=[])
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        print(time.monotonic() - began_s, ROWS * MICROBATCHES, flush=True)
        is_over = torch.tensor([time.monotonic() > until_s], dtype=torch.int32)
        distributed.broadcast(is_over, src=chains[chain][0], group=groups[chain])
        if is_over:
            break
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
