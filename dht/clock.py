"""The clock by which records expire: our own plus the offset to the coordinator's clock.

hivemind refuses peers whose clock is off by more than 3 s. A peer that has learnt its offset from
its first authenticated contact sets it here, and hivemind's DHT in this process follows. The peer
measures again later (`follow`): a clock that is put right jumps, and every record of the others
would seem to have expired.
"""

from __future__ import annotations

import sys
import time

JUMP_S = 1.0  # hivemind bears 3 s; less is no jump but how far two measurements differ

_offset_s = 0.0


def now_s() -> float:
    """Return seconds since 1970 by the run's clock."""
    return time.time() + _offset_s


def set_offset(offset_s: float) -> None:
    """Set how far the run's clock is ahead of ours, for the whole process.

    Call it again after hivemind was imported; `Node.start` does.
    """
    global _offset_s
    _offset_s = offset_s
    for name, module in sys.modules.copy().items():  # copied: other threads may import
        if name.startswith("hivemind.") and hasattr(module, "get_dht_time"):
            # Each module holds its own reference, taken when it was imported.
            setattr(module, "get_dht_time", now_s)  # noqa: B010 - no declared attribute


def follow(offset_s: float, error_s: float) -> None:
    """Take over a later measurement if ours has jumped; by more than `error_s` it is not wrong."""
    if abs(offset_s - _offset_s) > JUMP_S + error_s:
        set_offset(offset_s)
