"""Activations and their gradients on the wire: a matrix to a frame of bytes, and back.

A row is what a model computes for one token. Rows are encoded one by one, so that a token with
large values costs no other its precision.

Errors::

    ValueError
     └ CodecError            a spec, a shape, a type or a frame that must be refused
        └ NotFiniteError     an input with NaN or infinity: a fault of this side, not of a frame

Frame (little endian) of R rows, each D wide::

    scales   bf16, one for each row; `fp32` and `bf16` have none
    codes    the codes of row 0, then those of row 1, ...

    spec                    codes of a row                                   bytes of a row
    fp32                    D fp32                                           4 D
    bf16                    D bf16, rounded to nearest even                  2 D
    int8                    D int8; value = code * scale                     2 + D
    int4                    D codes of 4 bits; value = (16 code) * scale     2 + 8 ceil(D / 16)
    int4(rounding=random)   the same
    subspace(k=N)           N int8, coordinates in an orthonormal basis      2 + N

Codes of 4 bits are two's complements, each row packed by itself as
`atoll.compression.kernels.planes` says. A frame has no header and no checksum: the message that
carries it MUST name codec and shape and protect the bytes. A receiver knows the exact length from
the shape that it expects. Encoders of two machines may differ in a last bit; a frame of all codecs
but `subspace` decodes to the same bits everywhere.

Errors are at most 1 / 252 of the largest magnitude of the row with 8 bits, and 1 / 13.8 with 4
(below 1e-34 they may be larger). Rounded at random, 4 bits are off by at most 1 / 6.9, but right
on average over seeds, so that gradients do not drift; the receiver needs no seed. Scales have 16
bits, since codes make up for their rounding: 32 would take 0.8% off the error of `int8` and add
1.5% to its bytes at a width of 128.

`subspace` makes x U U^T of x. U has k orthonormal columns that follow from a seed by integer
arithmetic (`atoll.compression.kernels.hadamard`). That map is its own transpose: gradients that
return by the same codec are those of the projected forward pass. The loss in 8 bits is one of
coordinates.

Sources: SWARM, arXiv:2301.11913 (activations and gradients in 8 bits; here linear, a scale for
each row); QSGD, arXiv:1610.02132 (rounding at random); Protocol Models, arXiv:2506.01260 (a
subspace for activations and gradients that all stages know; departures: it is seeded and
frozen, weights are not confined to it, and coordinates travel in 8 bits).
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from atoll.compression.base import (
    BF16_MAX,
    FLOAT_MAX,
    CodecError,
    Device,
    Frame,
    carve,
    require_finite,
)
from atoll.compression.blocks import absmax_scales, block_peaks, steps_of
from atoll.compression.floats import require_all_finite
from atoll.compression.int4 import ZERO
from atoll.compression.kernels.hadamard import seeded_basis
from atoll.compression.kernels.noise import MARGIN, MASK_64, add_noise_, mix
from atoll.compression.kernels.planes import EIGHTS, pack_, plane_bytes, unpack
from atoll.compression.scratch import MAX_TILES, TILE, room, scratch

MAX_WIDTH = TILE  # what the kernels take as one block; wide models have a quarter of it
MAX_DIRECTIONS = 4_096  # a spec may come from a stranger: the basis then fills a GiB at most
SCALE_BYTES = 2
VALUES_AT_ONCE = MAX_TILES * TILE  # what scratch memory keeps
VALUES_ON_DEVICE = 4 * VALUES_AT_ONCE  # few launches, and 16 MiB for each intermediate result


class NotFiniteError(CodecError):
    """An input holds NaN or infinity."""


@dataclass(frozen=True)
class ActivationCodec(ABC):
    """Turns a matrix of activations, or of their gradients, into a frame and back; thread safe.

    A subclass lays out the codes of a row in `_code_bytes`, `_write` and `_read`.
    """

    name: ClassVar[str]
    scaled: ClassVar[bool] = True
    # A power of two. No value exceeds it times its scale, so that all decoded values are finite.
    code_limit: ClassVar[float] = 128.0

    @property
    def spec(self) -> str:
        """Return the string that `parse_activations` turns back into this codec."""
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        items = ", ".join(f"{f.name}={getattr(self, f.name)}" for f in changed)
        return f"{self.name}({items})" if items else self.name

    def frame_bytes(self, rows: int, width: int) -> int:
        """Return the exact length of a frame, in bytes.

        Raises:
            CodecError: no row, a width out of range, or one that the codec cannot serve.
        """
        if rows < 1 or not 1 <= width <= MAX_WIDTH:
            raise CodecError(
                f"expected at least 1 row and a width of 1 to {MAX_WIDTH}, got ({rows}, {width})"
            )
        return rows * (SCALE_BYTES * self.scaled + self._code_bytes(width))

    def encode(self, x_RD: Tensor, *, seed: int = 0) -> Tensor:
        """Return the frame of `x_RD` as uint8 on the CPU.

        Args:
            x_RD: one row for each token; any floating type, any device.
            seed: of rounding at random, without effect on other codecs. It MUST differ from
                frame to frame, or else errors do not average out.

        Raises:
            NotFiniteError: a row holds NaN or infinity.
            CodecError: not a matrix, not floating point, or a shape that `frame_bytes` refuses.
        """
        if x_RD.ndim != 2 or not x_RD.is_floating_point():
            raise CodecError(
                f"expected a floating-point matrix (rows, width), got {x_RD.dtype} of "
                f"{tuple(x_RD.shape)}; flatten or convert it first"
            )
        x_RD = x_RD.detach()
        rows, width = x_RD.shape
        frame = _empty((self.frame_bytes(rows, width),), torch.uint8, x_RD.device)
        scales_RS, codes_RB = self._sections(frame, rows)
        peaks_R1 = _empty((rows, 1), torch.float32, x_RD.device)
        for number, tile in enumerate(_tiles(rows, width, x_RD.device)):
            x_TD, out = _as_fp32(x_RD[tile]), (scales_RS[tile], codes_RB[tile])
            self._write(x_TD, peaks_R1[tile], *out, seed=mix(seed) + number)
        _refuse_not_finite(peaks_R1.cpu())
        return frame.cpu()

    def decode(
        self, frame: Tensor | Frame, rows: int, width: int, *, device: Device = "cpu"
    ) -> Tensor:
        """Return the fp32 matrix (rows, width) that `frame` stands for, on `device`.

        Nothing is allocated before the length is right. All values of the result are finite.

        Raises:
            CodecError: a shape that `frame_bytes` refuses, a wrong length, values or scales that
                are NaN or infinite, or a scale so large that values would be.
        """
        data = _opened(frame, self.frame_bytes(rows, width), f"{self.spec} for ({rows}, {width})")
        if self.scaled:
            scales_RS, _ = self._sections(data, rows)
            require_finite(scales_RS.to(torch.float32), "scales", limit=FLOAT_MAX / self.code_limit)
        out_RD = _empty((rows, width), torch.float32, device)
        scales_RS, codes_RB = self._sections(data.to(out_RD.device), rows)
        scales_RS = scales_RS.to(torch.float32)
        for tile in _tiles(rows, width, out_RD.device):
            self._read(scales_RS[tile], codes_RB[tile], out_RD[tile])
        return out_RD

    def _sections(self, frame: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Return scales [R, 1], or [R, 0] if there are none, and codes [R, bytes of a row]."""
        num_scales = rows * self.scaled
        code_bytes = frame.numel() - SCALE_BYTES * num_scales
        scales, codes = carve(frame, (torch.bfloat16, num_scales), (torch.uint8, code_bytes))
        return scales.view(rows, int(self.scaled)), codes.view(rows, -1)

    @abstractmethod
    def _code_bytes(self, width: int) -> int:
        """Return the bytes of the codes of a row; refuse a width that does not suit the codec."""

    @abstractmethod
    def _write(
        self, x_TD: Tensor, peaks_T1: Tensor, scales_TS: Tensor, codes_TB: Tensor, *, seed: int
    ) -> None:
        """Store scales and codes of some rows (fp32, contiguous), and the peak of each.

        A peak MUST be NaN or infinite if a value of the row is, or if its codes overflowed.
        """

    @abstractmethod
    def _read(self, scales_TS: Tensor, codes_TB: Tensor, out_TD: Tensor) -> None:
        """Decode some rows, given their scales as fp32."""


