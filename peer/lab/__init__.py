"""Experiments on one machine: demo, baseline, simulator, plans, advice and plots.

No peer that trains imports this package. It loads a module with its first use, so that a
command pays only for what it needs.
"""

from typing import TYPE_CHECKING

from atoll.coordinator.exports import exports

if TYPE_CHECKING:
    from atoll.peer.lab.demo import Demo
    from atoll.peer.lab.simulate import Simulation

__all__ = ["Demo", "Simulation"]

__getattr__ = exports(__name__, {"Demo": "demo", "Simulation": "simulate"})
