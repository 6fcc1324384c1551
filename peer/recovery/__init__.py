"""Catching up: snapshots, missed entries and their sources.

`Recovery` asks the donors that `sources` ranks. `ledger` is the coordinator's: it wants every
entry, and no snapshot. docs/protocol.md, part 8, has the rules.
"""

from atoll.peer.recovery.errors import NoDonor
from atoll.peer.recovery.recovery import Recovery
from atoll.peer.recovery.sources import Source

__all__ = ["NoDonor", "Recovery", "Source"]
