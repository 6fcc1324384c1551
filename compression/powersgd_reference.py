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
        outputs = [torch.empty_like(tensor) for tensor in inputs[0]]
        compressed = [i for i in self._by_shape(inputs[0]) if self._shrinks(inputs[0][i])]
        for i in set(range(len(outputs))) - set(compressed):
            outputs[i] = _sum([grads[i] for grads in inputs]).div_(len(workers))
        self._reduce(compressed, inputs, outputs)
        self.errors = [[x - y for x, y in zip(xs, outputs, strict=True)] for xs in inputs]
        return outputs

    def _with_error(self, worker: int, grads: Sequence[Tensor]) -> list[Tensor]:
        if not self.errors:
            return [grad.clone() for grad in grads]
        return [grad + error for grad, error in zip(grads, self.errors[worker], strict=True)]

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
        for j, i in enumerate(order):
            q = self.qs[j]
            p = _sum([torch.bmm(worker[j], q) for worker in matrices])
            orthogonalize_(p)
            q = _sum([torch.bmm(worker[j].transpose(1, 2), p) for worker in matrices])
            self.qs[j] = q.div_(len(matrices))
            outputs[i] = torch.bmm(p, self.qs[j].transpose(1, 2)).view_as(outputs[i])

    def _prepare(self, matrices: list[Tensor]) -> None:
        """Draw the first Qs, or make the last ones orthonormal again."""
        if not self.qs:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.draw_seed())
                for matrix in matrices:
                    rank = min(matrix.shape[1], matrix.shape[2], self.rank)
                    self.qs.append(orthogonalize_(torch.randn(1, matrix.shape[2], rank)))
        else:
            for q in self.qs:
                orthogonalize_(q)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.view(tensor.shape[0], -1)


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
