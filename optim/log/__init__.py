"""The replicated log of a run.

`entry` has the records, the chain, certificates, and the rules that make an entry valid;
`electorate` the rules of who votes; `store` the log on disk; `replica` a copy of the log and its
state, and `LiveReplica`, the same for an event loop.
"""

from atoll.optim.log.entry import Certificate, Entry, Epoch, LogError
from atoll.optim.log.replica import LiveReplica, Module, Replica
from atoll.optim.log.store import LogStore

__all__ = [
    "Certificate",
    "Entry",
    "Epoch",
    "LiveReplica",
    "LogError",
    "LogStore",
    "Module",
    "Replica",
]
