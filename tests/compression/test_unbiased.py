"""The mean over many draws of an unbiased codec is the input, within what chance allows."""

import pytest
import torch

from atoll.compression import CodecError, ErrorFeedback, Ternary, parse

DRAWS = 1_200


def mean_and_error(codec, x):
    """Return the mean of the decoded draws and the standard error of it."""
    draws = torch.stack([codec.decode(codec.encode(x), x.shape) for _ in range(DRAWS)]).double()
    # what was (almost) never or always drawn has no spread of its own to show
    floor = float(draws.abs().max()) / DRAWS
    return draws.mean(0), (draws.std(0) / DRAWS**0.5).clamp(min=floor)


@pytest.mark.parametrize(
    ("spec", "numel"),
    [
        ("ternary(seed=1)", 300),
        ("ternary(block=64, seed=2)", 300),
        ("randk(k=512, seed=3)", 300),
        ("randk(k=512, seed=4)", 4_100),
        ("randk(k=1024, seed=5)+ternary(seed=6)", 300),
    ],
)
def test_mean_of_draws_is_the_input(spec, numel):
    codec = parse(spec)
    assert codec.mode == "unbiased"
    x = torch.randn(numel, generator=torch.Generator().manual_seed(7))
    mean, error = mean_and_error(codec, x)
    z = (mean - x) / error
    assert float(z.abs().max()) < 5.0
    assert abs(float(z.mean())) < 5.0 / numel**0.5 + 0.12
    assert 0.6 < float(z.square().mean()) < 1.4


def test_clipped_ternary_is_biased_towards_the_clip_only():
    x = torch.randn(2_000, generator=torch.Generator().manual_seed(7))
    codec = parse("ternary(clip=2.5, seed=1)")
    mean, error = mean_and_error(codec, x)
    limit = 2.5 * float(x.square().mean().sqrt())
    clipped = x.clamp(-limit, limit)
    assert float(((mean - clipped) / error).abs().max()) < 6.0
    bias = float((mean - x).norm() / x.norm())
    assert bias > float((clipped - x).norm() / x.norm()) * 0.5


def test_draws_differ_without_a_seed_and_repeat_with_one():
    x = torch.randn(1_000)
    for spec in ("ternary", "randk"):
        assert parse(spec).encode(x) != parse(spec).encode(x)
        seeded = spec + "(seed=5)"
        first, again = parse(seeded), parse(seeded)
        frames = [first.encode(x), first.encode(x)]
        assert frames == [again.encode(x), again.encode(x)]
        assert frames[0] != frames[1]


@pytest.mark.parametrize("spec", ["ternary", "randk", "ternary(clip=2.5)"])
def test_feedback_around_an_unbiased_codec_is_refused_with_the_reason(spec):
    with pytest.raises(CodecError, match="grows without bound"):
        ErrorFeedback(codec=parse(spec))


def test_ternary_values_are_the_scale_or_zero():
    x = torch.randn(1_000)
    decoded = Ternary().decode(Ternary().encode(x), 1_000)
    assert len(decoded.abs().unique()) == 2
    assert float(decoded.abs().max()) >= float(x.abs().max())
