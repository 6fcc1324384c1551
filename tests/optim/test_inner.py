"""Inner optimizers: Muon against an SVD, AdamW and Lion against PyTorch and the paper."""

import pytest
import torch
from torch import nn

from atoll.optim import inner
from atoll.optim.inner import Lion, Muon, muon_groups, orthogonalize
from atoll.optim.methods import MethodError, parse
from support.toys import Team, backward, flat, net


@pytest.mark.parametrize("shape", [(32, 32), (24, 60), (60, 24), (1, 7)])
def test_orthogonalisation_turns_no_singular_vector(shape):
    """O(U) has the singular vectors of U, and singular values within 0.68 and 1.21."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3.0
    u, values, vt = torch.linalg.svd(matrix, full_matrices=False)
    inside = u.T @ orthogonalize(matrix) @ vt.T
    reached = values > 0.002 * torch.linalg.matrix_norm(matrix)
    diagonal = inside.diagonal()[reached]
    assert 0.68 < float(diagonal.min()) <= float(diagonal.max()) < 1.21
    torch.testing.assert_close(inside, inside.diagonal().diag(), rtol=0.0, atol=2e-4)


def test_singular_values_from_two_thousandths_of_the_norm_on_arrive():
    for value in torch.logspace(-2.69, -0.01, 50).tolist():
        matrix = torch.diag(torch.tensor([value, (1 - value**2) ** 0.5]))
        reached = orthogonalize(matrix).diagonal()
        assert 0.68 < float(reached.min()) <= float(reached.max()) < 1.21
        assert value < 0.01 or float(reached.max()) < 1.14
    assert float(orthogonalize(torch.diag(torch.tensor([1e-4, 1.0])))[0, 0]) < 0.1


def test_orthogonalisation_does_not_see_the_scale():
    matrix = torch.randn(16, 40, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(
        orthogonalize(matrix * 1e-4), orthogonalize(matrix), rtol=1e-2, atol=1e-2
    )
    assert not orthogonalize(torch.zeros(4, 4)).any()


@pytest.mark.parametrize("shape", [(8, 6), (6, 8)])
@pytest.mark.parametrize(("options", "mu"), [({"momentum": 0.9}, 0.9), ({}, 0.95)])
def test_muon_by_hand(shape, options, mu):
    param = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(3)))
    muon = Muon([param], lr=0.1, weight_decay=0.5, **options)
    expected, momentum = param.detach().clone(), torch.zeros(shape)
    for seed in range(3):
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(10 + seed))
        param.grad = grad.clone()
        muon.step()
        assert torch.equal(param.grad, grad)
        momentum = mu * momentum + grad
        step = orthogonalize(grad + mu * momentum) * 0.2 * 8**0.5
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * step
    torch.testing.assert_close(param.detach(), expected, rtol=1e-4, atol=1e-5)


def test_the_adamw_of_muon_is_torchs():
    ours, torchs = net(), net()
    groups = [{"params": list(ours.parameters()), "kind": "adamw"}]
    first = Muon(groups, lr=1e-2, weight_decay=0.1)
    second = torch.optim.AdamW(torchs.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for seed in range(5):
        backward(ours, seed)
        backward(torchs, seed)
        first.step()
        second.step()
    torch.testing.assert_close(flat(ours), flat(torchs), rtol=1e-4, atol=1e-6)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.norm = nn.LayerNorm(4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 11)


def test_embedding_head_and_vectors_are_not_made_orthogonal():
    model = Tied()
    muon, tables, vectors = muon_groups(model, weight_decay=0.1)
    assert [id(p) for p in muon["params"]] == [id(model.hidden.weight)]
    assert {id(p) for p in tables["params"]} == {id(model.table.weight), id(model.head.weight)}
    assert (muon["kind"], tables["kind"], vectors["kind"]) == ("muon", "adamw", "adamw")
    assert [group["weight_decay"] for group in (muon, tables, vectors)] == [0.1, 0.1, 0.0]
    assert len(vectors["params"]) == 4


class Bytes(nn.Module):
    """As wide as a byte has values, so that hidden layers have as many outputs as the head."""

    def __init__(self, *, tied: bool = False, wide_head: bool = False, heads: int = 1) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 16)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(16, 32), "down": nn.Linear(32, 16)}) for _ in range(2)
        )
        self.widen = nn.Linear(16, 24)
        if wide_head:
            self.head = nn.Linear(24, 16)
        else:
            self.heads = nn.ModuleList(nn.Linear(16, 16) for _ in range(heads))
        if tied:
            self.heads[0].weight = self.table.weight


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"heads": 3}])
def test_hidden_layers_as_wide_as_the_head_are_made_orthogonal(options):
    model = Bytes(**options)
    muon, tables, _ = muon_groups(model, weight_decay=0.1)
    hidden = [layer.weight for block in model.blocks for layer in block.values()]
    assert [id(p) for p in muon["params"]] == [*map(id, hidden), id(model.widen.weight)]
    ends = {id(model.table.weight), *(id(head.weight) for head in model.heads)}
    assert {id(p) for p in tables["params"]} == ends


def test_where_no_layer_is_sure_to_be_the_head_all_are_hidden():
    model = Bytes(wide_head=True)
    _, tables, _ = muon_groups(model, weight_decay=0.1)
    assert [id(p) for p in tables["params"]] == [id(model.table.weight)]


def test_lion_by_hand():
    """The last value's sign turns, since only a hundredth of its first gradient is kept."""
    start = torch.tensor([1.0, -2.0, 3.0, 4.0])
    param = nn.Parameter(start.clone())
    lion = Lion([param], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    grads = [torch.tensor([1.0, -1.0, 0.0, 1.0]), torch.tensor([-20.0, -1.0, 1.0, -0.5])]
    for grad in grads:
        param.grad = grad.clone()
        lion.step()
    first = start * 0.95 - 0.1 * torch.tensor([1.0, -1.0, 0.0, 1.0])
    second = first * 0.95 - 0.1 * torch.tensor([-1.0, -1.0, 1.0, -1.0])
    torch.testing.assert_close(param.detach(), second)


@pytest.mark.parametrize("name", ["adamw", "muon", "lion", "sgd"])
def test_each_inner_optimizer_learns_and_resumes(name):
    def make(model):
        return inner.build(name, model, lr=3e-3)

    team = Team(2, "muloco", 3, inner=make, codec="fp32")
    losses = []
    for step in range(30):
        losses.append(float(backward(team.workers[0].model, 7)))
        team.run(range(step, step + 1))
    assert losses[-1] < losses[0]
    saved = team.save()
    team.run(range(30, 36))
    again = Team(2, "muloco", 3, inner=make, codec="fp32")
    again.load(saved)
    again.run(range(30, 36))
    assert again.states() == team.states()


def test_muloco_is_diloco_around_muon():
    def muon(model):
        return inner.build("muon", model, lr=1e-2)

    settings = {"lr": 0.7, "momentum": 0.6}
    first, second = (Team(2, name, 3, inner=muon, **settings) for name in ("muloco", "diloco"))
    for team in (first, second):
        team.run(range(9))
    assert first.states() == second.states()
    assert parse("muloco").inner == "muon"


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_betas_and_decay_are_those_that_were_asked_for(name):
    built = inner.build(name, Tied(), lr=1e-3, betas=(0.8, 0.7), weight_decay=0.3)
    for group in built.param_groups:
        vectors = all(param.dim() < 2 for param in group["params"])
        assert group["betas"] == (0.8, 0.7)
        assert group["weight_decay"] == (0.0 if vectors else 0.3)


def test_what_does_not_exist_is_refused():
    with pytest.raises(MethodError, match="adamw, muon"):
        inner.build("adam", net(), lr=1.0)
    with pytest.raises(ValueError, match="vector"):
        Muon([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="closure"):
        Lion([nn.Parameter(torch.zeros(3))]).step(lambda: 0.0)
    with pytest.raises(ValueError, match="momentum"):
        Muon([nn.Parameter(torch.zeros(3, 3))], momentum=1.0)
