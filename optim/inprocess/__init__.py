"""All workers of a run in one process: the arithmetic of rounds without a network."""

from atoll.optim.inprocess.gossip import GossipGroup
from atoll.optim.inprocess.group import GroupError, GroupStatistics, WorkerGroup, at_random
from atoll.optim.inprocess.rounds import InProcessGroup, in_process

__all__ = [
    "GossipGroup",
    "GroupError",
    "GroupStatistics",
    "InProcessGroup",
    "WorkerGroup",
    "at_random",
    "in_process",
]
