"""Arithmetic of pairwise exchanges: pairing, masses, means, and the step after them.

By gossip each peer has weights x and a momentum m of its own, and a **mass** w, the push-sum
weight (Kempe et al., FOCS 2003; for learning, SGP, arXiv:1811.10792). Peers that begin a run have
mass 1, those that join it later 0: what they hold counts only once they have met somebody. When
two meet that do not hold about the same mass, the heavier one hands over half of what it has more,
d, together with its weights and its momentum:

    w = (w1 + w2) / 2        the lighter: x = ((w - d) x + d x2) / w, m likewise
                             the heavier: x = x + d / w (x - x2), m likewise

x2 and m2 are what the lighter decodes of the heavier's, so what a codec loses is not lost. Then
both take the outer step on the pair's mean: the pull towards it moves w1 x1 as far as it moves
w2 x2 back. So, to rounding, no meeting changes

    sum of w        and        sum of w (x + mu / (1 - mu) m)

of the averaging part, that is for a step without pseudo-gradients; the second term is where a
momentum that is left alone still leads. A peer that dies takes its mass with it.

Both sides compute all this from the same decoded vectors. `GossipGroup` does it in one process,
`atoll.peer.gossip` over the network.

# N parameters
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from atoll.optim.inprocess.group import GroupError, Misses, WorkerGroup, nobody
from atoll.optim.methods.base import Method
from atoll.optim.methods.noloco import PairedMethod
from atoll.optim.reducer import Commit, Contribution
from atoll.optim.reduction.cells import Cells
from atoll.optim.reduction.contribution import cap_weights, clip_factors, work_weight
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState

# Share of the mean mass. Mass may not travel without the momentum, which is a third vector on the
# wire; a smaller difference is not worth one.
UNEVEN = 1 / 16

T = TypeVar("T", int, str)


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """One side of an exchange, as the other side decodes it."""

    delta_N: Tensor  # noqa: N815
    """Pseudo-gradient of its window."""

    params_N: Tensor  # noqa: N815
    """Its weights before the step."""

    momentum_N: Tensor | None = None  # noqa: N815
    """Its momentum, if it hands over mass."""

    mass: float = 1.0
    """Push-sum weight, in [0, 1]."""

    weight: float = 1.0
    """Weight of its pseudo-gradient; 0 for a joiner's first window."""

    steps: int = 1
    """Inner steps behind the pseudo-gradient."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Met:
    """The state of one side after an exchange."""

    state: OuterState
    mass: float
    update_2N: Tensor  # noqa: N815
    """The pair's mean pseudo-gradient, then the way to its mean weights."""


def pairs(members: Sequence[T], seed: object, position: int) -> list[tuple[T, ...]]:
    """Return the pairs of a round; with an odd number of peers the last one is alone.

    Members are ordered by SHA-256 of `seed/position/member`, and each two neighbours meet, so
    everyone who knows the same members draws the same pairs.

    Args:
        members: distinct numbers or names, in any order.
        seed: what the run shares.
        position: the round.
    """

    def place(member: T) -> bytes:
        return hashlib.sha256(f"{seed}/{position}/{member}".encode()).digest()

    order = sorted(members, key=place)
    return [tuple(order[i : i + 2]) for i in range(0, len(order), 2)]


def handed_over(mine: float, theirs: float) -> float:
    """Return the mass that `mine` hands over to `theirs`; negative if it is given some."""
    given = (mine - theirs) / 2
    return given if abs(given) > UNEVEN * (mine + theirs) / 2 else 0.0


