"""gRPC between peers and the coordinator: messages, pinned TLS channels and the client.

`StatusClient` (`channel`) asks for the status alone and loads no torch; `CoordinatorClient`
(`client`) joins a run. Errors are in `client_errors`.
"""

from typing import TYPE_CHECKING

from atoll.coordinator.exports import exports

if TYPE_CHECKING:
    from atoll.coordinator.rpc.channel import StatusClient
    from atoll.coordinator.rpc.client import CoordinatorClient
    from atoll.coordinator.rpc.client_errors import CoordinatorError

__all__ = ["CoordinatorClient", "CoordinatorError", "StatusClient"]

__getattr__ = exports(
    __name__,
    {"CoordinatorClient": "client", "CoordinatorError": "client_errors", "StatusClient": "channel"},
)
