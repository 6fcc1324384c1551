"""The reducer that the ranks of a peer share.

At the leader it wraps the reducer of the network, or of a group in this process. All ranks call it
alike, so each call is also where they meet:

    start     the leader joins; each rank gets its range of the run's parameters
    submit    ranks add up their work, encode their ranges, and the leader hands in all frames
    wait      the leader waits for the network, the ranks for the leader

After each, the leader hands out what was decided: each commit with the new parameters, and what
became of the residuals. A decision that only the leader sees, such as the end of the run, reaches
all ranks at the same call.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from atoll.optim import methods
from atoll.optim.log.replay import residual_of, with_codec
from atoll.optim.methods import Method, MethodError
from atoll.optim.ranks import residuals
from atoll.optim.ranks.placing import RankPlaces
from atoll.optim.ranks.ranks import Message, Ranks, RanksError
from atoll.optim.ranks.residuals import RemoteResidual, Settlement
from atoll.optim.reducer import AS_PLANNED, Commit, Contribution, Course, Reducer, Residual, Settle
from atoll.optim.reduction.cells import Bytes
from atoll.optim.reduction.contribution import Feedback, Offer
from atoll.optim.schedules import Stair, Timetable
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.layout import Layout
from atoll.optim.state.parts import TensorPart, TensorParts


class Led(Reducer, Protocol):
    """A reducer that can leave its residuals and its encoding to others."""

    @property
    def spec(self) -> Any:  # noqa: ANN401 - of a run, or of a group in this process
        ...

    @property
    def method(self) -> Method: ...

    @property
    def timetable(self) -> Timetable: ...

    @property
    def finished(self) -> bool: ...

    def close(self) -> None: ...

    def leave_residuals(self, keep: Callable[[int], Residual]) -> None:
        """Let `keep(fragment)` keep each residual; contributions then hold an `Offer`."""
        ...

    def weight_of(self, fragment: int, tokens: int, steps: int) -> float:
        """Return the weight at which a contribution has to be encoded now."""
        ...

    def await_residuals(self) -> None:
        """Wait until all that was decided has been settled."""
        ...


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """The length of a run, as a training loop reads it."""

    rounds: int


@dataclass(frozen=True, kw_only=True)
class RankOuter:
    """The windows of a run, as a training loop reads them."""

    inner_steps: int
    method: str


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """The part of a run's spec that every rank knows."""

    run: RankRun
    outer: RankOuter


