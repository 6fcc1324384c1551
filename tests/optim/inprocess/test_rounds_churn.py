"""Workers that miss rounds, join and leave: what they learned counts once, and bits stay equal."""

import pytest
import torch
from torch import nn

from atoll.optim.inprocess.group import GroupError, at_random
from atoll.optim.inprocess.rounds import InProcessGroup
from atoll.optim.methods import parse
from atoll.optim.reducer import Contribution
from atoll.optim.reduction.contribution import clip_factors
from support.toys import TOKENS, Team, flat, net, set_gradient, sgd

EXACT = "diloco(codec=fp32, lr=1.0, momentum=0.0, weights=equal, clip_at=0.0)"
METHODS = {
    "diloco": 3,
    "muloco": 3,
    "ddp(codec=powersgd(rank=1))": 1,
    "streaming(count=2, tau=2)": 4,
    "eager(peers=3)": 3,
    "co2": 3,
    "sparseloco": 3,
    "demo": 1,
    "dlion": 1,
    "noloco": 3,
}


def team(spec: str, size: int, inner_steps: int, **options: object) -> Team:
    inner = {} if parse(spec).inner == "adamw" else {"inner": sgd}
    return Team(size, spec, inner_steps, **inner, **options)


class Scripted:
    """Workers whose every step moves each weight by whole numbers, so that fp32 sums are exact."""

    def __init__(self, size: int, misses, spec: str = EXACT, inner_steps: int = 2):
        self.group = InProcessGroup(size, spec, misses=misses)
        self.moved_N = torch.zeros(12)
        self.workers = []
        for index in range(size):
            model = nn.Linear(3, 3)
            nn.init.zeros_(model.weight)
            nn.init.zeros_(model.bias)
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            member = self.group.member(index)
            method = self.group.method
            self.workers.append(method.worker(model, inner, member, inner_steps=inner_steps))

    def run(self, steps: range) -> None:
        for step in steps:
            for index, worker in enumerate(self.workers):
                move_N = torch.arange(12.0) % (index + 2) - 2.0 * step
                set_gradient(worker, move_N)
                self.moved_N += move_N
                worker.step(tokens=8)

    def drift(self, index: int) -> torch.Tensor:
        worker = self.workers[index]
        return worker.synced_N - flat(worker.model)


def in_turn(position: int, index: int) -> bool:
    return position % 3 == index


def test_work_of_missed_rounds_counts_once():
    """Of three workers one misses each round, so every mean is over two: halves, exact in fp32."""
    trained = Scripted(3, in_turn)
    start_N = trained.group.state.params_N.clone()
    trained.run(range(14))
    applied_N = (start_N - trained.group.state.params_N) * 2
    open_N = sum(trained.drift(index) for index in range(3))
    assert trained.group.statistics().rounds == 7
    assert torch.equal(applied_N + open_N, trained.moved_N)
    assert [w.statistics().left_out for w in trained.workers] == [3, 2, 2]


def test_a_missed_window_stays_in_the_drift_and_is_sent_next():
    trained = Scripted(2, lambda position, index: (position, index) == (0, 1))
    trained.run(range(2))
    missed_N = trained.drift(1)
    assert torch.equal(trained.drift(0), torch.zeros(12))
    assert bool((missed_N != 0).any())
    handed_in = overheard(trained.group.member(1))
    trained.run(range(2, 4))
    (contribution,) = handed_in
    moves_N = sum(torch.arange(12.0) % 3 - 2.0 * step for step in range(4))
    assert torch.equal(contribution.delta_N, moves_N)
    assert (contribution.tokens, contribution.steps) == (32, 4)
    assert torch.equal(trained.drift(1), torch.zeros(12))


def test_a_pending_contribution_of_two_windows_resumes_bit_identical():
    """Saved between the turns of two workers: one has handed in two windows at once."""
    misses = at_random(0.5, 8)
    whole = Team(2, "diloco", 3, misses=misses)
    resumed = Team(2, "diloco", 3, misses=misses)
    whole.run(range(5))
    whole.turn(0, 5)
    assert whole.group.member(0).contributions[0].steps == 6
    resumed.load(whole.save())
    assert resumed.group.member(0).contributions[0].steps == 6
    for each in (whole, resumed):
        each.turn(1, 5)
        each.run(range(6, 20))
    assert resumed.states() == whole.states()
    assert torch.equal(resumed.local(0), whole.local(0))


@pytest.mark.parametrize("spec", ["ddp", "demo", "dlion"])
def test_a_gradient_that_missed_its_round_is_in_no_later_one(spec):
    trained = team(spec, 2, 1, misses=lambda position, index: (position, index) == (0, 1))
    handed_in = overheard(trained.group.member(1))
    trained.run(range(2))
    assert [(c.tokens, c.steps) for c in handed_in] == [(TOKENS, 1)] * 2


