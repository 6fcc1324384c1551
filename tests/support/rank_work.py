"""What tests let the ranks of a peer do; a function here is named to another process."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from atoll.optim.state.dtensors import PlacementError
from atoll.optim.state.layout import Layout


def model_of(width: int) -> nn.Sequential:
    """Four layers, each a block of its own for methods with fragments."""
    torch.manual_seed(7)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Sequential(nn.Linear(width, 1)))


def backward(model: nn.Module, width: int, seed: int, parts: int = 1) -> torch.Tensor:
    """Add the gradients of one batch, divided by the number of batches; return the loss."""
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(seed))
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean() / parts
    loss.backward()
    return loss.detach()


def sharded(width: int, mesh: object) -> nn.Module:
    """The toy model, cut over ranks block by block, as FSDP2 is meant to be used."""
    model = model_of(width)
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def cut_by_rows_and_columns(width: int, mesh: object) -> nn.Module:
    """The toy model with each matrix cut in both dimensions, as tensor parallelism with FSDP."""
    model = model_of(width)
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            places = [Shard(0), Shard(1) if param.dim() == 2 else Shard(0)]
            placed = distribute_tensor(param.detach(), mesh, places)
            module.register_parameter(name, nn.Parameter(placed))
    return model


def layout_of_cut_parameters() -> None:
    """Compare all that a layout does with a model whose parameters are cut over four ranks."""
    width, rank = 7, distributed.get_rank()  # 7: shards of unequal length
    flat, hybrid = (
        init_device_mesh("cpu", shape, mesh_dim_names=names)
        for shape, names in [((4,), ("shard",)), ((2, 2), ("replicate", "shard"))]
    )
    plain = model_of(width)
    layout = Layout.of(plain)
    first_N = layout.flatten(plain)
    backward(plain, width, seed=0)
    grad_N = layout.gradient(plain)
    spans = ((3, 20), (40 + rank, 150 - 10 * rank))  # cuts parameters, at other places on each rank
    expected = torch.cat([first_N[start:stop] for start, stop in spans])
    new_N = torch.randn(layout.numel, generator=torch.Generator().manual_seed(1))
    for model in (
        sharded(width, flat),
        sharded(width, hybrid),
        cut_by_rows_and_columns(width, hybrid),
    ):
        assert isinstance(next(model.parameters()), DTensor)
        assert Layout.of(model) == layout
        assert torch.equal(layout.flatten(model), first_N)
        assert torch.equal(layout.flatten(model, spans), expected)
        assert layout.flatten(model, ()).numel() == 0
        assert layout.held(model, expected, spans) is expected
        layout.load_(model, new_N)
        assert torch.equal(layout.flatten(model), new_N)
        local = next(model.parameters()).to_local()
        assert local.numel() < width * width, "each rank holds a shard still"

    model = sharded(width, flat)
    backward(model, width, seed=0)  # the same batch on all ranks: the mean of equal gradients
    assert torch.allclose(layout.gradient(model), grad_N, atol=1e-6)
    some = layout.gradient(model, spans)
    assert torch.equal(some, torch.cat([layout.gradient(model)[a:b] for a, b in spans]))


def gathered_root() -> None:
    """Read and write a model whose root FSDP2 keeps gathered after a forward pass alone."""
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=False)
    layout = Layout.of(model)
    with torch.no_grad():
        model(torch.zeros(1, 7))
    layout.load_(model, torch.arange(float(layout.numel)))
    assert torch.equal(layout.flatten(model), torch.arange(float(layout.numel)))


def partial_sum() -> None:
    """Refuse a parameter of which each rank holds an addend."""
    model = nn.Linear(3, 3)
    mesh = init_device_mesh("cpu", (2,))
    addend = DTensor.from_local(torch.ones(3, 3), mesh, [Partial()])
    model.register_parameter("weight", nn.Parameter(addend))
    layout = Layout.of(model)
    with pytest.raises(PlacementError, match="Shard or Replicate"):
        layout.flatten(model)
    with pytest.raises(PlacementError, match="Shard or Replicate"):
        layout.load_(model, torch.zeros(layout.numel))


def two_ranks() -> None:
    gathered_root()
    partial_sum()
