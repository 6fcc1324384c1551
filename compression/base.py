"""What every codec is: a tensor in, a frame of bytes out, and back.

A codec is a frozen dataclass; its fields are its parameters, and its spec string
names it completely (``parse(codec.spec) == codec``).

Errors::

    ValueError
     └ CodecError        a frame, a tensor or a spec that must be refused

Wire format (little endian), the same for all codecs::

    offset  size  field
    0       1     codec number (``Codec.code``)
    1       1     format version of the codec (``Codec.version``)
    2       2     low half of CRC-32("spec|count"): which parameters, which shape
    4       4     checksum over bytes 0..3 and the payload
    8       ...   payload, laid out by the codec

The checksum of a payload of at most 4,096 bytes is its CRC-32.  A longer payload is
read as rows of 64 signed 64-bit words: the sums of the rows and of the columns
(modulo 2^64) go into the CRC-32, and so do the bytes after the last whole row.  It
runs at memory speed, and whatever changes one word, swaps words or moves rows
changes it.  A receiver MUST check the length against `Codec.wire_bytes` before
it allocates anything, and the checksum before it reads the payload.

A tensor with NaN or infinity has no encoding.  An empty tensor has a frame with an
empty payload.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

Shape = int | Sequence[int]
Mode = Literal["contractive", "unbiased"]
Device = torch.device | str
Frame = bytes | bytearray | memoryview

HEADER_BYTES = 8
TILE = 65_536  # values; 256 KiB of fp32 and its codes stay in a 1 MiB L2 cache
WORDS_PER_ROW = 64
ROW_BYTES = 8 * WORDS_PER_ROW
SMALL_BYTES = 4_096  # below this a plain CRC-32 is faster than two sums
FLOAT_MAX = torch.finfo(torch.float32).max
BF16_MAX = torch.finfo(torch.bfloat16).max


class CodecError(ValueError):
    """A frame, a tensor or a spec that a codec must refuse."""


def numel_of(shape: Shape) -> int:
    """Return how many values a tensor of `shape` holds."""
    return shape if isinstance(shape, int) else math.prod(shape)


def shape_of(shape: Shape) -> tuple[int, ...]:
    """Return `shape` as a tuple; a bare count is a vector."""
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(dim < 0 for dim in dims):
        raise CodecError(f"expected dimensions of at least 0, got {dims}")
    return dims


def _grid_sums(payload: Tensor, rows: int) -> bytearray:
    words = payload[: rows * ROW_BYTES].view(torch.int64).view(rows, WORDS_PER_ROW)
    out = bytearray(8 * (rows + WORDS_PER_ROW))
    sums = torch.frombuffer(out, dtype=torch.int64)
    torch.sum(words, 1, out=sums[:rows])
    torch.sum(words, 0, out=sums[rows:])
    return out


def checksum(buffer: bytearray) -> int:
    """Return the checksum of a frame of at least `HEADER_BYTES`; see the module docstring."""
    view = memoryview(buffer)
    crc = zlib.crc32(view[:4])
    payload = view[HEADER_BYTES:]
    if len(payload) <= SMALL_BYTES:
        return zlib.crc32(payload, crc)
    rows = len(payload) // ROW_BYTES
    sums = _grid_sums(torch.frombuffer(buffer, dtype=torch.uint8, offset=HEADER_BYTES), rows)
    return zlib.crc32(payload[rows * ROW_BYTES :], zlib.crc32(sums, crc))


def floats(x: Tensor) -> Tensor:
    """Return `x` as a contiguous fp32 vector on its own device."""
    if not x.is_floating_point():
        raise CodecError(f"expected a floating-point tensor, got {x.dtype}; convert it first")
    return x.detach().to(torch.float32).contiguous().view(-1)


def peak(x: Tensor) -> Tensor:
    """Return the largest magnitude of `x`, 0-d; NaN or infinite exactly if `x` has such a value."""
    return x.abs().amax() if x.numel() else x.new_zeros(())


def require_finite(x: Tensor, what: str, *, limit: float = FLOAT_MAX) -> None:
    """Refuse a decoded field that is NaN, infinite or beyond `limit` in magnitude."""
    largest = float(peak(x))
    if not largest <= limit:
        raise CodecError(f"expected {what} of at most {limit:.3g}, got {largest:.3g}")


def carve(payload: Tensor, *sections: tuple[torch.dtype, int]) -> list[Tensor]:
    """Cut a uint8 payload into typed views, one after the other: (dtype, count) each.

    The widest type must come first, so that every view is aligned.
    """
    views, offset = [], 0
    for dtype, count in sections:
        end = offset + count * dtype.itemsize
        views.append(payload[offset:end].view(dtype))
        offset = end
    return views


def spans(x_N: Tensor) -> list[tuple[int, int]]:
    """Return what to process at once, as (start, stop): tiles, or all on an accelerator.

    The layout of a frame does not depend on it: a tile on the wire is always `TILE` values.
    """
    numel = x_N.numel()
    step = TILE if x_N.device.type == "cpu" else max(numel, 1)
    return [(start, min(start + step, numel)) for start in range(0, numel, step)]


@dataclass(frozen=True)
class Codec(ABC):
    """Turns a tensor into a self-checking frame and back; thread safe.

    A subclass lays out the payload in `_payload_bytes`, `_write` and `_read`.
    """

    name: ClassVar[str]
    code: ClassVar[int]
    version: ClassVar[int] = 1
    stateful: ClassVar[bool] = False  # True: order of calls matters, so not for a run's updates
    exact_size: ClassVar[bool] = True  # False: `wire_bytes` is an upper bound

    @property
    def mode(self) -> Mode:
        """Return "contractive" (feedback allowed) or "unbiased" (feedback refused)."""
        return "contractive"

    @cached_property
    def spec(self) -> str:
        """Return the string that `parse` turns back into this codec."""
        values = ((f, getattr(self, f.name)) for f in fields(self))
        changed = [
            f"{f.name}={_spec_value(value)}"
            for f, value in values
            if f.default is MISSING or value != f.default
        ]
        return f"{self.name}({', '.join(changed)})" if changed else self.name

    def wire_bytes(self, shape: Shape) -> int:
        """Return the exact length of a frame for a tensor of `shape`, in bytes."""
        return HEADER_BYTES + (self._payload_bytes(shape_of(shape)) if numel_of(shape) else 0)

    def encode(self, x: Tensor) -> bytes:
        """Return the frame of `x`: any shape, any floating dtype, any device.

        Raises:
            CodecError: `x` holds NaN or infinity, or is not floating point.
        """
        shape = tuple(x.shape)
        buffer = bytearray(self.wire_bytes(shape))
        if len(buffer) > HEADER_BYTES:
            self._fill(floats(x), shape, buffer)
        return self._seal(buffer, shape)

    def decode(self, data: Frame, shape: Shape, *, device: Device = "cpu") -> Tensor:
        """Return the fp32 tensor of `shape` that the frame `data` stands for.

        The result has the same bits on every device.

        Raises:
            CodecError: wrong length, codec, version, parameters, count, checksum, or a
                payload with NaN, infinity or an index out of range.
        """
        dims = shape_of(shape)
        buffer = self._open(data, dims)
        if numel_of(dims) == 0:
            return torch.zeros(dims, device=device)
        payload = torch.frombuffer(buffer, dtype=torch.uint8, offset=HEADER_BYTES)
        return self._read(payload.to(device), dims).view(dims)

    @abstractmethod
    def _payload_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the payload's length for a non-empty tensor of `shape`."""

    @abstractmethod
    def _write(self, x_N: Tensor, shape: tuple[int, ...], payload: Tensor) -> Tensor:
        """Encode into `payload` (uint8, zeros, same device).

        Returns a 0-d fp32 witness: NaN or infinite exactly if `x_N` holds NaN or infinity.
        """

    @abstractmethod
    def _read(self, payload: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Decode `payload` on its device; refuse what no encoder writes and would do harm."""

    def _frame_key(self, shape: tuple[int, ...]) -> str:
        return str(math.prod(shape))

    def _head(self, shape: tuple[int, ...]) -> bytes:
        tag = zlib.crc32(f"{self.spec}|{self._frame_key(shape)}".encode()) & 0xFFFF
        return bytes((self.code, self.version)) + tag.to_bytes(2, "little")

    def _fill(self, x_N: Tensor, shape: tuple[int, ...], buffer: bytearray) -> None:
        target = torch.frombuffer(buffer, dtype=torch.uint8, offset=HEADER_BYTES)
        if x_N.device.type == "cpu":
            witness = float(self._write(x_N, shape, target))
        else:
            witness = self._fill_from_device(x_N, shape, target)
        if not math.isfinite(witness):
            raise CodecError("expected finite values, got NaN or infinity in the input")

    def _fill_from_device(self, x_N: Tensor, shape: tuple[int, ...], target: Tensor) -> float:
        """Encode on the accelerator; the payload and its witness come over in one copy."""
        padded = -(-target.numel() // 8) * 8
        staging = torch.zeros(padded + 4, dtype=torch.uint8, device=x_N.device)
        witness = self._write(x_N, shape, staging[: target.numel()])
        staging[padded:].view(torch.float32).copy_(witness)
        host = staging.cpu()
        target.copy_(host[: target.numel()])
        return float(host[padded:].view(torch.float32))

    def _seal(self, buffer: bytearray, shape: tuple[int, ...]) -> bytes:
        buffer[:4] = self._head(shape)
        buffer[4:HEADER_BYTES] = checksum(buffer).to_bytes(4, "little")
        return bytes(buffer)

    def _check_length(self, length: int, shape: tuple[int, ...]) -> None:
        expected = self.wire_bytes(shape)
        if length != expected:
            raise CodecError(f"expected {expected} bytes of {self.spec} for {shape}, got {length}")

    def _open(self, data: Frame, shape: tuple[int, ...]) -> bytearray:
        """Check everything about a frame but its payload's meaning; return a private copy."""
        self._check_length(len(data), shape)
        head = self._head(shape)
        got = bytes(data[:4])
        if got != head:
            raise CodecError(self._wrong_head(got, shape))
        buffer = bytearray(data)
        if int.from_bytes(buffer[4:HEADER_BYTES], "little") != checksum(buffer):
            raise CodecError(f"expected an intact {self.spec} frame, got a wrong checksum")
        return buffer

    def _wrong_head(self, got: bytes, shape: tuple[int, ...]) -> str:
        if got[0] != self.code:
            return f"expected a frame of codec number {self.code} ({self.name}), got {got[0]}"
        if got[1] != self.version:
            return f"expected version {self.version} of {self.name}, got {got[1]}; update the older"
        return f"expected a frame of {self.spec} for {shape}, got other parameters or another count"


def _spec_value(value: object) -> str:
    if isinstance(value, Codec):
        return value.spec
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
