"""Kernels of codecs on a GPU against the torch operations of the CPU."""

import pytest
import torch

from atoll.compression import CodecError, parse
from atoll.compression.kernels import fused
from atoll.compression.scratch import TILE

pytestmark = pytest.mark.cuda

N = 3 * TILE + 1000  # whole tiles, and a rest that the kernels do not take
SAME_FRAMES = ("bf16", "int8", "int8(block=32)", "int4", "int4(block=512)", "fp4")
SAME_ERROR = ("fp16", "sign", "2bit", "2bit(block=1024)")  # they add up, or measure otherwise


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Fail here, and not by slow tests that pass, where a GPU has no kernels."""
    assert fused.kernels(torch.device("cuda", 0)) is not None


def values(kind):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, generator=generator) * 1e-3
    match kind:
        case "zeros":
            x[: N // 2], x[1] = 0.0, -0.0
        case "wide":
            x *= torch.exp(8 * torch.randn(N, generator=generator))
        case "tiny":
            x *= 1e-36
        case "huge":
            x *= 1e38
        case "same":
            x.fill_(0.125)
    return x


@pytest.mark.parametrize("kind", ["plain", "zeros", "wide", "tiny", "huge", "same"])
@pytest.mark.parametrize("spec", [*SAME_FRAMES, *SAME_ERROR])
def test_a_frame_of_the_gpu_is_the_cpus_or_loses_no_more(spec, kind):
    x, codec = values(kind), parse(spec)
    here, there = codec.encode(x), codec.encode(x.cuda())
    decoded = codec.decode(there, N)
    on_gpu = codec.decode(there, N, device="cuda").cpu()
    assert torch.equal(decoded.view(torch.int32), on_gpu.view(torch.int32))
    if spec in SAME_FRAMES:
        assert here == there
    lost = [(codec.decode(frame, N) - x).double().norm() for frame in (here, there)]
    assert lost[1] <= 1.01 * lost[0]


@pytest.mark.parametrize("at", [0, TILE + 5, N - 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("spec", [*SAME_FRAMES, *SAME_ERROR])
def test_a_value_that_is_not_finite_is_refused_wherever_it_is(spec, value, at):
    x = values("plain")
    x[at] = value
    with pytest.raises(CodecError, match="finite"):
        parse(spec).encode(x.cuda())


@pytest.mark.parametrize("spec", ["fp16", "bf16"])
def test_a_gpu_refuses_a_frame_that_decodes_to_no_number(spec):
    codec = parse(spec)
    frame = bytearray(codec.encode(values("plain")))
    frame[-2:] = b"\xff\x7f"  # NaN in either format
    payload = torch.frombuffer(frame, dtype=torch.uint8)[8:].clone().cuda()
    with pytest.raises(CodecError, match="values"):
        codec._read(payload, (N,), torch.empty(N, device="cuda"))


def test_blocks_that_no_kernel_takes_are_encoded_by_operations():
    codec = parse("int8(block=8192)")
    x = values("plain")
    assert codec.encode(x.cuda()) == codec.encode(x)
