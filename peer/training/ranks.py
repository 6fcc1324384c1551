"""Several processes that train as one peer: how the model lies on them, and what they agree on.

    OneRank         a process that trains alone: nothing is sent
    SeveralRanks    the processes that torchrun or `atoll peer --gpus` has started

A model that fits on one device is whole on each rank, and its gradients are averaged (data
parallel). A larger one is cut by `fully_shard`, block by block, over the ranks of each host, and
copied from host to host (HSDP). Each rank has data and random numbers of its own; what follows
from a clock or from the network, the first rank decides for all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn

from atoll.optim.methods.worker import Worker
from atoll.optim.ranks import Ranks, RanksError
from atoll.optim.ranks.ranks import TIMEOUT_S, losing
from atoll.optim.state import vectors
from atoll.peer.training import models
from atoll.peer.training.devices import Device
from atoll.peer.training.machine import memory_total

TRAIN_BYTES = 18  # a parameter: itself, gradient and AdamW's moments in fp32, a copy in bf16
FROZEN_BYTES = 6  # a parameter that is not trained, as those beneath adapters: itself and the copy
FIT_SHARE = 0.6  # of a device's memory; the rest is for activations


class OneRank:
    """A process that trains alone."""

    rank, size, leads = 0, 1, True

    is_cut = False
    """True if the model is cut over the ranks."""

    def agreed(self, value: Any) -> Any:  # noqa: ANN401 - JSON
        """Return the leader's value, which each rank uses instead of its own."""
        return value

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Let the leader do in the block what the others wait for; then it must agree with them."""
        yield

    def gathered(self, value: Any) -> list[Any]:  # noqa: ANN401 - JSON
        """Return the values of all ranks, by rank, at the leader."""
        return [value]

    def all_of(self, is_true: bool) -> bool:
        """Return whether something is true on all ranks."""
        return is_true

    def own_name(self, peer_id: str) -> str:
        """Return the name from which this rank's data and random numbers follow."""
        return peer_id

    def label(self, device: str) -> str:
        """Return the name of the devices, for display."""
        return device

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Move the model to the device, or this rank's shard of it."""
        return model.to(device)

    def expect_backward(self, model: nn.Module, *, is_last: bool) -> None:
        """Announce a backward pass; gradients have to be complete after the last one alone."""

    def average_(self, model: nn.Module) -> None:
        """Let the gradients be the means over all ranks."""

    def totals(self, *numbers: float) -> list[float]:
        """Return the sums of numbers over all ranks."""
        return list(numbers)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a number over all ranks; NaN if it is that on one."""
        return value


STORE = "ATOLL_RANKS_STORE"
"""Environment variable: a file by which the ranks of one machine find each other. torchrun has an
address instead."""


def is_one_of_several() -> bool:
    """Return whether torchrun or `atoll peer --gpus` has started this process as one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def several_ranks(device: str) -> Iterator[tuple[SeveralRanks, str]]:
    """Connect this process with the other ranks of its peer.

    Args:
        device: as `Device.choose` takes it; of several GPUs each rank takes its own.

    Yields:
        The ranks, and the name of this one's device.

    Raises:
        DeviceError: the device is not usable.
        RanksError: a rank is missing.
    """
    chosen = Device.choose(device).device
    if chosen.type == "cuda":
        if chosen.index is None or device == "auto":
            chosen = Device.choose(f"cuda:{os.environ.get('LOCAL_RANK', '0')}").device
        torch.cuda.set_device(chosen)
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    store = os.environ.get(STORE)
    try:
        distributed.init_process_group(
            backend,
            init_method=f"file://{store}" if store else "env://",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=TIMEOUT_S),
        )
    except RuntimeError as error:  # its errors are of this class
        raise RanksError(f"could not connect the ranks of this peer: {error}") from error
    try:
        yield SeveralRanks(Ranks()), str(chosen)
    finally:
        distributed.destroy_process_group()


