"""What codecs say of themselves is true, and combinators say it of the codec that they wrap."""

import pytest
import torch

from atoll.compression import CodecError, Zstd, names, parse
from atoll.compression.registry import codec_class
from support.specs import SPECS

CODECS = [spec for spec in SPECS if parse(spec).name != "feedback"]
SEEDED = {"ternary": "ternary(seed=1)", "randk": "randk(seed=1)"}
SHAPE = (70, 130)


def fixed(spec):
    """A codec that draws the same numbers whenever it is made."""
    for name, seeded in SEEDED.items():
        spec = seeded if spec == name else spec.replace(f"{name}(", f"{name}(seed=1, ")
    return spec.replace("randk+ternary", "randk(seed=1)+ternary(seed=1)")


@pytest.mark.parametrize("spec", CODECS)
def test_a_codec_is_elementwise_where_shapes_and_names_do_not_matter(spec):
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    shaped = parse(fixed(spec)).encode(x)
    flat = parse(fixed(spec)).encode(x.view(-1))
    named = parse(spec).for_layer("a.bias") == parse(spec).for_layer("a.weight")
    assert parse(spec).elementwise == (shaped == flat and named)


@pytest.mark.parametrize("spec", CODECS)
def test_a_codec_is_of_exact_size_where_values_do_not_matter(spec):
    codec, x = parse(spec), torch.randn(SHAPE)
    lengths = {len(codec.encode(values)) for values in (x, torch.zeros(SHAPE), x**5)}
    assert codec.exact_size == (lengths == {codec.wire_bytes(SHAPE)})


@pytest.mark.parametrize("spec", [s for s in CODECS if parse(s).exact_size])
def test_zstd_has_all_properties_of_what_it_wraps_but_the_size(spec):
    inner, codec = parse(spec), Zstd(codec=parse(spec), level=5)
    assert (codec.mode, codec.elementwise) == (inner.mode, inner.elementwise)
    assert (codec.stateful, codec.exact_size) == (False, False)
    assert codec.for_layer("a.bias") == Zstd(codec=inner.for_layer("a.bias"), level=5)


@pytest.mark.parametrize("spec", [s for s in CODECS if parse(s).exact_size])
def test_mixed_is_of_the_mode_of_its_codecs_and_gives_each_layer_its_own(spec):
    codec, inner = parse(f"mixed(a.*={spec}, *=fp16)"), parse(spec)
    assert codec.mode == inner.mode
    assert not codec.elementwise
    assert codec.for_layer("a.bias") == inner.for_layer("a.bias")
    assert codec.for_layer("b.bias") == parse("fp16")
    nested = parse(f"mixed(a.*=mixed(*.bias={spec}, *=int4), *=fp16)")
    assert nested.for_layer("a.bias") == inner.for_layer("a.bias")
    assert nested.for_layer("a.weight") == parse("int4")


@pytest.mark.parametrize("spec", [s for s in CODECS if not hasattr(parse(s), "values")])
def test_values_of_sparse_codecs_leave_their_mode_true(spec):
    values = parse(spec)
    fits = values.elementwise and values.exact_size
    for sparse in ("topk", "randk(scaled=False)"):
        if fits and values.mode == "contractive":
            assert parse(f"{sparse}+{spec}").mode == "contractive"
        else:
            with pytest.raises(CodecError):
                parse(f"{sparse}+{spec}")
    if fits and (values.mode == "unbiased" or spec == "fp32"):
        assert parse(f"randk+{spec}").mode == "unbiased"
    else:
        with pytest.raises(CodecError):
            parse(f"randk+{spec}")


@pytest.mark.parametrize("spec", CODECS)
def test_feedback_takes_what_is_contractive_and_of_exact_size(spec):
    inner = parse(spec)
    if inner.mode == "contractive" and inner.exact_size:
        codec = parse(f"feedback({spec})")
        assert (codec.mode, codec.stateful, codec.exact_size) == ("contractive", True, True)
    else:
        with pytest.raises(CodecError):
            parse(f"feedback({spec})")


@pytest.mark.parametrize("name", [n for n in names() if codec_class(n).stateful])
@pytest.mark.parametrize(
    "outer", ["zstd({})", "feedback({})", "mixed(*={})", "topk+{}", "randk(scaled=False)+{}"]
)
def test_nothing_with_a_state_goes_into_another_codec(name, outer):
    with pytest.raises(CodecError, match="expected"):
        parse(outer.format(name))
