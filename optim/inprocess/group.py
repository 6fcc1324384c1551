"""Groups of workers that share one process: presence, contributions and their settlement.

The workers run in turns in one thread, or with `threads=True` in a thread each: the last one to
submit a fragment reduces it. In one thread that settles for all; in threads each worker takes its
commits in its own. They come and go as peers do:

    joins    a worker that starts after the first round has weight 0 in its first window
    leaves   nobody waits for it any more; what it handed in and its residual are lost
    misses   a round that closes without a worker's contribution: it has trained and sent, and
             its work stays in its drift, to be counted in a later round, once

    GroupError (RuntimeError)   workers out of step, of different models, in threads that the group
                                does not expect, or a method of the other kind of group
"""

import logging
import random
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from atoll.optim import methods, schedules
from atoll.optim.methods.base import Method
from atoll.optim.reducer import Commit, Contribution, Residual, Settle
from atoll.optim.reduction.contribution import Offer, work_weight
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState, is_finite

POLL_S = 0.2  # how soon a thread that waits notices that another has ended
REPORT_S = 10.0  # after which it reports what it waits for
PATIENCE = 4  # windows that a worker trains beyond one that nobody reduces; then it is an error

_log = logging.getLogger(__name__)

Misses = Callable[[int, int], bool]
"""(position, index) -> whether the round at a position closes without a worker."""


class GroupError(RuntimeError):
    """A worker that is out of step with its group or does not fit it."""


@dataclass(frozen=True, kw_only=True)
class GroupRun:
    """The length of a group's run."""

    rounds: int = 0
    """Rounds after which `finished` is true; 0 for a run without an end."""


@dataclass(frozen=True, kw_only=True)
class GroupOuter:
    """The windows of a group's run."""

    inner_steps: int = 30
    """Steps between two rounds."""

    method: str = ""
    """Spec of the method."""


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """The part of a run's spec that a training loop reads, under the same names."""

    run: GroupRun
    outer: GroupOuter


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
    # Drawn again from its place, so a run that resumes misses the same rounds.
    return lambda position, index: random.Random(f"{seed}/{position}/{index}").random() < share


