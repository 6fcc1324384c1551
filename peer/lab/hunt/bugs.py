"""Faults put into the product by hand, to see whether the hunt finds them.

Each replaces a function while a block runs, or each of those that do the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, get_args

from torch import Tensor

from atoll.coordinator import orders
from atoll.coordinator.run import admission
from atoll.coordinator.service import service
from atoll.dht.tasks import Tasks
from atoll.optim.log import log_file, mending, replica, store
from atoll.optim.log.orders import Order, OrderBook, RunSettings
from atoll.optim.log.store import LogStore
from atoll.optim.reduction.contribution import Feedback, Offer
from atoll.optim.state.outer_state import OuterState
from atoll.peer.daemon import log_run
from atoll.peer.daemon.keeping import KeptBallots
from atoll.peer.gossip.messages import Terms
from atoll.peer.gossip.peer import GossipPeer, Known, Outcomes
from atoll.peer.rounds import fetching
from atoll.peer.rounds.consensus.ballots import NOWHERE, Place

BugName = Literal[
    "skipped-fsync",
    "unwritten-promise",
    "unverified-body",
    "doubled-residual",
    "stale-admission",
    "unkept-order",
    "repeated-order",
    "kept-mass",
    "assumed-outcome",
    "unpruned-set",
]
BUGS: tuple[BugName, ...] = get_args(BugName)


@contextmanager
def with_bug(name: BugName) -> Iterator[None]:
    """Break the product inside the block."""
    with ExitStack() as stack:
        for owner, attribute, broken in _PLACES[name]():
            stack.callback(setattr, owner, attribute, vars(owner)[attribute])
            setattr(owner, attribute, broken)
        yield


Broken = list[tuple[Any, str, Any]]
"""Owners, attributes, and what is put there."""


def _skipped_fsync() -> Broken:
    """The coordinator's log is not synced, so a loss of power takes what it acknowledged."""
    open_log = log_file.open_log
    return [
        (store, "open_log", lambda path, run_id, *, fsync: open_log(path, run_id, fsync=False)),
    ]


def _unwritten_promise() -> Broken:
    """A keeper does not write where it votes, and votes there again after a restart."""
    keep = KeptBallots.keep

    def forget(self: KeptBallots, place: Place) -> None:
        if place == NOWHERE:  # the file itself is made, or it would be a new elector each time
            keep(self, place)

    return [(KeptBallots, "keep", forget)]


def _unverified_body() -> Broken:
    """No body is compared with its digests, so what a disk has spoiled counts as the update."""

    def unchecked(
        log: LogStore, position: int, start: int = 0, stop: int = sys.maxsize
    ) -> Iterator[bytes]:
        return log.part_chunks(position, start, stop)

    return [
        (mending, "split_body", lambda entry, body: []),
        (mending, "checked_body", unchecked),
        (replica, "split_body", lambda entry, body: []),
        (fetching, "checked_body", unchecked),
        (service, "checked_body", unchecked),
        (log_run, "checked_body", unchecked),
    ]


def _doubled_residual() -> Broken:
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

    return [(Feedback, "settle", twice)]


def _stale_admission() -> Broken:
    """An admission counts after it has expired."""
    return [(admission, "CLOCK_SLACK_S", 10**9)]


def _unkept_order() -> Broken:
    """The coordinator does not write the orders that it takes."""
    return [(orders, "_write", lambda path, given: None)]


def _repeated_order() -> Broken:
    """An order counts again, whatever number it has."""
    after = RunSettings.after

    def again(self: RunSettings, order: Order, position: int) -> RunSettings:
        return after(self, order.model_copy(update={"number": self.number + 1}), position)

    def add(self: OrderBook, signed: bytes, order: Order) -> bool:
        self._orders = {n: signed for n in range(order.number, order.number + 99)}
        return True

    return [(RunSettings, "after", again), (OrderBook, "add", add)]


def _kept_mass() -> Broken:
    """A peer that hands over mass keeps it as well."""
    move = GossipPeer.move

    def keep(self: GossipPeer, state: OuterState, mass: float) -> None:
        move(self, state, max(self.mass, mass))

    return [(GossipPeer, "move", keep)]


def _assumed_outcome() -> Broken:
    """A peer that has promised to commit, and hears no commit, takes it that there was none."""

    async def assume(self: Outcomes, partner: str, terms: Terms) -> Known:
        return "not committed"

    return [(Outcomes, "ask", assume)]


def _unpruned_set() -> Broken:
    """What owns background work keeps each task, also those that have ended."""
    return [(Tasks, "_ended", lambda self, task: None)]


_PLACES: dict[BugName, Callable[[], Broken]] = {
    "skipped-fsync": _skipped_fsync,
    "unwritten-promise": _unwritten_promise,
    "unverified-body": _unverified_body,
    "doubled-residual": _doubled_residual,
    "stale-admission": _stale_admission,
    "unkept-order": _unkept_order,
    "repeated-order": _repeated_order,
    "kept-mass": _kept_mass,
    "assumed-outcome": _assumed_outcome,
    "unpruned-set": _unpruned_set,
}
