"""Small models and groups that the tests of the methods train."""

import io
from collections.abc import Callable

import torch
from torch import Tensor, nn

from atoll.optim.inprocess.group import Misses, WorkerGroup, nobody
from atoll.optim.inprocess.rounds import in_process
from atoll.optim.methods import Method, parse
from atoll.optim.methods.worker import Worker

WIDTH = 6
TOKENS = 48


def net(blocks: int = 2, width: int = WIDTH) -> nn.Module:
    """Linear blocks with a name like a transformer's, so that they can be cut in fragments."""
    torch.manual_seed(7)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks)]
    return nn.ModuleDict(
        {
            "first": nn.Linear(width, width),
            "blocks": nn.Sequential(*layers),
            "head": nn.Linear(width, 1),
        }
    )


def forward(model: nn.Module, x: Tensor) -> Tensor:
    return model["head"](model["blocks"](model["first"](x)))


def batch(seed: int, width: int = WIDTH) -> Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(seed))


def backward(model: nn.Module, seed: int) -> Tensor:
    """Gradients of one batch in place of the model's."""
    x = batch(seed, model["first"].in_features)
    loss = (forward(model, x) - x.sum(1, keepdim=True)).square().mean()
    model.zero_grad()
    loss.backward()
    return loss.detach()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def flat(model: nn.Module) -> Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def set_gradient(worker: Worker, grad_N: Tensor) -> None:
    """Put a vector in place of a worker's gradients."""
    pieces = worker.layout.split(grad_N)
    for param, piece in zip(worker.model.parameters(), pieces, strict=True):
        param.grad = piece.clone()


class Team:
    """Workers of one group, trained in lockstep; worker i sees batch 100 step + i."""

    def __init__(
        self,
        size: int,
        method: Method | str,
        inner_steps: int = 1,
        *,
        inner: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        make: Callable[[], nn.Module] = net,
        misses: Misses = nobody,
        present: int | None = None,
        **options: object,
    ) -> None:
        self.method = parse(method, **options) if isinstance(method, str) else method
        self.group: WorkerGroup = in_process(size, self.method, misses=misses)
        self._make, self._inner, self._inner_steps = make, inner, inner_steps
        self._worker_of: dict[int, Worker] = {}
        for index in range(size if present is None else present):
            self.join(index)

    def join(self, index: int | None = None) -> None:
        """Start a worker; the first that is not here by default."""
        index = len(self._worker_of) if index is None else index
        model, member = self._make(), self.group.member(index)
        worker = self.method.worker(
            model, self._inner(model), member, inner_steps=self._inner_steps
        )
        self._worker_of[index] = worker

    def leave(self, index: int) -> None:
        self.group.member(index).leave()
        del self._worker_of[index]

    @property
    def workers(self) -> list[Worker]:
        """Those that are here."""
        return [self._worker_of[index] for index in sorted(self._worker_of)]

    def run(self, steps: range) -> None:
        for step in steps:
            for index in sorted(self._worker_of):
                self.turn(index, step)

    def turn(self, index: int, step: int) -> None:
        worker = self._worker_of[index]
        loss = backward(worker.model, 100 * step + index)
        worker.step(tokens=TOKENS, loss=loss)

    def local(self, index: int = 0) -> Tensor:
        return flat(self._worker_of[index].model)

    def save(self) -> bytes:
        file = io.BytesIO()
        torch.save([worker.state_dict() for worker in self.workers], file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        states = torch.load(io.BytesIO(saved), weights_only=True)
        for worker, state in zip(self.workers, states, strict=True):
            worker.load_state_dict(state)

    def states(self) -> list[bytes]:
        return [self.group.state_of(index).root() for index in range(self.group.size)]
