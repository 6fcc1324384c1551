"""The rule of gossip holds for exchanges as they are, and is broken by each wrong one."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from atoll.optim.inprocess.gossip import Met, Side, meet
from atoll.optim.methods.noloco import NoLoCoMethod
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.peer.gossip.meeting import GossipWindow, OwnSide
from atoll.peer.lab.hunt.mass_audits import MassAudit, Process

METHOD = NoLoCoMethod()
LAYOUT = Layout(names=("w",), shapes=((8,),))
FRAGMENT = METHOD.fragments(LAYOUT)[0]
A, B = ("a", 1), ("b", 1)


def window(seed: int, weight: float) -> GossipWindow:
    noise = torch.Generator().manual_seed(seed)
    delta_N = torch.randn(8, generator=noise)
    return GossipWindow(
        number=1, delta_N=delta_N, weight=weight, tokens=8, steps=1, loss=None, inner_lr=0.1
    )


@dataclass
class Run:
    """Two processes that hold the first state, and what the audit finds wrong."""

    masses: dict[Process, float]
    broken: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        genesis = METHOD.genesis(LAYOUT, torch.linspace(-1.0, 1.0, 8))
        self.audit = MassAudit(METHOD.scalars(0.1), genesis, lambda rule, text: self._note(text))
        self.states = {A: genesis, B: genesis}
        for number, process in enumerate(self.states):
            self.audit.begun(process, genesis, self.masses[process])
            self.alone(process, window(number, 1.0))  # so that their states differ
        assert not self.broken

    def _note(self, text: str) -> None:
        self.broken.append(text)

    def alone(self, process: Process, window: GossipWindow) -> None:
        state, mass = self.states[process], self.masses[process]
        met = meet(METHOD, FRAGMENT, state, self.side(process, window), None, inner_lr=0.1)
        self.move(process, met.state, mass, window)

    def side(self, process: Process, window: GossipWindow) -> Side:
        state = self.states[process]
        return Side(
            delta_N=window.delta_N,
            params_N=state.params_N,
            momentum_N=state.momentum_N,
            mass=self.masses[process],
            weight=window.weight,
        )

    def move(
        self, process: Process, state: OuterState, mass: float, window: GossipWindow | None
    ) -> None:
        before = self.states[process], self.masses[process]
        self.states[process], self.masses[process] = state, mass
        self.audit.moved(process, before, (state, mass), window)

    def agree(self) -> dict[Process, Met]:
        """Let both compute an exchange, and commit nothing."""
        windows = {A: window(3, 1.0), B: window(4, 9.0)}
        name = b"exchange %d" % self.audit.num_exchanges
        met = {}
        for one, other in ((A, B), (B, A)):
            sides = [self.side(each, windows[each]) for each in (one, other)]
            met[one] = meet(METHOD, FRAGMENT, self.states[one], *sides, inner_lr=0.1)
            own = OwnSide(window=windows[one], state=self.states[one], mass=self.masses[one])
            self.audit.offered(one, name, own, met[one].state)
        return met

    def commit(self, process: Process, met: Met, mass: float | None = None) -> None:
        self.move(process, met.state, met.mass if mass is None else mass, window(3, 1.0))


@pytest.mark.parametrize("masses", [(1.0, 1.0), (1.0, 0.97), (1.0, 0.25), (0.0, 1.0), (0.0, 0.0)])
def test_exchanges_as_they_are_keep_the_rule(masses: tuple[float, float]) -> None:
    run = Run(dict(zip((A, B), masses, strict=True)))
    for _ in range(3):
        met = run.agree()
        run.commit(A, met[A])
        run.commit(B, met[B])
        run.alone(A, window(7, 0.0))
        run.audit.look(B, run.masses[B])
    assert not run.broken
    assert run.audit.num_exchanges == 3


def keep_mass(run: Run) -> None:
    met = run.agree()
    run.commit(A, met[A], mass=1.0)
    run.commit(B, met[B])


def forget_the_exchange(run: Run) -> None:
    run.commit(A, run.agree()[A])
    run.alone(B, window(5, 1.0))


def count_a_window_twice(run: Run) -> None:
    met = run.agree()
    run.commit(A, met[A])
    state = OuterState.genesis(LAYOUT, met[B].state.params_N + 1e-3, met[B].state.memory_M)
    run.audit._offered[B] = replace(run.audit._offered[B], after=state)
    run.move(B, state, met[B].mass, window(4, 9.0))


def commit_alone(run: Run) -> None:
    own = OwnSide(window=window(3, 1.0), state=run.states[A], mass=run.masses[A])
    side = run.side(A, own.window)
    met = meet(METHOD, FRAGMENT, own.state, side, run.side(B, own.window), inner_lr=0.1)
    run.audit.offered(A, b"name", own, met.state)
    run.commit(A, met)


def change_between(run: Run) -> None:
    run.audit.look(A, 0.5)


def begin_with_another_state(run: Run) -> None:
    run.audit.begun(("a", 2), run.states[B], 1.0)


def give_up_and_keep(run: Run) -> None:
    run.agree()
    run.audit.gave_up(B, run.states[B], 0.25)


def take_over_with_mass(run: Run) -> None:
    run.move(A, run.states[B], 1.0, None)


@pytest.mark.parametrize(
    "wrong",
    [
        keep_mass,
        forget_the_exchange,
        count_a_window_twice,
        commit_alone,
        change_between,
        begin_with_another_state,
        give_up_and_keep,
        take_over_with_mass,
    ],
)
def test_each_wrong_move_is_found(wrong: Callable[[Run], None]) -> None:
    run = Run({A: 1.0, B: 0.25})
    wrong(run)
    assert run.broken


def test_a_peer_in_doubt_may_give_up_its_mass() -> None:
    run = Run({A: 1.0, B: 0.25})
    run.commit(A, run.agree()[A])
    run.masses[B] = 0.0
    run.audit.gave_up(B, run.states[B], 0.0)
    run.alone(B, window(5, 1.0))
    assert not run.broken


def test_a_process_that_ended_takes_its_mass_with_it() -> None:
    run = Run({A: 1.0, B: 0.25})
    run.commit(A, run.agree()[A])
    run.audit.begun(("b", 2), run.states[B], 0.0)
    run.alone(A, window(5, 1.0))
    assert not run.broken