@dataclass(frozen=True)
class FloatRows(ActivationCodec):
    """Base of the codecs with one float of type `dtype` for each value."""

    dtype: ClassVar[torch.dtype]
    scaled: ClassVar[bool] = False

    def _code_bytes(self, width: int) -> int:
        return width * self.dtype.itemsize

    def _write(
        self, x_TD: Tensor, peaks_T1: Tensor, scales_TS: Tensor, codes_TB: Tensor, *, seed: int
    ) -> None:
        block_peaks(x_TD, peaks_T1)
        if self.dtype == torch.bfloat16:  # which would round the largest fp32 to infinity
            x_TD = torch.clamp(x_TD, -BF16_MAX, BF16_MAX, out=scratch("work", x_TD))
        codes_TB.view(self.dtype).copy_(x_TD)

    def _read(self, scales_TS: Tensor, codes_TB: Tensor, out_TD: Tensor) -> None:
        values_TD = codes_TB.view(self.dtype)
        require_all_finite(values_TD)
        out_TD.copy_(values_TD)


@dataclass(frozen=True)
class Fp32Rows(FloatRows):
    """32 bits a value, lossless."""

    name: ClassVar[str] = "fp32"
    dtype: ClassVar[torch.dtype] = torch.float32


@dataclass(frozen=True)
class Bf16Rows(FloatRows):
    """16 bits a value, 8 of precision, the range of fp32."""

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16