class RankReducer(Reducer):
    """The reducer of one rank."""

    def __init__(self, ranks: Ranks, join: Callable[[], Led]) -> None:
        """Join on the leader; the other ranks wait until it has.

        Args:
            ranks: of the peer.
            join: returns the reducer of a run or of a group; called on the leader alone.

        Raises:
            RanksError: the leader could not join, or a rank is gone.
            MethodError: the run has no common state (`noloco`).
        """
        self._ranks = ranks
        self._inner: Led | None = None
        with ranks.leading():
            if ranks.leads:
                self._inner = join()
        told = ranks.tell(_described(self._inner) if self._inner is not None else None)
        self.method = methods.parse(told["method"])
        """The run's method, whose `worker` goes into a training loop."""
        if not self.method.logged:
            raise MethodError(
                f"expected a method with a common state, got {self.method.name}: several ranks "
                "can't meet other peers in pairs; give each process an invite of its own"
            )
        self.spec = RankSpec(
            run=RankRun(rounds=told["rounds"]),
            outer=RankOuter(inner_steps=told["inner_steps"], method=told["method"]),
        )
        self.timetable = Timetable(
            stairs=tuple(Stair(**stair) for stair in told["stairs"]),
            num_fragments=told["num_fragments"],
            total_steps=told["total_steps"],
        )
        """Steps and windows of the run by position."""
        self.places: RankPlaces | None = None
        """The own values of this rank; known after `start`."""
        self.recovers = bool(told["recovers"])
        """True if `start` takes the parameters from a log that is stored."""
        self.begins = ranks.leads
        """True if `start` wants the model's parameters from this rank."""
        self.course = AS_PLANNED
        """The course of training at this position."""
        self._codec: str | None = None
        """The codec that an order has set and that is in use here."""
        self.finished = False
        """True once the run is complete: what is trained from here on reaches nobody."""
        self._position = 0
        self._fragments: Sequence[Fragment] = ()
        self._settle: Settle | None = None
        self._commits: list[Commit] = []
        """Decided and not handed out; at the leader."""
        self._ledger: deque[Settlement] = deque()
        self._remote: list[RemoteResidual] = []
        self._feedback: list[Feedback] = []
        self._loaded: list[Tensor] = []
        """Own values of saved residuals, while a state is loaded."""
        self._offers: dict[int, Offer] = {}
        """This rank's share of what is on offer, by fragment."""
        self._latest_R: Tensor | None = None
        """Own values of all fragments, if there are several."""

    @property
    def position(self) -> int:
        """Entries of the log that the trainer has taken."""
        return self._position

    @property
    def fragments(self) -> Sequence[Fragment]:
        """The pieces into which the method cuts the run's model; ranks share each."""
        return self._fragments

    @property
    def leader(self) -> Led:
        """The reducer that the leader wraps.

        Raises:
            RanksError: on another rank.
        """
        if self._inner is None:
            raise RanksError("only the first rank talks to other peers; ask there")
        return self._inner

    def start(self, layout: Layout, params_N: Tensor, settle: Settle) -> Tensor:
        """Join the run; returns this rank's own values of its parameters."""
        self._settle = settle
        self._fragments = self.method.fragments(layout)
        self.places = places = RankPlaces(self._ranks, layout, self._fragments)
        self._feedback = [residual_of(self.method, own) for own in places.fragments]
        self._remote = [RemoteResidual(f, self._ledger) for f in range(len(self._fragments))]
        synced_N = None
        with self._ranks.leading(self._stop):
            if self._inner is not None:
                self._inner.leave_residuals(self._remote.__getitem__)
                synced_N = self._inner.start(layout, params_N, self._commits.append)
        synced_R = places.scatter(synced_N)
        self._latest_R = synced_R if len(self._fragments) > 1 else None
        self._share_news()
        return synced_R

    def encode_on(self, device: torch.device) -> None:
        """Encode this rank's ranges on a device from now on; call it once started."""
        for feedback in self._feedback:
            feedback.encode_on(device)

    def submit(self, contribution: Contribution) -> None:
        """Encode this rank's range; the leader hands in all of them as one contribution.

        Tokens are added up over the ranks; the loss is their mean.

        Raises:
            RanksError: the ranks are not at the same step, or one of them is gone.
        """
        fragment, steps = contribution.fragment, contribution.steps
        has_loss = math.isfinite(contribution.loss)
        tokens, losses, loss, *same = self._ranks.totals(
            contribution.tokens, has_loss, contribution.loss if has_loss else 0.0, steps, fragment
        )
        size = self._ranks.size
        if same != [steps * size, fragment * size]:
            raise RanksError(
                f"expected all ranks to end a window of {steps} steps, got others: each rank must "
                "call step() equally often, and skip the same steps"
            )
        weight = self._settled_weight(fragment, int(tokens), steps)
        assert not isinstance(contribution.delta, Offer), "a worker hands in values"
        own = self._feedback[fragment].offer(contribution.delta, weight)
        self._offers[fragment] = own
        offer = self._gathered(own)
        with self._ranks.leading(self._stop):
            if self._inner is not None:
                self._inner.submit(
                    replace(
                        contribution,
                        delta=offer,
                        tokens=int(tokens),
                        loss=loss / losses if losses else math.nan,
                    )
                )
        self._share_news()

    def wait(self) -> None:
        """Let the leader wait, and take what is decided."""
        with self._ranks.leading(self._stop):
            if self._inner is not None:
                self._inner.wait()
        self._share_news()

    def close(self) -> None:
        """Leave the run, at the leader. Idempotent."""
        if self._inner is not None:
            self._inner.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the leader's reducer's state with its part of the residuals, elsewhere the part.

        Raises:
            GroupError: a contribution is on offer in a group of one process.
        """
        assert self.places is not None
        self._settled_weight(None, 0, 0)
        masses = list[TensorPart]()
        for index, feedback in enumerate(self._feedback):
            mass_R, kept = feedback.mass_N, feedback.beta > 0
            masses.append(
                self.places.common(mass_R, index)
                if kept
                else TensorPart(values=mass_R, runs=(), shape=(0,))
            )
        if self._inner is None:
            return {"residuals": masses}
        for remote, mass in zip(self._remote, masses, strict=True):
            remote.mass = mass
        state = self._inner.state_dict()
        for remote in self._remote:
            remote.mass = torch.empty(0)  # the next step replaces what is saved now
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, by any number of ranks."""
        assert self.places is not None
        masses = list(_residuals_in(state))
        self._loaded = [
            self.places.own(mass, index) if math.prod(mass.shape) else torch.empty(0)
            for index, mass in enumerate(masses)
        ]
        with self._ranks.leading(self._stop):
            if self._inner is not None:
                self._inner.load_state_dict(_without_residuals(state))
                self._inner.await_residuals()
        self._offers.clear()
        self._share_news()
        self._loaded = []

    def _stop(self) -> None:
        """End the leader's wait: a rank is gone, and nothing can be trained without it."""
        stopping = getattr(self._inner, "stopping", None)
        if stopping is not None:
            stopping.set()

    def _settled_weight(self, fragment: int | None, tokens: int, steps: int) -> float:
        """Settle all that was decided; return the weight at which a contribution is encoded."""
        with self._ranks.leading(self._stop):
            weight = 0.0
            if self._inner is not None:
                self._inner.await_residuals()
                if fragment is not None:
                    weight = self._inner.weight_of(fragment, tokens, steps)
        told = self._ranks.tell_each(self._with_ledger({"weight": weight}, lambda rank: []))
        self._take_ledger(told)
        return float(told.fields["weight"])

    def _gathered(self, own: Offer) -> Offer:
        """Return all ranks' frames at the leader."""
        found = self._ranks.gather(
            Message(
                tensors=[
                    _joined(own.frames),
                    torch.tensor([len(frame) for frame in own.frames], dtype=torch.int64),
                    torch.tensor(own.squares, dtype=torch.float64),
                ]
            )
        )
        frames, squares = list[bytes](), list[float]()
        while found:  # the frames of a rank are copied once, and then its message goes
            joined, lengths, some = found.pop(0).tensors
            data, at = joined.numpy().data, 0
            for length in lengths.tolist():
                frames.append(bytes(data[at : at + length]))
                at += length
            squares += some.tolist()
        return Offer(weight=own.weight, frames=tuple(frames), squares=tuple(squares), after_N=None)

    # what was decided

    def _share_news(self) -> None:
        """Hand out what was decided, and deliver it on every rank."""
        commits = self._commits.copy()
        self._commits.clear()
        fields: dict[str, Any] = {"commits": [_fields_of(commit) for commit in commits]}
        if self._inner is not None:
            fields |= {"position": self._inner.position, "finished": self._inner.finished}
            fields["course"] = dataclasses.asdict(getattr(self._inner, "course", AS_PLANNED))
        told = self._ranks.tell_each(
            self._with_ledger(fields, lambda rank: self._tensors_of(commits, rank))
        )
        left = deque(self._take_ledger(told))
        for each in told.fields["commits"]:
            each = dict(each)
            params_R = self._own_params(each, left.popleft())
            included = left.popleft() if each.pop("has_included") else None
            self._position = each["position"]
            self.course = Course(**each.pop("course"))
            assert self._settle is not None, "a reducer settles only after start"
            self._settle(Commit(params_N=params_R, included=included, course=self.course, **each))
        self._position, self.finished = told.fields["position"], told.fields["finished"]
        self._follow(Course(**told.fields["course"]))

    def _follow(self, course: Course) -> None:
        """Take over the course of training at this position."""
        if course.codec != self._codec:
            self._codec, chosen = course.codec, with_codec(self.method, course.codec).codec
            for feedback in self._feedback:
                feedback.use_codec(chosen)
        self.course = course

    def _own_params(self, commit: Mapping[str, Any], values: Tensor) -> Tensor:
        """Return own values of all fragments, given those that a commit moved."""
        assert self.places is not None
        if self._latest_R is None or commit["reset"]:
            params_R = values
        else:
            params_R = self._latest_R.clone()
            self.places.fragments[commit["fragment"]].put_cut_(params_R, values)
        if self._latest_R is not None:
            self._latest_R = params_R
        return params_R

    def _tensors_of(self, commits: Sequence[Commit], rank: int) -> list[Tensor]:
        """Return what one rank needs of some commits."""
        assert self.places is not None
        tensors = list[Tensor]()
        for commit in commits:
            if commit.reset:
                tensors.append(self.places.cut(commit.params_N, rank))
            else:
                tensors.append(self.places.cut_fragment(commit.params_N, rank, commit.fragment))
            if commit.included is not None:
                own = self.places.ranges[commit.fragment][rank]
                tensors.append(commit.included[own.pieces])
        return tensors

    def _with_ledger(
        self, fields: dict[str, Any], tensors_of: Callable[[int], list[Tensor]]
    ) -> list[Message] | None:
        """Return a message a rank, with what became of the residuals first; at the leader."""
        if self._inner is None:
            return None
        assert self.places is not None
        entries = [self._ledger.popleft() for _ in range(len(self._ledger))]
        messages = []
        for rank in range(self._ranks.size):
            settled, tensors = residuals.cut(
                entries, self.places, rank, with_update=self._needs_update
            )
            messages.append(
                Message(fields=fields | {"settled": settled}, tensors=[*tensors, *tensors_of(rank)])
            )
        return messages

    def _take_ledger(self, told: Message) -> list[Tensor]:
        """Bring this rank's residuals up to date; return the other tensors of the message."""
        return residuals.apply(
            told.fields["settled"],
            told.tensors,
            self._feedback,
            self._offers,
            self._loaded,
            with_update=self._needs_update,
        )

    @property
    def _needs_update(self) -> bool:
        """Return whether losses are measured against the update that all peers apply."""
        return self.method.reduction == "low-rank"


