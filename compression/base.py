"""Interface of codecs: a tensor to a frame of bytes, and back.

A codec is a frozen dataclass; its fields are its parameters, and its spec string
names it completely (`parse(codec.spec) == codec`).

Errors::

    ValueError
     └ CodecError        a frame, a tensor or a spec that must be refused

Wire format (little endian), the same for all codecs::

    offset  size  field
    0       1     codec number (`Codec.code`)
    1       1     format version of the codec (`Codec.version`)
    2       2     low half of CRC-32("spec|count"): which parameters, which shape
    4       4     checksum over bytes 0..3 and the payload
    8       ...   payload, laid out by the codec

The checksum is the CRC-32 of bytes 0..3, then for each whole segment of 32 KiB of the payload,
read as 64 rows of 64 signed 64-bit words, the 64 sums of its rows and the 64 sums of its columns
(64 bits, carry dropped), then the rest of the payload as it is. Sums are twice as fast as
a CRC. A change of one word changes the sums of its row and its column; only four words or more, in
a rectangle and by equal amounts, could keep all sums.

A receiver MUST check the length against `Codec.wire_bytes` before it allocates
anything, and the checksum before it reads the payload.

A tensor with NaN or infinity has no encoding. An empty tensor has a frame with an
empty payload.
"""

from __future__ import annotations

import itertools
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from atoll.compression import staging
from atoll.compression.checksum import Checksum, of_rows
from atoll.compression.scratch import TILE, frame_buffer, scratch

Shape = int | Sequence[int]
Mode = Literal["contractive", "unbiased"]
Device = torch.device | str
Frame = bytes | bytearray | memoryview
Dims = tuple[int, ...]

CPU = torch.device("cpu")
HEADER_BYTES = 8  # a multiple of 8, so that a payload is aligned if its frame is
FLOAT_MAX = torch.finfo(torch.float32).max
BF16_MAX = torch.finfo(torch.bfloat16).max
TINY = torch.tensor(1e-37)  # 1 / TINY is finite; far below any gradient that matters


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


def floats(x: Tensor) -> Tensor:
    """Return `x` as a contiguous fp32 vector on its own device."""
    if not x.is_floating_point():
        raise CodecError(f"expected a floating-point tensor, got {x.dtype}; convert it first")
    x = x.detach()
    if x.dtype != torch.float32 or not x.is_contiguous():
        x = x.to(torch.float32).contiguous()
    return x.view(-1)


def peak(x_N: Tensor) -> Tensor:
    """Return the largest magnitude, 0-d; NaN or infinite exactly if `x_N` has such a value."""
    return torch.abs(x_N, out=scratch("peak", x_N)).amax()


def refuse_infinite(witness: float) -> None:
    """Refuse an input whose witness is NaN or infinite."""
    if not math.isfinite(witness):
        raise CodecError("expected finite values, got NaN or infinity in the input")


def require_finite(x: Tensor, what: str, *, limit: float = FLOAT_MAX) -> None:
    """Refuse a decoded field that is NaN, infinite or beyond `limit` in magnitude."""
    largest = float(peak(x).cpu())
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


def part(x: Tensor, start: int, stop: int, *, dim: int = 0) -> Tensor:
    """Return a slice of `x`; `x` itself if the slice is all of it, which saves a call."""
    if start == 0 and stop == x.shape[dim]:
        return x
    return x.narrow(dim, start, stop - start)


