"""A peer as a process: joining, connection to the run, reducer and reports.

`join_and_train` is the whole peer; `connect` gives a training loop of one's own the reducer of a
run. They load torch when they are first used, and hivemind in a process beside the trainer.
"""

from typing import TYPE_CHECKING

from atoll.coordinator.exports import exports

if TYPE_CHECKING:
    from atoll.peer.daemon.network import connect
    from atoll.peer.daemon.process import join_and_train

__all__ = ["connect", "join_and_train"]

__getattr__ = exports(__name__, {"connect": "network", "join_and_train": "process"})
