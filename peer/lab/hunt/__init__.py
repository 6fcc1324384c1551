"""A whole run from one seed, in one process and in virtual time, to hunt faults.

world       the run: coordinator, keepers, trainers, and what joins them
plans       what happens in it: drawn from a seed, or shrunk
faults      each kind of what goes wrong
audits      what must hold whatever happens, with order_audits, unit_audits, mass_audits
watched     parts of a process that tell the audits what they do
checks      what is looked at from outside: stored logs, tasks, memory
holdings    what a process holds in memory, counted from its objects
machines    one computer: its clock, disk, links and the process that runs on it
disks       files that lose what was not synced
wires       gRPC over the network in memory
nodes       a DHT node over the network in memory
trainers    a training loop that takes turns with the event loop
copies      where the coordinator's copies go, and a new machine from them
edges       what a process gets from its system, replaced for all of that
bugs        faults put in by hand, to see whether the hunt finds them
hunting     seeds one after another, and the shrinking of those that fail
"""

from typing import TYPE_CHECKING

from atoll.coordinator.exports import exports

if TYPE_CHECKING:
    from atoll.peer.lab.hunt.hunting import HuntSummary, Search, hunt

__all__ = ["HuntSummary", "Search", "hunt"]

__getattr__ = exports(__name__, {"HuntSummary": "hunting", "Search": "hunting", "hunt": "hunting"})