class WorkerGroup(ABC):
    """Workers of one process; each takes its `member`."""

    def __init__(
        self,
        size: int,
        method: Method | str,
        *,
        misses: Misses = nobody,
        inner_steps: int = 30,
        rounds: int = 0,
        threads: bool = False,
        **options: object,
    ) -> None:
        """Form a group.

        Args:
            size: number of workers, those that join later included.
            method: what they run, or its spec.
            misses: who misses which rounds.
            inner_steps: H, as `spec.outer.inner_steps` of each member gives it to a loop.
            rounds: rounds after which the members are `finished`; 0 for no end.
            threads: True if each worker has a thread of its own. A round then waits for all
                `size` workers, whether they have started or not, until they `close`.
            options: of the method, instead of its spec's or the defaults.

        Raises:
            ValueError: when a number is out of range, or there is no such method or option.
            CodecError: when there is no such codec.
        """
        if size < 1 or inner_steps < 1 or rounds < 0:
            raise ValueError(
                "expected at least one worker, one inner step and no negative rounds, "
                f"got {size}, {inner_steps} and {rounds}"
            )
        self.size = size
        self.method = chosen(method, options)
        outer = GroupOuter(inner_steps=inner_steps, method=self.method.spec)
        self.spec = GroupSpec(run=GroupRun(rounds=rounds), outer=outer)
        self.threads = threads
        self.changed = threading.Condition()
        """Guards all of the group, its members' contributions and their commits."""
        self._absent: set[int] = set()
        """Workers that have left, of a group in threads."""
        self._reported_lone = False
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
            raise GroupError(
                "expected workers of one model, got another layout; the first parameter that "
                f"differs: {self._layout.difference(layout)}"
            )
        self._absent.discard(index)
        if index not in self._present:
            self._present.add(index)
            self._seat(index)

    def _leave(self, index: int) -> None:
        self._absent.add(index)
        if index in self._present:
            self._present.remove(index)
            self._unseat(index)
        for fragment in range(len(self._fragments)):
            self._submitted(fragment)
        self.changed.notify_all()

    def _submitted(self, fragment: int) -> None:
        """Reduce if this was the last contribution that somebody waits for."""
        pending = {i: self._members[i].contributions.get(fragment) for i in self._expected()}
        contributions = {i: c for i, c in pending.items() if c is not None}
        if contributions and len(contributions) == len(pending):
            self._report_lone(contributions)
            self._reduce(fragment, contributions)

    def _report_lone(self, contributions: Mapping[int, Contribution]) -> None:
        """Warn once that a round averages nothing, as in loops that run one after the other."""
        if len(contributions) == 1 < self.size and not self._reported_lone:
            self._reported_lone = True
            _log.warning(
                "a round takes the work of worker %d alone, of a group of %d; start all workers "
                "before a window ends: in turns, or with threads=True in a thread each",
                *contributions,
                self.size,
            )

    def _expected(self) -> tuple[int, ...]:
        """Return the workers that a round waits for."""
        if self.threads:  # a thread may begin long after the first
            return tuple(i for i in range(self.size) if i not in self._absent)
        return self.present

    def _expect_one_thread(self, index: int) -> None:
        """Refuse a worker in another thread than the others, whose rounds it would not meet.

        Raises:
            GroupError: when there is one, and the group was not told.
        """
        here = threading.current_thread()
        self._members[index].thread = here
        # Also of those that have left: a short loop may have ended before the next one begins.
        others = [member.thread for member in self._members if member.index != index]
        if not self.threads and any(t is not here and t.is_alive() for t in others if t):
            raise GroupError(
                f"expected all workers in one thread, in turns of one step each, got worker "
                f"{index} in thread {here.name!r}; for a thread each, make the group with "
                "threads=True"
            )

    def _bury(self) -> None:
        """Let workers leave whose threads have ended without `close`."""
        for index in self._expected():
            thread = self._members[index].thread
            if thread is not None and not thread.is_alive():
                _log.warning("worker %d left: its thread ended without close()", index)
                self._members[index].contributions.clear()
                self._leave(index)

    def _missing(self, fragments: Sequence[int]) -> str:
        """Name the workers whose contributions are missing for one of some fragments."""
        members = [self._members[i] for i in self._expected()]
        late = [m.index for m in members if not all(f in m.contributions for f in fragments)]
        return ", ".join(map(str, late)) or "none"

    def _settle(self, fragment: int, commits: Mapping[int, Commit]) -> None:
        for index in commits:
            del self._members[index].contributions[fragment]
        for index, commit in commits.items():
            self._members[index].decide(commit)
        self.changed.notify_all()

    def _count(self, *, clipped: int = 0, body_bytes: int = 0, wire_bytes: int = 0) -> None:
        before = self._statistics
        self._statistics = GroupStatistics(
            rounds=before.rounds + 1,
            clipped=before.clipped + clipped,
            body_bytes=before.body_bytes + body_bytes,
            wire_bytes=before.wire_bytes + wire_bytes,
        )


