"""`randk`: k of each 4,096 values, drawn from a seed; no indices on the wire.

Payload::

    seed     uint64
    values   payload of the codec `values` for all entries

Entry j of chunk c is the value at (a j + b) mod size of the chunk, with a (coprime to the size)
and b from splitmix64(seed + c). So the indices are distinct and each value is drawn with
probability k / size over seeds. Peers that encode with the same seed send the same
indices, and a reducer adds values.

Variants::

    randk                 unbiased: values scaled by size / k, in an exact or unbiased codec
    randk(scaled=False)   contractive: values as they are

Scaled values beyond the largest fp32 become that. Over seeds the expected squared error is
(1 - k / 4096) |x|^2 unscaled and (4096 / k - 1) |x|^2 scaled, for whole chunks and exact values.

Source: MASHA, arXiv:2110.03313 (random-k with shared randomness). Departure: chunks, and an
affine sequence instead of a generator's permutation, which differs between devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.base import FLOAT_MAX, Codec, CodecError, Dims, Mode, peak, spans
from atoll.compression.floats import Fp32
from atoll.compression.kernels.noise import MASK_64, fresh_seed, mix
from atoll.compression.registry import register
from atoll.compression.sparse import CHUNK, SparseCodec, entries, num_entries
from atoll.compression.topk import check_sparse

SEED_BYTES = 8  # one word of 64 bits


@register
@dataclass(frozen=True)
class RandK(SparseCodec):
    """k of 4,096 values, no indices; unbiased, or contractive with `scaled=False`."""

    name: ClassVar[str] = "randk"
    code: ClassVar[int] = 13
    k: int = 64
    scaled: bool = True
    seed: int = -1
    values: Codec = field(default_factory=Fp32)
    _draws: Iterator[int] = field(
        default_factory=itertools.count, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Refuse biased values in an unbiased codec, and what `check_sparse` refuses."""
        check_sparse(self.k, self.values)
        exact = self.values.name == "fp32" or self.values.mode == "unbiased"
        if self.scaled and not exact:
            raise CodecError(
                f"expected fp32 or unbiased values in a scaled randk, got {self.values.spec!r}; "
                "set scaled=False"
            )
        if not self.scaled and self.values.mode == "unbiased":
            raise CodecError("expected contractive values with scaled=False")

    @property
    def mode(self) -> Mode:
        """Return "unbiased" for the scaled variant."""
        return "unbiased" if self.scaled else "contractive"

    def _payload_bytes(self, dims: Dims) -> int:
        count = num_entries(math.prod(dims), self.k)
        return SEED_BYTES + self.values.wire_bytes(count) - 8

    def _write(self, x_N: Tensor, dims: Dims, payload: Tensor) -> Tensor:
        seed = fresh_seed() if self.seed < 0 else (mix(self.seed) + next(self._draws)) & MASK_64
        raw = torch.frombuffer(bytearray(seed.to_bytes(8, "little")), dtype=torch.uint8)
        payload[:SEED_BYTES].copy_(raw)
        values_K = x_N[draw(x_N.numel(), self.k, seed, x_N.device)]
        if self.scaled:
            values_K.mul_(self._gains(x_N.numel(), x_N.device)).clamp_(-FLOAT_MAX, FLOAT_MAX)
        witness = self.values._write(values_K, tuple(values_K.shape), payload[SEED_BYTES:])
        return peak(torch.stack([witness, *(peak(x_N[a:b]) for a, b in spans(x_N))]))

    def _entries(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        seed = int.from_bytes(payload[:SEED_BYTES].cpu().numpy().tobytes(), "little")
        indices_K = draw(numel, self.k, seed, payload.device)
        values_K = torch.empty(indices_K.numel(), dtype=torch.float32, device=payload.device)
        self.values._read(payload[SEED_BYTES:], tuple(values_K.shape), values_K)
        return indices_K, values_K

    def _gains(self, numel: int, device: torch.device) -> Tensor:
        whole, rest, rest_k = entries(numel, self.k)
        gains = torch.full((num_entries(numel, self.k),), CHUNK / self.k, device=device)
        if rest:
            gains[whole * self.k :] = rest / rest_k
        return gains


def draw(numel: int, k: int, seed: int, device: torch.device) -> Tensor:
    """Return the flat indices that `seed` draws, int64, k distinct ones for each chunk."""
    whole, rest, rest_k = entries(numel, k)
    words = [mix((seed + chunk) & MASK_64) for chunk in range(whole)]
    # Odd factors are coprime to 4,096, so that k <= 4096 indices are distinct. Offsets take other
    # bits of the hash.
    factors = _integers([(word | 1) & (CHUNK - 1) for word in words], device)
    offsets = _integers([word >> 12 & (CHUNK - 1) for word in words], device)
    steps = torch.arange(k, device=device)
    inside = (factors * steps + offsets).bitwise_and_(CHUNK - 1)
    starts = torch.arange(whole, device=device).mul_(CHUNK).unsqueeze(1)
    return torch.cat([(inside + starts).view(-1), _draw_rest(whole, rest, rest_k, seed, device)])


def _integers(words: list[int], device: torch.device) -> Tensor:
    return torch.tensor(words, dtype=torch.int64, device=device).unsqueeze(1)


def _draw_rest(chunk: int, size: int, k: int, seed: int, device: torch.device) -> Tensor:
    if size == 0:
        return torch.zeros(0, dtype=torch.int64, device=device)
    word = mix((seed + chunk) & MASK_64)
    factor = 1 + word % size
    while math.gcd(factor, size) != 1:
        factor += 1
    offset = (word >> 16) % size
    inside = (torch.arange(k, device=device) * factor + offset) % size
    return inside + chunk * CHUNK
