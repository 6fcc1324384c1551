"""Codecs of activations: sizes, errors, draws, projections, and frames that are refused."""

import concurrent.futures
import hashlib

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from atoll.compression import CodecError, activations
from atoll.compression.activations import (
    MAX_WIDTH,
    ActivationCodec,
    NotFiniteError,
    Subspace,
    parse_activations,
)
from support.accelerator import DEVICE, Accelerator

SPECS = ["fp32", "bf16", "int8", "int4", "int4(rounding=random)", "subspace(k=3, seed=5)"]
SCALED = ["int8", "int4", "int4(rounding=random)", "subspace(k=3, seed=5)"]
# Units of the largest magnitude of a row.
BOUNDS = {"fp32": 0.0, "bf16": 2.0**-8, "int8": 1 / 252, "int4": 1 / 13.8}
BOUNDS["int4(rounding=random)"] = 1 / 6.9


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def peaks(x_RD):
    return x_RD.abs().amax(1, keepdim=True)


def passed(codec, x_RD, **options):
    return codec.decode(codec.encode(x_RD, **options), *x_RD.shape)


def digest(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@st.composite
def matrices(draw):
    """Rows of very different size, some of zeros."""
    rows, width = draw(st.integers(1, 9)), draw(st.integers(3, 70))
    exponents = draw(st.lists(st.integers(-33, 30), min_size=rows, max_size=rows))
    sizes_R1 = torch.tensor([0.0 if e == -33 else 10.0**e for e in exponents]).unsqueeze(1)
    return normal(rows, width, seed=draw(st.integers(0, 2**32))) * sizes_R1


@pytest.mark.parametrize(
    ("spec", "rows", "width", "expected"),
    [
        ("fp32", 7, 384, 7 * 384 * 4),
        ("bf16", 7, 384, 7 * 384 * 2),
        ("int8", 7, 384, 7 * (2 + 384)),
        ("int8", 1, 1, 3),
        ("int4", 7, 384, 7 * (2 + 192)),
        ("int4", 3, 17, 3 * (2 + 16)),
        ("int4(rounding=random)", 7, 384, 7 * (2 + 192)),
        ("subspace(k=48)", 7, 384, 7 * (2 + 48)),
        ("subspace(k=384)", 1, 384, 386),
    ],
)
def test_frame_bytes_is_the_length_of_the_frame(spec, rows, width, expected):
    codec = parse_activations(spec)
    assert codec.frame_bytes(rows, width) == expected
    frame = codec.encode(normal(rows, width))
    assert (frame.shape, frame.dtype) == ((expected,), torch.uint8)
    decoded = codec.decode(frame, rows, width)
    assert (decoded.shape, decoded.dtype) == ((rows, width), torch.float32)


@pytest.mark.parametrize("spec", SPECS)
def test_a_spec_names_a_codec_completely(spec):
    codec = parse_activations(spec)
    assert isinstance(codec, ActivationCodec)
    assert codec.spec == spec
    assert parse_activations(f"  {spec} ") == codec


def test_a_basis_takes_the_seed_of_the_run_unless_its_spec_has_one():
    assert parse_activations("subspace(k=9)", seed=7) == Subspace(k=9, seed=7)
    assert parse_activations("subspace(k=9)", seed=7).spec == "subspace(k=9, seed=7)"
    assert parse_activations("subspace(seed=3, k=9)", seed=7) == Subspace(k=9, seed=3)
    assert parse_activations("int8", seed=7).spec == "int8"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "one of the activation codecs fp32, bf16, int8, int4, subspace"),
        ("int9", "got 'int9'"),
        ("int8(", "one of"),
        ("subspace(k=(3))", "one of"),
        ("int8(block=3)", r"each of \[\] of 'int8' once, got 'block=3'"),
        ("int4(rounding=up)", "rounding=nearest or rounding=random, got 'up'"),
        ("int4(random)", r"each of \['rounding'\]"),
        ("subspace", r"write subspace\(k=96\)"),
        ("subspace(seed=3)", r"write subspace\(k=96\)"),
        ("subspace(k=3, k=4)", "once"),
        ("subspace(k=3.5)", "whole number in 'k=3.5'"),
        ("subspace(k=)", "whole number"),
        ("subspace(k=0)", "k of 1 to 4096, got 0"),
        ("subspace(k=5000)", "k of 1 to 4096"),
        ("subspace(k=3, seed=18446744073709551616)", "seed of 0 to"),
    ],
)
def test_a_spec_that_names_no_codec_is_refused(spec, message):
    with pytest.raises(CodecError, match=message):
        parse_activations(spec)


