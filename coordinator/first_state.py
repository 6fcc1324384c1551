"""The first state of a log: made from what the spec names, and made again when the disk spoils it.

The store keeps it as the snapshot at position 0. `genesis.root` has its root, from which the log's
identity follows, so only the same state may take its place. Where that cannot be made any more, as
on a machine that restored the run without the weights that it began from, a later snapshot does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from atoll.coordinator.run.keys import write_private
from atoll.optim.log.mending import Damage, reads_whole
from atoll.optim.log.store import LogStore
from atoll.optim.state.outer_state import DIGEST_BYTES, OuterState

ROOT_FILE = "genesis.root"
ROOT_NOTE = "genesis"  # the root, in a store that begins with a later snapshot


class RootDamaged(Exception):
    """The file of the root does not hold one."""


class FirstStateLost(Exception):
    """The state with which the run began is not here, and what is made now is another one."""


class FirstState:
    """Makes the first state of a log and knows its root."""

    def __init__(self, make: Callable[[], OuterState], root_file: Path) -> None:
        """Read the root, or make the state of a log that begins and keep its root; blocks.

        Args:
            make: builds the state, which takes seconds for large models; raises anything.
            root_file: where the root is, or will be.

        Raises:
            RootDamaged: the file does not hold a root.
        """
        self._make = make
        self._made: OuterState | None = None
        if root_file.exists():
            self.root = _read_root(root_file)
        else:
            self._made = make()
            self.root = self._made.root()
            write_private(root_file, self.root.hex().encode())

    def put(self, store: LogStore) -> None:
        """Store the state; blocks.

        Raises:
            FirstStateLost: the run did not begin with what is made now.
        """
        state, self._made = self._made or self._make(), None
        if state.root() != self.root:
            raise FirstStateLost(
                "the first state is not the one with which this run began: its start was "
                "interrupted and the model has changed since; remove the directory and start again"
            )
        store.save_snapshot(state, store.genesis_chain)

    def mend(self, store: LogStore) -> Damage:
        """Put the state where the disk has spoiled it, or let a later snapshot do; blocks.

        Raises:
            FirstStateLost: what is made now is another one, and no other snapshot can be read.
        """
        later = [position for position in store.snapshot_positions() if position]
        spoiled = [position for position in later if not reads_whole(store, position)]
        try:
            self.put(store)
        except FirstStateLost:
            if spoiled == later:
                raise FirstStateLost(
                    "the disk has spoiled all states of this run, and the first one that its files "
                    "make now is another one; put back the files with which the run began, or a "
                    "copy of this directory, or restore the run from its copies into a new one"
                ) from None
            store.put_note(ROOT_NOTE, self.root)  # first: a start without either makes it
            store.drop_snapshots([0, *spoiled])
            return Damage(snapshots=[0, *spoiled])
        store.drop_snapshots(spoiled)
        return Damage(first_state=True, snapshots=spoiled)


def _read_root(path: Path) -> bytes:
    try:
        root = bytes.fromhex(path.read_bytes().decode("ascii"))
    except ValueError:
        root = b""
    if len(root) != DIGEST_BYTES:
        raise RootDamaged(f"{path}: expected the root of the first state")
    return root
