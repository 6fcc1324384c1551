"""`eager` and `co2`: reductions that are one window late."""

import pytest
import torch

from atoll.optim.methods import EagerMethod, parse
from atoll.optim.methods.eager import Eager
from atoll.optim.reducer import Commit
from support.scripted import ScriptedReducer
from support.toys import TOKENS, Team, adamw, backward, flat, net

EXACT = {"codec": "fp32", "clip_at": 0}


class Replica:
    """A model and its inner optimizer, to write a paper's rule around."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.model = net()
        self.inner = adamw(self.model)

    def window(self, start, first_step, inner_steps):
        """Train from `start`; returns the pseudo-gradient."""
        torch.nn.utils.vector_to_parameters(start.clone(), self.model.parameters())
        for step in range(first_step, first_step + inner_steps):
            backward(self.model, 100 * step + self.index)
            self.inner.step()
        return start - flat(self.model)


def plain_eager(workers, windows, inner_steps, lr, mu):
    """The paper's algorithm: each replica its own outer optimizer."""
    replicas = [Replica(index) for index in range(workers)]
    thetas = [flat(net()) for _ in replicas]
    momenta = [torch.zeros_like(theta) for theta in thetas]
    before = [torch.zeros_like(theta) for theta in thetas]
    for window in range(windows):
        deltas = [
            replica.window(theta, window * inner_steps, inner_steps)
            for replica, theta in zip(replicas, thetas, strict=True)
        ]
        stale = torch.stack(before).mean(0)
        for r in range(workers):
            mixed = stale + (deltas[r] - before[r]) / workers
            momenta[r] = mu * momenta[r] + mixed
            thetas[r] = thetas[r] - lr * (mixed + mu * momenta[r])
        before = deltas
    return thetas


@pytest.mark.parametrize("workers", [1, 3])
def test_eager_is_the_papers_algorithm(workers):
    team = Team(workers, "eager", 3, lr=0.7, momentum=0.6, peers=workers, **EXACT)
    team.run(range(15))
    expected = plain_eager(workers, 5, 3, 0.7, 0.6)
    for index in range(workers):
        torch.testing.assert_close(team.local(index), expected[index], rtol=1e-4, atol=1e-5)


def test_eager_with_one_peer_is_diloco():
    """delta(t-1) + (delta(t) - delta(t-1)) is delta(t)."""
    eager = Team(1, "eager", 3, lr=0.7, momentum=0.6, **EXACT)
    diloco = Team(1, "diloco", 3, lr=0.7, momentum=0.6, **EXACT)
    for team in (eager, diloco):
        team.run(range(12))
    torch.testing.assert_close(eager.local(), diloco.local(), rtol=1e-4, atol=1e-5)


class PlainEager(Eager):
    """The rule at the top of the module, vector by vector."""

    def _next_start(self):
        lr, mu = self.method.lr, self.method.momentum
        fresh_N = self._sent_N / self._members
        x_N = fresh_N - self._fresh_N
        self._fresh_N = fresh_N
        self._overlay_momentum_N = self._overlay_momentum_N * mu + x_N
        self._overlay_N = self._overlay_N - (x_N + self._overlay_momentum_N * mu) * lr
        return self.synced_N + self._overlay_N


def test_eager_has_the_bits_of_its_rule_tile_by_tile(monkeypatch):
    monkeypatch.setattr("atoll.optim.methods.eager.TILE", 7)
    team = Team(3, "eager", 2, lr=0.7, momentum=0.6, peers=3, codec="int8")
    monkeypatch.setattr(EagerMethod, "worker_class", PlainEager)
    plain = Team(3, "eager", 2, lr=0.7, momentum=0.6, peers=3, codec="int8")
    for each in (team, plain):
        each.run(range(8))
    for index in range(3):
        assert torch.equal(team.local(index), plain.local(index))
        states = [each.workers[index].state_dict() for each in (team, plain)]
        for name in ("fresh_N", "overlay_N", "overlay_momentum_N", "start_N", "sent_N"):
            assert torch.equal(states[0][name], states[1][name])


def test_overlay_never_enters_the_common_state():
    """The log gets the means of the windows alone, each once."""
    team = Team(2, "eager", 2, lr=1.0, momentum=0.0, peers=2, **EXACT)
    start = flat(net())
    team.run(range(2))
    first = [worker.state_dict()["sent_N"] for worker in team.workers]
    team.run(range(2, 4))
    torch.testing.assert_close(team.workers[0].synced_N, start - (first[0] + first[1]) / 2)


def plain_co2(workers, windows, inner_steps, *, lr, mu, penalty, clip, stale):
    replicas = [Replica(index) for index in range(workers)]
    theta = flat(net())
    momentum = torch.zeros_like(theta)
    before = torch.zeros_like(theta)
    for window in range(windows):
        deltas = [r.window(theta, window * inner_steps, inner_steps) for r in replicas]
        mean = torch.stack(deltas).mean(0)
        arrived, before = (before if stale else mean), mean
        if stale and window == 0:
            continue
        momentum = (mu * momentum + arrived / penalty).clamp(-clip, clip)
        theta = theta - lr * momentum
    return theta


