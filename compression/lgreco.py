"""`lgreco`: the best codec for each layer, under a budget of error or of bytes.

`plan` chooses; as a codec, a tensor is cut into segments of 4,096 values, the candidates compete
for each under a budget of `bits` a value, and the frame states the choices. `planned` chooses for
the layers of a model from its pseudo-gradients, and returns a `mixed`. Layers whose names differ by
numbers only (blocks.0.mlp.w, blocks.1.mlp.w) are planned as one, so that the spec stays short and
describes the model instead of the numbers seen.

Payload, tile after tile of 65,536 values (the last may be short)::

    choices   a byte for each segment, an index into `CANDIDATES`
    segments  payload of each segment's codec, one after another, padded with zeros to the budget

The budget for the N values of a tile is floor(N bits / 8) bytes, within what the cheapest and
the dearest candidate take; frames always have the whole length, so `wire_bytes` is exact.
A decoder MUST refuse choices without a candidate, and segments beyond the budget.

Source: L-GreCo, arXiv:2210.17357. Departures: the search is exact (states that are worse in both
bytes and error are dropped, nothing is rounded) unless a front outgrows `max_states`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from atoll.compression.base import HEADER_BYTES, Codec, CodecError, Dims, peak, spans
from atoll.compression.mixed import Mixed
from atoll.compression.registry import parse, register
from atoll.compression.scratch import TILE

SEGMENT = 4_096
MAX_STATES = 200  # of the search in a tile: a finer one gains less than 0.1% of the error
CANDIDATES = (
    "sign(block=4096)",
    "ternary(block=4096, stochastic=False)",
    "2bit(width=1)",
    "int4(block=256)",
    "int4",
    "int8",
)  # the order is part of the format


@dataclass(frozen=True, kw_only=True)
class Option:
    """The cost of one codec for one layer."""

    size: int
    """Bytes."""

    error: float
    """Squared error, absolute; errors of layers add up."""


def plan(
    layers: Sequence[Sequence[Option]],
    *,
    max_size: int | None = None,
    max_error: float | None = None,
    max_states: int = 20_000,
) -> list[int]:
    """Return the index of the chosen option of each layer.

    Args:
        layers: the options of each layer.
        max_size: bytes for all layers; the least error within them is chosen.
        max_error: squared error for all layers; the fewest bytes within it are chosen.
        max_states: of the search; beyond it only states on a grid of sizes are kept.

    Raises:
        CodecError: not exactly one budget, or no choice fits it.
    """
    if (max_size is None) == (max_error is None):
        raise CodecError("expected exactly one of max_size and max_error")
    fronts: list[list[_State]] = [[_State(0, 0.0, -1, -1)]]
    for options in layers:
        fronts.append(_thin(_extend(fronts[-1], options, max_size, max_error), max_states))
    last = fronts[-1]
    if not last:
        raise CodecError("no choice of options fits the budget; raise it or add options")
    best = 0 if max_error is not None else len(last) - 1  # sizes rise and errors fall
    return _trace(fronts, best)


@dataclass(frozen=True, slots=True)
class _State:
    size: int
    error: float
    parent: int
    option: int


def _extend(
    front: list[_State],
    options: Sequence[Option],
    max_size: int | None,
    max_error: float | None,
) -> list[_State]:
    """Add one layer; keep the states that no other beats in both size and error."""
    states = [
        _State(state.size + option.size, state.error + option.error, i, j)
        for i, state in enumerate(front)
        for j, option in enumerate(options)
        if (max_size is None or state.size + option.size <= max_size)
        and (max_error is None or state.error + option.error <= max_error)
    ]
    states.sort(key=lambda state: (state.size, state.error))
    kept: list[_State] = []
    for state in states:
        if not kept or state.error < kept[-1].error:
            kept.append(state)
    return kept


def _thin(front: list[_State], max_states: int) -> list[_State]:
    """Keep the smallest error of each step of size, and the ends."""
    if len(front) <= max_states:
        return front
    step = max(1, (front[-1].size - front[0].size) // (max_states - 1))
    kept = {state.size // step: state for state in front}  # the last of a step errs least
    return sorted({front[0], *kept.values()}, key=lambda state: state.size)


def _trace(fronts: list[list[_State]], last: int) -> list[int]:
    choices = []
    for front in reversed(fronts[1:]):
        choices.append(front[last].option)
        last = front[last].parent
    return choices[::-1]


@register
@dataclass(frozen=True)
class LGreco(Codec):
    """`bits` a value, spent where they save most; contractive."""

    name: ClassVar[str] = "lgreco"
    code: ClassVar[int] = 16
    bits: float = 3.0

    def __post_init__(self) -> None:
        """Refuse budgets that no candidate meets."""
        # 1.1: signs, their scales and the choices take a little more than 1 bit a value.
        if not 1.1 <= self.bits <= 32:
            raise CodecError(f"expected 1.1 to 32 bits a value, got {self.bits}")

    def _budget(self, numel: int) -> int:
        """Return the bytes of the segments of a tile."""
        lengths = [min(SEGMENT, numel - start) for start in range(0, numel, SEGMENT)]
        least = sum(min(_costs(length)) for length in lengths)
        most = sum(max(_costs(length)) for length in lengths)
        return min(max(int(numel * self.bits / 8), least), most)

    def _tile_bytes(self, numel: int) -> int:
        return -(-numel // SEGMENT) + self._budget(numel) if numel else 0

    def _payload_bytes(self, dims: Dims) -> int:
        whole, rest = divmod(math.prod(dims), TILE)
        return whole * self._tile_bytes(TILE) + self._tile_bytes(rest)

    def _write(self, x_N: Tensor, dims: Dims, payload: Tensor) -> Tensor:
        largest = peak(torch.stack([peak(x_N[start:stop]) for start, stop in spans(x_N)]))
        if math.isfinite(float(largest)):
            for values, part in self._cut(x_N, payload):
                self._write_tile(values, part)
        return largest

    def _cut(self, x_N: Tensor, payload: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the values and the payload of each tile."""
        step = self._tile_bytes(TILE)
        numbers = range(-(-x_N.numel() // TILE))
        return [
            (x_N[i * TILE : (i + 1) * TILE], payload[i * step : (i + 1) * step]) for i in numbers
        ]

    def _write_tile(self, x_M: Tensor, payload: Tensor) -> None:
        starts = range(0, x_M.numel(), SEGMENT)
        trials = [_trials(x_M[start : start + SEGMENT]) for start in starts]
        options = [[option for option, _ in trial] for trial in trials]
        choices = plan(options, max_size=self._budget(x_M.numel()), max_states=MAX_STATES)
        chosen = [trial[j][1] for trial, j in zip(trials, choices, strict=True)]
        body = torch.cat([torch.tensor(choices, dtype=torch.uint8, device=x_M.device), *chosen])
        payload[: body.numel()] = body
        payload[body.numel() :].zero_()

    def _read(self, payload: Tensor, dims: Dims, out_N: Tensor) -> None:
        for values, part in self._cut(out_N, payload):
            _read_tile(part, values)


def _read_tile(payload: Tensor, out_M: Tensor) -> None:
    starts = range(0, out_M.numel(), SEGMENT)
    offset = len(starts)
    choices: list[int] = payload[:offset].tolist()
    if max(choices) >= len(CANDIDATES):
        raise CodecError(f"expected choices below {len(CANDIDATES)}, got {max(choices)}")
    for start, choice in zip(starts, choices, strict=True):
        segment = out_M[start : start + SEGMENT]
        end = offset + _costs(segment.numel())[choice]
        if end > payload.numel():
            raise CodecError("expected segments within the budget, got more")
        # A clone, since a segment may begin anywhere and codecs view words of up to 8 bytes.
        _codecs()[choice]._read(payload[offset:end].clone(), (segment.numel(),), segment)
        offset = end


@cache
def _codecs() -> list[Codec]:
    return [parse(spec) for spec in CANDIDATES]


@cache
def _costs(numel: int) -> list[int]:
    return [codec.wire_bytes(numel) - HEADER_BYTES for codec in _codecs()]


def _trials(x_M: Tensor) -> list[tuple[Option, Tensor]]:
    """Encode a segment in every candidate."""
    results = []
    for codec, size in zip(_codecs(), _costs(x_M.numel()), strict=True):
        payload = torch.zeros(size, dtype=torch.uint8, device=x_M.device)
        codec._write(x_M, (x_M.numel(),), payload)
        decoded = torch.empty_like(x_M)
        codec._read(payload, (x_M.numel(),), decoded)
        error = float((decoded - x_M).to(torch.float64).square().sum())
        results.append((Option(size=size, error=error), payload))
    return results


Rules = list[tuple[str, Codec]]


def planned(
    layers: Mapping[str, Tensor], *, bits: float, candidates: Sequence[str] = CANDIDATES
) -> Mixed:
    """Return the `mixed` codec with the least squared error in a budget of bytes.

    Args:
        layers: a pseudo-gradient of each layer.
        bits: budget a value, over all layers, whole frames counted.
        candidates: specs to choose from.

    Raises:
        CodecError: no layers, NaN or infinity in one, or a budget that no choice fits.
    """
    if not layers:
        raise CodecError("expected pseudo-gradients of layers, got none")
    codecs = [parse(spec) for spec in candidates]
    kinds = _kinds(layers)
    options = [_options(codecs, [layers[name] for name in names]) for names in kinds.values()]
    numel = sum(values.numel() for values in layers.values())
    choices = plan(options, max_size=int(numel * bits / 8))
    chosen = dict(zip(kinds, (codecs[choice] for choice in choices), strict=True))
    return Mixed(_shortened(kinds, chosen))


def _kinds(layers: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the names that match each pattern, patterns with the most letters first.

    A name has no more letters than the pattern of its kind, so that none before that matches it.
    """
    kinds: dict[str, list[str]] = {}
    for name in layers:
        kinds.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return dict(sorted(kinds.items(), key=lambda kind: -len(kind[0].replace("*", ""))))


def _options(codecs: Sequence[Codec], tensors: Sequence[Tensor]) -> list[Option]:
    return [
        Option(
            size=sum(codec.wire_bytes(x.shape) for x in tensors),
            error=sum(_squared_error(codec, x) for x in tensors),
        )
        for codec in codecs
    ]


def _squared_error(codec: Codec, x: Tensor) -> float:
    lost = codec.decode(codec.encode(x), x.shape) - x
    return float(lost.to(torch.float64).square().sum())


def _shortened(kinds: Mapping[str, Sequence[str]], chosen: Mapping[str, Codec]) -> Rules:
    """Return the rules, with the codec of most kinds last for all others; drop redundant rules."""
    specs = [codec.spec for codec in chosen.values()]
    rules: Rules = [*chosen.items(), ("*", parse(max(specs, key=specs.count)))]
    for rule in list(chosen.items()):
        fewer = [other for other in rules if other != rule]
        if _agrees(Mixed(fewer), kinds, chosen):
            rules = fewer
    return rules


def _agrees(codec: Mixed, kinds: Mapping[str, Sequence[str]], chosen: Mapping[str, Codec]) -> bool:
    return all(
        codec.for_layer(name) == chosen[kind] for kind, names in kinds.items() for name in names
    )