def test_what_the_codec_lost_is_conserved_when_rounds_are_missed():
    """sum g + W u before and after a round differ by the deltas that were counted."""
    trained = Team(3, "diloco(lr=1.0, momentum=0.0, clip_at=0.0, weights=equal)", 2)
    trained.group._misses = in_turn
    handed_in = {index: overheard(trained.group.member(index)) for index in range(3)}
    for round_ in range(6):
        before_N = masses(trained)
        params_N = trained.group.state.params_N.clone()
        trained.run(range(2 * round_, 2 * round_ + 2))
        counted_N = sum(said[-1].delta_N for i, said in handed_in.items() if i != round_ % 3)
        update_N = params_N - trained.group.state.params_N
        torch.testing.assert_close(masses(trained) + 2 * update_N, before_N + counted_N)


def test_what_the_codec_lost_is_conserved_when_a_norm_is_clipped():
    """sum g + W u before and after differ by the deltas, each by the share that it counted."""
    trained = Team(3, "diloco(lr=1.0, momentum=0.0, weights=equal)", 1)
    generator = torch.Generator().manual_seed(1)
    params_N = trained.group.state.params_N.clone()
    deltas = [torch.randn(len(params_N), generator=generator) * size for size in (1.0, 1.0, 50.0)]
    codec = trained.method.codec
    norms = [float(codec.decode(codec.encode(d), d.shape).norm()) for d in deltas]
    shares = clip_factors(norms, [1, 1, 1])
    for index, delta in enumerate(deltas):
        trained.group.member(index).submit(
            Contribution(window=0, delta=delta, tokens=8, steps=1, loss=0.0)
        )
    assert trained.group.statistics().clipped == 1
    counted_N = sum(delta * share for delta, share in zip(deltas, shares, strict=True))
    update_N = params_N - trained.group.state.params_N
    torch.testing.assert_close(masses(trained) + 3 * update_N, counted_N, rtol=1e-3, atol=1e-3)


def overheard(member) -> list:
    """All contributions that a worker hands in from now on."""
    handed_in, submit = [], member.submit
    member.submit = lambda contribution: (handed_in.append(contribution), submit(contribution))
    return handed_in


def masses(trained: Team) -> torch.Tensor:
    states = [trained.group.member(i).state_dict() for i in range(trained.group.size)]
    return sum(state["feedback"]["mass_N"] for state in states)


def test_a_round_that_all_miss_changes_no_bit_and_loses_nothing():
    trained = Scripted(2, lambda position, index: position == 1)
    trained.run(range(2))
    before = trained.group.state
    trained.run(range(2, 4))
    after = trained.group.state
    assert after.position == before.position + 1
    assert torch.equal(after.params_N, before.params_N)
    trained.run(range(4, 6))
    assert torch.equal(-2 * trained.group.state.params_N, trained.moved_N)


@pytest.mark.parametrize("spec", METHODS)
def test_replicas_keep_their_bits_and_resume_in_them(spec):
    inner_steps = METHODS[spec]
    whole = team(spec, 3, inner_steps, misses=at_random(0.3, 5))
    whole.run(range(7))
    resumed = team(spec, 3, inner_steps, misses=at_random(0.3, 5))
    resumed.load(whole.save())
    for each in (whole, resumed):
        each.run(range(7, 16))
    assert resumed.states() == whole.states()
    for index in range(3):
        assert torch.equal(resumed.local(index), whole.local(index))
    assert sum(w.statistics().left_out for w in whole.workers) > 0
    if whole.group.method.reduction != "pairs":
        first, *others = (worker.synced_N for worker in whole.workers)
        assert all(torch.equal(first, other) for other in others)


def test_the_first_window_of_a_joiner_moves_nobody():
    """With it in, the state has the bits of a group that it never joined; then it counts."""
    spec = "diloco(codec=fp32, clip_at=0.0)"
    alone, joined = Team(2, spec, 2), Team(3, spec, 2, present=2)
    for each in (alone, joined):
        each.run(range(4))
    joined.join()
    assert torch.equal(joined.local(2), joined.group.state.params_N)
    for each in (alone, joined):
        each.run(range(4, 6))
    assert joined.group.state.root() == alone.group.state.root()
    assert torch.equal(joined.local(2), joined.group.state.params_N)
    assert joined.workers[2].statistics().included == 1
    for each in (alone, joined):
        each.run(range(6, 8))
    assert joined.group.state.root() != alone.group.state.root()
    assert joined.group.statistics().rounds == 4


def test_a_joiner_that_missed_its_first_round_counts_for_nothing():
    """Its drift holds that window; what comes after an entry with it in counts."""
    spec = "diloco(codec=fp32, clip_at=0.0)"
    alone, joined = Team(2, spec, 2), Team(3, spec, 2, present=2)
    joined.group._misses = lambda position, index: (position, index) == (2, 2)
    for each in (alone, joined):
        each.run(range(4))
    joined.join()
    for each in (alone, joined):
        each.run(range(4, 8))
    assert joined.workers[2].statistics().left_out == joined.workers[2].statistics().included == 1
    assert joined.group.state.root() == alone.group.state.root()
    for each in (alone, joined):
        each.run(range(8, 10))
    assert joined.group.state.root() != alone.group.state.root()


