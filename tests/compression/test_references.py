"""Each codec against its paper or the library that people use."""

import hashlib
import itertools
import math
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks

from atoll.compression import Option, parse, plan
from atoll.compression.dct import (
    columns,
    cosine_basis,
    integer_basis,
    rows_of_all,
    rows_of_few,
    transform,
)
from atoll.compression.int8_dynamic import code_table
from support.powersgd_reference import PowerSGDReference

BASIS_SHA256 = "daa428273f2adf3227f41bdbcb2cdbf8f309f042911610e8c8651073a085d4ee"
SHAPES = [(64, 32), (32,), (64, 32), (48, 8, 3), (10, 10), (128, 64)]


class Bucket:
    """What the hook asks of a DDP bucket."""

    def __init__(self, grads):
        self.flat = torch.cat([grad.reshape(-1) for grad in grads])
        self.shapes = [grad.shape for grad in grads]

    def buffer(self):
        return self.flat

    def gradients(self):
        parts = self.flat.split([math.prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def index(self):
        return 0

    def is_last(self):
        return True


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_powersgd_reference_has_the_bits_of_pytorchs_hook(rank, group):
    state = hooks.PowerSGDState(
        group, matrix_approximation_rank=rank, start_powerSGD_iter=2, random_seed=3
    )
    state.iter = 2
    numbers = np.random.RandomState(3)
    ours = PowerSGDReference(rank, lambda: int(numbers.randint(1_000_000_000)))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(10):
        grads = [torch.randn(shape, generator=generator) for shape in SHAPES]
        bucket = Bucket(grads)
        hooks.powerSGD_hook(state, bucket).wait()
        for expected, got in zip(bucket.gradients(), ours.step([grads]), strict=True):
            assert torch.equal(got, expected)


def test_powersgd_recovers_a_low_rank_matrix():
    x = torch.randn(96, 3) @ torch.randn(3, 200)
    codec = parse("powersgd(rank=3)")
    decoded = codec.decode(codec.encode(x), x.shape)
    assert torch.allclose(decoded, x, rtol=1e-3, atol=1e-4)


def test_dynamic_table_is_the_published_one():
    """The construction of bitsandbytes' create_dynamic_map(signed=True, 7, 8), in its order."""
    data = []
    for i in range(7):
        boundaries = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float64)
        means = (boundaries[:-1] + boundaries[1:]) / 2.0
        data += (10.0 ** (i - 6) * means).tolist()
        data += (-(10.0 ** (i - 6)) * means).tolist()
    expected = torch.tensor(sorted([*data, 0, 1.0]))
    table = torch.tensor(code_table())
    assert len(table) == 256
    assert torch.allclose(table, expected, rtol=3e-7, atol=0)
    assert code_table()[127] == 0.0
    assert code_table()[255] == 1.0
    # first, median and last magnitudes as published (arXiv:2110.02861, figure of the data type)
    assert code_table()[128] == pytest.approx(5.5e-7)
    assert code_table()[254] == pytest.approx(0.99296875)


def test_dynamic_code_is_nearest_but_for_the_middle():
    table = torch.tensor(code_table(), dtype=torch.float64)
    x = torch.randn(256) * 10.0 ** (-6 * torch.rand(256))
    x[0] = x.abs().max() * 1.1
    codec = parse("int8-dynamic")
    frame = codec.encode(x)
    decoded = codec.decode(frame, 256).double()
    scale = float(torch.frombuffer(bytearray(frame[8:10]), dtype=torch.bfloat16))
    nearest = (table.unsqueeze(0) * scale - x.double().unsqueeze(1)).abs().min(1).values
    assert bool(((decoded - x.double()).abs() <= nearest + 2**-10 * x.abs() + 1e-7 * scale).all())


def test_dct_is_orthonormal():
    basis = cosine_basis()
    assert torch.allclose(basis @ basis.T, torch.eye(64, dtype=torch.float64), atol=1e-13)
    x = torch.randn(3, 64, 64)
    assert float(transform(x, torch.ones(())).norm()) == pytest.approx(float(x.norm()), rel=1e-5)


def test_inverse_dct_is_exact_in_any_order():
    """Fast path = plain sums of Python integers, for the largest codes and random ones."""
    basis = integer_basis(torch.device("cpu"))
    whole = [[int(value) for value in row] for row in basis.tolist()]
    worst = max(sum(abs(row[n]) for row in whole) for n in range(64))
    assert 128 * worst * worst < 2**53
    generator = torch.Generator().manual_seed(0)
    at = torch.randperm(4_096, generator=generator)[:40].sort().values.unsqueeze(0)
    code = torch.randint(-128, 128, (1, 40), generator=generator).double()
    got = columns(rows_of_few(at, code))[0].clone()
    for i, j in itertools.product((0, 1, 31, 32, 63), repeat=2):
        terms = zip(at[0].tolist(), code[0].tolist(), strict=True)
        exact = sum(int(c) * whole[a // 64][i] * whole[a % 64][j] for a, c in terms)
        assert int(got[i, j]) == exact
    order = torch.randperm(40, generator=generator)
    assert torch.equal(columns(rows_of_few(at[:, order], code[:, order]))[0], got)
    dense = torch.zeros(1, 64 * 64, dtype=torch.float64).scatter_(1, at, code)
    assert torch.equal(columns(rows_of_all(dense.view(1, 64, 64)))[0], got)


def test_integer_basis_is_pinned():
    """Computed on each machine, so no entry may be near the middle of two integers."""
    exact = cosine_basis() * 2**20
    assert float((exact - exact.floor() - 0.5).abs().min()) > 1e-6
    raw = integer_basis(torch.device("cpu")).to(torch.int32).numpy().astype("<i4").tobytes()
    assert hashlib.sha256(raw).hexdigest() == BASIS_SHA256


def test_inverse_dct_undoes_the_transform():
    x = torch.randn(2, 64, 64)
    codec = parse("dct(k=4096)")
    decoded = codec.decode(codec.encode(x.view(128, 64)), (128, 64))
    assert float((decoded - x.view(128, 64)).norm() / x.norm()) < 0.02


@pytest.mark.parametrize(
    "shape", [(), (1,), (3,), (100,), (50_257,), (50_257, 8), (32_003, 3), (7, 5, 3), (3, 64, 5, 5)]
)
def test_dct_costs_less_than_dense_for_any_shape(shape):
    dense = parse("fp32").wire_bytes(shape)
    assert parse("dct").wire_bytes(shape) < dense
    if math.prod(shape) > 1_000:
        assert 8 * parse("dct").wire_bytes(shape) < 0.3 * math.prod(shape)


@pytest.mark.parametrize("seed", range(20))
def test_plan_equals_brute_force(seed):
    rng = random.Random(seed)
    layers = [
        [Option(size=rng.randint(1, 60), error=rng.random()) for _ in range(rng.randint(1, 4))]
        for _ in range(6)
    ]
    every = [
        (sum(o.size for o in pick), sum(o.error for o in pick))
        for pick in itertools.product(*layers)
    ]
    max_size = sorted(size for size, _ in every)[len(every) // 3]
    choice = [layers[i][j] for i, j in enumerate(plan(layers, max_size=max_size))]
    assert sum(o.size for o in choice) <= max_size
    least = min(error for size, error in every if size <= max_size)
    assert sum(o.error for o in choice) == pytest.approx(least, abs=1e-12)
    max_error = sorted(error for _, error in every)[len(every) // 3] + 1e-12
    choice = [layers[i][j] for i, j in enumerate(plan(layers, max_error=max_error))]
    assert sum(o.size for o in choice) == min(s for s, error in every if error <= max_error)


def test_lgreco_spends_its_bits_where_they_save_most():
    x = torch.randn(16, 4_096) * torch.tensor([1.0, 100.0]).repeat(8).unsqueeze(1)
    mixed, even = parse("lgreco(bits=4.3)"), parse("int4")
    errors = [float((c.decode(c.encode(x), x.shape) - x).norm() / x.norm()) for c in (mixed, even)]
    assert mixed.wire_bytes(x.shape) <= even.wire_bytes(x.shape) * 1.02
    assert errors[0] < 0.7 * errors[1]


@pytest.mark.parametrize(
    ("spec", "bits", "source"),
    [
        ("int8", 8.13, "8 and scales"),
        ("int4", 4.26, "SDP4Bit: 4 and group scales"),
        ("nf4", 4.26, "QLoRA: 4 and block scales"),
        ("fp4", 4.26, "Streaming DiLoCo: 4"),
        ("2bit", 2.02, "MuLoCo: 2"),
        ("ternary", 1.61, "TernGrad: log2(3) = 1.58"),
        ("sign", 1.02, "Distributed Lion: 1"),
        ("topk(k=64)+2bit", 0.222, "SparseLoCo: 14 bits of 1.56% = 0.219"),
        ("dct(k=32)", 0.165, "DeMo k=32 of 4,096: 0.156 and scales"),
        ("dct(k=8, bits=1)", 0.032, "psyche k=8, one bit: 0.025 and scales"),
    ],
)
def test_bits_per_number(spec, bits, source):
    """Checksums, versions, scales and codebooks counted, in a cell of 65,536 values."""
    assert 8 * parse(spec).wire_bytes(65_536) / 65_536 <= bits, source


def test_errors_on_heavy_tails():
    x = torch.distributions.StudentT(3.0).sample((1 << 20,))

    def error(spec):
        codec = parse(spec)
        return float((codec.decode(codec.encode(x), x.shape) - x).norm() / x.norm())

    assert error("int8") <= 0.018
    assert error("int8-uniform") > 0.05  # the published scheme, and why it is not the default
    assert error("nf4") < error("fp4") < error("int4")
