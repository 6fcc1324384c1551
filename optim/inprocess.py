"""Reducers for workers that share one process: a round's arithmetic without its network.

Codec on both legs, error feedback at senders and owners, weights, caps, clip factors and the
outer step are the ones of a real round, so what trains here trains there. The workers run in
lockstep in one thread: the last one to submit a fragment reduces it and settles for all.

    InProcessGroup   one state that all workers share, for the methods with a log
    GossipGroup      a state each, pairs drawn by a shared seed, for `noloco`

    GroupError (RuntimeError)   workers out of step, of different models, or a method of the other
                                kind of group
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.optim import methods
from atoll.optim.fragments import Fragment, decode_pieces, encode_pieces
from atoll.optim.layout import Layout
from atoll.optim.methods.base import Method
from atoll.optim.reducer import Commit, Contribution, Settle
from atoll.optim.reduction import SHAPES, Reduction
from atoll.optim.state import OuterState, is_finite
from atoll.optim.weights import work_weight


class GroupError(RuntimeError):
    """A worker that is out of step with its group or does not fit it."""


@dataclass(frozen=True, kw_only=True)
class GroupStatistics:
    """What a group has done so far."""

    rounds: int = 0
    """Reductions, those without an update included."""

    clipped: int = 0
    """Contributions whose norm was clipped."""

    body_bytes: int = 0
    """Length of all updates together: what a follower of the log receives."""

    wire_bytes: int = 0
    """Payload that all workers together have sent to one another; as much was received."""


class Group(ABC):
    """Workers of one process; each takes its `member`."""

    def __init__(self, size: int, method: Method | str, **options: object) -> None:
        """Form a group.

        Args:
            size: number of workers.
            method: what they run, or its spec.
            options: of the method, in place of its spec's or the defaults.

        Raises:
            ValueError: when size is below 1, or there is no such method or option.
            CodecError: when there is no such codec.
        """
        if size < 1:
            raise ValueError(f"expected at least one worker, got {size}")
        self.size = size
        self.method = _chosen(method, options)
        self._members = [InProcessMember(self, index) for index in range(size)]
        self._layout: Layout | None = None
        self._fragments: tuple[Fragment, ...] = ()
        self._statistics = GroupStatistics()

    def member(self, index: int) -> "InProcessMember":
        """The reducer of one worker.

        Raises:
            IndexError: when there is no such worker.
        """
        return self._members[index]

    def statistics(self) -> GroupStatistics:
        """What the group has done so far."""
        return self._statistics

    @abstractmethod
    def state_of(self, index: int) -> OuterState:
        """The state that a worker stands at.

        Raises:
            GroupError: when no worker has started.
        """

    @abstractmethod
    def _begin(self, layout: Layout, params_N: Tensor) -> None:
        """Make the first state, of the first worker's parameters."""

    @abstractmethod
    def _set_state(self, index: int, state: OuterState) -> None: ...

    @abstractmethod
    def _reduce(self, fragment: int, contributions: Sequence[Contribution]) -> None:
        """Reduce, apply and settle."""

    @abstractmethod
    def _member_state(self, index: int, fragment: int) -> dict[str, Any]: ...

    @abstractmethod
    def _load_member_state(self, index: int, fragment: int, state: Mapping[str, Any]) -> None: ...

    def _start(self, layout: Layout, params_N: Tensor) -> None:
        if self._layout is None:
            self._fragments = self.method.fragments(layout)
            self._begin(layout, params_N)
            self._layout = layout
        elif self._layout != layout:
            raise GroupError("expected workers of one model, got another layout")

    def _submitted(self, fragment: int) -> None:
        pending = [member.contributions.get(fragment) for member in self._members]
        contributions = [c for c in pending if c is not None]
        if len(contributions) == self.size:
            self._reduce(fragment, contributions)

    def _settle(self, fragment: int, commits: Sequence[Commit]) -> None:
        for member in self._members:
            del member.contributions[fragment]
        for member, commit in zip(self._members, commits, strict=True):
            member.settle(commit)

    def _count(self, *, clipped: int = 0, body_bytes: int = 0, wire_bytes: int = 0) -> None:
        before = self._statistics
        self._statistics = GroupStatistics(
            rounds=before.rounds + 1,
            clipped=before.clipped + clipped,
            body_bytes=before.body_bytes + body_bytes,
            wire_bytes=before.wire_bytes + wire_bytes,
        )