def meet(
    method: PairedMethod,
    fragment: Fragment,
    state: OuterState,
    mine: Side,
    theirs: Side | None,
    *,
    inner_lr: float,
) -> Met:
    """Return one side's state after an exchange; alone, it steps on its own pseudo-gradient.

    Args:
        method: of the run.
        fragment: of the method; all values.
        state: this peer's own, exact; left as it is.
        mine: what the partner decodes of this peer.
        theirs: what this peer decodes of the partner; None if there is none.
        inner_lr: inner learning rate at the end of the window.
    """
    sides = [mine] if theirs is None else [mine, theirs]
    mass = mine.mass
    if theirs is not None and (given := handed_over(mine.mass, theirs.mass)):
        mass = (mine.mass + theirs.mass) / 2
        state = _levelled(state, mine, theirs, given / mass)
        sides = [_evened(mine, theirs), _evened(theirs, mine)]
    masses = [side.mass for side in sides]
    if not any(masses):
        masses = [1.0] * len(masses)  # two joiners: neither counts more
    centre_N = _mean([side.params_N for side in sides], masses)
    if len(sides) > 1:
        centre_N = method.centre(centre_N, [side.params_N for side in sides], state.layout)
    delta_N = _mean(_clipped(sides, method.clip_at), cap_weights([s.weight for s in sides]))
    update_2N = torch.cat([delta_N, centre_N - sides[0].params_N])
    lr, momentum = method.scalars(inner_lr)
    stepped = method.apply(state, update_2N, fragment=fragment, lr=lr, momentum=momentum)
    return Met(state=stepped, mass=mass, update_2N=update_2N)


def decoded(cells: Cells, frames: Sequence[bytes]) -> Tensor:
    """Return what the other side decodes from frames that `cells` encoded."""
    values_N = torch.empty(cells.numel)
    for index, frame in enumerate(frames):
        values_N[cells.values(index, index + 1)] = cells.decode_sent(index, frame)
    return values_N


def _levelled(state: OuterState, mine: Side, theirs: Side, share: float) -> OuterState:
    """Weights and momentum after mass was handed over.

    Args:
        state: before.
        mine: what the partner decodes of this peer.
        theirs: likewise the other way.
        share: handed over, in the mean mass; negative if it was given.
    """
    carried = mine if share > 0 else theirs
    if carried.momentum_N is None:
        raise ValueError("expected the momentum of the heavier of the two, got none")
    new = OuterState.blank(state.layout, state.position)
    new.params_N.copy_(state.params_N + (state.params_N - carried.params_N) * share)
    new.momentum_N.copy_(state.momentum_N + (state.momentum_N - carried.momentum_N) * share)
    return new


def _evened(side: Side, other: Side) -> Side:
    """A side as both know it after mass was handed over."""
    mass = (side.mass + other.mass) / 2
    share = max(0.0, (other.mass - side.mass) / 2) / mass
    params_N = side.params_N + (other.params_N - side.params_N) * share
    return replace(side, params_N=params_N, mass=mass)


def _clipped(sides: Sequence[Side], at: float) -> list[Tensor]:
    """Clip the partner's pseudo-gradient to `at` times one's own a step, the first; 0 clips none.

    One's own is whole: next to nothing of a partner would otherwise clip it to next to nothing.
    """
    deltas = [side.delta_N for side in sides]
    if not at:
        return deltas
    norms = [float(delta_N.norm()) for delta_N in deltas]
    _, *factors = clip_factors(norms, [max(1, side.steps) for side in sides], at=at)
    theirs = [delta_N * factor for delta_N, factor in zip(deltas[1:], factors, strict=True)]
    return [deltas[0], *theirs]


