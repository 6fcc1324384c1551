"""The standing of a replica, which can be read without waiting, and what follows from it.

`ReplicaStanding` is replaced as a whole with each change, so what is read of one is of one moment.

Exceptions: `LogError` (atoll.optim.log.entry) for an entry that is wrong, and of these

    ChainMismatch
      NotNext       an entry of another position or epoch than the next; it may be next elsewhere
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from atoll.optim.log.claims import Claim, certified_roots
from atoll.optim.log.electorate import Succession
from atoll.optim.log.entry import ChainMismatch, Elector, Entry, Epoch, Newcomer, Trust
from atoll.optim.log.module import Module
from atoll.optim.log.orders import (
    RunSettings,
    read_settings,
)
from atoll.optim.log.replay import Replay
from atoll.optim.log.store import LogStore, StoreHead
from atoll.optim.log.stored_snapshots import SnapshotFile, WrittenSnapshot
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState


class NotNext(ChainMismatch):
    """Not the entry that comes next here; nothing need be wrong with it."""


@dataclass(frozen=True, kw_only=True)
class ReplicaStanding:
    """Standing of a replica. It is replaced as a whole, so all of it is of one moment."""

    head: StoreHead = field(default_factory=lambda: StoreHead(epoch=0, position=0, chain=b""))
    """The epoch, the next position, and the chain there."""
    electorate: tuple[Elector, ...] = ()
    """The next entry's electorate; empty while the entries here are not the epoch's."""
    newcomers: tuple[Newcomer, ...] = ()
    """Peers that may vote after some entries more."""
    norms: tuple[float, ...] = ()
    """By fragment: what bounds the clip factors of its next contributions from below."""
    settings: bytes | None = b""
    """The settings that orders have changed up to the head (`orders.py`); None if they are not
    known: the entry before the head is missing here."""
    units: bytes | None = b""
    """The table of units at the head (`units.py`); None as for `settings`."""
    state: OuterState | None = None
    """The state at the head, or an older one (`ReplicaView.is_current`)."""
    snapshots: dict[int, SnapshotFile] = field(default_factory=dict)
    """Snapshots that joiners may fetch, by position."""
    opened: Epoch | None = None
    epoch_record: bytes = b""
    """`opened` as the run's key signed it; empty before the first."""
    diverged: str = ""
    """Why the state here is no longer the run's; empty while it is."""
    was_disproved: bool = False
    """True once an entry has certified another root than that of a state here."""
    leaps: int = 0
    """Number of times that a state was put in place without entries leading to it."""

    def is_at_base(self, epoch: Epoch) -> bool:
        """Return whether the head is where an epoch begins."""
        return (self.head.position, self.head.chain) == (epoch.base_position, epoch.base_chain)


