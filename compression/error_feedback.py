"""`feedback`: a codec that adds what it lost to its next input.

Payload: that of the inner codec. The residual stays with the encoder.

For use alone, in a training loop of one's own. A run of Atoll keeps its residuals by peer and
weight (`[compression] feedback`), because there they must survive repairs and changes of weight.

Source: EF-SGD, arXiv:1901.09847. Only contractive codecs may carry feedback: an unbiased one
adds more variance than the input has energy, and the residual grows without bound.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.base import HEADER_BYTES, Codec, CodecError, Dims, floats
from atoll.compression.blocks import Int8
from atoll.compression.registry import register


@register
@dataclass(frozen=True)
class ErrorFeedback(Codec):
    """Keeps residual = decay * residual + input - decoded for each key."""

    name: ClassVar[str] = "feedback"
    code: ClassVar[int] = 18
    stateful: ClassVar[bool] = True
    by_tensor: ClassVar[bool] = True
    codec: Codec = field(default_factory=Int8)
    decay: float = 1.0
    _residuals: dict[Hashable, Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _lock: threading.Lock = field(
        default_factory=threading.Lock, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Refuse codecs around which feedback diverges."""
        if self.codec.mode == "unbiased":
            raise CodecError(
                f"expected a contractive codec for feedback, got the unbiased {self.codec.spec!r}, "
                "around which the residual grows without bound; use it alone, or its contractive "
                "variant"
            )
        if not 0 <= self.decay <= 1 or self.codec.stateful or not self.codec.exact_size:
            raise CodecError(f"expected decay 0..1 and a plain codec of exact size: {self.spec}")

    def encode_keyed(self, x: Tensor, key: Hashable) -> bytes:
        """Encode the tensor called `key` (a layer, a part), with its own residual.

        Raises:
            CodecError: as `encode`, or `key` had another shape before.
        """
        with self._lock:
            residual = self._residuals.get(key)
            if residual is not None and residual.shape != x.shape:
                raise CodecError(f"expected {key!r} of {tuple(residual.shape)}, got {x.shape}")
            total = floats(x).view(x.shape)
            if residual is not None:
                total = total + self.decay * residual
            frame = self.codec.encode(total)
            sent = self.codec.decode(frame, total.shape, device=total.device)
            self._residuals[key] = total - sent
        return self._relabelled(frame, tuple(x.shape))

    def encode(self, x: Tensor) -> bytes:
        """Encode with the residual of the tensors of this shape; see `encode_keyed`."""
        return self.encode_keyed(x, tuple(x.shape))

    def residual(self, key: Hashable) -> Tensor | None:
        """Return what `key` still owes, or None before its first frame."""
        return self._residuals.get(key)

    def state_dict(self) -> dict[Hashable, Tensor]:
        """Return the residuals by key."""
        return dict(self._residuals)

    def load_state_dict(self, state: dict[Hashable, Tensor]) -> None:
        """Replace the residuals."""
        with self._lock:
            self._residuals.clear()
            self._residuals.update(state)

    # The inner frame has the inner codec's number and tag: it needs a header of its own.
    def _relabelled(self, frame: bytes, dims: Dims) -> bytes:
        buffer = bytearray(frame)
        buffer[:HEADER_BYTES] = self._header(dims, buffer, len(buffer))
        return bytes(buffer)

    def _frame_key(self, dims: Dims) -> str:
        return self.codec._frame_key(dims)

    def _payload_bytes(self, dims: Dims) -> int:
        return self.codec.wire_bytes(dims) - HEADER_BYTES

    def _write(self, x_N: Tensor, dims: Dims, payload: Tensor) -> Tensor:
        frame = self.encode(x_N.view(dims))
        body = torch.frombuffer(bytearray(frame), dtype=torch.uint8)[HEADER_BYTES:]
        payload.copy_(body)
        return torch.zeros(())

    def _read(self, payload: Tensor, dims: Dims, out_N: Tensor) -> None:
        self.codec._read(payload, dims, out_N)
