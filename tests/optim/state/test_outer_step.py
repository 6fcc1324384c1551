import hashlib
from functools import partial

import pytest
import torch
from torch import Tensor

from atoll.optim import Layout, OuterState, StateError, nesterov
from atoll.optim.state import fragments, outer_step
from atoll.optim.state.fragments import strided
from atoll.optim.state.outer_step import (
    ADAMW_SUMS,
    adamw,
    clipped,
    descend,
    exact_norm,
    gossip,
    heavy_ball,
    to_fp32,
)

N = 150_001  # three cells, the last one short; an odd number for the vector kernels' tails
EXPECTED = "50045ae3a36bce9dae989b4c36aad612b1a18981fe8b37800d4a288fcb6a292d"


def hashed(num: int, seed: int) -> Tensor:
    """fp32 numbers in (-1, 1) times powers of two from 2^-24 to 2^7, from integers alone."""
    x = torch.arange(num, dtype=torch.int64) + seed * 0x9E3779B1
    for _ in range(3):
        x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
    mantissa = (x & 0xFFFFFF).to(torch.float32) * to_fp32(2.0**-24)
    sign = torch.where((x >> 24) & 1 == 1, 1.0, -1.0)
    scale = torch.tensor([2.0**-k for k in range(24, -8, -1)])[(x >> 25) & 31]
    return mantissa * sign * scale


def states(positions: int) -> list[OuterState]:
    layout = Layout(names=("w",), shapes=((N,),))
    run = [OuterState.genesis(layout, hashed(N, 1_000))]
    for position in range(positions):
        run.append(nesterov(run[-1], hashed(N, position), lr=0.7, momentum=0.9))
    return run


def test_twenty_positions_have_the_checked_in_digest():
    digest = hashlib.sha256()
    for state in states(20):
        digest.update(state.root())
    assert digest.hexdigest() == EXPECTED


def test_apply_is_torch_sgd_nesterov_within_rounding():
    param = torch.nn.Parameter(hashed(N, 1_000))
    sgd = torch.optim.SGD([param], lr=0.7, momentum=0.9, nesterov=True)
    for position in range(5):
        param.grad = hashed(N, position)
        sgd.step()
    torch.testing.assert_close(states(5)[-1].params_N, param.data, rtol=1e-5, atol=1e-4)


def test_lr_one_without_momentum_subtracts_the_update_exactly():
    layout = Layout(names=("w",), shapes=((N,),))
    state = OuterState.genesis(layout, hashed(N, 1))
    new = nesterov(state, hashed(N, 2), lr=1.0, momentum=0.0)
    assert torch.equal(new.params_N, hashed(N, 1) - hashed(N, 2))


def test_denormal_numbers_survive():
    layout = Layout(names=("w",), shapes=((8,),))
    tiny = torch.full((8,), 1e-41)
    new = nesterov(OuterState.genesis(layout, torch.zeros(8)), tiny, lr=1.0, momentum=0.0)
    assert torch.equal(new.params_N, -tiny)
    assert new.params_N[0] != 0


def test_apply_leaves_the_old_state_as_it_was():
    layout = Layout(names=("w",), shapes=((N,),))
    state = OuterState.genesis(layout, hashed(N, 1))
    root = state.root()
    new = nesterov(state, hashed(N, 2), lr=0.5, momentum=0.5)
    assert (state.position, new.position) == (0, 1)
    assert state.at(0).root() == root
    assert new.root() != root


@pytest.mark.parametrize("gives_way", [False, True])
def test_any_number_of_threads_gives_the_same_bits(monkeypatch, gives_way):
    monkeypatch.setattr(fragments, "RUN", 10_000)  # of which each thread takes several
    threads = torch.get_num_threads()
    try:
        roots = set()
        for count in (1, 2, 16):
            torch.set_num_threads(count)
            state = states(3)[-1]
            if gives_way:
                assert state.give_way(params=False)
            roots.add(nesterov(state, hashed(N, 3), lr=0.7, momentum=0.9).root())
    finally:
        torch.set_num_threads(threads)
    assert len(roots) == 1


