"""The exceptions of a recovery.

RecoveryError (RuntimeError; atoll.optim.log.live_replica)
+-- NoDonor     nobody who could be reached has what is missing; try again later
+-- NoWay  donors answered, and have neither the updates nor a state that can be proved
ChainMismatch (LogError; atoll.optim.log.entry)
+-- OffTheLog  entries here are void
TransportError (atoll.dht.transport)
+-- GaveWay  a donor gives nothing at the moment; ask again soon
"""

from atoll.dht.transport import TransportError
from atoll.optim.log.entry import ChainMismatch
from atoll.optim.log.live_replica import Nowhere, RecoveryError


class NoDonor(RecoveryError):
    """No reachable peer has the missing entries or snapshot."""


class NoWay(NoDonor, Nowhere):
    """Donors answered, and have neither the updates nor a state that can be proved."""


class OffTheLog(ChainMismatch):
    """The entries here do not lead to the base of the epoch: some of them are void."""


class GaveWay(TransportError):
    """A round, or others, need a donor's link; it has what was asked for, and gives it later."""
