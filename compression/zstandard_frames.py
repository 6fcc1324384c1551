"""`zstd`: another codec's payload, deflated if that makes it smaller.

Payload::

    0      1   0: as it is; 1: one zstd frame that states its content size
    1      ... the inner codec's payload, or the zstd frame

Lossless: the error is that of the inner codec. The length varies; `wire_bytes` is an upper bound.
A decoder MUST refuse a zstd frame whose stated content size is not the inner payload's, before it
inflates it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
import zstandard
from torch import Tensor

from atoll.compression.base import HEADER_BYTES, Codec, CodecError, Dims, Mode
from atoll.compression.blocks import Int8
from atoll.compression.checksum import Checksum
from atoll.compression.registry import register

MAX_WINDOW_BYTES = 8 << 20  # what any level below 20 uses; bounds a hostile frame's memory


@register
@dataclass(frozen=True)
class Zstd(Codec):
    """Another codec and lossless compression; the mode of the other."""

    name: ClassVar[str] = "zstd"
    code: ClassVar[int] = 17
    exact_size: ClassVar[bool] = False
    codec: Codec = field(default_factory=Int8)
    level: int = 3

    def __post_init__(self) -> None:
        """Refuse levels beyond zstd's ordinary ones, and codecs that vary themselves."""
        # From level 20 on a window may exceed `MAX_WINDOW_BYTES`, which decoders refuse.
        if not 1 <= self.level <= 19 or not self.codec.exact_size or self.codec.stateful:
            raise CodecError(f"expected level 1..19 around a codec of exact size, got {self.spec}")

    @property
    def mode(self) -> Mode:
        """Return the mode of the inner codec."""
        return self.codec.mode

    @property
    def elementwise(self) -> bool:
        """Return True if the inner codec is elementwise."""
        return self.codec.elementwise

    def for_layer(self, layer: str) -> Codec:
        """Return the inner codec of the layer, deflated."""
        return replace(self, codec=self.codec.for_layer(layer))

    def _frame_key(self, dims: Dims) -> str:
        return self.codec._frame_key(dims)

    def _inner_bytes(self, dims: Dims) -> int:
        return self.codec.wire_bytes(dims) - HEADER_BYTES

    def _payload_bytes(self, dims: Dims) -> int:
        return 1 + self._inner_bytes(dims)

    def _check_length(self, length: int, dims: Dims) -> None:
        bound = self.wire_bytes(dims)
        least = HEADER_BYTES + (2 if math.prod(dims) else 0)
        if not least <= length <= bound:
            raise CodecError(f"expected {least} to {bound} bytes of {self.spec}, got {length}")

    def _fill(self, x_N: Tensor, dims: Dims, payload: Tensor, seal: Checksum | None = None) -> int:
        inner = bytearray(self._inner_bytes(dims))
        self.codec._fill(x_N, dims, torch.frombuffer(inner, dtype=torch.uint8))
        small = zstandard.ZstdCompressor(level=self.level).compress(inner)
        body = b"\1" + small if len(small) < len(inner) else b"\0" + bytes(inner)
        payload[: len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        return len(body)

    def _write(self, x_N: Tensor, dims: Dims, payload: Tensor) -> Tensor:
        raise NotImplementedError("zstd frames are filled on the host")

    def _read(self, payload: Tensor, dims: Dims, out_N: Tensor) -> None:
        flag, body = int(payload[0]), payload[1:].cpu().numpy().tobytes()
        size = self._inner_bytes(dims)
        if flag == 1:
            body = inflate(body, size)
        if flag > 1 or len(body) != size:
            raise CodecError(f"expected flag 0 or 1 and {size} bytes, got {flag} and {len(body)}")
        inner = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        self.codec._read(inner.to(out_N.device), dims, out_N)


def inflate(body: bytes | memoryview, size: int) -> bytes:
    """Inflate one zstd frame of `size` bytes.

    Raises:
        CodecError: it is no such frame, which is noticed before memory is taken.
    """
    try:
        stated = zstandard.get_frame_parameters(body).content_size
        if stated != size:
            raise CodecError(f"expected a zstd frame of {size} bytes, got one of {stated}")
        inflater = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        return inflater.decompress(body, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"not a zstd frame: {error}") from error
