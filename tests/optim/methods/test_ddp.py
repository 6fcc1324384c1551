"""`ddp` against plain data parallel, and with PowerSGD against PyTorch's hook."""

import pytest
import torch

from atoll.compression.powersgd import orthonormal
from atoll.optim.inner import build
from atoll.optim.methods import MethodError, parse
from atoll.optim.state.layout import Layout
from support.powersgd_reference import PowerSGDReference, orthogonalize_
from support.toys import Team, adamw, backward, flat, net, sgd


def mean_gradients(model, seeds):
    """The gradients of several batches, averaged by PyTorch itself."""
    totals = [torch.zeros_like(p) for p in model.parameters()]
    for seed in seeds:
        backward(model, seed)
        for total, param in zip(totals, model.parameters(), strict=True):
            total += param.grad / len(seeds)
    return totals


def test_replicas_are_one_model_trained_on_all_batches():
    team = Team(3, "ddp", codec="fp32")
    team.run(range(6))
    plain = net()
    inner = build("adamw", plain, lr=1e-2)
    for step in range(6):
        grads = mean_gradients(plain, [100 * step + i for i in range(3)])
        for param, grad in zip(plain.parameters(), grads, strict=True):
            param.grad = grad
        inner.step()
    torch.testing.assert_close(team.local(), flat(plain), rtol=1e-5, atol=1e-6)
    moment_N = torch.cat([inner.state[p]["exp_avg_sq"].flatten() for p in plain.parameters()])
    numel = moment_N.numel()
    kept_N = team.group.state.memory_M[numel : 2 * numel]
    torch.testing.assert_close(kept_N, moment_N, rtol=1e-5, atol=1e-12)
    assert all(torch.equal(team.local(), team.local(i)) for i in (1, 2))


def test_mean_gradient_is_clipped_not_each_workers():
    team = Team(2, "ddp(codec=fp32, clip_norm=0.5)")
    team.run(range(1))
    grads = torch.cat([g.flatten() for g in mean_gradients(net(), [0, 1])])
    moment_N = team.group.state.momentum_N
    torch.testing.assert_close(moment_N, 0.1 * grads * (0.5 / grads.norm()), rtol=1e-5, atol=1e-9)
    assert grads.norm() > 0.5


def test_joiner_takes_the_moments_with_the_parameters():
    team = Team(3, "ddp", codec="fp32", present=2)
    team.run(range(3))
    team.join()
    team.run(range(3, 6))
    assert all(torch.equal(team.local(), team.local(i)) for i in (1, 2))


def test_only_the_rate_of_the_inner_optimizer_counts():
    one, other = (Team(2, "ddp", codec="fp32", inner=inner) for inner in (adamw, sgd))
    for team in (one, other):
        team.run(range(3))
    assert torch.equal(one.local(), other.local())


def test_stop_and_resume_gives_the_bits_of_not_stopping():
    straight, first, second = (Team(2, "ddp(codec=int8, feedback=1)") for _ in range(3))
    straight.run(range(6))
    first.run(range(3))
    second.load(first.save())
    second.run(range(3, 6))
    assert second.states() == straight.states()


@pytest.mark.parametrize(
    "option", ["beta1=1", "beta2=-0.1", "eps=0", "decay=-1", "clip_norm=-1", "beta1=nan"]
)
def test_options_out_of_range_are_refused(option):
    with pytest.raises(MethodError, match="expected"):
        parse(f"ddp({option})")


def test_powersgd_is_that_of_pytorchs_hook():
    """Three workers, ten steps: errors, warm Q and what is sent whole are those of the hook."""

    def wide():
        return net(width=12)

    team = Team(3, "ddp(codec=powersgd(rank=2))", make=wide)
    reference = PowerSGDReference(2, lambda: 0)
    cells = team.group._reductions[0].cells
    warm = [orthonormal(q) for q in cells.warm(team.group.state)]
    plain = wide()
    layout = Layout.of(plain)
    inner = build("adamw", plain, lr=1e-2)
    for step in range(10):
        workers = []
        for index in range(3):
            backward(plain, 100 * step + index)
            workers.append([p.grad.clone() for p in plain.parameters()])
        if step == 0:
            reference.step([[torch.zeros_like(g) for g in grads] for grads in workers])
            matrices = [dims for dims, rank in zip(layout.shapes, cells.ranks, strict=True) if rank]
            reference.qs = [q.unsqueeze(0) for q in _by_shape(matrices, warm)]
            reference.errors = []
        for param, grad in zip(plain.parameters(), reference.step(workers), strict=True):
            param.grad = grad.clone()
        inner.step()
        team.run(range(step, step + 1))
        torch.testing.assert_close(team.local(), flat(plain), rtol=1e-3, atol=1e-4)
    sent = team.group.statistics().body_bytes
    assert 0 < sent < 10 * 4 * flat(plain).numel()


def _by_shape(matrices, qs):
    """The hook's order: grouped by shape, first seen first."""
    groups = {}
    for dims, q in zip(matrices, qs, strict=True):
        groups.setdefault(dims, []).append(q)
    return [q for group in groups.values() for q in group]


def test_orthonormal_start_is_kept_by_the_reference():
    team = Team(1, "ddp(codec=powersgd(rank=2))", make=lambda: net(width=12))
    start = orthonormal(team.group._reductions[0].cells.warm(team.group.state)[0]).unsqueeze(0)
    torch.testing.assert_close(orthogonalize_(start.clone()), start, rtol=1e-5, atol=1e-6)


def test_int8_with_feedback_stays_near_exact_gradients():
    exact = Team(2, "ddp", codec="fp32")
    coded = Team(2, "ddp", codec="int8", feedback=1.0)
    for team in (exact, coded):
        team.run(range(10))
    torch.testing.assert_close(coded.local(), exact.local(), rtol=0.0, atol=0.02)
    assert not torch.equal(coded.local(), exact.local())
    assert coded.group.statistics().wire_bytes < 0.4 * exact.group.statistics().wire_bytes