@dataclass(frozen=True)
class Int8Rows(ActivationCodec):
    """8 bits a value and 16 a row."""

    name: ClassVar[str] = "int8"

    def _code_bytes(self, width: int) -> int:
        return width

    def _write(
        self, x_TD: Tensor, peaks_T1: Tensor, scales_TS: Tensor, codes_TB: Tensor, *, seed: int
    ) -> None:
        block_peaks(x_TD, peaks_T1)
        factors_T1 = absmax_scales(peaks_T1, 127.0, scales_TS, code_limit=self.code_limit)
        codes_TB.view(torch.int8).copy_(steps_of(x_TD, factors_T1))

    def _read(self, scales_TS: Tensor, codes_TB: Tensor, out_TD: Tensor) -> None:
        out_TD.copy_(codes_TB.view(torch.int8)).mul_(scales_TS)


@dataclass(frozen=True)
class Int4Rows(ActivationCodec):
    """4 bits a value and 16 a row, rounded to nearest or at random."""

    name: ClassVar[str] = "int4"
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        """Refuse another rounding."""
        if self.rounding not in ("nearest", "random"):
            raise CodecError(f"expected rounding=nearest or rounding=random, got {self.rounding!r}")

    def _code_bytes(self, width: int) -> int:
        return plane_bytes(width, 2)

    def _write(
        self, x_TD: Tensor, peaks_T1: Tensor, scales_TS: Tensor, codes_TB: Tensor, *, seed: int
    ) -> None:
        block_peaks(x_TD, peaks_T1)
        if self.rounding == "random":
            steps_TD = _draw(x_TD, peaks_T1, scales_TS, seed)
        else:
            # 112 = 7 * 16: scales are of codes in the high half of a byte, factors of -7..7.
            factors_T1 = absmax_scales(peaks_T1, 112.0, scales_TS).mul_(1 / 16)
            steps_TD = steps_of(x_TD, factors_T1, ZERO)
        code_TD = scratch("codes", x_TD, torch.int8).copy_(steps_TD)
        pack_(code_TD, 4, codes_TB, code_TD.numel(), ZERO, run=x_TD.shape[1])
        codes_TB.view(torch.int16).bitwise_xor_(EIGHTS)

    def _read(self, scales_TS: Tensor, codes_TB: Tensor, out_TD: Tensor) -> None:
        code_M = unpack(codes_TB, 4, out_TD.numel(), high=True, run=out_TD.shape[1])
        out_TD.view(-1).copy_(code_M.view(torch.int8))
        out_TD.mul_(scales_TS)