@pytest.mark.parametrize("spec", BOUNDS)
@hypothesis.settings(max_examples=40)
@hypothesis.given(x_RD=matrices())
def test_errors_stay_within_a_share_of_the_row(spec, x_RD):
    error_RD = (passed(parse_activations(spec), x_RD) - x_RD).double().abs()
    assert bool((error_RD <= BOUNDS[spec] * peaks(x_RD).double() + 1e-35).all())


@pytest.mark.parametrize("spec", BOUNDS)
def test_the_largest_values_of_fp32_stay_finite(spec):
    limit = torch.finfo(torch.float32).max
    x_RD = torch.tensor([[limit, -limit, 0.0, limit / 2]])
    error_RD = (passed(parse_activations(spec), x_RD) / limit - x_RD / limit).abs()
    assert float(error_RD.max()) <= BOUNDS[spec] + 0.06  # the scale has a bound too


@hypothesis.settings(max_examples=40)
@hypothesis.given(x_RD=matrices(), k=st.integers(1, 70), seed=st.integers(0, 2**64 - 1))
def test_a_subspace_is_off_by_the_rounding_of_coordinates(x_RD, k, seed):
    codec = Subspace(k=min(k, x_RD.shape[1]), seed=seed)
    basis_DK = codec.basis(x_RD.shape[1]).double()
    x_RK = x_RD.double() @ basis_DK
    norms_R = (passed(codec, x_RD) - x_RK @ basis_DK.T).norm(dim=1)
    rounding_R = 1e-5 * x_RD.double().norm(dim=1)
    bound_R = codec.k**0.5 * peaks(x_RK).view(-1) / 252
    assert bool((norms_R <= bound_R + rounding_R + 1e-34).all())


@pytest.mark.parametrize("width", [384, 100])
def test_all_directions_are_the_whole_space(width):
    x_RD = normal(5, width)
    error_RD = passed(Subspace(k=width), x_RD) - x_RD
    assert float(error_RD.norm() / x_RD.norm()) < 0.02


def test_what_was_projected_passes_a_second_time():
    """Up to the rounding of coordinates, and that only once: codes come back to themselves."""
    codec, x_RD = Subspace(k=48, seed=5), normal(20, 384)
    once = passed(codec, x_RD)
    twice = passed(codec, once)
    assert float((once - x_RD).norm() / x_RD.norm()) > 0.9
    assert float((twice - once).norm() / once.norm()) < 0.01
    basis_DK = codec.basis(384)
    projected = once @ basis_DK @ basis_DK.T
    torch.testing.assert_close(projected, once, atol=1e-5, rtol=0)


def test_gradients_by_the_codec_are_those_of_the_projection():
    codec = Subspace(k=48, seed=5)
    basis_DK = codec.basis(384)
    x_RD = normal(20, 384).requires_grad_()
    gradient_RD = normal(20, 384, seed=1)
    (x_RD @ basis_DK @ basis_DK.T).backward(gradient_RD)
    returned = passed(codec, gradient_RD)
    assert float((returned - x_RD.grad).norm() / x_RD.grad.norm()) < 0.01
    # <P x, g> = <x, P g>, with the coordinates' rounding on both sides
    forward = float((passed(codec, x_RD) * gradient_RD).sum())
    backward = float((x_RD.detach() * returned).sum())
    assert abs(forward - backward) < 0.01 * float(x_RD.detach().norm() * gradient_RD.norm())