def _mean(vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    sum_N = torch.zeros_like(vectors[0])
    for vector_N, weight in zip(vectors, weights, strict=True):
        sum_N += vector_N * weight
    return sum_N / (sum(weights) or 1.0)


class GossipGroup(WorkerGroup):
    """Pairs that a shared seed draws each round; with an odd number one worker stays alone.

    A worker sends its pseudo-gradient and its weights. One whose partner is away, or misses the
    round, stays alone as well. A joiner begins at the weights of the first that is present, without
    mass.
    """

    def __init__(
        self,
        size: int,
        method: Method | str = "noloco",
        *,
        seed: int = 0,
        misses: Misses = nobody,
        inner_steps: int = 30,
        rounds: int = 0,
        threads: bool = False,
        **options: object,
    ) -> None:
        """Take the arguments of `WorkerGroup`; the seed draws the pairs.

        Raises:
            GroupError: for a method with a common state.
        """
        super().__init__(
            size,
            method,
            misses=misses,
            inner_steps=inner_steps,
            rounds=rounds,
            threads=threads,
            **options,
        )
        if not isinstance(self.method, PairedMethod):
            raise GroupError(f"expected a method by gossip, got {self.method.name}")
        self._paired = self.method
        self.seed = seed
        self._states: dict[int, OuterState] = {}
        self._mass: dict[int, float] = {}

    def state_of(self, index: int) -> OuterState:
        """A worker's own state.

        Raises:
            GroupError: when the worker has not started.
        """
        if index not in self._states:
            raise GroupError("expected a worker to have started; give a member to a method first")
        return self._states[index]

    def mass_of(self, index: int) -> float:
        """A worker's push-sum weight; 0 for one that is not here.

        For observers: a joiner begins at 0, and no meeting changes the sum.
        """
        return self._mass.get(index, 0.0)

    def _begin(self, layout: Layout, params_N: Tensor) -> None:
        self._genesis = OuterState.genesis(layout, params_N)
        self._cells = Cells(codec=self.method.codec, fragment=self._fragments[0])

    def _seat(self, index: int) -> None:
        known = next(iter(sorted(self._states.items())), (index, self._genesis))[1]
        begun = OuterState.genesis(known.layout, known.params_N)
        self._states[index] = begun.at(known.position)
        # A mass for a joiner would count the first worker's weights twice.
        self._mass[index] = 0.0 if self.statistics().rounds else 1.0

    def _unseat(self, index: int) -> None:
        del self._states[index], self._mass[index]

    def _set_state(self, index: int, state: OuterState) -> None:
        self._states[index] = state

    def _reduce(self, fragment: int, contributions: Mapping[int, Contribution]) -> None:
        position = self.state_of(min(contributions)).position
        meeting = {index for index in contributions if not self._misses(position, index)}
        commits = {i: self._missed(i) for i in contributions if i not in meeting}
        wire_bytes = 0
        for drawn in pairs(range(self.size), self.seed, position):
            pair = [index for index in drawn if index in meeting]
            met, used = self._meet(pair, contributions) if pair else ([], 0)
            wire_bytes += used
            for index, after in zip(pair, met, strict=True):
                commits[index] = self._take(index, after, len(pair))
        self._count(body_bytes=wire_bytes, wire_bytes=wire_bytes)
        self._settle(fragment, dict(sorted(commits.items())))

    def _missed(self, index: int) -> Commit:
        """Let a worker miss a round: its state stays, its work remains in its drift."""
        state = self.state_of(index)
        state = self._states[index] = state.at(state.position + 1)
        return Commit(position=state.position, params_N=state.params_N, included=None, members=0)

    def _meet(
        self, pair: Sequence[int], contributions: Mapping[int, Contribution]
    ) -> tuple[list[Met], int]:
        """Return the state of each member, and the bytes that they exchanged."""
        shown = [self._shown(i, pair, contributions[i]) for i in pair]
        sides = [side for side, _ in shown]
        met = [
            meet(
                self._paired,
                self._fragments[0],
                self.state_of(index),
                side,
                next((other for other in sides if other is not side), None),
                inner_lr=contributions[index].lr,
            )
            for index, side in zip(pair, sides, strict=True)
        ]
        return met, sum(wire_bytes for _, wire_bytes in shown)

    def _shown(
        self, index: int, pair: Sequence[int], contribution: Contribution
    ) -> tuple[Side, int]:
        """Return what a member sends, and its bytes."""
        state, used = self.state_of(index), 0

        def sent(vector_N: Tensor) -> Tensor:
            nonlocal used
            if len(pair) < 2:  # alone: nothing travels, so no codec loses anything
                return vector_N
            frames = self._cells.encode(vector_N)
            used += sum(map(len, frames))
            return decoded(self._cells, frames)

        gives = any(handed_over(self._mass[index], self._mass[other]) > 0 for other in pair)
        side = Side(
            delta_N=sent(contribution.delta_N),
            params_N=sent(state.params_N),
            momentum_N=sent(state.momentum_N) if gives else None,
            mass=self._mass[index],
            weight=work_weight(contribution.tokens, contribution.steps, self.method.weights),
            steps=contribution.steps,
        )
        return side, used

    def _take(self, index: int, met: Met, members: int) -> Commit:
        self._states[index], self._mass[index] = met.state, met.mass
        return Commit(
            position=met.state.position,
            params_N=met.state.params_N,
            included=torch.ones(len(self._fragments[0].pieces), dtype=torch.bool),
            members=members,
        )

    def _member_state(self, index: int, fragment: int) -> dict[str, Any]:
        return {"mass": self._mass[index]}

    def _load_member_state(self, index: int, fragment: int, state: Mapping[str, Any]) -> None:
        self._mass[index] = float(state["mass"])
