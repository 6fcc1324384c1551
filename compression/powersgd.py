"""`powersgd`: a matrix as the product of two thin ones.

A tensor of two or more dimensions is the matrix [dims[0], rest]; a vector of N values is
[R, ceil(N / R)] with R the smallest power of two whose square is at least N, padded with zeros.
If (rows + columns) * rank is not below the number of values, fp32 values are sent instead.

Payload::

    factors   payload of the codec `values` for P [rows, rank] then Q [columns, rank], row-major

or one fp32 for each value. M = P Q^T is summed as `rank` outer products in order, each an
fp32 multiplication and an fp32 addition, so it has the same bits everywhere.

The codec alone starts from a fixed Q and takes `iterations` steps of the power method. In
rounds the two phases are exchanged one after the other and Q stays warm
(`atoll.optim.reduction.lowrank`): P and Q are linear in the matrix, so they are averaged as dense
tensors are. The squared error is at least that of the best matrix of this rank: the sum of the
squares of the other singular values.

Source: PowerSGD, arXiv:1905.13727. Departures: the factors may travel in any elementwise codec;
vectors are folded into matrices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.base import (
    FLOAT_MAX,
    HEADER_BYTES,
    TINY,
    Codec,
    CodecError,
    Dims,
    peak,
    require_finite,
)
from atoll.compression.floats import Fp32
from atoll.compression.kernels.noise import MASK_64, mix
from atoll.compression.registry import register

# A spec may come from a stranger. At this rank the two factors of a 2,048 x 2,048 matrix are as
# large as its int8 codes.
MAX_RANK = 256


@register
@dataclass(frozen=True)
class PowerSGD(Codec):
    """rank * (rows + columns) values for a matrix; contractive."""

    name: ClassVar[str] = "powersgd"
    code: ClassVar[int] = 15
    by_tensor: ClassVar[bool] = True
    rank: int = 4
    iterations: int = 2
    values: Codec = field(default_factory=Fp32)

    def __post_init__(self) -> None:
        """Refuse ranks out of range, and factors in a codec that cannot carry them."""
        if not 1 <= self.rank <= MAX_RANK or not 1 <= self.iterations <= 16:
            raise CodecError(f"expected rank 1..{MAX_RANK} and iterations 1..16, got {self}")
        fits = self.values.elementwise and self.values.exact_size and not self.values.stateful
        if not fits or self.values.mode != "contractive":
            raise CodecError(f"expected a contractive elementwise codec, got {self.values.spec!r}")

    def _frame_key(self, dims: Dims) -> str:
        return str(dims)

    def _plain(self, dims: Dims) -> bool:
        rows, columns = matrix_shape(dims)
        return (rows + columns) * self.rank >= math.prod(dims)

    def _payload_bytes(self, dims: Dims) -> int:
        if self._plain(dims):
            return 4 * math.prod(dims)
        rows, columns = matrix_shape(dims)
        return self.values.wire_bytes((rows + columns) * self.rank) - HEADER_BYTES

    def _write(self, x_N: Tensor, dims: Dims, payload: Tensor) -> Tensor:
        largest = peak(x_N)
        if self._plain(dims):
            payload.view(torch.float32).copy_(x_N)
            return largest
        unit = largest + TINY  # no product of x / unit overflows; a matrix of zeros is no 0 / 0
        factors = torch.cat([part.reshape(-1) for part in self._factors(x_N / unit, dims, unit)])
        self.values._write(factors, (factors.numel(),), payload)
        return largest

    def _factors(self, x_N: Tensor, dims: Dims, unit: Tensor) -> tuple[Tensor, Tensor]:
        matrix = as_matrix(x_N, dims)
        q = orthonormal(start_factor(matrix.shape[1], self.rank, x_N.device))
        p = orthonormal(matrix @ q)
        unit = unit.clamp(max=FLOAT_MAX / (self.rank * matrix.shape[0]))  # no sum overflows
        for _ in range(self.iterations - 1):
            p = orthonormal(matrix @ orthonormal(matrix.T @ p))
        return p, (matrix.T @ p) * unit

    def _read(self, payload: Tensor, dims: Dims, out_N: Tensor) -> None:
        if self._plain(dims):
            require_finite(out_N.copy_(payload.view(torch.float32)), "values")
            return
        rows, columns = matrix_shape(dims)
        factors = torch.empty((rows + columns) * self.rank, device=payload.device)
        self.values._read(payload, (factors.numel(),), factors)
        p, q = factors[: rows * self.rank], factors[rows * self.rank :]
        product = outer_sum(p.view(rows, self.rank), q.view(columns, self.rank))
        out_N.copy_(product.view(-1)[: out_N.numel()])
        require_finite(out_N, "values")


def matrix_shape(dims: Dims) -> tuple[int, int]:
    """Return the rows and columns as which a tensor is approximated."""
    if len(dims) >= 2:
        return dims[0], math.prod(dims[1:])
    numel = math.prod(dims)
    rows = 1
    while rows * rows < numel:
        rows *= 2
    return rows, -(-numel // rows)


def as_matrix(x_N: Tensor, dims: Dims) -> Tensor:
    """Return the flat values as a matrix, padded with zeros."""
    rows, columns = matrix_shape(dims)
    return torch.nn.functional.pad(x_N, (0, rows * columns - x_N.numel())).view(rows, columns)


def outer_sum(p_RK: Tensor, q_CK: Tensor) -> Tensor:
    """Return P Q^T as a sum of outer products in order: multiply, then add, never fused."""
    total = p_RK[:, :1] * q_CK[:, 0]
    for k in range(1, p_RK.shape[1]):
        total.add_(p_RK[:, k : k + 1] * q_CK[:, k])
    return total


def orthonormal(x_RK: Tensor) -> Tensor:
    """Return orthonormal columns with the same span; not needed bit for bit by others."""
    basis: Tensor = torch.linalg.qr(x_RK).Q
    return basis


@cache
def start_factor(rows: int, rank: int, device: torch.device) -> Tensor:
    """Return a fixed [rows, rank] matrix of uniform hashes in [-1, 1)."""
    # Hashes, since a generator's numbers differ between devices; fp32 holds 24 bits exactly.
    words = [mix((rank << 32) + i) & MASK_64 for i in range(rows * rank)]
    numbers = torch.tensor([(word >> 40) / 2**23 - 1 for word in words], dtype=torch.float32)
    return numbers.view(rows, rank).to(device)
