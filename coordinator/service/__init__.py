"""The coordinator as a process: gRPC service, server and metrics.

`serve` and `running` start one; they load torch when they are first used.
"""

from typing import TYPE_CHECKING

from atoll.coordinator.exports import exports

if TYPE_CHECKING:
    from atoll.coordinator.service.server import running, serve

__all__ = ["running", "serve"]

__getattr__ = exports(__name__, {"running": "server", "serve": "server"})
