"""Plans of which layer gets which codec."""

import itertools

import pytest
import torch

from atoll.compression import CodecError, Mixed, parse, planned

CANDIDATES = ("int8", "int4", "2bit(width=1)", "fp16")


def layers():
    generator = torch.Generator().manual_seed(5)
    sizes = {"embed.w": 900, "blocks.0.w": 700, "blocks.0.norm.w": 130, "blocks.1.w": 700}
    sizes |= {"blocks.1.norm.w": 130, "blocks.10.w": 700, "norm.w": 64}
    scales = torch.logspace(-2, 2, len(sizes))
    return {
        name: torch.randn(size // 2, 2, generator=generator) * scale
        for (name, size), scale in zip(sizes.items(), scales, strict=True)
    }


def cost(codec, tensors):
    """Bytes and squared error of a plan."""
    size = lost = 0.0
    for name, x in tensors.items():
        frame = codec.for_layer(name).encode(x)
        size += len(frame)
        decoded = codec.for_layer(name).decode(frame, x.shape)
        lost += float((decoded - x).double().square().sum())
    return size, lost


def brute_force(tensors, max_size):
    kinds = ("embed.w", "blocks.*.norm.w", "blocks.*.w", "norm.w")
    best = float("inf")
    for choice in itertools.product(CANDIDATES, repeat=len(kinds)):
        codec = Mixed([(k, parse(spec)) for k, spec in zip(kinds, choice, strict=True)])
        size, lost = cost(codec, tensors)
        if size <= max_size:
            best = min(best, lost)
    return best


@pytest.mark.parametrize(
    "bits", [3, 9, *(pytest.param(bits, marks=pytest.mark.exhaustive) for bits in (4.5, 6, 20))]
)
def test_no_plan_of_the_budget_loses_less(bits):
    tensors = layers()
    max_size = int(bits / 8 * sum(x.numel() for x in tensors.values()))
    codec = planned(tensors, bits=bits, candidates=CANDIDATES)
    size, lost = cost(codec, tensors)
    assert size <= max_size
    assert lost == pytest.approx(brute_force(tensors, max_size), rel=1e-9)


def test_numbered_layers_share_a_rule_and_the_commonest_codec_is_last():
    codec = planned(layers(), bits=20, candidates=CANDIDATES)
    assert codec.spec == "mixed(*=fp16)"
    codec = planned(layers(), bits=4.5, candidates=CANDIDATES)
    assert parse(codec.spec) == codec
    assert codec.rules[-1][0] == "*"
    assert [pattern for pattern, _ in codec.rules].index("blocks.*.norm.w") == 0
    assert codec.for_layer("blocks.0.w") == codec.for_layer("blocks.77.w")


def test_a_budget_that_nothing_fits_is_refused():
    with pytest.raises(CodecError, match="budget"):
        planned(layers(), bits=0.5)
    with pytest.raises(CodecError, match="none"):
        planned({}, bits=3)