def step_sizes(x_N: Tensor, tiles: int = 2) -> list[int]:
    """Return how many values to process at once, one step after the other.

    All but the last are multiples of `TILE`: on a CPU at most `tiles` tiles, on an accelerator all
    whole tiles; the last is what is left, less than a tile.
    """
    whole, rest = divmod(x_N.numel(), TILE)
    tiles = tiles if x_N.device.type == "cpu" else max(whole, 1)
    counts = [tiles] * (whole // tiles) + [whole % tiles]
    return [size for size in (*(count * TILE for count in counts), rest) if size]


def spans(x_N: Tensor, tiles: int = 2) -> list[tuple[int, int]]:
    """Return the ranges (start, stop) to process at once, one after the other."""
    ends = list(itertools.accumulate(step_sizes(x_N, tiles), initial=0))
    return list(itertools.pairwise(ends))


def _aligned(data: Frame) -> Tensor:
    """Return `data` as a uint8 tensor that starts at a multiple of 8; a copy only if needed."""
    # Payloads are read as words of 64 bits. torch takes read-only memory for writable, so that
    # `bytes` are copied.
    if not memoryview(data).readonly:
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        if tensor.data_ptr() % 8 == 0:
            return tensor
    buffer = frame_buffer(len(data))
    with memoryview(buffer) as view:
        view[: len(data)] = data
    return torch.frombuffer(buffer, dtype=torch.uint8)[: len(data)]


def _result(dims: Dims, device: Device, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.empty(math.prod(dims), dtype=torch.float32, device=device)
    if tuple(out.shape) != dims or out.dtype != torch.float32 or not out.is_contiguous():
        raise CodecError(f"expected out to be contiguous fp32 of {dims}, got {out.shape}")
    return out.view(-1)


@dataclass(frozen=True)
class Codec(ABC):
    """Turns a tensor into a self-checking frame and back; thread safe.

    A subclass lays out the payload in `_payload_bytes`, `_write` and `_read`.
    """

    name: ClassVar[str]
    code: ClassVar[int]
    version: ClassVar[int] = 1
    stateful: ClassVar[bool] = False  # True: order of calls matters, so not for a run's updates
    by_tensor: ClassVar[bool] = False  # True: a tensor's shape or layer matters
    any_shapes: ClassVar[bool] = False  # True: `encode_pieces` does more than one after the other
    exact_size: ClassVar[bool] = True  # False: `wire_bytes` is an upper bound

    @property
    def mode(self) -> Mode:
        """Return "contractive" (feedback allowed) or "unbiased" (feedback refused)."""
        return "contractive"

    @property
    def elementwise(self) -> bool:
        """Return True if values alone matter: then a model may be cut anywhere to encode it."""
        return not self.by_tensor

    def for_layer(self, layer: str) -> Codec:
        """Return the codec of the tensors of one layer, or of its pieces."""
        return self

    @cached_property
    def spec(self) -> str:
        """Return the string that `parse` turns back into this codec."""
        changed = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.init and getattr(self, f.name) != _default(f)
        }
        carried = changed.pop("values", None)
        items = ", ".join(_spec_item(key, value) for key, value in changed.items())
        suffix = f"+{carried.spec}" if isinstance(carried, Codec) else ""
        return (f"{self.name}({items})" if items else self.name) + suffix

    def wire_bytes(self, shape: Shape) -> int:
        """Return the exact length of a frame for a tensor of `shape`, in bytes."""
        return HEADER_BYTES + (self._payload_bytes(shape_of(shape)) if numel_of(shape) else 0)

    def encode(self, x: Tensor) -> bytes:
        """Return the frame of `x`: any shape, any floating dtype, any device.

        Raises:
            CodecError: `x` holds NaN or infinity, or is not floating point.
        """
        buffer = frame_buffer(self.wire_bytes(x.shape))
        with memoryview(buffer) as view:
            return bytes(view[: self.encode_into(x, buffer)])

    def encode_into(self, x: Tensor, buffer: bytearray) -> int:
        """Write the frame of `x` to the start of `buffer`; return its length in bytes.

        For large tensors: a buffer that is used again costs no page faults.

        Raises:
            CodecError: as `encode`, or `buffer` is shorter than `wire_bytes`.
        """
        dims = tuple(x.shape)
        length = self.wire_bytes(dims)
        if len(buffer) < length:
            raise CodecError(f"expected a buffer of {length} bytes, got {len(buffer)}")
        payload = torch.frombuffer(buffer, dtype=torch.uint8)[HEADER_BYTES:length]
        seal = Checksum(payload)
        if payload.numel():
            used = self._fill(floats(x), dims, payload, seal)
            if used < payload.numel():
                seal, length = Checksum(payload[:used]), HEADER_BYTES + used
        buffer[:HEADER_BYTES] = self._sealed(dims, seal)
        return length

    def decode(
        self, data: Frame, shape: Shape, *, device: Device = "cpu", out: Tensor | None = None
    ) -> Tensor:
        """Return the fp32 tensor of `shape` that the frame `data` stands for.

        The result has the same bits on every device.

        Args:
            data: one frame; nothing before or after it.
            shape: the shape that was encoded.
            device: the device that decodes and holds the result.
            out: a contiguous fp32 tensor of `shape` to write to, instead of a new one.

        Raises:
            CodecError: wrong length, codec, version, parameters, count, checksum, or a
                payload with NaN, infinity or an index out of range.
        """
        dims = shape_of(shape)
        payload = self._open(data, dims)
        out_N = _result(dims, device, out)
        if out_N.numel():
            self._read(staging.on_device(out_N.device, payload), dims, out_N)
        return out_N.view(dims)

    def encode_rows(self, x_RN: Tensor) -> list[bytes]:
        """Return a frame for each row of `x_RN`, as `encode` does; for many short frames.

        Raises:
            CodecError: as `encode`.
        """
        return [self.encode(x_N) for x_N in x_RN.unbind(0)]

    def decode_rows(self, frames: Sequence[Frame], out_RN: Tensor) -> None:
        """Decode a frame to each row of `out_RN` (fp32, contiguous), as `decode` does.

        Raises:
            CodecError: as `decode`.
        """
        for frame, out_N in zip(frames, out_RN.unbind(0), strict=True):
            self.decode(frame, out_N.shape, device=out_N.device, out=out_N)

    def encode_and_decode_rows(self, x_RN: Tensor, out_RN: Tensor) -> list[bytes]:
        """Return a frame for each row, and write what they decode to; both on one device.

        Raises:
            CodecError: as `encode`.
        """
        frames = self.encode_rows(x_RN)
        self.decode_rows(frames, out_RN)
        return frames

    def encode_pieces(self, x_N: Tensor, shapes: Sequence[Dims]) -> list[bytes]:
        """Return a frame for each of consecutive pieces of `x_N`, as `encode` does.

        Raises:
            CodecError: as `encode`.
        """
        parts = torch.split(x_N, [math.prod(dims) for dims in shapes])
        return [self.encode(part.view(dims)) for part, dims in zip(parts, shapes, strict=True)]

    def decode_pieces(self, frames: Sequence[Frame], shapes: Sequence[Dims], out_N: Tensor) -> None:
        """Decode frames to consecutive pieces of `out_N` (fp32, contiguous), as `decode` does.

        Raises:
            CodecError: as `decode`.
        """
        parts = torch.split(out_N, [math.prod(dims) for dims in shapes])
        for frame, part, dims in zip(frames, parts, shapes, strict=True):
            self.decode(frame, dims, device=part.device, out=part.view(dims))

    @abstractmethod
    def _payload_bytes(self, dims: Dims) -> int:
        """Return the payload's length for a non-empty tensor."""

    @abstractmethod
    def _write(self, x_N: Tensor, dims: Dims, payload: Tensor) -> Tensor:
        """Write every byte of `payload` (uint8, same device).

        Returns a 0-d fp32 witness: NaN or infinite exactly if `x_N` holds NaN or infinity.
        """

    def _write_sealed(
        self, x_N: Tensor, dims: Dims, payload: Tensor, seal: Checksum | None
    ) -> Tensor:
        """Write a payload on the CPU; report to `seal`, if given, each part that is final."""
        return self._write(x_N, dims, payload)

    @abstractmethod
    def _read(self, payload: Tensor, dims: Dims, out_N: Tensor) -> None:
        """Decode to `out_N`, same device; refuse harmful content that no encoder writes."""

    def _write_rows(self, x_RN: Tensor, payload_RB: Tensor) -> Tensor:
        """Write one payload per row; rows of `payload_RB` are aligned to 8."""
        dims = (x_RN.shape[1],)
        pairs = zip(x_RN.unbind(0), payload_RB.unbind(0), strict=True)
        return peak(torch.stack([self._write(x_N, dims, payload) for x_N, payload in pairs]))

    def _read_rows(self, payload_RB: Tensor, out_RN: Tensor) -> None:
        """Read one payload per row."""
        for payload, out_N in zip(payload_RB.unbind(0), out_RN.unbind(0), strict=True):
            self._read(payload, tuple(out_N.shape), out_N)

    def _frame_key(self, dims: Dims) -> str:
        return str(math.prod(dims))

    def _head(self, dims: Dims) -> bytes:
        tag = zlib.crc32(f"{self.spec}|{self._frame_key(dims)}".encode()) & 0xFFFF
        return bytes((self.code, self.version)) + tag.to_bytes(2, "little")

    def _header(self, dims: Dims, frame: Frame, length: int) -> bytes:
        return self._sealed(dims, Checksum(_aligned(frame)[HEADER_BYTES:length]))

    def _sealed(self, dims: Dims, seal: Checksum) -> bytes:
        head = self._head(dims)
        return head + seal.value(head).to_bytes(4, "little")

    def _fill(self, x_N: Tensor, dims: Dims, payload: Tensor, seal: Checksum | None = None) -> int:
        """Write `payload`, on the CPU, from `x_N` on any device; return the length used."""
        if x_N.device.type == "cpu":
            witness = float(self._write_sealed(x_N, dims, payload, seal))
        else:
            witness = self._fill_from_device(x_N, dims, payload)
        refuse_infinite(witness)
        return payload.numel()

    def _fill_from_device(self, x_N: Tensor, dims: Dims, payload: Tensor) -> float:
        """Encode on the accelerator; the payload and its witness come over together."""
        return self._fetch(self._written_on_device(x_N, dims, payload.numel()), payload)

    def _written_on_device(self, x_N: Tensor, dims: Dims, num_bytes: int) -> Tensor:
        """Return a payload of so many bytes on the device of `x_N`, with its witness behind it."""
        padded = -(-num_bytes // 8) * 8  # the witness must be aligned to be viewed
        written = torch.empty(padded + 8, dtype=torch.uint8, device=x_N.device)
        witness = self._write(x_N, dims, written[:num_bytes])
        written[padded : padded + 4].view(torch.float32).copy_(witness)
        return written

    def _fetch(self, written: Tensor, payload: Tensor) -> float:
        """Copy a payload from the device, and return its witness."""
        tail = torch.empty(8, dtype=torch.uint8)
        staging.to_host([(written[: payload.numel()], payload), (written[-8:], tail)])
        return float(tail[:4].view(torch.float32))

    def _check_length(self, length: int, dims: Dims) -> None:
        expected = self.wire_bytes(dims)
        if length != expected:
            raise CodecError(f"expected {expected} bytes of {self.spec} for {dims}, got {length}")

    def _open(self, data: Frame, dims: Dims) -> Tensor:
        """Check all of a frame but its payload's meaning; return the payload (uint8, CPU)."""
        self._check_length(len(data), dims)
        payload = _aligned(data)[HEADER_BYTES:]
        self._check_header(bytes(data[:HEADER_BYTES]), self._sealed(dims, Checksum(payload)), dims)
        return payload

    def _check_header(self, got: bytes, expected: bytes, dims: Dims) -> None:
        if got[:4] != expected[:4]:
            raise CodecError(self._wrong_head(got, dims))
        if got != expected:
            raise CodecError(f"expected an intact {self.spec} frame, got a wrong checksum")

    def _seal_rows(self, frames_RB: Tensor, dims: Dims) -> list[bytes]:
        """Return the frames whose payloads are written; rows of a multiple of 8 bytes, CPU."""
        self._put_heads(frames_RB, dims)
        return [row.tobytes() for row in frames_RB.numpy()]

    def _put_heads(self, frames_RB: Tensor, dims: Dims) -> None:
        """Complete the frames whose payloads are written; rows of a multiple of 8 bytes, CPU."""
        heads = self._heads_of_rows(frames_RB[:, HEADER_BYTES:], dims)
        frames_RB.numpy()[:, :HEADER_BYTES] = heads

    def _open_rows(self, frames: Sequence[Frame], dims: Dims) -> Tensor:
        """Check frames as `_open` does; return their payloads, a row each."""
        for length in {len(frame) for frame in frames}:
            self._check_length(length, dims)
        together = torch.frombuffer(bytearray().join(frames), dtype=torch.uint8)
        frames_RB = together.view(len(frames), -1)
        payload_RB, heads = frames_RB[:, HEADER_BYTES:], frames_RB[:, :HEADER_BYTES].numpy()
        expected = self._heads_of_rows(payload_RB, dims)
        for row in np.flatnonzero((heads != expected).any(1)):
            self._check_header(heads[row].tobytes(), expected[row].tobytes(), dims)
        return payload_RB

    def _heads_of_rows(self, payload_RB: Tensor, dims: Dims) -> np.ndarray:
        """Return the header of each payload."""
        head, heads = self._head(dims), np.empty((len(payload_RB), HEADER_BYTES), np.uint8)
        heads[:, :4] = np.frombuffer(head, np.uint8)
        heads[:, 4:].view("<u4")[:, 0] = of_rows(payload_RB, head)
        return heads

    def _wrong_head(self, got: bytes, dims: Dims) -> str:
        if got[0] != self.code:
            return f"expected a frame of codec number {self.code} ({self.name}), got {got[0]}"
        if got[1] != self.version:
            return f"expected version {self.version} of {self.name}, got {got[1]}; update the older"
        return f"expected a frame of {self.spec} for {dims}, got other parameters or another count"


def _spec_item(key: str, value: object) -> str:
    if isinstance(value, Codec):
        return value.spec
    # The short form only if it parses to the same float: the spec names a codec completely.
    short = f"{value:g}" if isinstance(value, float) else ""
    return f"{key}={short if short and float(short) == value else value}"


def _default(parameter: Field[Any]) -> object:
    if parameter.default_factory is not MISSING:
        return parameter.default_factory()
    return parameter.default
