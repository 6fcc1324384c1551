"""Which codec for which layers of a model, in a budget of bytes: pseudo-gradients to a `mixed`.

Layers whose names differ by numbers only (blocks.0.mlp.w, blocks.1.mlp.w) are planned as one, so
that the spec stays short and says something of the model rather than of the numbers seen.

Source: L-GreCo, arXiv:2210.17357; see `atoll.compression.lgreco`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from atoll.compression.base import Codec, CodecError
from atoll.compression.lgreco import CANDIDATES, Option, plan
from atoll.compression.mixed import Mixed
from atoll.compression.registry import parse

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
    """The names that match each pattern, patterns with the most letters first.

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
    """The codec of most kinds last and for all others, without the rules that then say nothing."""
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