@pytest.mark.parametrize("lr", [float("nan"), float("inf"), 1e39])
def test_a_scalar_that_is_not_finite_in_fp32_is_refused(lr):
    state = OuterState.genesis(Layout(names=("w",), shapes=((4,),)), torch.zeros(4))
    with pytest.raises(StateError):
        nesterov(state, torch.zeros(4), lr=lr, momentum=0.0)


@pytest.mark.parametrize("update", [torch.zeros(3), torch.zeros(4, dtype=torch.float64)])
def test_an_update_of_another_shape_or_dtype_is_refused(update):
    state = OuterState.genesis(Layout(names=("w",), shapes=((4,),)), torch.zeros(4))
    with pytest.raises(StateError):
        nesterov(state, update, lr=0.7, momentum=0.9)


def moved(rule, positions: int = 20, values: int = N) -> str:
    """Digest of the roots after each of several steps of a rule."""
    digest = hashlib.sha256()
    state = OuterState.genesis(Layout(names=("w",), shapes=((N,),)), hashed(N, 1_000))
    for position in range(positions):
        state = rule(state, hashed(values, position))
        digest.update(state.root())
    return digest.hexdigest()


@pytest.mark.parametrize(
    ("name", "rule", "values", "expected"),
    [
        (
            "co2",
            partial(heavy_ball, lr=0.9, momentum=0.5, scale=0.3, clip=1.5),
            N,
            "03445594a0cb068fcb600b07728d3f5ce742ddc86c31bb2697015a6210b400fc",
        ),
        (
            "sparseloco",
            partial(descend, lr=0.65),
            N,
            "05dedc83966eae14b8ab335831b41a66ec092e42bbac155adac0cb2f964d2dc5",
        ),
        (
            "demo",
            partial(descend, lr=1e-3, decay=0.1, signed=True),
            N,
            "3785fe3910d453505bdb7c60378b869d7a31c37a2dcbe347bed1cb24af8ad4ca",
        ),
        (
            "noloco",
            partial(gossip, lr=0.7, momentum=0.5, pull=0.7),
            2 * N,
            "143dc31e9d0c28990a637b014552b10904abcf0c6a9d0b96cfbebf059c43ed2f",
        ),
    ],
)
def test_every_rule_has_its_checked_in_digest(name, rule, values, expected):
    assert moved(rule, values=values) == expected


ADAMW_LAYOUT = Layout(names=("w", "b"), shapes=((300, 500), (1,)))  # the vector does not decay
ADAMW = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "decay": 0.1}
ADAMW_EXPECTED = "62287be4dc900f2704ce5e89a62c8ae784a65f02c29d08b0669aa2b80c59958d"


def adamw_states(positions: int, **options: float) -> list[OuterState]:
    memory_M = torch.zeros(2 * N + ADAMW_SUMS)
    run = [OuterState.genesis(ADAMW_LAYOUT, hashed(N, 1_000), memory_M)]
    for position in range(positions):
        run.append(adamw(run[-1], hashed(N, position), **(ADAMW | options)))
    return run


def test_twenty_steps_of_adamw_have_the_checked_in_digest():
    digest = hashlib.sha256()
    for state in adamw_states(20):
        digest.update(state.root())
    assert digest.hexdigest() == ADAMW_EXPECTED


def test_square_roots_are_correctly_rounded_on_every_processor():
    """torch.sqrt is an ulp off for some values where MKL takes AVX-512."""
    values = hashed(1_000_000, 7).abs()
    exact = torch.sqrt(values.double()).float()  # 53 bits are more than twice 24: rounds once
    assert torch.equal(outer_step._sqrt(values), exact)


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_adamw_is_torchs_within_rounding(beta2):
    params = [torch.nn.Parameter(p.clone()) for p in ADAMW_LAYOUT.split(hashed(N, 1_000))]
    groups = [
        {"params": params[:1], "weight_decay": ADAMW["decay"]},
        {"params": params[1:], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, beta2), eps=1e-8)
    ours = adamw_states(20, beta2=beta2)
    for position in range(20):
        for param, grad in zip(params, ADAMW_LAYOUT.split(hashed(N, position)), strict=True):
            param.grad = grad
        theirs.step()
        flat = torch.cat([p.detach().flatten() for p in params])
        moved = (flat - ours[position].params_N).abs().max()
        torch.testing.assert_close(ours[position + 1].params_N, flat, rtol=1e-6, atol=1e-6)
        assert moved > 1e-3


