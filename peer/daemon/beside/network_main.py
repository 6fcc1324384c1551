"""The program of the network process.

python -m atoll.peer.daemon.beside.network_main DESCRIPTOR
"""

import socket
import sys

from atoll.peer.daemon.beside.starting import loading


def main() -> None:
    """Load the network process, and serve the trainer at the other end of a descriptor."""
    with loading():
        from atoll.peer.daemon.beside.network_side import serve
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