class SeveralRanks(OneRank):
    """The processes of one peer; the process group is made already."""

    def __init__(self, ranks: Ranks) -> None:
        """Train on this rank of them."""
        self.ranks = ranks
        self.rank, self.size, self.leads = ranks.rank, ranks.size, ranks.leads

    def agreed(self, value: Any) -> Any:  # noqa: ANN401 - JSON
        return self.ranks.tell(value)

    @contextmanager
    def leading(self) -> Iterator[None]:
        with self.ranks.leading():
            yield

    def gathered(self, value: Any) -> list[Any]:  # noqa: ANN401 - JSON
        return self.ranks.gathered(value)

    def all_of(self, is_true: bool) -> bool:
        return self.ranks.all_of(is_true)

    def own_name(self, peer_id: str) -> str:
        return f"{peer_id}/{self.rank} of {self.size}"

    def label(self, device: str) -> str:
        return f"{self.size} x {device}"

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        self.is_cut = not self.agreed(fits(model, device, ranks=ranks_here()))
        return cut_over_ranks(model, device) if self.is_cut else model.to(device)

    def expect_backward(self, model: nn.Module, *, is_last: bool) -> None:
        if self.is_cut:
            model.set_requires_gradient_sync(is_last)  # type: ignore[operator]

    def average_(self, model: nn.Module) -> None:
        if self.is_cut:
            return  # FSDP has done it in the last backward pass
        # A parameter that one rank's batch did not touch has no gradient there.
        grads = []
        for param in model.parameters():
            if param.requires_grad:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                grads.append(param.grad)
        with losing():
            pending = [distributed.all_reduce(grad, async_op=True) for grad in grads]
            for work in pending:
                assert work is not None, "every rank is a member"
                work.wait()
        for grad in grads:
            grad.div_(self.size)

    def totals(self, *numbers: float) -> list[float]:
        return self.ranks.totals(*numbers)

    def mean(self, value: Tensor) -> Tensor:
        with losing():
            distributed.all_reduce(value)
        return value / self.size


def held_out_loss(
    worker: Worker,
    device: Device,
    batches: Sequence[Tensor],
    ranks: OneRank,
    *,
    sequences: int,
    between: Callable[[], object],
) -> float:
    """Return the mean loss of the synced parameters, with the model that is trained.

    Each rank takes its share of the batches; the local parameters come back afterwards, to the
    bit. A second model would take as much memory again.

    Args:
        worker: whose model.
        device: of the model.
        batches: int64 tokens `(B, T + 1)` each.
        ranks: of the worker.
        sequences: that each device holds at once, the same on all ranks.
        between: called before each batch; an exception from it, on all ranks, ends this.
    """
    places, model = worker.places, worker.model
    local = [places.flatten(model, index) for index in range(len(places.fragments))]
    sums = torch.zeros(2, dtype=torch.float64)
    try:
        places.load_(model, worker.synced_N)
        model.eval()
        with torch.no_grad(), device.autocast():
            for first in range(0, len(batches), ranks.size):
                between()
                group = batches[first : first + ranks.size]
                own = group[ranks.rank : ranks.rank + 1]
                parts = torch.split(own[0] if own else group[0], sequences)
                passes = max(-(-len(batch) // sequences) for batch in group)
                # Ranks with nothing left take some piece along: all of them gather parameters.
                for number in range(passes):
                    piece = parts[number % len(parts)]
                    tokens_BT = device.put(piece)
                    loss = models.loss_of(model, tokens_BT[:, :-1], tokens_BT[:, 1:])
                    if own and number < len(parts):
                        lost = float(loss) * len(piece)
                        sums += torch.tensor([lost, len(piece)], dtype=torch.float64)
    finally:
        model.train()
        places.load_(model, local[0] if len(local) == 1 else vectors.cat(local))
    total, count = ranks.totals(*sums.tolist())
    return total / count


def fits(model: nn.Module, device: torch.device, *, ranks: int) -> bool:
    """Return whether one device can train a whole model.

    Args:
        model: anywhere; only the sizes of its parameters count.
        device: of which one is a rank's own; ranks without one share the machine's memory.
        ranks: on this machine.
    """
    if device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
    else:
        total_bytes = memory_total() // ranks
    needed_bytes = sum(
        param.numel() * (TRAIN_BYTES if param.requires_grad else FROZEN_BYTES)
        for param in model.parameters()
    )
    return needed_bytes <= FIT_SHARE * total_bytes


def ranks_here() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", distributed.get_world_size()))


def cut_over_ranks(model: nn.Module, device: torch.device) -> nn.Module:
    """Cut a model over the ranks of each machine: each block of a list, then what is left."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    here, size = ranks_here(), distributed.get_world_size()
    if here == size:
        mesh = init_device_mesh(device.type, (size,))
    else:
        names = ("replicate", "shard")
        mesh = init_device_mesh(device.type, (size // here, here), mesh_dim_names=names)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for block in {id(block): block for each in lists for block in each}.values():
        if any(True for _ in block.parameters()) and not isinstance(block, nn.ModuleList):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.to(device)
