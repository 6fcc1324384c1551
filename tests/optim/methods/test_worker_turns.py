"""Fragments are handed in when the log has their turn, also by whom it went on without."""

import pytest
import torch

from atoll.optim.methods import parse
from atoll.optim.reducer import Commit
from support.toys import adamw, backward, net

INNER_STEPS = 12


class TurnsOfOthers:
    """A log that others move on too, and that takes what is on offer at its turn."""

    def __init__(self, method):
        self.method, self.position, self.decided = method, 0, 0
        self.on_offer, self.queue = set(), []
        self.handed_in = []
        """(step, fragment, steps behind it)"""
        self.step = 0

    def start(self, layout, params_N, settle):
        self.fragments, self.settle, self.params_N = self.method.fragments(layout), settle, params_N
        return params_N

    @property
    def turn(self):
        return (self.decided + 1) % len(self.fragments)

    def submit(self, contribution):
        assert contribution.fragment not in self.on_offer
        self.on_offer.add(contribution.fragment)
        self.handed_in.append((self.step, contribution.fragment, contribution.steps))
        while self.turn in self.on_offer:
            self.decide()

    def decide(self):
        fragment, mine = self.turn, self.turn in self.on_offer
        self.on_offer.discard(fragment)
        self.decided += 1
        pieces = len(self.fragments[fragment].pieces)
        self.queue.append(
            Commit(
                fragment=fragment,
                position=self.decided,
                params_N=self.params_N,
                included=torch.ones(pieces, dtype=torch.bool) if mine else None,
                settles=mine,
                members=2,
            )
        )

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def wait(self):
        while self.queue:
            commit = self.queue.pop(0)
            self.position = commit.position
            self.settle(commit)


def train(method, steps, before_step):
    """What a lone worker hands in, the log being moved by `before_step` too."""
    method = parse(method)
    model, reducer = net(blocks=4), TurnsOfOthers(method)
    worker = method.worker(model, adamw(model), reducer, inner_steps=INNER_STEPS)
    for step in range(1, steps + 1):
        reducer.step = step
        before_step(reducer, step)
        backward(model, step)
        worker.step(tokens=8)
    return reducer.handed_in


@pytest.mark.parametrize(("count", "tau"), [(2, 0), (2, 2), (2, 5), (3, 0), (3, 3), (4, 2)])
def test_whom_the_log_went_on_without_is_in_turn_at_the_next_window(count, tau):
    apart, missed = INNER_STEPS // count, 2

    def one_without_us(log, step):
        if step == (missed + 1) * apart - 1:
            log.decide()

    handed_in = train(f"streaming(count={count}, tau={tau})", 72, one_without_us)
    assert [step for step, _, _ in handed_in] == list(range(apart, 73, apart))
    positions = [p for p in range(len(handed_in) + 1) if p != missed]
    assert [fragment for _, fragment, _ in handed_in] == [(p + 1) % count for p in positions]
    assert all(n == INNER_STEPS for step, _, n in handed_in if step > 3 * INNER_STEPS)


@pytest.mark.parametrize(("count", "tau"), [(2, 2), (2, 5), (3, 4), (4, 3)])
def test_the_next_position_counts_what_came_early_and_is_not_taken_once(count, tau):
    method = parse(f"streaming(count={count}, tau={tau})")
    model, log = net(blocks=4), TurnsOfOthers(method)
    worker = method.worker(model, adamw(model), log, inner_steps=INNER_STEPS)
    for step in range(1, 200):
        if step % 7 == 0:
            log.decide()
            log.wait()
        backward(model, step)
        worker.step(tokens=8)
        not_delivered = len(log.on_offer) + sum(commit.settles for commit in log.queue)
        assert worker.next_position == log.position + not_delivered


def test_every_fragment_of_a_slow_peer_has_its_turns():
    """Others move the log twice in each of its turns, so that it is always at the same one."""

    def two_turns(log, step):
        if step % (INNER_STEPS // 4) == 0:
            log.decide()

    handed_in = train("streaming(count=2, tau=1)", 600, two_turns)
    times = [sum(fragment == which for _, fragment, _ in handed_in) for which in range(2)]
    assert sum(times) >= 95
    assert min(times) >= 30


def test_windows_that_end_at_one_time_are_set_apart_again():
    """As where a peer trained on while nothing was decided."""
    method = parse("streaming(count=2, tau=1)")
    model, reducer = net(blocks=4), TurnsOfOthers(method)
    worker = method.worker(model, adamw(model), reducer, inner_steps=INNER_STEPS)
    together = worker.state_dict()
    for window in (together, *together["fragments"]):
        window["step_in_window"] = window["steps"] = INNER_STEPS - 1
    worker.load_state_dict(together)
    for step in range(1, 26):
        reducer.step = step
        backward(model, step)
        worker.step(tokens=8)
    handed_in = [(step, fragment) for step, fragment, _ in reducer.handed_in]
    assert handed_in == [(1, 1), (7, 0), (13, 1), (19, 0), (25, 1)]