def _joined(frames: Sequence[Bytes]) -> Tensor:
    """Return bytes one after another, copied once."""
    data = bytearray().join(frames)
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _residuals_in(node: Any) -> Iterator[Tensor | TensorParts]:  # noqa: ANN401 - a tree of anything
    """Yield the residuals in the state of any reducer, by fragment."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from [value] if key == "mass_N" else _residuals_in(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _residuals_in(value)


def _without_residuals(node: Any) -> Any:  # noqa: ANN401 - a tree of anything
    """Return the state without them: the ranks have taken their own."""
    if isinstance(node, Mapping):
        return {
            key: torch.empty(0) if key == "mass_N" else _without_residuals(value)
            for key, value in node.items()
        }
    if isinstance(node, list | tuple):
        return type(node)(map(_without_residuals, node))
    return node


def _described(inner: Led) -> dict[str, Any]:
    """Return what every rank needs to know of a run."""
    spec, timetable = inner.spec, inner.timetable
    return {
        "stairs": [dataclasses.asdict(stair) for stair in timetable.stairs],
        "num_fragments": timetable.num_fragments,
        "total_steps": timetable.total_steps,
        "method": inner.method.spec,
        "rounds": spec.run.rounds,
        "inner_steps": spec.outer.inner_steps,
        "recovers": getattr(inner, "recovers", False),
    }


def _fields_of(commit: Commit) -> dict[str, Any]:
    """Return what is equal on all ranks of a commit."""
    return {
        "fragment": commit.fragment,
        "position": commit.position,
        "settles": commit.settles,
        "members": commit.members,
        "reset": commit.reset,
        "course": dataclasses.asdict(commit.course),
        "in_part": commit.counts,
        "has_included": commit.included is not None,
    }
