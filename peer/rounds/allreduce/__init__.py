"""The reduction of a group's contributions: owners of parts, relays of rows, and the members.

`Exchange` is the entry point: one member's exchange. `sides` has its two ends, `Sender`
and `Owner`; `reduction`, `sums` and `factors` the arithmetic; `rows` the relays of large groups.
"""

from typing import TYPE_CHECKING

from atoll.coordinator.exports import exports

if TYPE_CHECKING:
    from atoll.peer.rounds.allreduce.exchange import Exchange

__all__ = ["Exchange"]

__getattr__ = exports(__name__, {"Exchange": "exchange"})