def _draw(x_TD: Tensor, peaks_T1: Tensor, scales_T1: Tensor, seed: int) -> Tensor:
    """Return codes + `ZERO` and fractions to cut off, right on average over seeds; scratch."""
    # With this headroom no bound lowers a factor below the inverse of its scale: that would bias.
    steps = 16 * (7 - MARGIN)
    factors_T1 = absmax_scales(peaks_T1, steps, scales_T1, headroom=1 + 2**-7).mul_(1 / 16)
    steps_TD = torch.mul(x_TD, factors_T1, out=scratch("work", x_TD))
    return add_noise_(steps_TD, seed).add_(ZERO + 0.5)  # all in [1, 16): cutting off is rounding


@dataclass(frozen=True)
class Subspace(Int8Rows):
    """8 bits for each of `k` coordinates and 16 a row; `seed` is that of the basis."""

    name: ClassVar[str] = "subspace"
    # A value is a sum over a block of at most 65,536 columns, each entry 1 / sqrt(block).
    code_limit: ClassVar[float] = 128.0 * 256.0
    k: int
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        if not 1 <= self.k <= MAX_DIRECTIONS:
            raise CodecError(f"expected k of 1 to {MAX_DIRECTIONS}, got {self.k}")
        if not 0 <= self.seed <= MASK_64:
            raise CodecError(f"expected a seed of 0 to 2^64 - 1, got {self.seed}")

    def basis(self, width: int, device: Device = "cpu") -> Tensor:
        """Return U, fp32 [width, k]: orthonormal columns. It is shared: do not change it.

        Raises:
            CodecError: a width below `k`, or out of range.
        """
        self.frame_bytes(1, width)
        return seeded_basis(width, self.k, self.seed, torch.device(device))

    def _code_bytes(self, width: int) -> int:
        if width < self.k:
            raise CodecError(
                f"{self.spec} needs a width of at least {self.k}, got {width}; choose a smaller k"
            )
        return self.k

    def _write(
        self, x_TD: Tensor, peaks_T1: Tensor, scales_TS: Tensor, codes_TB: Tensor, *, seed: int
    ) -> None:
        x_TK = self._coordinates(x_TD)
        torch.mm(x_TD, self.basis(x_TD.shape[1], x_TD.device), out=x_TK)
        super()._write(x_TK, peaks_T1, scales_TS, codes_TB, seed=seed)

    def _read(self, scales_TS: Tensor, codes_TB: Tensor, out_TD: Tensor) -> None:
        out_TK = self._coordinates(out_TD)
        super()._read(scales_TS, codes_TB, out_TK)
        torch.mm(out_TK, self.basis(out_TD.shape[1], out_TD.device).T, out=out_TD)

    def _coordinates(self, like_TD: Tensor) -> Tensor:
        return room("coordinates", (len(like_TD), self.k), like_TD.device, torch.float32)


CODECS: dict[str, type[ActivationCodec]] = {
    cls.name: cls for cls in (Fp32Rows, Bf16Rows, Int8Rows, Int4Rows, Subspace)
}
_TERM = re.compile(r"(\w+)\s*(?:\(([^()]*)\))?")


