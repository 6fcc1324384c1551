"""`demo` against an implementation of its own: explicit cosine matrices, no shared code."""

import math

import pytest
import torch

from atoll.optim.state.layout import Layout
from support.toys import Team, flat, net, sgd

LR = 1e-2


def cosine(n: int = 64):
    rows = [[math.cos(math.pi * (i + 0.5) * k / n) for i in range(n)] for k in range(n)]
    basis = torch.tensor(rows, dtype=torch.float64) * math.sqrt(2 / n)
    basis[0] /= math.sqrt(2)
    return basis


class PlainDeMo:
    """The paper's algorithm in float64 for matrices whose sides 64 divides, with 8-bit values."""

    def __init__(self, workers: int, params, k: int, beta: float, *, by_senders: bool) -> None:
        self.params = [p.double().clone() for p in params]
        self.momenta = [[torch.zeros_like(p) for p in self.params] for _ in range(workers)]
        self.k, self.beta, self.by_senders = k, beta, by_senders
        self.basis = cosine()

    def step(self, gradients) -> list:
        votes = []
        for index in range(len(self.params)):
            sent = []
            for momenta, grads in zip(self.momenta, gradients, strict=True):
                momenta[index] = self.beta * momenta[index] + LR * grads[index].double()
                chosen = [self.largest(block) for block in blocks(momenta[index])]
                momenta[index] = momenta[index] - self.back(chosen, momenta[index].shape)
                sent.append(chosen)
            means = [
                self.mean(torch.stack(coefficients)) for coefficients in zip(*sent, strict=True)
            ]
            mean = self.back(means, self.params[index].shape)
            self.params[index] = self.params[index] - LR * mean.sign()
            votes.append(mean)
        return votes

    def mean(self, sent):
        if not self.by_senders:
            return sent.mean(0)
        mean = sent.sum(0) / (sent != 0).sum(0).clamp(min=1)
        step = mean.abs().max() / 127
        return (mean / step).round() * step

    def largest(self, block):
        spectrum = (self.basis @ block @ self.basis.T).flatten()
        top = spectrum.abs().topk(self.k).indices
        step = (spectrum[top].abs().max() * (1 + 2**-8) / 127).bfloat16().double()
        kept = torch.zeros_like(spectrum)
        kept[top] = (spectrum[top] / step).round().clamp(-127, 127) * step
        return kept.view(64, 64)

    def back(self, spectra, shape):
        matrix = torch.zeros(shape, dtype=torch.float64)
        for block, spectrum in zip(blocks(matrix), spectra, strict=True):
            block.copy_(self.basis.T @ spectrum @ self.basis)
        return matrix


def blocks(matrix) -> list:
    return [block for rows in matrix.split(64) for block in rows.split(64, 1)]


class Matrices(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.a = torch.nn.Parameter(torch.randn(64, 128, generator=generator))
        self.b = torch.nn.Parameter(torch.randn(128, 64, generator=generator))


def smooth(shape, seed):
    """A gradient with more in its low frequencies, as gradients have."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return noise.cumsum(0).cumsum(1) / 30 + noise


@pytest.mark.parametrize("average", ["all", "senders"])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_demo_is_the_papers_algorithm(workers, average):
    spec = f"demo(codec=dct(k=16), feedback=0.99, average={average})"
    team = Team(workers, spec, make=Matrices, inner=_sgd)
    params, by_senders = Matrices().parameters(), average == "senders"
    plain = PlainDeMo(workers, params, k=16, beta=0.99, by_senders=by_senders)
    decided = total = 0
    for step in range(6):
        before = team.local()
        gradients = [
            [smooth(p.shape, 1_000 * step + 10 * i + j) for j, p in enumerate(plain.params)]
            for i in range(workers)
        ]
        for worker, grads in zip(team.workers, gradients, strict=True):
            for param, grad in zip(worker.model.parameters(), grads, strict=True):
                param.grad = grad
            worker.step(tokens=8)
        votes = torch.cat([vote.flatten() for vote in plain.step(gradients)])
        signs = ((before - team.local()) / LR).round().double()
        clear = votes.abs() > 1e-4 * votes.abs().max()
        decided += int((signs == votes.sign())[clear].sum())
        total += int(clear.sum())
    assert total > 0.9 * 6 * votes.numel()
    assert decided >= 0.9999 * total


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=LR)


def test_all_coefficients_are_signed_momentum():
    """With every coefficient sent nothing stays behind: the step is the gradient's sign."""
    team = Team(1, "demo(codec=dct(k=4096), feedback=0.999)", make=Matrices, inner=_sgd)
    before = team.local()
    (worker,) = team.workers
    gradient = smooth((64, 128), 1), smooth((128, 64), 2)
    for param, grad in zip(worker.model.parameters(), gradient, strict=True):
        param.grad = grad
    worker.step(tokens=8)
    signs = ((before - team.local()) / LR).round()
    expected = torch.cat([grad.flatten() for grad in gradient])
    clear = expected.abs() > 0.05 * expected.abs().max()
    assert int(clear.sum()) > 4_000
    assert torch.equal(signs[clear], expected.sign()[clear])


def test_results_of_a_step_are_applied_after_the_next():
    now = Team(2, "demo", inner=sgd)
    later = Team(2, "demo(delay=1)", inner=sgd)
    start = flat(net())
    for team in (now, later):
        team.run(range(1))
    assert not torch.equal(now.local(), start)
    assert torch.equal(later.local(), start)
    later.run(range(1, 2))
    torch.testing.assert_close(later.local(), now.local())


def test_residual_is_in_the_state():
    team = Team(2, "demo", inner=sgd, make=lambda: net(1, 64))
    team.run(range(2))
    mass = team.workers[0].state_dict()["reducer"]["feedback"]["mass_N"]
    assert mass.shape == (Layout.of(net(1, 64)).numel,)
    assert float(mass.abs().sum()) > 0


def test_weights_decay():
    team = Team(1, "demo(decay=0.5)", inner=sgd)
    start = flat(net())
    (worker,) = team.workers
    for param in worker.model.parameters():
        param.grad = torch.zeros_like(param)
    worker.step(tokens=8)
    torch.testing.assert_close(team.local(), start * (1 - 1e-2 * 0.5))
