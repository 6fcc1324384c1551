"""The seam between a method and whatever reduces: in this process, over the network, by gossip.

A method hands in contributions and gets commits back, in the order of the log, on its own thread.
It knows nothing of sockets, peers or certificates; a reducer knows nothing of models.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from atoll.compression.base import Codec
from atoll.optim.reduction.contribution import Offer
from atoll.optim.state.fragments import Difference, Fragment
from atoll.optim.state.layout import Layout
from atoll.optim.state.updates import Update


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """The result of one window of a peer; frozen until a commit settles it."""

    fragment: int = 0
    """Fragment of the model; 0 if the whole model syncs together."""

    window: int
    """The peer's own count of windows, from 0; names the contribution with its fragment."""

    delta: Tensor | Difference | Offer
    """Pseudo-gradient, synced minus local, or what else the method sends, of the fragment's
    values in its order; fp32 on the CPU, all finite. Or what computes it, on the thread
    of whoever asks: a pass over the model need not hold up the trainer. Of a peer of several
    ranks, all that they have encoded."""

    tokens: int
    """Tokens behind delta since the last contribution that was included; 0 gives it weight 0."""

    steps: int
    """Inner steps behind delta, likewise."""

    loss: float
    """Mean training loss of these steps; NaN if the caller does not report it."""

    lr: float = 0.0
    """Inner learning rate at the end of the window, for methods whose outer step follows it; the
    same for all peers."""

    units: int = 0
    """Units of this peer's lease behind delta, in runs with `data.once` (`atoll.optim.log.units`);
    0 gives it weight 0 there."""

    @property
    def delta_N(self) -> Tensor:  # noqa: N802
        """Return `delta`, computing it at each call if it is not stored.

        Raises:
            ValueError: when it was handed in encoded.
        """
        if isinstance(self.delta, Offer):
            raise ValueError("expected values, got a contribution that is encoded already")
        return self.delta if isinstance(self.delta, Tensor) else self.delta()


@dataclass(frozen=True, kw_only=True)
class Course:
    """The course of training, as the organiser's orders up to a position have changed it."""

    inner_steps: int | None = None
    """H; None: the spec's."""

    inner_scale: float = 1.0
    """Factor of the schedule's inner learning rate."""

    last_round: int | None = None
    """The round after which the run ends; None: the spec's."""

    is_paused: bool = False
    """True if no update is decided now."""

    codec: str | None = None
    """The codec of contributions and means; None: the spec's."""

    def window(self, planned: int) -> int:
        """Return H, given that of the run's timetable."""
        return planned if self.inner_steps is None else self.inner_steps

    def rounds(self, planned: int) -> int:
        """Return the run's number of rounds, given the spec's; 0 for a run without an end."""
        return min(filter(None, (planned, self.last_round)), default=0)


AS_PLANNED = Course()
"""The course of a run without orders."""


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A decided entry of the log, as a method needs it."""

    fragment: int = 0
    """The fragment that it moved."""

    position: int
    """Position after this entry."""

    params_N: Tensor  # noqa: N815
    """The new synced parameters, fp32 on the CPU, all of the model. Read only."""

    included: Tensor | None
    """Bool per piece of the fragment: where my contribution is in. None: nowhere; the drift still
    holds it. A contribution of weight 0 counts as included: its work is dropped, as a joiner's
    first window is meant to be."""

    settles: bool = True
    """True if this entry decides my pending contribution. False for an earlier entry that
    arrives while a contribution for a later one is under way; then `included` is None."""

    members: int
    """Number of contributions in it; 0 for an entry without an update."""

    in_part: bool | None = None
    """True if any piece is in, of a commit that is cut to the range of a rank: there `included`
    holds that rank's pieces alone. None: `included` holds all."""

    reset: bool = False
    """Drop drift and pending contribution and take params_N as they are: this peer's work is
    too late, too large, or its outcome unknown."""

    course: Course = AS_PLANNED
    """The course of training from this position on."""

    units: tuple[int, ...] = ()
    """In runs with `data.once`, the pass, and the units that I hold from here on: start, stop of
    each range, in the order in which I train on them."""

    @property
    def counts(self) -> bool:
        """Return whether any piece of my contribution is in."""
        if self.in_part is not None:
            return self.in_part
        return self.included is not None and bool(self.included.any())


Settle = Callable[[Commit], None]
"""Called by the reducer once an entry, in order, on the thread that called wait or submit."""


class Residual(Protocol):
    """A peer's error feedback of one fragment: `Feedback`, or ranks that keep a range each."""

    def offer(self, delta: Any, weight: float) -> Offer:  # noqa: ANN401 - as `Contribution.delta`
        """Encode a contribution; see `Feedback.offer`."""
        ...

    def encode_on(self, device: torch.device) -> None:
        """Encode on a device from now on; see `Feedback.encode_on`."""
        ...

    def use_codec(self, codec: Codec) -> None:
        """Encode in another codec from now on; see `Feedback.use_codec`."""
        ...

    def settle(
        self, offer: Offer, included: Tensor, *, weight: float, update_F: Update | None = None
    ) -> None:
        """Take the residual of an offer that was included; see `Feedback.settle`."""
        ...

    def owner_credit(self, part: slice, lost: Update) -> None:
        """Keep the loss of the owner's encoding of a part; see `Feedback.owner_credit`."""
        ...

    def reset(self) -> None:
        """Forget the residual."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the residual."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the residual of a `state_dict`."""
        ...


class Reducer(Protocol):
    """Turns contributions of all peers into one sequence of commits."""

    @property
    def position(self) -> int:
        """The position that the last commit, or else `start`, brought the parameters to."""
        ...

    @property
    def fragments(self) -> Sequence[Fragment]:
        """Return the fragments of the group's method; known after `start`."""
        ...

    def start(self, layout: Layout, params_N: Tensor, settle: Settle) -> Tensor:
        """Join. Called once, before anything else.

        Args:
            layout: the model's layout; all members' are equal.
            params_N: the caller's parameters; they begin the run if nothing else has.
            settle: takes each commit from here on.

        Returns:
            synced_N: the parameters that every replica stands at, fp32 on the CPU, read only.
        """
        ...

    def submit(self, contribution: Contribution) -> None:
        """Hand in a contribution; at most one unsettled a fragment. May settle at once."""
        ...

    def wait(self) -> None:
        """Deliver decided entries, until one settles a contribution of mine.

        If the next entry is not mine to wait for, this delivers what is decided and returns at
        once: it can be called at each step. A contribution has one deadline, set when it is
        submitted; one whose fragment has its turn at a later position is not waited for.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a restart needs to continue in the same bits."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; called after `start`."""
        ...
