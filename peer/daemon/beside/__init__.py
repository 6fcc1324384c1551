"""The network process: a peer's rounds beside its trainer, in a process of their own.

segments        memory without a name that both processes map, and tensors lent from it
channel         messages between the two: plain values, tensors, errors; nothing is unpickled
starting        starts the process, perhaps before the trainer has loaded
trainer_side    asks it, and is the trainer's reducer
network_side    joins the run and answers the trainer
owner_side      answers for this machine's owner while the network process joins
texts           texts of clients, computed in the network process
"""

from typing import TYPE_CHECKING

from atoll.coordinator.exports import exports

if TYPE_CHECKING:
    from atoll.peer.daemon.beside.trainer_side import NetworkProcess, SeatReducer

__all__ = ["NetworkProcess", "SeatReducer"]

__getattr__ = exports(__name__, {"NetworkProcess": "trainer_side", "SeatReducer": "trainer_side"})