@dataclass(frozen=True, kw_only=True)
class Due:
    """A state whose root and snapshot are due, and the chain there."""

    state: OuterState
    chain: bytes
    leaps: int
    """As of the replica's standing when it came to be due."""
    release: Callable[[], None]
    """Ends the keeping of the state; the next one may take its place then."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """The root of a state, and its file, of which the log does not know yet."""

    position: int
    leaps: int
    root: bytes
    file: WrittenSnapshot | None
    """None if a ledger wrote none, to save time or because its disk is full."""


class ReplicaView:
    """The read-only view of a replica; nothing in it waits."""

    module: Module
    store: LogStore
    standing: ReplicaStanding
    is_ledger: bool
    follows: bool
    """A ledger of a follower: others open the epochs, which may void entries here, and joiners
    fetch its snapshots."""

    @property
    def run_id(self) -> bytes:
        return self.module.run_id

    @property
    def trust(self) -> Trust:
        """Faults of electors that the run tolerates."""
        return self.module.trust

    @property
    def replay(self) -> Replay:
        """The rules by which entries are applied."""
        return self.module.replay

    @property
    def layout(self) -> Layout:
        """The parameters that the log decides."""
        return self.module.layout

    @property
    def snapshot_every(self) -> int:
        """Positions between two snapshots."""
        return self.module.snapshot_every

    @property
    def ready(self) -> bool:
        """Return whether there is a state."""
        return self.standing.state is not None

    @property
    def state(self) -> OuterState:
        """The state at the head, or an older one if it is not `is_current`."""
        if self.standing.state is None:
            raise RuntimeError("this replica holds no state yet: resume or install one first")
        return self.standing.state

    @property
    def is_current(self) -> bool:
        """Return whether the state is the one at the head."""
        at = self.standing
        has_its_state = at.state is not None and at.state.position == at.head.position
        return has_its_state and not at.diverged

    @property
    def head(self) -> StoreHead:
        """The epoch, the next position, and the chain there."""
        return self.standing.head

    @property
    def epoch(self) -> int:
        """The newest epoch that is known."""
        return self.standing.head.epoch

    @property
    def position(self) -> int:
        """The position that is decided next; the number of entries here or before them."""
        return self.standing.head.position

    @property
    def chain(self) -> bytes:
        """The chain that the next entry has to name."""
        return self.standing.head.chain

    @property
    def electorate(self) -> tuple[Elector, ...]:
        """Return the next entry's electorate; empty while the entries here are not the epoch's."""
        return self.standing.electorate

    @property
    def first_term(self) -> int:
        """Return the term with which the next entry's position begins."""
        opened = self.opened
        is_base = opened is not None and self.position == opened.base_position
        return opened.first_term if opened is not None and is_base else 0

    @property
    def voters(self) -> Succession:
        """Return the next entry's electorate, those who may vote later, and the norms."""
        at = self.standing
        return Succession(at.electorate, at.newcomers, at.norms)

    @property
    def settings(self) -> RunSettings:
        """Return what the organiser's orders have changed up to the head."""
        return read_settings(self.standing.settings or b"")

    @property
    def snapshots(self) -> dict[int, SnapshotFile]:
        """Snapshots that joiners may fetch, by position."""
        return self.standing.snapshots

    @property
    def opened(self) -> Epoch | None:
        """The newest epoch that is known; None before the first."""
        return self.standing.opened

    @property
    def epoch_record(self) -> bytes:
        """The newest epoch as the run's key signed it; empty before the first."""
        return self.standing.epoch_record

    @property
    def diverged(self) -> str:
        """Why the state here is no longer the run's; empty while it is."""
        return self.standing.diverged

    @property
    def is_disproved(self) -> bool:
        """Return whether this peer needs another state: the log certifies another root."""
        return bool(self.standing.diverged) and not self.is_ledger

    @property
    def takes_signed(self) -> bool:
        """Return whether a root by the run's key proves a state that no entry certifies yet.

        It does to a peer, until the log has contradicted a state there.
        """
        return not self.is_ledger and not self.standing.was_disproved

    @property
    def leaps(self) -> int:
        """Return the number of states put in place without entries leading to them."""
        return self.standing.leaps

    def root_scheduled(self, position: int) -> int | None:
        """Return the position whose state root entry `position` has to carry."""
        due = position > 0 and position % self.snapshot_every == 0
        return position - self.snapshot_every if due else None

    def root_due(self, position: int) -> tuple[int, bytes] | None:
        """Return the state root that entry `position` carries; None too if it is not known here."""
        scheduled = self.root_scheduled(position)
        snapshot = self.snapshots.get(scheduled) if scheduled is not None else None
        return (snapshot.position, snapshot.root()) if snapshot is not None else None

    def certified_root(self, claims: Sequence[Claim], position: int) -> bytes | None:
        """Return the certified root of the state at a position, from claims or the stored log."""
        return self.certified_roots(claims, [position]).get(position)

    def certified_roots(
        self, claims: Sequence[Claim], positions: Collection[int]
    ) -> dict[int, bytes]:
        """Return the certified roots of the states at these positions, as far as there are any."""
        known = certified_roots(claims)
        found = ((position, known.get(position)) for position in positions)
        pairs = ((p, root or self._stored_root(p)) for p, root in found)
        return {position: root for position, root in pairs if root is not None}

    def _stored_root(self, position: int) -> bytes | None:
        record = self.store.get(position + self.snapshot_every)
        if record is None or not self.electorate:  # without, it may be void
            return None
        stored = Entry.decode(record.entry).state_root
        return stored.root if stored is not None and stored.position == position else None