def test_rounding_at_random_is_right_on_average():
    codec, x_RD = parse_activations("int4(rounding=random)"), normal(4, 40)
    x_RD[1] *= 1e-6
    x_RD[2] *= 1e12
    num_draws = 1_000
    draws = torch.stack([passed(codec, x_RD, seed=seed) for seed in range(num_draws)]).double()
    errors = draws - x_RD.double()
    steps_R1 = draws.flatten(2).abs().amax((0, 2)).unsqueeze(1) / 7
    fraction_RD = (x_RD.double() / steps_R1).remainder(1)
    sigma_RD = steps_R1 * (fraction_RD * (1 - fraction_RD)).sqrt()
    # Each value is off by its standard error, and by the rounding of its product to fp32.
    slack_RD = 1e-6 * steps_R1
    z_RD = (errors.mean(0).abs() - slack_RD) / (sigma_RD / num_draws**0.5 + slack_RD)
    assert float(z_RD.max()) < 5.0
    assert 0.8 < float(z_RD.square().mean()) < 1.25
    # Neighbours do not err together: the variance of a row's sum is the sum of variances.
    of_sums_R = errors.sum(2).square().mean(0) / sigma_RD.square().sum(1)
    assert bool(((of_sums_R > 0.8) & (of_sums_R < 1.25)).all())


def test_rounding_to_nearest_is_off_in_one_direction():
    """What rounding at random is for: of many small values nothing is left."""
    x_RD = torch.full((1, 400), 0.05)
    x_RD[0, 0] = 1.0
    assert float(passed(parse_activations("int4"), x_RD)[0, 1:].sum()) == 0
    codec = parse_activations("int4(rounding=random)")
    sums = [float(passed(codec, x_RD, seed=seed)[0, 1:].sum()) for seed in range(50)]
    assert sum(sums) / len(sums) == pytest.approx(399 * 0.05, rel=0.05)


def test_a_seed_repeats_its_draw_and_others_differ():
    codec, x_RD = parse_activations("int4(rounding=random)"), normal(5, 64)
    first, again, other = (codec.encode(x_RD, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    for spec in ("int4", "int8", "subspace(k=3)"):
        codec = parse_activations(spec)
        assert torch.equal(codec.encode(x_RD, seed=1), codec.encode(x_RD, seed=2))


# Frames and decoded values of an input whose coordinates and sums are exact in any order, and whose
# codes are not near a tie: every machine has these.
DIGESTS = {
    "fp32": ("fb10a1183ad64289", "fb10a1183ad64289"),
    "bf16": ("549044e5fae81585", "fb10a1183ad64289"),
    "int8": ("6d8a308d7a924f7d", "f1480a58b4c2f35e"),
    "int4": ("fcf588c779e0519e", "b4b238b862dd05f1"),
    "int4(rounding=random)": ("6ae5e0c23be1b8a2", "c569c3266eb87bc0"),
    "subspace(k=20, seed=5)": ("7aa665873e5db830", "58d55a09434fbfe1"),
}


@pytest.mark.parametrize("spec", DIGESTS)
def test_frames_keep_their_bits(spec):
    codec, index = parse_activations(spec), torch.arange(400).view(5, 80)
    sizes_R1 = torch.tensor([1.0, 2.0**-40, 2.0**20, 0.0, 1.0]).unsqueeze(1)
    x_RD = ((index * index * 37 + index * 11) % 61 - 30) * sizes_R1
    frame = codec.encode(x_RD, seed=9)
    assert (digest(frame)[:16], digest(codec.decode(frame, 5, 80))[:16]) == DIGESTS[spec]


@pytest.mark.parametrize("spec", SPECS)
def test_rows_are_encoded_by_themselves(spec):
    """A frame of several tiles has the codes of each row alone, except for draws."""
    codec, x_RD = parse_activations(spec), normal(35, 40_000)
    together = passed(codec, x_RD)
    for row in (0, 25, 26, 34):  # 26 rows are a tile
        alone = passed(codec, x_RD[row : row + 1])[0]
        if "random" in spec:
            assert float((together[row] - alone).abs().max() / x_RD[row].abs().max()) < 2 / 6.9
        else:
            torch.testing.assert_close(together[row], alone, atol=1e-5, rtol=1e-5)


def test_tiles_have_draws_of_their_own():
    x_RD = normal(1, 40_000).repeat(27, 1)  # the last row is alone in the second tile
    decoded = passed(parse_activations("int4(rounding=random)"), x_RD)
    assert not torch.equal(decoded[0], decoded[26])


@pytest.mark.parametrize("spec", SPECS)
def test_any_layout_and_type_of_float_is_encoded(spec):
    codec, x_RD = parse_activations(spec), normal(6, 48)
    expected = codec.encode(x_RD)
    assert torch.equal(codec.encode(x_RD.T.contiguous().T), expected)
    assert torch.equal(codec.encode(torch.cat([x_RD, x_RD], 1)[:, :48]), expected)
    assert torch.equal(codec.encode(x_RD.requires_grad_()), expected)
    half = x_RD.detach().to(torch.bfloat16)
    assert torch.equal(codec.encode(half), codec.encode(half.to(torch.float32)))


@pytest.mark.parametrize("spec", SPECS)
def test_a_frame_is_read_from_any_kind_of_bytes(spec):
    codec, x_RD = parse_activations(spec), normal(3, 48)
    frame = codec.encode(x_RD)
    expected, raw = codec.decode(frame, 3, 48), frame.numpy().tobytes()
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), frame])[3:]
    behind_a_header = memoryview(bytearray(b"abc" + raw))[3:]
    at_five = torch.frombuffer(bytearray(bytes(8) + raw), dtype=torch.uint8, offset=5)
    for same in (raw, bytearray(raw), memoryview(raw), behind_a_header, shifted, at_five[3:]):
        assert torch.equal(codec.decode(same, 3, 48), expected)


