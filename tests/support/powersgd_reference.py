"""PowerSGD as PyTorch's DDP hook computes it, on plain lists of gradients.

A reference for tests and for comparisons, in the order of operations of
``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook``: the same bits as that hook
with one worker.  It needs no process group, and takes the gradients of several workers at once.

Source: PowerSGD, arXiv:1905.13727.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class PowerSGDReference:
    """Error feedback and warm start, as the hook's defaults, from the first step on."""

    def __init__(
        self, rank: int, draw_seed: Callable[[], int], *, min_compression_rate: float = 2.0
    ) -> None:
        """Start cold.

        Args:
            rank: of the factors, at most.
            draw_seed: the seed of the first Q; the hook draws it from numpy.
            min_compression_rate: matrices that would shrink by less are sent as they are.
        """
        self.rank = rank
        self.draw_seed = draw_seed
        self.min_compression_rate = min_compression_rate
        self.errors: list[list[Tensor]] = []
        self.qs: list[Tensor] = []

    def step(self, workers: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return what every worker ends up with, for its gradients of this step.

        Args:
            workers: for each worker its gradients, the same shapes and order for all.
        """
        inputs = [self._with_error(i, grads) for i, grads in enumerate(workers)]
        outputs = _one_after_another([tensor.shape for tensor in inputs[0]])
        compressed = [i for i in self._by_shape(inputs[0]) if self._shrinks(inputs[0][i])]
        for i in set(range(len(outputs))) - set(compressed):
            outputs[i] = _sum([grads[i] for grads in inputs]).div_(len(workers))
        self._reduce(compressed, inputs, outputs)
        self.errors = [[x - y for x, y in zip(xs, outputs, strict=True)] for xs in inputs]
        return outputs

    def _with_error(self, worker: int, grads: Sequence[Tensor]) -> list[Tensor]:
        carried = _one_after_another([grad.shape for grad in grads])
        for x, grad in zip(carried, grads, strict=True):
            x.copy_(grad)
        for x, error in zip(carried, self.errors[worker] if self.errors else [], strict=False):
            x.add_(error)
        return carried

    def _shrinks(self, tensor: Tensor) -> bool:
        rows, columns = _matrix(tensor).shape
        factors = (rows + columns) * min(rows, columns, self.rank)
        return factors * self.min_compression_rate < rows * columns

    def _by_shape(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return the order of the hook: grouped by the matrix's shape, first seen first."""
        groups: dict[torch.Size, list[int]] = {}
        for i, tensor in enumerate(tensors):
            groups.setdefault(_matrix(tensor).shape, []).append(i)
        return [i for group in groups.values() for i in group]

    def _reduce(self, order: list[int], inputs: list[list[Tensor]], outputs: list[Tensor]) -> None:
        matrices = [[_matrix(grads[i]).unsqueeze(0) for i in order] for grads in inputs]
        self._prepare(matrices[0])
        shapes = [
            torch.Size((1, m.shape[1], q.shape[2]))
            for m, q in zip(matrices[0], self.qs, strict=True)
        ]
        ps = _one_after_another(shapes)
        for j, i in enumerate(order):
            p, q = ps[j], self.qs[j]
            _sum_of_products([worker[j] for worker in matrices], q, p)
            orthogonalize_(p)
            _sum_of_products([worker[j].transpose(1, 2) for worker in matrices], p, q)
            q.div_(len(matrices))
            torch.bmm(p, q.transpose(1, 2), out=outputs[i].view(1, *_matrix(outputs[i]).shape))

    def _prepare(self, matrices: list[Tensor]) -> None:
        """Draw the first Qs, or make the last ones orthonormal again."""
        if not self.qs:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.draw_seed())
                ranks = [min(*matrix.shape[1:], self.rank) for matrix in matrices]
                self.qs = _one_after_another(
                    [torch.Size((1, m.shape[2], r)) for m, r in zip(matrices, ranks, strict=True)]
                )
                for q in self.qs:
                    orthogonalize_(q.copy_(torch.randn(q.shape)))
        else:
            for q in self.qs:
                orthogonalize_(q)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.view(tensor.shape[0], -1)


def _one_after_another(shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return tensors in one piece of memory, as the hook has them.

    Where a matrix begins decides how a product is added up on some processors.
    """
    sizes = [shape.numel() for shape in shapes]
    pieces = torch.split(torch.zeros(sum(sizes)), sizes)
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _sum_of_products(lefts: Sequence[Tensor], right: Tensor, out: Tensor) -> None:
    torch.bmm(lefts[0], right, out=out)
    for left in lefts[1:]:
        out.add_(torch.bmm(left, right))


def _sum(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total.add_(tensor)
    return total


def orthogonalize_(matrices: Tensor) -> Tensor:
    """Make the columns of [batch, rows, rank] orthonormal in place, as the hook does."""
    rank = matrices.shape[2]
    if rank > 2:
        triangle = torch.empty(matrices.shape[0], rank, rank)
        torch.linalg.qr(matrices, out=(matrices, triangle))
        return matrices
    for i in range(rank):
        column = matrices[:, :, i : i + 1]
        column /= torch.norm(column, dim=1, keepdim=True)
        if i + 1 < rank:
            rest = matrices[:, :, i + 1 :]
            rest -= torch.sum(column * rest, dim=1, keepdim=True) * column
    return matrices