class InProcessMember:
    """The reducer that one worker of a group holds; what a loop asks of a networked one, it has."""

    def __init__(self, group: WorkerGroup, index: int) -> None:
        """Made by the group."""
        self.index = index
        self.contributions: dict[int, Contribution] = {}
        self.thread: threading.Thread | None = None
        """The last one that called this member."""
        self.keep: Callable[[int], Residual] | None = None
        """Keeps this worker's residuals, if the group does not."""
        self._joining: set[int] = set()
        self._group = group
        self._settle: Settle | None = None
        self._decided: deque[Commit] = deque()
        """Commits that this worker has not taken; in one thread it takes them at once."""
        self._position = 0
        self._waits = 0
        """Steps that this worker has taken since it handed in what is pending."""

    def start(self, layout: Layout, params_N: Tensor, settle: Settle) -> Tensor:
        """Join; the first worker's parameters begin the run.

        Raises:
            GroupError: when the model's layout is not the group's, or the thread is another.
            StateError: when the parameters hold NaN or infinity.
        """
        group = self._group
        with group.changed:
            group._expect_one_thread(self.index)
            group._start(self.index, layout, params_N)
            if group.statistics().rounds > 0:
                self._joining = set(range(len(group._fragments)))
            self._settle = settle
            self._decided.clear()
            state = group.state_of(self.index)
            self._position = state.position
            return state.params_N

    @property
    def spec(self) -> GroupSpec:
        """Return what a loop reads of the spec of a run: `outer.inner_steps` and `run.rounds`."""
        return self._group.spec

    @property
    def method(self) -> Method:
        """The group's method, whose `worker` goes into a training loop."""
        return self._group.method

    @property
    def timetable(self) -> schedules.Timetable:
        """Steps and windows of the group's run by position."""
        spec = self._group.spec
        return schedules.equal(
            spec.outer.inner_steps,
            rounds=spec.run.rounds,
            num_fragments=max(1, len(self.fragments)),
        )

    @property
    def fragments(self) -> Sequence[Fragment]:
        return self._group._fragments

    @property
    def position(self) -> int:
        if self._group.threads:
            return self._position
        return self._group.state_of(self.index).position

    @property
    def finished(self) -> bool:
        """Return whether the group's rounds are over; never if it has no number of them."""
        return self._settle is not None and 0 < self._group.spec.run.rounds <= self.position

    def close(self) -> None:
        """Leave the group. Idempotent."""
        with self._group.changed:
            if self.contributions:
                _log.warning(
                    "worker %d left with a window that no round has taken; the workers %s had not "
                    "ended theirs",
                    self.index,
                    self._group._missing(sorted(self.contributions)),
                )
            self.leave()

    def leave(self) -> None:
        """Go away, as a peer that dies; the others reduce without it. `start` joins again."""
        with self._group.changed:
            self.contributions.clear()
            self._group._leave(self.index)

    def submit(self, contribution: Contribution) -> None:
        """Hand in a contribution; the last worker's reduces all of them.

        Raises:
            GroupError: when one is pending, delta does not fit, or the thread is another.
            WorkRefused: when tokens or steps are absurd.
        """
        pending = self.contributions.get(contribution.fragment)
        if pending is not None:
            raise GroupError(
                f"expected the other workers to submit window {pending.window} first; "
                "run the workers in turns, one step each"
            )
        if not isinstance(contribution.delta, Offer):
            # A `Difference` is a pass over the model at each reading; a group reads it often.
            contribution = replace(contribution, delta=contribution.delta_N)
        self._check(contribution)
        if contribution.fragment in self._joining:  # as in a run, it counts from the second on
            contribution = replace(contribution, tokens=0)
        with self._group.changed:
            self._group._expect_one_thread(self.index)
            self._waits = 0
            self.contributions[contribution.fragment] = contribution
            self._group._submitted(contribution.fragment)
        self._take_decided()

    def leave_residuals(self, keep: Callable[[int], Residual]) -> None:
        """Let `keep(fragment)` keep each residual; contributions then hold an `Offer`."""
        self.keep = keep

    def weight_of(self, fragment: int, tokens: int, steps: int) -> float:
        """Return the weight at which a contribution has to be encoded now."""
        counted = 0 if fragment in self._joining else tokens
        return work_weight(counted, steps, self._group.method.weights)

    def await_residuals(self) -> None:
        """Return at once: rounds settle residuals as they end."""

    def wait(self) -> None:
        """Wait for a round if the workers have threads; in one thread the last submit settles.

        Raises:
            GroupError: when the other workers of a group in one thread do not take their turns.
        """
        if self._group.threads:
            self._await_round()
        elif self.contributions:
            self._expect_turns()
        self._take_decided()

    def decide(self, commit: Commit) -> None:
        """Pass a commit on to this worker: at once, or in its own thread.

        Raises:
            GroupError: before start.
        """
        self._decided.append(commit)
        if not self._group.threads:
            self._take_decided()

    def _await_round(self) -> None:
        """Wait until something is decided for this worker, unless it has nothing on offer."""
        waited_s = 0.0
        with self._group.changed:
            while self.contributions and not self._decided:
                if self._group.changed.wait(POLL_S):
                    continue
                waited_s += POLL_S
                self._group._bury()
                if REPORT_S <= waited_s < REPORT_S + POLL_S:
                    late = self._group._missing(sorted(self.contributions))
                    _log.warning(
                        "worker %d waits for the workers %s to end their windows; one that will "
                        "not must close() its member",
                        self.index,
                        late,
                    )

    def _expect_turns(self) -> None:
        self._waits += 1
        steps = max(contribution.steps for contribution in self.contributions.values())
        if self._waits > PATIENCE * steps + 1:
            late = self._group._missing(sorted(self.contributions))
            raise GroupError(
                f"worker {self.index} has trained {self._waits} steps beyond a window for which "
                f"the workers {late} did not hand in theirs; run the workers in turns, one step "
                "each, or make the group with threads=True and give each worker a thread; one "
                "that has ended must close() its member"
            )

    def _take_decided(self) -> None:
        """Take commits, in this worker's thread.

        Raises:
            GroupError: before start.
        """
        while self._decided:
            commit = self._decided.popleft()
            if self._settle is None:
                raise GroupError(f"expected worker {self.index} to have started")
            if commit.included is not None:  # dropped as meant, not missed: the next window counts
                self._joining.discard(commit.fragment)
            self._position = commit.position
            self._waits = 0
            self._settle(commit)

    def state_dict(self) -> dict[str, Any]:
        """The group's state, this worker's residuals and its pending contributions.

        The first fragment's lie at the top, the others' in "fragments".
        """
        group = self._group
        with group.changed:
            self._take_decided()  # early ones, which the worker only keeps
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
        with self._group.changed:
            self._load(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        group = self._group
        layout = group.state_of(self.index).layout
        restored = OuterState.genesis(layout, state["params_N"], state["memory_M"])
        group._set_state(self.index, restored.at(state["position"]))
        self._position = state["position"]
        group._statistics = GroupStatistics(**state.get("statistics", {}))
        self._joining = set(state.get("joining", ()))
        for index, slot in enumerate([state, *state.get("fragments", [])]):
            group._load_member_state(self.index, index, slot["feedback"])
            self.contributions.pop(index, None)
            if slot["contribution"] is not None:
                self.contributions[index] = Contribution(**slot["contribution"])

    def _slot(self, fragment: int) -> dict[str, Any]:
        pending = self.contributions.get(fragment)
        if pending is not None and isinstance(pending.delta, Offer):
            raise GroupError(
                "a contribution of several ranks is on offer, which a group in one process can't "
                "save; save when the other workers have ended their windows too"
            )
        return {
            "feedback": self._group._member_state(self.index, fragment),
            "contribution": None if pending is None else vars(pending).copy(),
        }

    def _check(self, contribution: Contribution) -> None:
        count = len(self._group._fragments)
        if not 0 <= contribution.fragment < count:
            raise GroupError(f"expected one of {count} fragments, got {contribution.fragment}")
        fragment = self._group._fragments[contribution.fragment]
        work_weight(contribution.tokens, contribution.steps, self._group.method.weights)
        if isinstance(contribution.delta, Offer):
            if len(contribution.delta.frames) != len(fragment.pieces):
                raise GroupError(f"expected {len(fragment.pieces)} frames of a contribution")
            return
        expected = fragment.numel
        delta_N = contribution.delta_N
        if delta_N.shape != (expected,) or not is_finite(delta_N):
            raise GroupError(f"expected a finite pseudo-gradient of {expected} values")


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
