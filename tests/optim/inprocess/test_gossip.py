"""Meetings of two: what no meeting changes, mass that is handed over, variance that is kept."""

import random

import pytest
import torch

from atoll.optim.inprocess.gossip import UNEVEN, Side, decoded, handed_over, meet, pairs
from atoll.optim.methods import MethodError, parse
from atoll.optim.methods.noloco import with_variance_kept
from atoll.optim.reduction.cells import Cells
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from support.toys import Team

LAYOUT = Layout(names=("a", "b", "c"), shapes=((40, 50), (300,), (1,)))


class Crowd:
    """Peers with weights and momenta at random, of which some have little or no mass."""

    def __init__(self, size, spec, seed=0):
        self.method = parse(spec, lr=0.0)
        self.fragment = self.method.fragments(LAYOUT)[0]
        self.cells = Cells(codec=self.method.codec, fragment=self.fragment)
        self.rng = random.Random(seed)
        self.states, self.mass = {}, {}
        for index in range(size):
            self.add(index, 1.0)

    def add(self, index, mass):
        noise = torch.Generator().manual_seed(index)
        params_N = torch.randn(LAYOUT.numel, generator=noise)
        memory_N = torch.randn(LAYOUT.numel, generator=noise)
        self.states[index] = OuterState.genesis(LAYOUT, params_N, memory_N)
        self.mass[index] = mass

    def side(self, index, other):
        def sent(vector_N):
            return decoded(self.cells, self.cells.encode(vector_N))

        state = self.states[index]
        gives = handed_over(self.mass[index], self.mass[other]) > 0
        return Side(
            delta_N=torch.zeros(LAYOUT.numel),
            params_N=sent(state.params_N),
            momentum_N=sent(state.momentum_N) if gives else None,
            mass=self.mass[index],
        )

    def meet(self, one, two):
        sides = {one: self.side(one, two), two: self.side(two, one)}
        for index, other in ((one, two), (two, one)):
            met = self.step(index, sides[index], sides[other])
            self.states[index], self.mass[index] = met.state, met.mass

    def alone(self, index):
        self.states[index] = self.step(index, self.side(index, index), None).state

    def step(self, index, mine, theirs):
        return meet(self.method, self.fragment, self.states[index], mine, theirs, inner_lr=1e-3)

    def kept(self):
        """Sum of w, and of w (x + mu / (1 - mu) m), in float64."""
        total_N = torch.zeros(LAYOUT.numel, dtype=torch.float64)
        for index, state in self.states.items():
            mu = self.method.momentum
            ahead_N = state.params_N.double() + mu / (1 - mu) * state.momentum_N.double()
            total_N += self.mass[index] * ahead_N
        return sum(self.mass.values()), total_N

    def spread(self):
        params = torch.stack([state.params_N for state in self.states.values()])
        return float((params - params.mean(0)).norm())


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("codec", ["fp32", "int8", "int4"])
def test_no_meeting_changes_the_mean_over_peers(codec, momentum):
    """Random pairs, some peers alone, some missing the round, joiners without mass, deaths."""
    crowd = Crowd(6, f"noloco(codec={codec}, momentum={momentum})")
    start = crowd.spread()
    for position in range(60):
        if position % 15 == 7:
            crowd.add(100 + position, 0.0)
        if position % 15 == 12:
            dead = crowd.rng.choice(sorted(crowd.states))
            del crowd.states[dead], crowd.mass[dead]
        mass, total_N = crowd.kept()
        for pair in pairs(sorted(crowd.states), 3, position):
            match crowd.rng.random(), pair:
                case chance, _ if chance < 0.2:
                    continue
                case _, (one, two):
                    crowd.meet(one, two)
                case _, (lone,):
                    crowd.alone(lone)
        after, after_N = crowd.kept()
        assert after == pytest.approx(mass, rel=1e-14)
        assert (after_N - total_N).abs().max() < 3e-6  # fp32 states of values up to 10
    assert crowd.spread() < start / 4


def test_masses_become_even():
    crowd = Crowd(4, "noloco")
    crowd.add(4, 0.0)
    crowd.add(5, 0.0)
    for position in range(40):
        for one, two in pairs(sorted(crowd.states), 0, position):
            crowd.meet(one, two)
    assert sum(crowd.mass.values()) == pytest.approx(4.0)
    assert max(crowd.mass.values()) < min(crowd.mass.values()) * (1 + 2 * UNEVEN)


def test_who_has_no_mass_takes_over_what_its_partner_holds():
    crowd = Crowd(1, "noloco")
    crowd.add(7, 0.0)
    before = crowd.states[0]
    crowd.meet(0, 7)
    params_N = before.params_N + 0.5 * before.momentum_N
    for index in (0, 7):
        torch.testing.assert_close(crowd.states[index].params_N, params_N)
    assert crowd.mass == {0: 0.5, 7: 0.5}


def test_two_without_mass_meet_as_equals():
    crowd = Crowd(0, "noloco(momentum=0.0, pull=1.0)")
    crowd.add(1, 0.0)
    crowd.add(2, 0.0)
    mean_N = (crowd.states[1].params_N + crowd.states[2].params_N) / 2
    crowd.meet(1, 2)
    torch.testing.assert_close(crowd.states[1].params_N, mean_N)
    torch.testing.assert_close(crowd.states[2].params_N, mean_N)
    assert crowd.mass == {1: 0.0, 2: 0.0}


