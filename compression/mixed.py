"""`mixed`: another codec for each layer, by the pattern that its name matches first.

Payload: that of the codec of the layer; for a bound set of layers, the payloads of all in order,
each padded to a multiple of 8.

A run cuts its model by tensors and encodes each by `for_layer` of its name. `bind` gives the
codec of a flat vector of named layers. A tensor without a name is coded as the layer "", which
only the pattern "*" matches.

Spec: `mixed(*norm*=fp32, *.bias=fp16, *=int4)`; patterns as in `fnmatch`, case matters.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.base import HEADER_BYTES, Codec, CodecError, Dims, Mode, peak
from atoll.compression.registry import register


@register
@dataclass(frozen=True, init=False)
class Mixed(Codec):
    """Codecs by pattern of the layer's name; unbiased if any is, for feedback must then be off."""

    name: ClassVar[str] = "mixed"
    code: ClassVar[int] = 19
    by_tensor: ClassVar[bool] = True
    rules: tuple[tuple[str, Codec], ...]

    def __init__(self, rules: Mapping[str, Codec] | Sequence[tuple[str, Codec]]) -> None:
        """Take the rules in order.

        Raises:
            CodecError: no rules, or a codec with state or of variable size.
        """
        pairs = tuple(rules.items() if isinstance(rules, Mapping) else rules)
        if not pairs or any(codec.stateful or not codec.exact_size for _, codec in pairs):
            raise CodecError("expected rules with plain codecs of exact size")
        object.__setattr__(self, "rules", pairs)

    @classmethod
    def from_items(cls, items: list[str], parse_inner: Callable[[str], Codec]) -> Mixed:
        """Build from the items of a spec."""
        pairs = [item.rpartition("=") if "(" not in item else _split(item) for item in items]
        if any(not pattern.strip() for pattern, _, _ in pairs):
            raise CodecError(f"expected pattern=codec in each of {items}")
        return cls([(pattern.strip(), parse_inner(spec.strip())) for pattern, _, spec in pairs])

    @cached_property
    def spec(self) -> str:
        """Return the string that `parse` turns back into this codec."""
        return f"mixed({', '.join(f'{pattern}={codec.spec}' for pattern, codec in self.rules)})"

    @property
    def mode(self) -> Mode:
        """Return "contractive" if all codecs are."""
        every = all(codec.mode == "contractive" for _, codec in self.rules)
        return "contractive" if every else "unbiased"

    def for_layer(self, layer: str) -> Codec:
        """Return the codec of a layer.

        Raises:
            CodecError: no pattern matches.
        """
        for pattern, codec in self.rules:
            if fnmatch.fnmatchcase(layer, pattern):
                return codec.for_layer(layer)
        raise CodecError(f"expected a pattern for layer {layer!r} in {self.spec}; add *=CODEC")

    def bind(self, layers: Mapping[str, Sequence[int]]) -> MixedLayers:
        """Return the codec of a flat vector that holds these layers (name: shape) in order."""
        parts = [(self.for_layer(name), tuple(shape)) for name, shape in layers.items()]
        return MixedLayers(rules=self.rules, parts=tuple(parts))

    def _frame_key(self, dims: Dims) -> str:
        return self.for_layer("")._frame_key(dims)

    def _payload_bytes(self, dims: Dims) -> int:
        return self.for_layer("").wire_bytes(dims) - HEADER_BYTES

    def _write(self, x_N: Tensor, dims: Dims, payload: Tensor) -> Tensor:
        return self.for_layer("")._write(x_N, dims, payload)

    def _read(self, payload: Tensor, dims: Dims, out_N: Tensor) -> None:
        self.for_layer("")._read(payload, dims, out_N)


@dataclass(frozen=True)
class MixedLayers(Codec):
    """A `Mixed` codec that knows the layers of its flat vector; made by `Mixed.bind`."""

    name: ClassVar[str] = "mixed-layers"
    code: ClassVar[int] = 20
    by_tensor: ClassVar[bool] = True
    rules: tuple[tuple[str, Codec], ...]
    parts: tuple[tuple[Codec, Dims], ...]

    @cached_property
    def spec(self) -> str:
        """Return the spec of the rules; the layers are no part of it."""
        return Mixed(self.rules).spec

    @property
    def mode(self) -> Mode:
        """Return "contractive" if the codecs of all layers are."""
        every = all(codec.mode == "contractive" for codec, _ in self.parts)
        return "contractive" if every else "unbiased"

    def _frame_key(self, dims: Dims) -> str:
        return str([(codec.spec, shape) for codec, shape in self.parts])

    def _payload_bytes(self, dims: Dims) -> int:
        numel = sum(math.prod(shape) for _, shape in self.parts)
        if math.prod(dims) != numel:
            raise CodecError(f"expected the {numel} values of all layers, got {dims}")
        return sum(_padded(codec, shape) for codec, shape in self.parts)

    def _write(self, x_N: Tensor, dims: Dims, payload: Tensor) -> Tensor:
        witnesses = [torch.zeros((), device=x_N.device)]
        for codec, shape, values, part in self._cut(x_N, payload):
            used = codec.wire_bytes(shape) - HEADER_BYTES
            part[used:].zero_()
            witnesses.append(codec._write(values, shape, part[:used]))
        return peak(torch.stack(witnesses))

    def _read(self, payload: Tensor, dims: Dims, out_N: Tensor) -> None:
        for codec, shape, values, part in self._cut(out_N, payload):
            codec._read(part[: codec.wire_bytes(shape) - HEADER_BYTES], shape, values)

    def _cut(self, x_N: Tensor, payload: Tensor) -> Iterator[tuple[Codec, Dims, Tensor, Tensor]]:
        """Yield each non-empty layer: codec, shape, values, padded payload."""
        value = byte = 0
        for codec, shape in self.parts:
            numel, size = math.prod(shape), _padded(codec, shape)
            if numel:
                yield codec, shape, x_N[value : value + numel], payload[byte : byte + size]
            value, byte = value + numel, byte + size


def _padded(codec: Codec, dims: Dims) -> int:
    # Codecs view payloads as words of up to 8 bytes: each must begin at a multiple of 8.
    return -(-(codec.wire_bytes(dims) - HEADER_BYTES) // 8) * 8


def _split(item: str) -> tuple[str, str, str]:
    """Split pattern=spec at the last "=" before the spec's brackets."""
    head, bracket, tail = item.partition("(")
    pattern, equals, name = head.rpartition("=")
    return pattern, equals, name + bracket + tail