def test_bias_corrections_are_one_less_the_powers_of_the_betas():
    sums = adamw_states(20, beta2=0.999)[-1].memory_M[-ADAMW_SUMS:].double()
    expected = torch.tensor([1 - 0.9**20, 1 - 0.999**20], dtype=torch.float64)
    torch.testing.assert_close(sums, expected, rtol=1e-6, atol=0.0)


def test_adamw_keeps_what_comes_after_its_moments():
    """The factors of PowerSGD lie there."""
    warm_K = hashed(7, 1)
    memory_M = torch.cat([torch.zeros(2 * N + ADAMW_SUMS), warm_K])
    state = OuterState.genesis(ADAMW_LAYOUT, hashed(N, 1_000), memory_M)
    after = adamw(state, hashed(N, 2), **ADAMW)
    assert torch.equal(after.memory_M[-7:], warm_K)
    assert after.memory_M[: 2 * N].all()


def test_exact_norm_is_the_norm():
    for seed, size in ((1, 1.0), (2, 1e30), (3, 1e-40)):
        x = hashed(N, seed) * size
        assert exact_norm(x) == pytest.approx(float(x.double().norm()), rel=1e-5)
    assert exact_norm(torch.zeros(3)) == 0.0


def test_exact_norm_has_the_same_bits_in_any_order():
    x = hashed(N, 5)
    orders = [torch.randperm(N, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    assert len({exact_norm(x[order]) for order in orders} | {exact_norm(x)}) == 1


def test_an_update_is_clipped_to_its_norm_and_no_further():
    x = hashed(N, 6)
    norm = float(x.double().norm())
    assert float(clipped(x, norm / 2).double().norm()) == pytest.approx(norm / 2, rel=1e-5)
    assert torch.equal(clipped(x, norm * 1.01), x)


def test_rules_without_a_second_moment_keep_the_bits_of_what_else_is_there():
    memory_M = hashed(N + 7, 3)
    layout = Layout(names=("w",), shapes=((N,),))
    state = OuterState.genesis(layout, hashed(N, 1), memory_M)
    new = nesterov(state, hashed(N, 2), lr=0.7, momentum=0.9)
    assert torch.equal(new.memory_M[N:], memory_M[N:])
    assert not torch.equal(new.momentum_N, state.momentum_N)


def test_descent_keeps_the_memory_without_a_copy():
    layout = Layout(names=("w",), shapes=((N,),))
    state = OuterState.genesis(layout, hashed(N, 1), hashed(N + 7, 3))
    new = descend(state, hashed(N, 2), lr=0.5)
    assert torch.equal(new.params_N, hashed(N, 1) - hashed(N, 2) * 0.5)
    assert new.memory_M.data_ptr() == state.memory_M.data_ptr()
    assert torch.equal(state.memory_M, hashed(N + 7, 3))


def test_a_fragment_moves_alone_and_in_the_bits_of_the_whole():
    layout = Layout(names=("blocks.0.w", "blocks.1.w"), shapes=((N // 2,), (N - N // 2,)))
    state = OuterState.genesis(layout, hashed(N, 1_000))
    whole = nesterov(state, hashed(N, 1), lr=0.7, momentum=0.9)
    first, second = strided(layout, 2)
    half = nesterov(state, first.take(hashed(N, 1)), lr=0.7, momentum=0.9, fragment=first)
    assert torch.equal(first.take(half.params_N), first.take(whole.params_N))
    assert torch.equal(second.take(half.params_N), second.take(state.params_N))
    both = nesterov(half, second.take(hashed(N, 1)), lr=0.7, momentum=0.9, fragment=second)
    assert both.root() == whole.root()
    assert both.position == 2


def test_exact_norm_of_many_equal_values_does_not_overflow():
    assert exact_norm(torch.ones(1 << 20)) == 1024.0  # squares of 2^44 each, 2^64 together