class InProcessGroup(Group):
    """Workers of one process that share one state, as replicas of a log do."""

    def __init__(self, size: int, method: Method | str = "diloco", **options: object) -> None:
        """As `Group`.

        Raises:
            GroupError: for a method by gossip.
        """
        super().__init__(size, method, **options)
        if self.method.reduction not in SHAPES:
            raise GroupError(f"expected a method with a common state, got {self.method.name}")
        self._state: OuterState | None = None
        self._reductions: list[Reduction] = []

    @property
    def state(self) -> OuterState:
        """The state that all workers share.

        Raises:
            GroupError: when no worker has started.
        """
        if self._state is None:
            raise GroupError("expected a worker to have started; give a member to a method first")
        return self._state

    def state_of(self, index: int) -> OuterState:
        """The state that all workers share."""
        return self.state

    def _begin(self, layout: Layout, params_N: Tensor) -> None:
        shape = SHAPES[self.method.reduction]
        self._reductions = [shape(self.method, layout, f, self.size) for f in self._fragments]
        self._state = OuterState.genesis(layout, params_N)

    def _set_state(self, index: int, state: OuterState) -> None:
        self._state = state

    def _reduce(self, fragment: int, contributions: Sequence[Contribution]) -> None:
        update_F = self._update(fragment, contributions)
        counted = update_F is not None
        pieces = len(self._fragments[fragment].pieces)
        commit = Commit(
            fragment=fragment,
            position=self.state.position,
            params_N=self.state.params_N,
            included=torch.ones(pieces, dtype=torch.bool) if counted else None,
            members=self.size if counted else 0,
            update_N=update_F,
        )
        self._settle(fragment, [commit] * self.size)

    def _update(self, fragment: int, contributions: Sequence[Contribution]) -> Tensor | None:
        """Move the state on; None where nothing counts and it keeps its bits."""
        reduction = self._reductions[fragment]
        weights = reduction.weights(contributions)
        if sum(weights) == 0:
            self._state = self.state.at(self.state.position + 1)
            self._count()
            return None
        reduced = reduction.reduce(contributions, weights)
        self._state = self.method.apply(
            self.state,
            reduced.update_F,
            fragment=self._fragments[fragment],
            lr=_common_lr(contributions),
        )
        self._count(
            clipped=reduced.clipped,
            body_bytes=reduced.body_bytes,
            wire_bytes=reduced.wire_bytes,
        )
        return reduced.update_F

    def _member_state(self, index: int, fragment: int) -> dict[str, Any]:
        return self._reductions[fragment].member_state(index)

    def _load_member_state(self, index: int, fragment: int, state: Mapping[str, Any]) -> None:
        self._reductions[fragment].load_member_state(index, state)


