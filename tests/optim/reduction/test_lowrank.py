"""Reduction by factors in one process; `test_ddp` compares it with PyTorch's hook."""

import pytest
import torch

from atoll.compression.powersgd import orthonormal
from atoll.optim.inprocess.rounds import InProcessGroup, LowRankReduction
from atoll.optim.log.replay import Replay
from atoll.optim.methods import parse
from atoll.optim.reducer import Contribution
from atoll.optim.reduction.lowrank import cold, rank_of, warm_numel
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import StateError
from support.powersgd_reference import PowerSGDReference
from support.toys import Team, net

LAYOUT = Layout(names=("w", "b", "v"), shapes=((40, 60), (7,), (30, 20)))
EXACT = "powersgd(rank=2)"


def contribution(delta_N, tokens=8):
    return Contribution(window=0, delta=delta_N, tokens=tokens, steps=1, loss=1.0)


def reduction_of(spec, size):
    method = parse(spec)
    return method, LowRankReduction(method, LAYOUT, method.fragments(LAYOUT)[0], size)


def noise(seed, numel=LAYOUT.numel):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def of_rank_two(seed):
    pieces = []
    for index, shape in enumerate(LAYOUT.shapes):
        draw = noise(100 * seed + index, 2 * sum(shape))
        if len(shape) == 2:
            left, right = draw[: 2 * shape[0]].view(-1, 2), draw[2 * shape[0] :].view(2, -1)
            pieces.append((left @ right).flatten())
        else:
            pieces.append(draw[: shape[0]])
    return torch.cat(pieces)


def test_what_shrinks_by_less_than_half_is_sent_whole():
    """As in PyTorch's hook: (rows + columns) rank 2 < rows columns."""
    assert [rank_of((12, 12), rank) for rank in (1, 2, 3, 4)] == [1, 2, 0, 0]
    assert rank_of((12, 2, 6), 2) == 2
    assert rank_of((144,), 1) == 0


def test_a_round_of_zeros_keeps_the_factors_warm():
    """A Q of zeros would have no direction to begin the next round from."""
    method, reduction = reduction_of(f"ddp(codec={EXACT})", 1)
    state = method.genesis(LAYOUT, torch.zeros(LAYOUT.numel))
    given = [contribution(torch.zeros(LAYOUT.numel))]
    reduced = reduction.reduce(given, reduction.weights(given), state)
    after = state.next_blank()
    reduction.cells.keep_warm(state, after, reduced.body)
    assert not reduced.update_F.any()
    for old, new in zip(reduction.cells.warm(state), reduction.cells.warm(after), strict=True):
        assert torch.equal(new, old) and bool(old.any())


def test_a_mean_of_the_factors_rank_is_exact_in_the_first_round():
    method, reduction = reduction_of(f"ddp(codec={EXACT})", 2)
    state = method.genesis(LAYOUT, torch.zeros(LAYOUT.numel))
    mean_N = of_rank_two(1)
    contributions = [contribution(mean_N * share) for share in (0.5, 1.5)]
    reduced = reduction.reduce(contributions, reduction.weights(contributions), state)
    torch.testing.assert_close(reduced.update_F, mean_N, rtol=1e-3, atol=1e-4)
    sent = 4 * (2 * (40 + 60) + 2 * (30 + 20) + 7)
    assert sent < reduced.body_bytes < sent + 400


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("workers", [1, 3])
def test_updates_equal_the_hooks_reference_to_rounding(rank, workers):
    layout = Layout(names=("w",), shapes=((48, 32),))
    method = parse(f"ddp(codec=powersgd(rank={rank}))")
    reduction = LowRankReduction(method, layout, method.fragments(layout)[0], workers)
    reference = PowerSGDReference(rank, lambda: 5)
    state = method.genesis(layout, torch.zeros(layout.numel))
    for step in range(10):
        grads = [noise(10 * step + worker, layout.numel) for worker in range(workers)]
        if step == 0:
            reference.qs = [orthonormal(q).unsqueeze(0) for q in reduction.cells.warm(state)]
        expected = reference.step([[grad.view(48, 32).clone()] for grad in grads])[0]
        contributions = [contribution(grad) for grad in grads]
        reduced = reduction.reduce(contributions, reduction.weights(contributions), state)
        torch.testing.assert_close(reduced.update_F.view(48, 32), expected, rtol=1e-3, atol=1e-4)
        after = state.next_blank()
        reduction.cells.keep_warm(state, after, reduced.body)
        state = after


