"""An order that evicts a process, at any moment of a round.

Either it comes to some of the processes, whose leaders propose it as soon as their machines let
them: the evicted process is in the electorate of the position that decides the order, and in no
later one. Or the position before decides it while this one reduces early: nobody votes here for an
entry with the evicted process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

from atoll.optim.log.entry import Elector, Entry, Member
from atoll.peer.rounds.consensus.round import Round
from atoll.peer.rounds.consensus.round_events import CloseGroup, LeaderView, SendProposal
from support.joint_model import JointModel
from support.round_model import PLACE, Broken, RoundModel, World


class _Ordered(RoundModel):
    """A world in which an order comes."""

    def __init__(self, *, knowing: Collection[int], evicted: int, **options: Any) -> None:
        """The order comes to all of `knowing` at once."""
        super().__init__(**options)
        self.knowing, self.evicted = frozenset(knowing), evicted

    @cached_property
    def control(self) -> Entry:
        """The entry that brings the order."""
        return Entry(
            run_id=b"r" * 32,
            epoch=PLACE.epoch,
            position=PLACE.position,
            kind="control",
            previous_chain=b"c" * 32,
            fragment=0,
            lr=1.0,
            momentum=0.0,
            members=(),
            parts=(),
            electorate=self.electorate_after,
            order=b"evict",
            settings=b"evicted",
        )

    @property
    def electorate_after(self) -> tuple[Elector, ...]:
        name = f"p{self.evicted}"
        return tuple(elector for elector in self.electorate if elector.peer_id != name)

    def steps(self, world: World) -> Iterator[World]:
        yield from super().steps(world)
        if not world.ordered:
            yield self._look_all(world._replace(ordered=True))

    def _view(self, world: World, leader: int, current: Round | None) -> LeaderView:
        view = super()._view(world, leader, current)
        knows = world.ordered and self.leaders[leader] in self.knowing
        return replace(view, control=self.control) if knows else view

    def _check_control(self, world: World, leader: int, entry: Entry) -> None:
        """It is the one that was given; who has not heard of it may be bound to it."""
        if not world.ordered or entry != self.control:
            raise Broken("proposed an order that nobody gave")


class OrderedRound(_Ordered):
    """Leaders and electors."""


class OrderedJoint(_Ordered, JointModel):
    """Leaders, members and electors."""


class RoundAfterOrder(RoundModel):
    """A round before whose turn a member is evicted."""

    def __init__(self, *, evicted: int, **options: Any) -> None:
        super().__init__(early=True, **options)
        self.out = frozenset({f"p{evicted}"})

    def steps(self, world: World) -> Iterator[World]:
        yield from super().steps(world)
        if not (world.ordered or world.turn):
            yield self._look_all(world._replace(ordered=True))

    def _view(self, world: World, leader: int, current: Round | None) -> LeaderView:
        view = super()._view(world, leader, current)
        return replace(view, evicted=self.out) if world.ordered else view

    def _do(self, world: World, leader: int, action: Any) -> World:
        match action:
            case CloseGroup(group=group) if world.ordered and self._are_in(group.members):
                raise Broken("closed a group with a member that is out")
            case SendProposal(entry=entry) if world.ordered and self._are_in(entry.members):
                raise Broken("proposed an entry with a member that is out")
        return super()._do(world, leader, action)

    def _awaited(self, world: World, current: Round) -> set[str]:
        return super()._awaited(world, current) - (self.out if world.ordered else frozenset())

    def _are_in(self, members: Collection[Member]) -> bool:
        return any(member.peer_id in self.out for member in members)