def parse_activations(spec: str, *, seed: int = 0) -> ActivationCodec:
    """Return the codec that `spec` names: "int8", "int4(rounding=random)", "subspace(k=96)".

    Args:
        spec: a name, and its parameters in brackets.
        seed: the run's; that of the basis if the spec gives none.

    Raises:
        CodecError: an unknown name or parameter, or a value out of range.
    """
    match = _TERM.fullmatch(spec.strip())
    if match is None or match[1] not in CODECS:
        known = ", ".join(CODECS)
        raise CodecError(f"expected one of the activation codecs {known}; got {spec[:80]!r}")
    cls = CODECS[match[1]]
    kinds = {f.name: str(f.type) for f in fields(cls)}
    arguments: dict[str, Any] = {"seed": seed} if "seed" in kinds else {}
    arguments |= _parameters(match[2] or "", kinds, cls.name)
    if "k" in kinds and "k" not in arguments:
        raise CodecError(f"{cls.name!r} needs the number of its directions; write {cls.name}(k=96)")
    return cls(**arguments)


def _parameters(text: str, kinds: dict[str, str], name: str) -> dict[str, Any]:
    """Return the values of "key=value, key=value"; `kinds` has the type of each key."""
    parameters: dict[str, Any] = {}
    for item in filter(None, (each.strip() for each in text.split(","))):
        key, _, value = (word.strip() for word in item.partition("="))
        if key not in kinds or key in parameters:
            raise CodecError(f"expected each of {list(kinds)} of {name!r} once, got {item!r}")
        if kinds[key] == "int" and not re.fullmatch("[0-9]{1,20}", value):
            raise CodecError(f"expected a whole number in {item!r}")
        parameters[key] = int(value) if kinds[key] == "int" else value
    return parameters


def _tiles(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Return the ranges of rows to process at once: intermediate results stay small."""
    at_once = (VALUES_AT_ONCE if device.type == "cpu" else VALUES_ON_DEVICE) // width
    return (slice(at, at + at_once) for at in range(0, rows, at_once))


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: Device) -> Tensor:
    """Return a tensor that autograd may use, whatever the mode of the thread that makes it."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def _as_fp32(x_TD: Tensor) -> Tensor:
    """Return some rows as contiguous fp32; scratch if they are not that already."""
    if x_TD.dtype == torch.float32 and x_TD.is_contiguous():
        return x_TD
    return scratch("activations", x_TD).copy_(x_TD)


def _refuse_not_finite(peaks_R1: Tensor) -> None:
    if not math.isfinite(float(peaks_R1.amax())):
        row = int(torch.isfinite(peaks_R1).logical_not_().view(-1).nonzero()[0])
        raise NotFiniteError(
            f"expected finite values, got NaN, infinity or an overflow in row {row} of "
            f"{len(peaks_R1)}; leave this batch out"
        )


def _opened(frame: Tensor | Frame, expected: int, what: str) -> Tensor:
    """Check the length of a frame; return its bytes on the CPU, aligned to 8."""
    if isinstance(frame, Tensor) and (frame.dtype != torch.uint8 or frame.ndim != 1):
        raise CodecError(f"expected a uint8 vector, got {frame.dtype} of {tuple(frame.shape)}")
    length = frame.numel() if isinstance(frame, Tensor) else memoryview(frame).nbytes
    if length != expected:
        raise CodecError(f"expected {expected} bytes of {what}, got {length}; refuse the frame")
    if isinstance(frame, Tensor):
        data = frame.cpu().contiguous()
    else:  # torch takes read-only memory for writable, so that `bytes` are copied
        writable = bytearray(frame) if memoryview(frame).readonly else frame
        data = torch.frombuffer(writable, dtype=torch.uint8)
    return data.clone() if data.data_ptr() % 8 or data.storage_offset() % 8 else data