class GossipGroup(Group):
    """Workers of one process with a state each, that meet in pairs.

    Each round a shared seed draws the pairs; with an odd number one worker stays alone. A worker
    sends its pseudo-gradient and its weights, and gets the pair's mean of the first and the
    difference from its own to the mean of the second. The difference is taken between decoded
    values, so what the codec loses does not move the pair's mean.
    """

    def __init__(
        self, size: int, method: Method | str = "noloco", *, seed: int = 0, **options: object
    ) -> None:
        """As `Group`; the seed draws the pairs.

        Raises:
            GroupError: for a method with a common state.
        """
        super().__init__(size, method, **options)
        if self.method.reduction != "pairs":
            raise GroupError(f"expected a method by gossip, got {self.method.name}")
        self.seed = seed
        self._states: list[OuterState] = []

    def state_of(self, index: int) -> OuterState:
        """A worker's own state.

        Raises:
            GroupError: when no worker has started.
        """
        if not self._states:
            raise GroupError("expected a worker to have started; give a member to a method first")
        return self._states[index]

    def _begin(self, layout: Layout, params_N: Tensor) -> None:
        self._states = [OuterState.genesis(layout, params_N)] * self.size

    def _set_state(self, index: int, state: OuterState) -> None:
        self._states[index] = state

    def _reduce(self, fragment: int, contributions: Sequence[Contribution]) -> None:
        commits: dict[int, Commit] = {}
        wire_bytes = 0
        for pair in pairs(self.size, self.seed, self.state_of(0).position):
            updates, used = self._meet(pair, contributions)
            wire_bytes += used
            for index, update_2N in zip(pair, updates, strict=True):
                commits[index] = self._step(index, update_2N, contributions[index], len(pair))
        self._count(body_bytes=wire_bytes, wire_bytes=wire_bytes)
        self._settle(fragment, [commits[index] for index in range(self.size)])

    def _meet(
        self, pair: Sequence[int], contributions: Sequence[Contribution]
    ) -> tuple[list[Tensor], int]:
        """Each member's update, and the bytes that they exchanged."""
        rule = self.method.weights
        weights = [work_weight(contributions[i].tokens, contributions[i].steps, rule) for i in pair]
        deltas, delta_bytes = self._exchange([contributions[i].delta_N for i in pair])
        params, params_bytes = self._exchange([self.state_of(i).params_N for i in pair])
        mean_N = _mean(deltas, weights)
        centre_N = _mean(params, [1.0] * len(pair))
        updates = [torch.cat([mean_N, centre_N - own_N]) for own_N in params]
        return updates, delta_bytes + params_bytes

    def _exchange(self, vectors: Sequence[Tensor]) -> tuple[list[Tensor], int]:
        """What the members of a pair decode of one another, and of themselves."""
        if len(vectors) == 1:
            return list(vectors), 0
        codec, pieces = self.method.codec, self._fragments[0].pieces
        frames = [encode_pieces(codec, vector_N, pieces) for vector_N in vectors]
        decoded = [decode_pieces(codec, each, pieces) for each in frames]
        return decoded, sum(len(frame) for each in frames for frame in each)

    def _step(
        self, index: int, update_2N: Tensor, contribution: Contribution, members: int
    ) -> Commit:
        fragment = self._fragments[0]
        state = self.method.apply(
            self.state_of(index), update_2N, fragment=fragment, lr=contribution.lr
        )
        self._states[index] = state
        return Commit(
            position=state.position,
            params_N=state.params_N,
            included=torch.ones(len(fragment.pieces), dtype=torch.bool),
            members=members,
            update_N=update_2N,
        )

    def _member_state(self, index: int, fragment: int) -> dict[str, Any]:
        return {}

    def _load_member_state(self, index: int, fragment: int, state: Mapping[str, Any]) -> None:
        pass


