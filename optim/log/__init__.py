"""The replicated log of a run.

`entry` has the records, the chain, certificates, and the rules that make an entry valid;
`electorate` the rules of who votes; `store` the log on disk; `module` what a log decides, and
`replay` how its entries become states; `replica` a copy of the log and its state, `standing` what
can be read of it, and `live_replica` the same for an event loop.
"""

from atoll.optim.log.entry import Certificate, Entry, Epoch, LogError
from atoll.optim.log.live_replica import LiveReplica
from atoll.optim.log.module import Module
from atoll.optim.log.replica import Replica
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