@pytest.mark.parametrize("spec", SPECS)
def test_threads_do_not_share_scratch(spec):
    codec = parse_activations(spec)
    inputs = [normal(40, 300, seed=seed) for seed in range(4)] * 3
    alone = [passed(codec, x_RD) for x_RD in inputs]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda x_RD: passed(codec, x_RD), inputs))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("spec", SPECS)
def test_autograd_takes_what_a_thread_without_gradients_decoded(spec):
    codec, x_RD = parse_activations(spec), normal(6, 41)

    @torch.inference_mode()
    def in_background():
        return passed(codec, x_RD), codec.basis(41) if spec.startswith("subspace") else x_RD

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        decoded, factor = pool.submit(in_background).result()
    (decoded.requires_grad_().T @ factor[:6]).sum().backward()
    assert torch.equal(decoded.detach(), passed(codec, x_RD))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS)
def test_the_first_row_that_is_not_finite_is_named(spec, dtype, bad):
    x_RD = normal(6, 48).to(dtype)
    x_RD[2, 47] = bad
    x_RD[4, 0] = bad
    with pytest.raises(NotFiniteError, match="row 2 of 6; leave this batch out"):
        parse_activations(spec).encode(x_RD)


def test_a_scale_whose_sums_of_coordinates_overflow_is_refused():
    codec = Subspace(k=1_024, seed=5)
    frame = codec.encode(torch.ones(1, 1_024))
    frame[:2].view(torch.bfloat16).fill_(2e36)
    frame[2:].view(torch.int8).copy_(127 * codec.basis(1_024)[0].sign())
    with pytest.raises(CodecError, match="scales of at most"):
        codec.decode(frame, 1, 1_024)


def test_coordinates_beyond_the_largest_scale_become_the_largest():
    x_RD = torch.zeros(1, 64)
    x_RD[0, 3] = 3e38
    decoded = passed(Subspace(k=64), x_RD)
    assert 1e36 < float(decoded[0, 3]) < 3e38


@pytest.mark.parametrize("noise", [0.5, -0.5])
@pytest.mark.parametrize("size", [1.0, 3.4e38])
def test_no_draw_goes_round_from_the_largest_code_to_the_least(monkeypatch, size, noise):
    monkeypatch.setattr(activations, "add_noise_", lambda x_TD, seed: x_TD.add_(noise))
    x_RD = torch.tensor([[size, -size]])
    ratio_RD = passed(parse_activations("int4(rounding=random)"), x_RD) / x_RD
    assert bool(((ratio_RD > 0.7) & (ratio_RD < 1.1)).all())


def test_coordinates_that_overflow_are_refused():
    with pytest.raises(NotFiniteError, match="overflow in row 1 of 2"):
        Subspace(k=64).encode(torch.tensor([[1.0], [3e38]]).expand(2, 64))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("x", [torch.ones(8), torch.ones(2, 2, 8), torch.ones(2, 8).int()])
def test_what_is_no_matrix_of_floats_is_refused(spec, x):
    with pytest.raises(CodecError, match="floating-point matrix"):
        parse_activations(spec).encode(x)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", [(0, 8), (-1, 8), (3, 0), (3, -8), (1, MAX_WIDTH + 1)])