def test_what_factors_lose_comes_back():
    """Errors add up to all that was given and not applied, and stay bounded."""
    method, reduction = reduction_of(f"diloco(codec={EXACT})", 2)
    group_N, state = noise(5), method.genesis(LAYOUT, torch.zeros(LAYOUT.numel))
    applied_N = torch.zeros(LAYOUT.numel)
    for _ in range(40):
        contributions = [contribution(group_N + noise(s) * 0.1) for s in (6, 7)]
        reduced = reduction.reduce(contributions, reduction.weights(contributions), state)
        after = state.next_blank()
        reduction.cells.keep_warm(state, after, reduced.body)
        applied_N, state = applied_N + reduced.update_F, after
    mean_N = group_N + (noise(6) + noise(7)) * 0.05
    left_N = sum(f.mass_N for f in reduction.feedback) / 16
    torch.testing.assert_close(applied_N + left_N, 40 * mean_N, rtol=1e-3, atol=1e-3)
    assert (applied_N / 40 - mean_N).norm() < 0.4 * mean_N.norm()


def test_a_rank_that_saves_nothing_is_no_compression():
    dense, whole = Team(2, "diloco(codec=fp32)", 3), Team(2, "diloco(codec=powersgd(rank=64))", 3)
    for team in (dense, whole):
        team.run(range(9))
    torch.testing.assert_close(dense.local(), whole.local(), rtol=1e-5, atol=1e-6)


def test_the_state_begins_with_a_q_for_each_matrix_that_has_factors():
    method = parse(f"ddp(codec={EXACT})")
    assert warm_numel(LAYOUT, 2) == 2 * (60 + 20)
    assert method.memory_numel(LAYOUT) == 2 * LAYOUT.numel + 2 + 160
    state = method.genesis(LAYOUT, torch.zeros(LAYOUT.numel))
    assert torch.equal(state.memory_M[-160:], cold(LAYOUT, 2))
    first, second = Replay(method, LAYOUT).cells_at(0).warm(state)
    assert (first.shape, second.shape) == ((60, 2), (20, 2))
    assert bool(first.any()) and bool(second.any())


def test_who_misses_a_round_keeps_its_error():
    def misses(position, index):
        return position == 1 and index == 1

    team = Team(2, f"ddp(codec={EXACT})", make=lambda: net(width=12), misses=misses)
    assert isinstance(team.group, InProcessGroup)
    team.run(range(1))
    (reduction,) = team.group._reductions
    before = [f.mass_N.clone() for f in reduction.feedback]
    assert all(bool(mass.any()) for mass in before)
    team.run(range(1, 2))
    assert not torch.equal(reduction.feedback[0].mass_N, before[0])
    assert torch.equal(reduction.feedback[1].mass_N, before[1])


@pytest.mark.parametrize("spec", ["streaming(count=1, codec=powersgd)", "sparseloco(merge=select)"])
def test_methods_that_cut_by_themselves_take_no_factors(spec):
    assert parse(spec).rank == 0
    assert parse(spec).reduction == "mean"


def test_qs_are_never_written_into_a_memory_that_two_states_share():
    method, reduction = reduction_of(f"diloco(codec={EXACT})", 1)
    state = method.genesis(LAYOUT, torch.zeros(LAYOUT.numel))
    with pytest.raises(StateError, match="memory of its own"):
        reduction.cells.put_warm(state, state.next_with_memory(), reduction.cells.warm(state))
