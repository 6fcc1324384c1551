#!/usr/bin/env python3
"""One host of a pipeline of `torch.distributed.pipelining` over gloo, for `bench_pipeline.py`.

    pipeline_rivals.py RANK ADDRESS,ADDRESS,... SCHEDULE

SCHEDULE is GPipe or 1F1B. The wiring is fixed: ranks 0, 1 and 2 are the stages of one chain, 3, 4
and 5 those of another, and both average their gradients before each step. The slices are those of
`paced.py` in the current folder. Between stages travels bfloat16, since gloo has no codec; no
forward pass is computed again. Takes steps until it is ended, and prints the time and the tokens of
each step at the first rank of each chain.
"""

import fcntl
import os
import socket
import struct
import sys
import time
from contextlib import suppress
from datetime import timedelta

import torch
from pipeline_lab import BATCH, ROWS, SEQ_LEN, WIDTH
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

VOCAB, STAGES, CHAINS, MICROBATCHES = 256, 3, 2, 32
LEARNING_RATE = 1e-3
SIOCGIFADDR = 0x8915  # of Linux
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
GIVE_UP = timedelta(seconds=120)  # much longer than any transfer takes here


class Narrow(nn.Module):
    """A slice whose input and output travel as bfloat16."""

    def __init__(self, inner: nn.Module, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.inner, self.is_first, self.is_last = inner, is_first, is_last

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits at the last stage, else activations."""
        output: Tensor = self.inner(inputs if self.is_first else inputs.float())
        return output if self.is_last else output.bfloat16()


def slice_of(number: int) -> nn.Module:
    """Return a stage of the bench's model."""
    sys.path.insert(0, os.getcwd())
    from paced import build  # type: ignore[import-not-found]

    slices = build(vocab_size=VOCAB, seq_len=SEQ_LEN, width=WIDTH, stages=STAGES)
    built: nn.Module = slices[number]()
    return built


def loss_of(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def average(model: nn.Module, group: distributed.ProcessGroup) -> None:
    """Average the gradients of a stage over the chains, as one tensor."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    flat_N = torch.cat([grad.flatten() for grad in grads]).div_(CHAINS)
    distributed.all_reduce(flat_N, group=group)
    for grad, part in zip(grads, flat_N.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def device_of(address: str) -> str:
    """Return the network device that has an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # a device without an address
                request = struct.pack("256s", name.encode())
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24]
                if socket.inet_ntoa(found) == address:
                    return name
    raise LookupError(f"no network device has {address}")


def main() -> None:
    """Take steps until this process is ended."""
    rank, schedule = int(sys.argv[1]), SCHEDULES[sys.argv[3]]
    addresses = sys.argv[2].split(",")
    os.environ["GLOO_SOCKET_IFNAME"] = device_of(addresses[rank])
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{addresses[0]}:29500",
        rank=rank,
        world_size=STAGES * CHAINS,
        timeout=GIVE_UP,
    )
    chain, number = divmod(rank, STAGES)
    # Every rank makes all groups, in the same order.
    chains = [
        distributed.new_group([n * STAGES + each for each in range(STAGES)]) for n in range(CHAINS)
    ]
    peers = [
        distributed.new_group([each * STAGES + n for each in range(CHAINS)]) for n in range(STAGES)
    ]
    model = Narrow(slice_of(number), is_first=number == 0, is_last=number == STAGES - 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    stage = PipelineStage(model, number, STAGES, torch.device("cpu"), group=chains[chain])
    steps = schedule(stage, MICROBATCHES, loss_fn=loss_of)
    tokens_BT = torch.randint(VOCAB, (MICROBATCHES * BATCH, SEQ_LEN))
    while True:
        if number == 0:
            steps.step(tokens_BT)
        elif number == STAGES - 1:
            steps.step(target=tokens_BT, losses=[])
        else:
            steps.step()
        average(model, peers[number])
        optimizer.step()
        optimizer.zero_grad()
        if number == 0:
            print(time.time(), ROWS * MICROBATCHES, flush=True)


if __name__ == "__main__":
    main()
