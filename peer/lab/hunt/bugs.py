"""Faults put into the product by hand, to see whether the hunt finds them.

Each replaces one function while a block runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

from torch import Tensor

from atoll.coordinator.run import admission
from atoll.optim.log import replica, store
from atoll.optim.reduction.contribution import Feedback, Offer
from atoll.peer.daemon.keeping import KeptBallots
from atoll.peer.rounds.consensus.round import NOWHERE, Place

BugName = Literal[
    "skipped-fsync",
    "unwritten-promise",
    "unverified-body",
    "doubled-residual",
    "stale-admission",
]
BUGS: tuple[BugName, ...] = get_args(BugName)


@contextmanager
def with_bug(name: BugName) -> Iterator[None]:
    """Break the product in one place inside the block."""
    owner, attribute, broken = _PLACES[name]()
    before = vars(owner)[attribute]
    setattr(owner, attribute, broken)
    try:
        yield
    finally:
        setattr(owner, attribute, before)


def _skipped_fsync() -> tuple[Any, str, Any]:
    """The coordinator's log is not synced, so a loss of power takes what it acknowledged."""
    open_log = store.open_log
    return store, "open_log", lambda path, run_id, *, fsync: open_log(path, run_id, fsync=False)


def _unwritten_promise() -> tuple[Any, str, Any]:
    """A keeper does not write where it votes, and votes there again after a restart."""
    keep = KeptBallots.keep

    def forget(self: KeptBallots, place: Place) -> None:
        if place == NOWHERE:  # the file itself is made, or it would be a new elector each time
            keep(self, place)

    return KeptBallots, "keep", forget


def _unverified_body() -> tuple[Any, str, Any]:
    """A body is taken without its digest, so a donor's damaged disk reaches the others."""
    return replica, "split_body", lambda entry, body: []


def _doubled_residual() -> tuple[Any, str, Any]:
    """A residual that was replaced is added instead, so old losses count twice."""
    settle = Feedback.settle

    def twice(
        self: Feedback,
        offer: Offer,
        included: Tensor,
        *,
        weight: float,
        update_F: Any = None,  # noqa: ANN401
    ) -> None:
        before = self.mass_N.clone()
        settle(self, offer, included, weight=weight, update_F=update_F)
        self.mass_N = self.mass_N + before

    return Feedback, "settle", twice


def _stale_admission() -> tuple[Any, str, Any]:
    """An admission counts after it has expired."""
    return admission, "CLOCK_SLACK_S", 10**9


_PLACES: dict[BugName, Callable[[], tuple[Any, str, Any]]] = {
    "skipped-fsync": _skipped_fsync,
    "unwritten-promise": _unwritten_promise,
    "unverified-body": _unverified_body,
    "doubled-residual": _doubled_residual,
    "stale-admission": _stale_admission,
}
