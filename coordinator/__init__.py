"""The coordinator of a run: it admits peers, opens epochs, keeps the log and shows the status.

`run` and `rpc` hold what peers share with it, `coordinator` its decisions, `service` its process,
`report` and `dashboard` its status as text and on a screen.
"""

from typing import TYPE_CHECKING

from atoll.coordinator.exports import exports

if TYPE_CHECKING:
    from atoll.coordinator.coordinator import Coordinator

__all__ = ["Coordinator"]

__getattr__ = exports(__name__, {"Coordinator": "coordinator"})