@pytest.mark.parametrize("clip", [float("inf"), 0.02])
def test_co2_is_local_sgd_with_a_late_penalised_clipped_outer_step(clip):
    options = {"lr": 0.9, "momentum": 0.5, "penalty": 2.0, "clip": clip}
    team = Team(3, "co2", 3, **options, **EXACT)
    team.run(range(15))
    expected = plain_co2(3, 5, 3, lr=0.9, mu=0.5, penalty=2.0, clip=clip, stale=True)
    torch.testing.assert_close(team.local(), expected, rtol=1e-4, atol=1e-5)


def test_co2_without_staleness_is_slowmo():
    team = Team(3, "co2(stale=False)", 3, lr=0.9, momentum=0.5, **EXACT)
    team.run(range(15))
    inf = float("inf")
    expected = plain_co2(3, 5, 3, lr=0.9, mu=0.5, penalty=1.0, clip=inf, stale=False)
    torch.testing.assert_close(team.local(), expected, rtol=1e-4, atol=1e-5)


def lone(spec: str, inner_steps: int):
    model, reducer = net(), ScriptedReducer()
    worker = parse(spec).worker(model, adamw(model), reducer, inner_steps=inner_steps)
    return worker, reducer


def train(worker, steps: range) -> None:
    for step in steps:
        worker.step(tokens=TOKENS, loss=backward(worker.model, step))


@pytest.mark.parametrize("spec", ["co2", "eager"])
def test_work_that_was_left_out_is_in_the_next_contribution_once(spec):
    worker, reducer = lone(spec, 2)
    start_N = worker.synced_N.clone()
    train(worker, range(2))
    reducer.queue = [[Commit(position=1, params_N=start_N, included=None, members=2)]]
    began_N = flat(worker.model)
    train(worker, range(2, 3))
    assert len(reducer.submitted) == 1
    backward(worker.model, 3)
    worker.inner.step()
    ended_N = flat(worker.model)
    worker.advance(tokens=TOKENS)
    first, second = reducer.submitted
    torch.testing.assert_close(second.delta_N, first.delta_N + (began_N - ended_N))
    assert (second.tokens, second.steps) == (4 * TOKENS, 4)
    everywhere = torch.ones(len(worker.fragments[0].pieces), dtype=torch.bool)
    reducer.queue = [[Commit(position=2, params_N=start_N, included=everywhere, members=2)]]
    train(worker, range(4, 6))
    assert reducer.submitted[2].tokens == 2 * TOKENS
    assert not worker.state_dict()["owed_N"].any()


def test_a_fresh_pseudo_gradient_counts_as_one_of_the_last_entrys_members():
    worker, reducer = lone("eager(peers=2)", 2)
    start_N = worker.synced_N.clone()
    shares = []
    for position, members in ((1, 5), (2, 0), (3, 3)):
        train(worker, range(2 * position - 2, 2 * position))
        state = worker.state_dict()
        shares.append(float(state["sent_N"].norm() / state["fresh_N"].norm()))
        everywhere = torch.ones(len(worker.fragments[0].pieces), dtype=torch.bool)
        included = everywhere if members else None
        reducer.queue = [
            [Commit(position=position, params_N=start_N, included=included, members=members)]
        ]
    assert shares == pytest.approx([2.0, 5.0, 5.0])
    train(worker, range(6, 8))
    state = worker.state_dict()
    assert float(state["sent_N"].norm() / state["fresh_N"].norm()) == pytest.approx(3.0)


def test_who_misses_a_round_is_no_member_of_it():
    team = Team(3, "eager(peers=3)", 2, misses=lambda position, index: index == 2)
    team.run(range(4))
    assert [worker.state_dict()["members"] for worker in team.workers] == [2, 2, 2]


def test_reset_drops_overlay_and_window():
    worker, reducer = lone("eager", 2)
    new_N = torch.full_like(worker.synced_N, 0.125)
    train(worker, range(2))
    reducer.queue = [[Commit(position=9, params_N=new_N, included=None, members=2, reset=True)]]
    train(worker, range(2, 4))
    assert torch.equal(flat(worker.model), new_N)
    assert worker.statistics().resets == 1
    assert not worker.state_dict()["overlay_N"].any()


def test_a_peer_keeps_training_until_a_late_commit_arrives():
    worker, reducer = lone("co2", 2)
    train(worker, range(5))
    assert len(reducer.submitted) == 1
    everywhere = torch.ones(len(worker.fragments[0].pieces), dtype=torch.bool)
    commit = Commit(position=1, params_N=worker.synced_N, included=everywhere, members=1)
    reducer.queue = [[commit]]
    train(worker, range(5, 6))
    assert reducer.submitted[1].steps == 4


def test_settings_out_of_range_are_refused():
    for spec in ("co2(penalty=0.5)", "co2(clip=0)", "eager(peers=0)"):
        with pytest.raises(ValueError, match="expected"):
            parse(spec)
