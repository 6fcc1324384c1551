"""Where a replica stands, and what can be read of it without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from atoll.optim.log.claims import Claim, certified_root
from atoll.optim.log.entry import Elector, Entry, Epoch
from atoll.optim.log.module import Module
from atoll.optim.log.replay import Replay
from atoll.optim.log.store import LogStore, StoreHead
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState


@dataclass(frozen=True, kw_only=True)
class ReplicaStanding:
    """Where a replica stands. It is replaced as a whole, so all of it is of one moment."""

    head: StoreHead = field(default_factory=lambda: StoreHead(epoch=0, position=0, chain=b""))
    """The epoch, the next position, and the chain there."""
    electorate: tuple[Elector, ...] = ()
    """Return the next entry's electorate; empty while the entries here are not the epoch's."""
    state: OuterState | None = None
    """The state at the head, or an older one (`ReplicaView.is_current`)."""
    snapshots: dict[int, OuterState] = field(default_factory=dict)
    """Those that joiners may fetch, by position."""
    opened: Epoch | None = None
    epoch_record: bytes = b""
    """`opened` as the run's key signed it; empty before the first."""
    diverged: str = ""
    """Why the state here is no longer the run's; empty while it is."""
    leaps: int = 0
    """Return how often a state was put in place without entries leading to it."""

    def is_at_base(self, epoch: Epoch) -> bool:
        """Return whether the head is where an epoch begins."""
        return (self.head.position, self.head.chain) == (epoch.base_position, epoch.base_chain)


class ReplicaView:
    """The read-only view of a replica; nothing in it waits."""

    module: Module
    store: LogStore
    standing: ReplicaStanding
    is_ledger: bool

    @property
    def run_id(self) -> bytes:
        """The run's."""
        return self.module.run_id

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
    def snapshots(self) -> dict[int, OuterState]:
        """Snapshots in memory, by position."""
        return self.standing.snapshots

    @property
    def opened(self) -> Epoch | None:
        """The newest epoch that is known; None before the first."""
        return self.standing.opened

    @property
    def epoch_record(self) -> bytes:
        """That epoch as the run's key signed it; empty before the first."""
        return self.standing.epoch_record

    @property
    def diverged(self) -> str:
        """Why the state here is no longer the run's; empty while it is."""
        return self.standing.diverged

    @property
    def leaps(self) -> int:
        """Return how often a state was put in place without entries leading to it."""
        return self.standing.leaps

    def root_scheduled(self, position: int) -> int | None:
        """Return the position whose state root entry `position` has to carry."""
        due = position > 0 and position % self.snapshot_every == 0
        return position - self.snapshot_every if due else None

    def root_due(self, position: int) -> tuple[int, bytes] | None:
        """Return the state root that entry `position` carries; None too if it is not known here."""
        scheduled = self.root_scheduled(position)
        state = self.snapshots.get(scheduled) if scheduled is not None else None
        return (state.position, state.root()) if state is not None else None

    def certified_root(self, claims: Sequence[Claim], position: int) -> bytes | None:
        """Return the certified root of the state at a position, from claims or the stored log."""
        root = certified_root(claims, position)
        record = self.store.get(position + self.snapshot_every)
        if root is None and record is not None and self.electorate:  # else it may be void
            stored = Entry.decode(record.entry).state_root
            root = stored.root if stored is not None and stored.position == position else None
        return root
