"""`diloco`: H inner steps, then Nesterov on the averaged pseudo-gradient (arXiv:2311.08105).

With `tau` above 0 the reduction travels for so many inner steps, at most a window, and what was
trained meanwhile stays; with `count` above 1 the model is cut in fragments that take turns, as in
`streaming`. The paper waits, and sends all at once.

A worker trains alone for a window, then meets the others:

    drift    synced - local; at the end of a window it is the pseudo-gradient delta. Of parameters
             in bf16 it is what they lack of synced as bf16 holds it

Each commit moves local, and counts a contribution once:

    pieces with my contribution   local = synced_new + (local - local at submission)
    all other pieces              local += synced_new - synced_old

`outer_defaults` lets the outer learning rate and momentum follow the length of the run. Momentum
remembers about 1 / (1 - momentum) rounds and multiplies the steady step by as much. A run of a
dozen rounds changes direction faster than that, and pays for it; one of thousands gains.

Measured here, nano, 4 peers (docs/benchmarks/outer.md), nats a byte: 12 rounds of H=10 end at 2.084
with 0.8/0.3, 2.095 with 1.0/0, 2.110 with 0.8/0.5, 2.456 with 1.0/0.6; 12 rounds of H=30 at 1.666
with 0.8/0.5, 1.691 with 1.0/0 and 1.756 with 1.0/0.6.
Published for thousands of rounds, from 335M parameters on (arXiv:2503.09799): momentum 0.9 and, by
peers, 0.4 (1), 0.6 (2 and 4), 0.8 (8). Between the two we interpolate over the logarithm of the
number of rounds.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from atoll.optim.methods.base import Method, StateFormat, register, require
from atoll.optim.methods.windows import Window
from atoll.optim.methods.worker import Worker
from atoll.optim.reducer import Commit
from atoll.optim.state import fragments as cuts
from atoll.optim.state.fragments import Difference, Fragment
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.optim.state.outer_step import nesterov

# Learning rate and momentum up to SHORT_ROUNDS. With a dozen rounds the steady outer step,
# lr / (1 - momentum), should be near 1: 0.8/0.3 ended at a loss of 2.084, 0.8/0.5 at 2.110,
# 1.0/0.6 at 2.456.
SHORT = (0.8, 0.3)
SHORT_ROUNDS = 100  # an order of magnitude below the published runs
LONG_MOMENTUM = 0.9  # published for thousands of rounds
LONG_ROUNDS = 1_000  # the published runs are longer
LONG_LR = ((1, 0.4), (4, 0.6), (8, 0.8))  # up to as many peers; 0.8 beyond


def outer_defaults(rounds: int, inner_steps: int, peers: int) -> tuple[float, float]:
    """Return outer learning rate and momentum for a run.

    Args:
        rounds: rounds of the run; 0 for one without an end, which counts as long.
        inner_steps: H. Windows of one step leave nothing to amplify: they take the plain average,
            which with one peer is the inner optimizer itself.
        peers: peers that are expected.

    Returns:
        (lr, momentum) for `nesterov`, rounded to two digits.

    Raises:
        ValueError: when rounds is negative, or one of the others is below 1.
    """
    if rounds < 0 or inner_steps < 1 or peers < 1:
        raise ValueError(
            f"expected rounds of at least 0, inner steps and peers of at least 1, "
            f"got {rounds}, {inner_steps} and {peers}"
        )
    if inner_steps == 1:
        return 1.0, 0.0
    share = 1.0  # a run without an end is long
    if rounds:  # 0 up to SHORT_ROUNDS, 1 from LONG_ROUNDS on, the logarithm between
        share = math.log(rounds / SHORT_ROUNDS) / math.log(LONG_ROUNDS / SHORT_ROUNDS)
        share = min(max(share, 0.0), 1.0)
    lr, momentum = SHORT
    long_lr = next((lr for limit, lr in LONG_LR if peers <= limit), LONG_LR[-1][1])
    return (
        round(lr + share * (long_lr - lr), 2),
        round(momentum + share * (LONG_MOMENTUM - momentum), 2),
    )


class DiLoCo(Worker):
    """DiLoCo (arXiv:2311.08105): inner steps by any optimizer, outer steps by the reducer.

    Departures: the outer optimizer lives with the log, so that all replicas apply the same
    bytes; a peer whose contribution is left out trains on and contributes both windows at once.
    """

    def _delta(self, index: int, local_F: Tensor) -> Difference:
        # A worker that waits keeps no copy of local.
        spends = self.delay == 0
        return Difference(self.fragments[index], self._held(index), local_F, spends=spends)

    def _follow(self, commit: Commit, new_F: Tensor, window: Window) -> None:
        """Move local by the two rules at the top of this module, parameter by parameter."""
        fragment, pending = self.fragments[commit.fragment], window.pending
        vectors, counts, is_masked = [new_F], False, False
        if pending is not None and commit.included is not None:
            counts, is_masked = True, not bool(commit.included.all())
            if is_masked:
                vectors.append(fragment.mask(commit.included))
            if pending.local_N is not None:
                vectors.append(pending.local_N)
        if not counts or is_masked:  # a GPU gets a copy of each vector
            vectors.append(self._held(commit.fragment))
        move = partial(self._move_, counts=counts, is_masked=is_masked)
        self.places.change_(self.model, commit.fragment, move, *vectors)
        if pending is not None and pending.local_N is not None and not commit.settles:
            # Another entry of the fragment came first: move the point that is subtracted later too.
            old_F = self._held(commit.fragment)
            window.pending = replace(pending, local_N=pending.local_N + (new_F - old_F))

    def _move_(
        self, local: Tensor, new: Tensor, *given: Tensor, counts: bool, is_masked: bool
    ) -> None:
        """Move some values.

        Args:
            local: values of the model, which change.
            new: the same of the commit.
            given: the mask of those that count if there is one; local at submission if something
                was trained since; the old synced values unless all count.
            counts: whether my contribution is in the commit.
            is_masked: whether it is so for some values alone.
        """
        more = list(given)
        if not counts:
            local.add_(new - more.pop())
            return
        others = local + (new - more.pop()) if is_masked else None
        counted = more.pop(0) if is_masked else None
        # Without a copy of it, nothing was trained since the submission.
        self._merge_(local, new, more.pop() if more else local.clone())
        if counted is not None and others is not None:
            local.copy_(torch.where(counted, local, others))

    def _merge_(self, local: Tensor, new: Tensor, submitted: Tensor) -> None:
        """Set local where my contribution is in: new synced values and what was trained since."""
        # In this order, nothing trained since leaves exactly the synced bits.
        local.sub_(submitted).add_(new)


@register
@dataclass(frozen=True, kw_only=True)
class DiLoCoMethod(Method):
    """DiLoCo; `outer_defaults` gives good settings for short runs."""

    name: ClassVar[str] = "diloco"
    worker_class: ClassVar[type[Worker]] = DiLoCo
    moves_values_apart: ClassVar[bool] = True

    lr: float = 0.7
    """Outer learning rate."""

    momentum: float = 0.9
    """Outer momentum."""

    state: StateFormat = "fp32"
    """Format of the momentum: fp32, or bf16 in half the memory. Parameters are fp32."""

    tau: int = 0
    """Inner steps that a reduction travels while training continues; 0 waits for it."""

    count: int = 1
    """Number of fragments."""

    pattern: Literal["strided", "sequential"] = "strided"
    """Choice of the blocks that make a fragment, if there are several."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            MethodError: when one is out of range.
        """
        super().__post_init__()
        require(self.count >= 1, "at least one fragment", self.count)
        require(
            self.count == 1 or not self.rank, "one fragment with powersgd's factors", self.count
        )

    def fragments(self, layout: Layout) -> tuple[Fragment, ...]:
        """Return one fragment, or blocks by `pattern`; cut by tensor if the codec needs it."""
        if self.count == 1:
            return super().fragments(layout)
        cut = cuts.strided if self.pattern == "strided" else cuts.sequential
        return cut(layout, self.count, tensors=not self.codec.elementwise)

    @classmethod
    def defaults_for(cls, *, rounds: int, inner_steps: int, peers: int) -> dict[str, object]:
        """Return outer learning rate and momentum for the length of the run."""
        lr, momentum = outer_defaults(rounds, inner_steps, peers)
        return {"lr": lr, "momentum": momentum}

    def apply(
        self, state: OuterState, update_F: Tensor, *, fragment: Fragment, lr: float, momentum: float
    ) -> OuterState:
        """Nesterov on the fragment."""
        return nesterov(state, update_F, lr=lr, momentum=momentum, fragment=fragment)
