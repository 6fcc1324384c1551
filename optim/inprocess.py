"""A reducer for workers that share one process: the round's arithmetic without its network.

Codec on both legs, error feedback at senders and owners, weights, caps, clip factors and the
outer step are the ones of a real round, so what trains here trains there. The workers run in
lockstep in one thread: the last one to submit reduces and settles for all.

    GroupError (RuntimeError)   workers out of step, or of different models
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.compression import Codec, parse
from atoll.optim.feedback import Feedback, Offer
from atoll.optim.layout import CELL, Layout
from atoll.optim.outer import nesterov
from atoll.optim.reducer import Commit, Contribution, Settle
from atoll.optim.state import OuterState, is_finite
from atoll.optim.update import decode_cells, encode_cells
from atoll.optim.weights import WeightRule, cap_weights, clip_factors, work_weight


class GroupError(RuntimeError):
    """A worker that is out of step with its group or does not fit it."""


@dataclass(frozen=True, kw_only=True)
class GroupStatistics:
    """What a group has done so far."""

    rounds: int
    """Reductions, those without an update included."""

    clipped: int
    """Contributions whose norm was clipped."""

    body_bytes: int
    """Length of all updates together: what each worker would have received."""


class InProcessGroup:
    """Workers of one process that reduce together."""

    def __init__(
        self,
        size: int,
        *,
        lr: float,
        momentum: float,
        codec: Codec | str = "int8",
        feedback: float = 1.0,
        weights: WeightRule = "rate",
    ) -> None:
        """Form a group; each worker takes its `member`.

        Args:
            size: number of workers.
            lr: outer learning rate; `outer_defaults` knows good ones.
            momentum: outer momentum.
            codec: codec of both legs, or its spec.
            feedback: share of the residual that comes back.
            weights: rule by which contributions are weighted.

        Raises:
            ValueError: when size is below 1 or feedback does not go with the codec.
            CodecError: when there is no such codec.
        """
        if size < 1:
            raise ValueError(f"expected at least one worker, got {size}")
        self.size = size
        self.lr = lr
        self.momentum = momentum
        self.codec = parse(codec) if isinstance(codec, str) else codec
        self.feedback = feedback
        self.weights: WeightRule = weights
        self._members = [InProcessMember(self, index) for index in range(size)]
        self._state: OuterState | None = None
        self._rounds = self._clipped = self._body_bytes = 0

    def member(self, index: int) -> "InProcessMember":
        """The reducer of one worker.

        Raises:
            IndexError: when there is no such worker.
        """
        return self._members[index]

    @property
    def state(self) -> OuterState:
        """The state that all workers share.

        Raises:
            GroupError: when no worker has started.
        """
        if self._state is None:
            raise GroupError("expected a worker to have started; give a member to DiLoCo first")
        return self._state

    def statistics(self) -> GroupStatistics:
        """What the group has done so far."""
        return GroupStatistics(
            rounds=self._rounds, clipped=self._clipped, body_bytes=self._body_bytes
        )

    def _start(self, layout: Layout, params_N: Tensor) -> OuterState:
        if self._state is None:
            self._state = OuterState.genesis(layout, params_N)
        elif self._state.layout != layout:
            raise GroupError("expected workers of one model, got another layout")
        return self._state

    def _submitted(self) -> None:
        if all(member.contribution is not None for member in self._members):
            self._reduce()

    def _reduce(self) -> None:
        contributions = [_pending(member) for member in self._members]
        weights = cap_weights([work_weight(c.tokens, c.steps, self.weights) for c in contributions])
        counted = self._step(contributions, weights) if sum(weights) > 0 else None
        if counted is None:
            self._state = self.state.at(self.state.position + 1)
        self._rounds += 1
        self._settle(counted=counted is not None)

    def _step(self, contributions: Sequence[Contribution], weights: Sequence[float]) -> Tensor:
        """Average, encode once, apply; leaves the members' residuals settled."""
        offers = [
            member.feedback.offer(c.delta_N, weight)
            for member, c, weight in zip(self._members, contributions, weights, strict=True)
        ]
        norms = [o.norm if weight > 0 else 0.0 for o, weight in zip(offers, weights, strict=True)]
        factors = clip_factors(norms, [c.steps for c in contributions])
        shares = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
        mean_N = self._mean(offers, shares, sum(weights))
        frames = encode_cells(self.codec, mean_N)
        update_N = decode_cells(self.codec, frames, mean_N.numel())
        everywhere = torch.ones(len(frames), dtype=torch.bool)
        for member, offer, share in zip(self._members, offers, shares, strict=True):
            member.feedback.settle(offer, everywhere, weight=share)
            part = self._part(member.index)
            member.feedback.owner_credit(part, (mean_N[part] - update_N[part]) * sum(weights))
        self._state = nesterov(self.state, update_N, lr=self.lr, momentum=self.momentum)
        self._clipped += sum(factor < 1 for factor in factors)
        self._body_bytes += sum(map(len, frames))
        return update_N

    def _mean(
        self, offers: Sequence[Offer], shares: Sequence[float], total_weight: float
    ) -> Tensor:
        sum_N = torch.zeros(self.state.layout.numel)
        for offer, share in zip(offers, shares, strict=True):
            if share > 0:
                sum_N += decode_cells(self.codec, offer.frames, sum_N.numel()) * share
        return sum_N / total_weight

    def _part(self, index: int) -> slice:
        """The values that one member owns: whole cells, as evenly as they go."""
        cells, numel = self.state.layout.num_cells, self.state.layout.numel
        start, stop = (cells * i // self.size * CELL for i in (index, index + 1))
        return slice(min(start, numel), min(stop, numel))

    def _settle(self, *, counted: bool) -> None:
        commit = Commit(
            position=self.state.position,
            params_N=self.state.params_N,
            included=torch.ones(self.state.layout.num_cells, dtype=torch.bool) if counted else None,
            members=self.size if counted else 0,
        )
        for member in self._members:
            member.contribution = None
        for member in self._members:
            member.settle(commit)


class InProcessMember:
    """The reducer that one worker of an `InProcessGroup` holds."""

    def __init__(self, group: InProcessGroup, index: int) -> None:
        """Made by the group."""
        self.index = index
        self.contribution: Contribution | None = None
        self._group = group
        self._settle: Settle | None = None
        self._feedback: Feedback | None = None

    @property
    def feedback(self) -> Feedback:
        """This worker's residual.

        Raises:
            GroupError: before start.
        """
        if self._feedback is None:
            raise GroupError(f"expected worker {self.index} to have started")
        return self._feedback

    def start(self, layout: Layout, params_N: Tensor, settle: Settle) -> Tensor:
        """Join; the first worker's parameters begin the run.

        Raises:
            GroupError: when the model's layout is not the group's.
            StateError: when the parameters hold NaN or infinity.
        """
        state = self._group._start(layout, params_N)
        self._settle = settle
        self._feedback = Feedback(layout.numel, self._group.codec, beta=self._group.feedback)
        return state.params_N

    def submit(self, contribution: Contribution) -> None:
        """Hand in a contribution; the last worker's reduces and settles all of them.

        Raises:
            GroupError: when one is pending, or delta does not fit.
            WorkRefused: when tokens or steps are absurd.
        """
        if self.contribution is not None:
            raise GroupError(
                f"expected the other workers to submit window {self.contribution.window} first; "
                "run the workers in turns, one step each"
            )
        delta_N = contribution.delta_N
        if delta_N.shape != (self._group.state.layout.numel,) or not is_finite(delta_N):
            raise GroupError("expected a finite pseudo-gradient of the group's layout")
        work_weight(contribution.tokens, contribution.steps, self._group.weights)
        self.contribution = contribution
        self._group._submitted()

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
        """The group's state, this worker's residual and its pending contribution."""
        state = self._group.state
        pending = self.contribution
        return {
            "position": state.position,
            "params_N": state.params_N,
            "momentum_N": state.momentum_N,
            "feedback": self.feedback.state_dict(),
            "contribution": None if pending is None else vars(pending).copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; load all workers before the next submit.

        Raises:
            StateError: when the parameters are of another length.
        """
        restored = OuterState.genesis(self._group.state.layout, state["params_N"])
        restored.momentum_N.copy_(state["momentum_N"])
        restored.require_finite()
        self._group._state = restored.at(state["position"])
        self.feedback.load_state_dict(state["feedback"])
        pending = state["contribution"]
        self.contribution = None if pending is None else Contribution(**pending)


def _pending(member: InProcessMember) -> Contribution:
    if member.contribution is None:
        raise GroupError(f"expected worker {member.index} to have submitted")
    return member.contribution