def test_a_shape_out_of_range_is_refused(spec, shape):
    codec = parse_activations(spec)
    with pytest.raises(CodecError, match="at least 1 row and a width of 1 to 65536"):
        codec.decode(b"", *shape)
    if min(shape) >= 0:
        with pytest.raises(CodecError, match="at least 1 row"):
            codec.encode(torch.ones(shape))


def test_a_width_below_the_directions_is_refused():
    codec = parse_activations("subspace(k=9)")
    for refused in (
        lambda: codec.frame_bytes(2, 8),
        lambda: codec.encode(normal(2, 8)),
        lambda: codec.basis(8),
    ):
        with pytest.raises(CodecError, match="width of at least 9, got 8; choose a smaller k"):
            refused()


@pytest.mark.parametrize("spec", SPECS)
def test_a_frame_of_another_length_is_refused(spec):
    codec = parse_activations(spec)
    frame = codec.encode(normal(3, 48))
    raw = frame.numpy().tobytes()
    for wrong in (b"", raw[:-1], raw + b"\0", frame[1:], bytearray(), memoryview(raw)[:9]):
        with pytest.raises(CodecError, match=rf"expected {len(raw)} bytes of .* for \(3, 48\)"):
            codec.decode(wrong, 3, 48)
    with pytest.raises(CodecError, match="expected a uint8 vector"):
        codec.decode(frame.view(torch.int8), 3, 48)


@pytest.mark.parametrize("spec", SPECS)
def test_a_short_frame_of_a_huge_shape_allocates_nothing(spec):
    with pytest.raises(CodecError, match="bytes of"):
        parse_activations(spec).decode(bytes(1_000), 10**15, 4_096)


@pytest.mark.parametrize("spec", SCALED)
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf"), 3e38, -3e38])
def test_a_scale_that_is_not_finite_or_overflows_is_refused(spec, scale):
    codec = parse_activations(spec)
    frame = codec.encode(normal(3, 48))
    frame[2:4].view(torch.bfloat16).fill_(scale)
    with pytest.raises(CodecError, match="scales of at most"):
        codec.decode(frame, 3, 48)


@pytest.mark.parametrize("spec", ["fp32", "bf16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_refused(spec, value):
    codec = parse_activations(spec)
    frame = codec.encode(normal(3, 48))
    frame[-4:].view(codec.dtype)[-1] = value
    with pytest.raises(CodecError, match="values"):
        codec.decode(frame, 3, 48)


@pytest.mark.parametrize("spec", SPECS)
@hypothesis.settings(max_examples=40)
@hypothesis.given(data=st.data())
def test_rubbish_is_refused_or_finite(spec, data):
    codec, rows, width = parse_activations(spec), 3, data.draw(st.integers(3, 40))
    length = codec.frame_bytes(rows, width)
    frame = data.draw(st.binary(min_size=length, max_size=length))
    try:
        decoded = codec.decode(frame, rows, width)
    except CodecError:
        return
    assert bool(decoded.isfinite().all())


@pytest.mark.parametrize("spec", SPECS)
def test_an_accelerator_encodes_and_decodes_with_two_copies(spec):
    codec, x_RD = parse_activations(spec), normal(6, 48)
    frame = codec.encode(x_RD, seed=3)
    with Accelerator() as accelerator:
        assert torch.equal(codec.encode(x_RD.to(DEVICE), seed=3), frame)
        assert accelerator.copies == [6, frame.numel()]  # peaks, then the frame
        decoded = codec.decode(frame, 6, 48, device=DEVICE).cpu()
    assert torch.equal(decoded, codec.decode(frame, 6, 48))


@pytest.mark.cuda
@pytest.mark.parametrize("spec", SPECS)
def test_a_gpu_decodes_as_the_cpu_does(spec):
    codec, x_RD = parse_activations(spec), normal(300, 384)
    frame = codec.encode(x_RD.cuda(), seed=3)
    here, there = codec.decode(frame, 300, 384), codec.decode(frame, 300, 384, device="cuda")
    torch.testing.assert_close(there.cpu(), here, atol=1e-5 if "subspace" in spec else 0, rtol=0)
    torch.testing.assert_close(here, passed(codec, x_RD, seed=3), atol=0.2, rtol=0.3)
