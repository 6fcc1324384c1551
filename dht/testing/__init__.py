"""Test doubles for peers: a network, a roster and a clock in one process, without hivemind.

`MemoryNetwork` carries calls and streams with the latency, bandwidth and faults that a test sets;
`MemoryBoard` is its roster; `run_virtual` runs a test in an event loop whose clock jumps.
"""

from atoll.dht.testing.memory import MemoryLink, MemoryNetwork, MemoryTransport
from atoll.dht.testing.roster import MemoryBoard, MemoryRoster
from atoll.dht.testing.virtualtime import Deadlock, VirtualTimeLoop, inline, run_virtual

__all__ = [
    "Deadlock",
    "MemoryBoard",
    "MemoryLink",
    "MemoryNetwork",
    "MemoryRoster",
    "MemoryTransport",
    "VirtualTimeLoop",
    "inline",
    "run_virtual",
]
