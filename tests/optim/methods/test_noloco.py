"""`noloco`: pairs from a shared seed, and the update of the paper."""

from collections import Counter

import torch

from atoll.optim.inprocess.gossip import pairs
from atoll.optim.state.outer_state import OuterState
from support.toys import Team, adamw, backward, flat, net


def plain(workers: int, rounds: int, inner_steps: int, seed: int = 0):
    """The paper's rule, peer by peer: m = 0.5 m + 0.7 mean(d) + 0.7 (mean(phi) - phi)."""
    models = [net() for _ in range(workers)]
    inners = [adamw(model) for model in models]
    phis = [flat(model) for model in models]
    momenta = [torch.zeros_like(phi) for phi in phis]
    for round_ in range(rounds):
        for index, (model, inner) in enumerate(zip(models, inners, strict=True)):
            for step in range(round_ * inner_steps, (round_ + 1) * inner_steps):
                backward(model, 100 * step + index)
                inner.step()
        drifts = [flat(model) - phi for model, phi in zip(models, phis, strict=True)]
        new = list(phis)
        for group in pairs(range(workers), seed, round_):
            drift = torch.stack([drifts[i] for i in group]).mean(0)
            centre = torch.stack([phis[i] for i in group]).mean(0)
            for i in group:
                momenta[i] = 0.5 * momenta[i] + 0.7 * drift + 0.7 * (centre - phis[i])
                new[i] = phis[i] + momenta[i]
        phis = new
        for model, phi in zip(models, phis, strict=True):
            torch.nn.utils.vector_to_parameters(phi.clone(), model.parameters())
    return phis


def test_two_peers_follow_the_formula():
    team = Team(2, "noloco", 3)
    team.run(range(12))
    for index, phi in enumerate(plain(2, 4, 3)):
        torch.testing.assert_close(team.local(index), phi, rtol=1e-4, atol=1e-5)


def test_five_peers_follow_the_formula_one_of_them_alone():
    team = Team(5, "noloco", 2)
    team.run(range(8))
    phis = plain(5, 4, 2)
    for index, phi in enumerate(phis):
        torch.testing.assert_close(team.local(index), phi, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(phis[0], phis[1])


def test_everyone_meets_everyone_in_time():
    met = Counter()
    for position in range(200):
        drawn = pairs(range(6), 1, position)
        assert sorted(index for pair in drawn for index in pair) == list(range(6))
        met.update(frozenset(pair) for pair in drawn)
    assert len(met) == 15
    assert pairs(range(6), 1, 3) == pairs(range(6), 1, 3)
    assert pairs(range(6), 1, 3) != pairs(range(6), 2, 3)


def test_a_codec_does_not_move_the_pairs_mean():
    """The pull is taken between decoded weights: what one gains the other loses."""
    team = Team(2, "noloco(codec=int8, lr=0.0)", 1)
    state = team.group.state_of(1)
    apart = OuterState.genesis(state.layout, state.params_N * 1.1 + 0.01)
    team.group._states[1] = apart
    before = (team.group.state_of(0).params_N + team.group.state_of(1).params_N) / 2
    team.run(range(1))
    after = (team.group.state_of(0).params_N + team.group.state_of(1).params_N) / 2
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