class InProcessMember:
    """The reducer that one worker of a group holds."""

    def __init__(self, group: Group, index: int) -> None:
        """Made by the group."""
        self.index = index
        self.contributions: dict[int, Contribution] = {}
        self._group = group
        self._settle: Settle | None = None

    def start(self, layout: Layout, params_N: Tensor, settle: Settle) -> Tensor:
        """Join; the first worker's parameters begin the run.

        Raises:
            GroupError: when the model's layout is not the group's.
            StateError: when the parameters hold NaN or infinity.
        """
        self._group._start(layout, params_N)
        self._settle = settle
        return self._group.state_of(self.index).params_N

    def submit(self, contribution: Contribution) -> None:
        """Hand in a contribution; the last worker's reduces and settles all of them.

        Raises:
            GroupError: when one is pending, or delta does not fit.
            WorkRefused: when tokens or steps are absurd.
        """
        pending = self.contributions.get(contribution.fragment)
        if pending is not None:
            raise GroupError(
                f"expected the other workers to submit window {pending.window} first; "
                "run the workers in turns, one step each"
            )
        self._check(contribution)
        self.contributions[contribution.fragment] = contribution
        self._group._submitted(contribution.fragment)

    def wait(self) -> None:
        """Nothing to wait for: the last submit settles."""

    def settle(self, commit: Commit) -> None:
        """Pass a commit on to this worker's method.

        Raises:
            GroupError: before start.
        """
        if self._settle is None:
            raise GroupError(f"expected worker {self.index} to have started")
        self._settle(commit)

    def state_dict(self) -> dict[str, Any]:
        """The group's state, this worker's residuals and its pending contributions.

        The first fragment's lie at the top, the others' in "fragments".
        """
        group = self._group
        state = group.state_of(self.index)
        first, *others = [self._slot(index) for index in range(len(group._fragments))]
        return {
            "position": state.position,
            "params_N": state.params_N,
            "momentum_N": state.momentum_N,
            "statistics": vars(group.statistics()).copy(),
            **first,
            **({"fragments": others} if others else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; load all workers before the next submit.

        Raises:
            StateError: when the parameters are of another length.
        """
        group = self._group
        restored = OuterState.genesis(group.state_of(self.index).layout, state["params_N"])
        restored.momentum_N.copy_(state["momentum_N"])
        restored.require_finite()
        group._set_state(self.index, restored.at(state["position"]))
        group._statistics = GroupStatistics(**state.get("statistics", {}))
        for index, slot in enumerate([state, *state.get("fragments", [])]):
            group._load_member_state(self.index, index, slot["feedback"])
            self.contributions.pop(index, None)
            if slot["contribution"] is not None:
                self.contributions[index] = Contribution(**slot["contribution"])

    def _slot(self, fragment: int) -> dict[str, Any]:
        pending = self.contributions.get(fragment)
        return {
            "feedback": self._group._member_state(self.index, fragment),
            "contribution": None if pending is None else vars(pending).copy(),
        }

    def _check(self, contribution: Contribution) -> None:
        count = len(self._group._fragments)
        if not 0 <= contribution.fragment < count:
            raise GroupError(f"expected one of {count} fragments, got {contribution.fragment}")
        expected = self._group._fragments[contribution.fragment].numel
        delta_N = contribution.delta_N
        if delta_N.shape != (expected,) or not is_finite(delta_N):
            raise GroupError(f"expected a finite pseudo-gradient of {expected} values")
        work_weight(contribution.tokens, contribution.steps, self._group.method.weights)


def in_process(size: int, method: Method | str, **options: object) -> Group:
    """The group for a method: with a common state, or by gossip.

    Raises:
        ValueError: as `Group`.
    """
    chosen = _chosen(method, options)
    return (GossipGroup if chosen.reduction == "pairs" else InProcessGroup)(size, chosen)


def _chosen(method: Method | str, options: Mapping[str, object]) -> Method:
    if isinstance(method, Method) and not options:
        return method
    return methods.parse(method if isinstance(method, str) else method.spec, **options)


def pairs(size: int, seed: int, position: int) -> list[tuple[int, ...]]:
    """Who meets whom at a position; with an odd number the last one is alone.

    Everyone draws the same, from the seed that the run shares.
    """
    order = list(range(size))
    random.Random(f"{seed}/{position}").shuffle(order)
    return [tuple(order[i : i + 2]) for i in range(0, size, 2)]


def _mean(vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    sum_N = torch.zeros_like(vectors[0])
    for vector_N, weight in zip(vectors, weights, strict=True):
        sum_N += vector_N * weight
    return sum_N / (sum(weights) or 1.0)


def _common_lr(contributions: Sequence[Contribution]) -> float:
    """The inner rate that the outer step follows.

    Raises:
        GroupError: when the workers' schedules differ.
    """
    rates = {c.lr for c in contributions if c.tokens > 0}
    if len(rates) > 1:
        raise GroupError(f"expected the same inner learning rate of all, got {sorted(rates)}")
    return rates.pop()