def test_the_rate_of_who_counts_for_nothing_is_not_asked():
    team = Team(2, "demo", inner=sgd)
    numel = len(team.group.state.params_N)

    def hand_in(index: int, tokens: int, lr: float) -> None:
        given = Contribution(
            window=0, delta=torch.ones(numel), tokens=tokens, steps=1, loss=0.0, lr=lr
        )
        team.group.member(index).submit(given)

    hand_in(0, tokens=8, lr=1e-2)
    hand_in(1, tokens=0, lr=5e-3)
    assert team.group.state.position == 1
    hand_in(0, tokens=8, lr=1e-2)
    with pytest.raises(GroupError, match="the same inner learning rate"):
        hand_in(1, tokens=8, lr=5e-3)


@pytest.mark.parametrize("spec", [s for s in METHODS if not s.startswith("ddp")])
def test_every_method_with_a_common_state_takes_joiners_and_losses(spec):
    inner_steps = METHODS[spec]
    trained = team(spec, 4, inner_steps, present=3)
    trained.run(range(2 * inner_steps))
    trained.join()
    trained.run(range(2 * inner_steps, 5 * inner_steps))
    trained.leave(0)
    before = trained.group.statistics().rounds
    trained.run(range(5 * inner_steps, 8 * inner_steps))
    assert trained.group.present == (1, 2, 3)
    assert trained.group.statistics().rounds > before
    assert all(bool(torch.isfinite(flat(w.model)).all()) for w in trained.workers)
    if trained.group.method.reduction != "pairs":
        assert torch.equal(trained.workers[0].synced_N, trained.workers[2].synced_N)


def test_a_joiner_saved_in_its_first_window_counts_for_nothing():
    whole = Team(3, "diloco", 3, present=2)
    whole.run(range(6))
    whole.join()
    whole.run(range(6, 8))
    resumed = Team(3, "diloco", 3)
    resumed.load(whole.save())
    for each in (whole, resumed):
        each.run(range(8, 15))
    assert resumed.states() == whole.states()


def test_nobody_waits_for_a_worker_that_has_left():
    trained = Team(3, EXACT, 2)
    for index in (0, 1):
        trained.turn(index, 0)
        trained.turn(index, 1)
    assert trained.group.statistics().rounds == 0
    trained.leave(2)
    assert trained.group.statistics().rounds == 1
    assert [w.statistics().included for w in trained.workers] == [1, 1]


def test_residual_stays_with_its_worker_when_others_come_and_go():
    trained = Team(4, "diloco", 2, present=3)
    trained.run(range(4))
    kept_N = trained.group.member(1).state_dict()["feedback"]["mass_N"]
    assert bool(kept_N.any())
    trained.join()
    trained.leave(0)
    mass_N = trained.group.member(1).state_dict()["feedback"]["mass_N"]
    assert torch.equal(mass_N, kept_N)
    assert not bool(trained.group.member(3).state_dict()["feedback"]["mass_N"].any())


def test_who_comes_back_comes_as_a_joiner():
    trained = Team(2, "diloco(codec=fp32, clip_at=0.0)", 2)
    trained.run(range(4))
    trained.leave(1)
    trained.run(range(4, 6))
    trained.join(1)
    before = trained.group.state
    trained.run(range(6, 8))
    alone = Team(2, "diloco(codec=fp32, clip_at=0.0)", 2)
    alone.run(range(4))
    alone.leave(1)
    alone.run(range(4, 8))
    assert trained.group.state.root() == alone.group.state.root() != before.root()


def test_gossip_leaves_alone_whose_partner_is_missing():
    trained = Team(2, "noloco", 2, misses=lambda position, index: index == 1)
    start = flat(net())
    trained.run(range(4))
    assert torch.equal(trained.group.state_of(1).params_N, start)
    assert trained.group.statistics().wire_bytes == 0
    assert trained.workers[1].statistics().left_out == 2
    assert not torch.equal(trained.group.state_of(0).params_N, start)


def test_random_misses_are_the_same_for_all_who_ask():
    misses, again = at_random(0.2, 3), at_random(0.2, 3)
    drawn = [misses(position, index) for position in range(1000) for index in range(4)]
    assert drawn == [again(position, index) for position in range(1000) for index in range(4)]
    assert sum(drawn) / len(drawn) == pytest.approx(0.2, abs=0.02)
    assert not any(at_random(0.0, 3)(position, 0) for position in range(100))


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_share_that_leaves_no_round_is_refused(share):
    with pytest.raises(ValueError, match="expected a share"):
        at_random(share, 0)