def test_what_one_hands_over_the_other_is_given():
    assert handed_over(1.0, 0.0) == 0.5 == -handed_over(0.0, 1.0)
    assert handed_over(0.0, 0.0) == handed_over(0.5, 0.5) == 0.0
    assert handed_over(1.0, 0.99) == 0.0


def test_a_weight_counts_at_most_four_times_the_others():
    method = parse("noloco", momentum=0.0, lr=1.0)
    state = OuterState.genesis(LAYOUT, torch.zeros(LAYOUT.numel))
    ones = torch.ones(LAYOUT.numel)
    mine = Side(delta_N=0 * ones, params_N=0 * ones, weight=1.0)
    theirs = Side(delta_N=ones, params_N=0 * ones, weight=1e12)
    met = meet(method, method.fragments(LAYOUT)[0], state, mine, theirs, inner_lr=0.0)
    torch.testing.assert_close(met.state.params_N, -0.8 * ones)


def test_a_long_pseudo_gradient_is_clipped_where_the_run_asks_for_it():
    method = parse("noloco", momentum=0.0, lr=1.0, clip_at=2.0)
    state = OuterState.genesis(LAYOUT, torch.zeros(LAYOUT.numel))
    ones = torch.ones(LAYOUT.numel)
    mine = Side(delta_N=ones, params_N=0 * ones, steps=10)
    theirs = Side(delta_N=100 * ones, params_N=0 * ones, steps=10)
    met = meet(method, method.fragments(LAYOUT)[0], state, mine, theirs, inner_lr=0.0)
    torch.testing.assert_close(met.state.params_N, -1.5 * ones)


def test_a_partner_with_next_to_nothing_clips_nobody():
    """P15, by gossip."""
    method = parse("noloco", momentum=0.0, lr=1.0, clip_at=2.0)
    state = OuterState.genesis(LAYOUT, torch.zeros(LAYOUT.numel))
    ones = torch.ones(LAYOUT.numel)
    mine = Side(delta_N=ones, params_N=0 * ones, steps=10)
    theirs = Side(delta_N=1e-30 * ones, params_N=0 * ones, steps=10)
    met = meet(method, method.fragments(LAYOUT)[0], state, mine, theirs, inner_lr=0.0)
    torch.testing.assert_close(met.state.params_N, -0.5 * ones)


def test_the_mean_keeps_the_variance_of_what_was_averaged():
    """arXiv:2404.04616, by NumPy-like means over each tensor."""
    one, two = torch.randn(LAYOUT.numel), 3 * torch.randn(LAYOUT.numel) + 1
    centre_N = (one + two) / 2
    kept = LAYOUT.split(with_variance_kept(centre_N, [one, two], LAYOUT))
    for name, centre, first, second, got in zip(
        LAYOUT.names, *map(LAYOUT.split, (centre_N, one, two)), kept, strict=True
    ):
        if name == "c":
            assert torch.equal(got, centre)
            continue
        wanted = (first.var(correction=0) + second.var(correction=0)) / 2
        torch.testing.assert_close(got.var(correction=0), wanted)
        torch.testing.assert_close(got.mean(), centre.mean())
        scale = torch.sqrt(wanted / centre.var(correction=0))
        torch.testing.assert_close(got, (centre - centre.mean()) * scale + centre.mean())
        assert centre.var() < 0.8 * wanted


def test_variance_is_corrected_where_the_run_asks_for_it():
    spread = {}
    for keep in (False, True):
        method = parse("noloco", momentum=0.0, pull=1.0, lr=0.0, keep_variance=keep)
        one, two = torch.randn(LAYOUT.numel), torch.randn(LAYOUT.numel)
        zeros = torch.zeros(LAYOUT.numel)
        state = OuterState.genesis(LAYOUT, one)
        mine, theirs = (Side(delta_N=zeros, params_N=x) for x in (one, two))
        met = meet(method, method.fragments(LAYOUT)[0], state, mine, theirs, inner_lr=0.0)
        spread[keep] = float(met.state.params_N.std())
    assert spread[False] == pytest.approx(0.5**0.5, rel=0.1)
    assert spread[True] == pytest.approx(1.0, rel=0.1)
    assert parse("noloco(keep_variance=True)").spec == "noloco(keep_variance=True)"


@pytest.mark.parametrize("options", [{"feedback": 1.0}, {"momentum": 1.0}, {"pull": 0.0}])
def test_what_gossip_cannot_do_is_refused(options):
    with pytest.raises(MethodError, match="expected"):
        parse("noloco", **options)


def test_pairs_do_not_depend_on_the_order_in_which_peers_are_known():
    names = ["ann", "bob", "eve", "joe", "zoe"]
    assert pairs(names, "run", 4) == pairs(names[::-1], "run", 4)
    drawn = pairs(names, "run", 4)
    assert sorted(name for pair in drawn for name in pair) == names
    assert sorted(map(len, drawn)) == [1, 2, 2]


def test_a_joiner_of_a_group_begins_without_mass():
    team = Team(3, "noloco", 2, present=2)
    team.run(range(4))
    team.join()
    assert [team.group.mass_of(index) for index in range(3)] == [1.0, 1.0, 0.0]
    team.run(range(4, 16))
    assert sum(team.group.mass_of(index) for index in range(3)) == pytest.approx(2.0)
    assert team.group.mass_of(2) > 0
