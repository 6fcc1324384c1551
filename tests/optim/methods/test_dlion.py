"""`dlion` against Lion written out, and what its votes do."""

import pytest
import torch

from atoll.optim.inner import Lion
from support.toys import Team, backward, flat, net, set_gradient, sgd


def plain(workers: int, steps: int, vote: str, lr=1e-2, beta1=0.9, beta2=0.99, decay=0.1):
    """Algorithm 1 of the paper on one shared model."""
    model = net()
    momenta = [torch.zeros_like(flat(model)) for _ in range(workers)]
    for step in range(steps):
        signs = []
        for index in range(workers):
            backward(model, 100 * step + index)
            grad = torch.cat([p.grad.flatten() for p in model.parameters()])
            signs.append((beta1 * momenta[index] + (1 - beta1) * grad).sign())
            momenta[index] = beta2 * momenta[index] + (1 - beta2) * grad
        total = torch.stack(signs).sum(0)
        update = total.sign() if vote == "majority" else total / workers
        theta = flat(model)
        theta = theta - lr * (update + decay * theta)
        torch.nn.utils.vector_to_parameters(theta, model.parameters())
    return flat(model)


@pytest.mark.parametrize("vote", ["majority", "average"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_votes_are_the_papers(vote, workers):
    team = Team(workers, f"dlion(vote={vote}, decay=0.1)", inner=sgd)
    team.run(range(8))
    torch.testing.assert_close(team.local(), plain(workers, 8, vote), rtol=1e-4, atol=1e-5)


def test_one_worker_is_lion():
    team = Team(1, "dlion(decay=0.1)", inner=sgd)
    team.run(range(8))
    model = net()
    lion = Lion(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(8):
        backward(model, 100 * step)
        lion.step()
    torch.testing.assert_close(team.local(), flat(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("workers", [2, 4, 6, 10, 14, 50])
def test_a_tie_moves_nothing_in_whatever_order_votes_are_added(workers):
    """A sixth is no fp32 number, so sums of as many for as against are not quite 0."""
    team = Team(workers, "dlion", inner=sgd)
    start = flat(net())
    generator = torch.Generator().manual_seed(1)
    votes = [torch.randperm(workers, generator=generator) % 2 for _ in range(len(start) - 1)]
    majority = torch.arange(workers) < workers // 2 + 1
    votes = torch.stack([*votes, majority], dim=1) * 2.0 - 1.0
    for worker, vote_N in zip(team.workers, votes, strict=True):
        set_gradient(worker, vote_N)
        worker.step(tokens=8)
    assert torch.equal(team.local()[:-1], start[:-1])
    assert float((team.local() - start)[-1]) == pytest.approx(-1e-2, rel=1e-4)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_parameters_without_a_gradient_go_nowhere(workers):
    """As an expert that is not used, or a byte that does not occur: one bit has no zero."""
    team = Team(workers, "dlion", inner=sgd)
    start = flat(net())
    for _ in range(20):
        for worker in team.workers:
            worker.step(tokens=8)
    torch.testing.assert_close(team.local(), start, rtol=0.0, atol=1e-6)


def test_a_value_and_step_costs_a_bit():
    team = Team(2, "dlion", inner=sgd, make=lambda: net(2, 256))
    team.run(range(1))
    bits = 8 * team.group.statistics().wire_bytes / 2 / flat(net(2, 256)).numel()
    assert 1.0 < bits < 1.05
