"""Text from a live pipeline: servers that keep a cache for each text, and a client that asks them.

`Sessions` is the machine of a server, which a `TextServer` connects to the network and to the
stage's state; `LiveModel` is the client. The package loads a module with its first use.
"""

from typing import TYPE_CHECKING

from atoll.coordinator.exports import exports

if TYPE_CHECKING:
    from atoll.peer.inference.client import LiveModel
    from atoll.peer.inference.server import TextServer
    from atoll.peer.inference.sessions import Sessions

__all__ = ["LiveModel", "Sessions", "TextServer"]

__getattr__ = exports(
    __name__, {"LiveModel": "client", "Sessions": "sessions", "TextServer": "server"}
)
