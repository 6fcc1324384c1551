"""Groups of workers that share one process: presence, contributions and their settlement.

The workers run in lockstep in one thread: the last one to submit a fragment reduces it and
settles for all. They come and go as peers do:

    joins    a worker that starts after the first round has weight 0 in its first window
    leaves   nobody waits for it any more; what it handed in and its residual are lost
    misses   a round that closes without a worker's contribution: it has trained and sent, and
             its work stays in its drift, to be counted in a later round, once

    GroupError (RuntimeError)   workers out of step, of different models, or a method of the other
                                kind of group
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from atoll.optim import methods
from atoll.optim.methods.base import Method
from atoll.optim.reducer import Commit, Contribution, Settle
from atoll.optim.reduction.contribution import work_weight
from atoll.optim.state.layout import Fragment, Layout
from atoll.optim.state.outer_state import OuterState, is_finite

Misses = Callable[[int, int], bool]
"""(position, index) -> whether the round at a position closes without a worker."""


class GroupError(RuntimeError):
    """A worker that is out of step with its group or does not fit it."""


@dataclass(frozen=True, kw_only=True)
class GroupStatistics:
    """Counters of a group."""

    rounds: int = 0
    """Reductions, those without an update included."""

    clipped: int = 0
    """Contributions whose norm was clipped."""

    body_bytes: int = 0
    """Length of all updates together: what a follower of the log receives."""

    wire_bytes: int = 0
    """Payload that all workers together have sent to one another; as much was received. A worker
    that misses a round has sent all the same."""


def nobody(position: int, index: int) -> bool:
    """No worker misses a round."""
    return False


def at_random(share: float, seed: int) -> Misses:
    """Each worker misses each round with a probability of `share`; the same at every call.

    Raises:
        ValueError: when the share is not in [0, 1).
    """
    if not 0.0 <= share < 1.0:
        raise ValueError(f"expected a share of missed rounds from 0 to below 1, got {share}")
    # Drawn anew from its place, so a run that resumes misses the same rounds.
    return lambda position, index: random.Random(f"{seed}/{position}/{index}").random() < share


class WorkerGroup(ABC):
    """Workers of one process; each takes its `member`."""

    def __init__(
        self, size: int, method: Method | str, *, misses: Misses = nobody, **options: object
    ) -> None:
        """Form a group.

        Args:
            size: number of workers, those that join later included.
            method: what they run, or its spec.
            misses: who misses which rounds.
            options: of the method, instead of its spec's or the defaults.

        Raises:
            ValueError: when size is below 1, or there is no such method or option.
            CodecError: when there is no such codec.
        """
        if size < 1:
            raise ValueError(f"expected at least one worker, got {size}")
        self.size = size
        self.method = chosen(method, options)
        self._misses = misses
        self._members = [InProcessMember(self, index) for index in range(size)]
        self._present: set[int] = set()
        self._layout: Layout | None = None
        self._fragments: tuple[Fragment, ...] = ()
        self._statistics = GroupStatistics()

    def member(self, index: int) -> "InProcessMember":
        """The reducer of one worker.

        Raises:
            GroupError: when there is no such worker.
        """
        if not 0 <= index < len(self._members):
            raise GroupError(f"expected a worker of 0 to {len(self._members) - 1}, got {index}")
        return self._members[index]

    @property
    def present(self) -> tuple[int, ...]:
        """Return the members that have started and not left, in order."""
        return tuple(sorted(self._present))

    def statistics(self) -> GroupStatistics:
        """Return the counters of the group."""
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
    def _seat(self, index: int) -> None:
        """Make room for a worker that is new among those present."""

    @abstractmethod
    def _unseat(self, index: int) -> None:
        """Forget what was kept of a worker that has left."""

    @abstractmethod
    def _set_state(self, index: int, state: OuterState) -> None: ...

    @abstractmethod
    def _reduce(self, fragment: int, contributions: Mapping[int, Contribution]) -> None:
        """Reduce, apply and settle; there is one contribution of each who is present."""

    @abstractmethod
    def _member_state(self, index: int, fragment: int) -> dict[str, Any]: ...

    @abstractmethod
    def _load_member_state(self, index: int, fragment: int, state: Mapping[str, Any]) -> None: ...

    def _start(self, index: int, layout: Layout, params_N: Tensor) -> None:
        if self._layout is None:
            self._fragments = self.method.fragments(layout)
            self._begin(layout, params_N)
            self._layout = layout
        elif self._layout != layout:
            raise GroupError("expected workers of one model, got another layout")
        if index not in self._present:
            self._present.add(index)
            self._seat(index)

    def _leave(self, index: int) -> None:
        if index in self._present:
            self._present.remove(index)
            self._unseat(index)
        for fragment in range(len(self._fragments)):
            self._submitted(fragment)

    def _submitted(self, fragment: int) -> None:
        """Reduce if this was the last contribution that somebody waits for."""
        pending = {i: self._members[i].contributions.get(fragment) for i in self.present}
        contributions = {i: c for i, c in pending.items() if c is not None}
        if contributions and len(contributions) == len(pending):
            self._reduce(fragment, contributions)

    def _settle(self, fragment: int, commits: Mapping[int, Commit]) -> None:
        for index in commits:
            del self._members[index].contributions[fragment]
        for index, commit in commits.items():
            self._members[index].settle(commit)

    def _count(self, *, clipped: int = 0, body_bytes: int = 0, wire_bytes: int = 0) -> None:
        before = self._statistics
        self._statistics = GroupStatistics(
            rounds=before.rounds + 1,
            clipped=before.clipped + clipped,
            body_bytes=before.body_bytes + body_bytes,
            wire_bytes=before.wire_bytes + wire_bytes,
        )


class InProcessMember:
    """The reducer that one worker of a group holds."""

    def __init__(self, group: WorkerGroup, index: int) -> None:
        """Made by the group."""
        self.index = index
        self.contributions: dict[int, Contribution] = {}
        self._joining: set[int] = set()
        self._group = group
        self._settle: Settle | None = None

    def start(self, layout: Layout, params_N: Tensor, settle: Settle) -> Tensor:
        """Join; the first worker's parameters begin the run.

        Raises:
            GroupError: when the model's layout is not the group's.
            StateError: when the parameters hold NaN or infinity.
        """
        group = self._group
        group._start(self.index, layout, params_N)
        if group.statistics().rounds > 0:
            self._joining = set(range(len(group._fragments)))
        self._settle = settle
        return group.state_of(self.index).params_N

    @property
    def fragments(self) -> Sequence[Fragment]:
        return self._group._fragments

    @property
    def position(self) -> int:
        return self._group.state_of(self.index).position

    def leave(self) -> None:
        """Go away, as a peer that dies; the others reduce without it. `start` joins again."""
        self.contributions.clear()
        self._group._leave(self.index)

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
        # A `Difference` is a pass over the model at each reading; a group reads it several times.
        contribution = replace(contribution, delta=contribution.delta_N)
        self._check(contribution)
        if contribution.fragment in self._joining:  # as in a run, it counts from the second on
            contribution = replace(contribution, tokens=0)
        self.contributions[contribution.fragment] = contribution
        self._group._submitted(contribution.fragment)

    def wait(self) -> None:
        """Return at once: the last submit settles."""

    def settle(self, commit: Commit) -> None:
        """Pass a commit on to this worker's method.

        Raises:
            GroupError: before start.
        """
        if self._settle is None:
            raise GroupError(f"expected worker {self.index} to have started")
        if commit.included is not None:  # dropped as meant, not missed: the next window counts
            self._joining.discard(commit.fragment)
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
            "memory_M": state.memory_M,
            "statistics": vars(group.statistics()).copy(),
            "joining": sorted(self._joining),
            **first,
            **({"fragments": others} if others else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; load all workers before the next submit.

        Raises:
            StateError: when the parameters are of another length.
        """
        group = self._group
        layout = group.state_of(self.index).layout
        restored = OuterState.genesis(layout, state["params_N"], state["memory_M"])
        group._set_state(self.index, restored.at(state["position"]))
        group._statistics = GroupStatistics(**state.get("statistics", {}))
        self._joining = set(state.get("joining", ()))
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


def chosen(method: Method | str, options: Mapping[str, object]) -> Method:
    """A method with some options changed.

    Raises:
        MethodError: when there is no such method or option.
    """
    if isinstance(method, Method) and not options:
        return method
    return methods.parse(method if isinstance(method, str) else method.spec, **options)


def common_lr(contributions: Sequence[Contribution]) -> float:
    """The inner rate that the outer step follows.

    Raises:
        GroupError: when the workers' schedules differ.
    """
    rates = {c.lr for c in contributions if c.tokens > 0}
    if len(rates) > 1:
        raise GroupError(f"expected the same inner learning rate of all, got {sorted(rates)}")
    return rates.pop()
