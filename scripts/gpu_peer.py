#!/usr/bin/env python3
"""`atoll`, but the peer of one name trains on the CPU, whatever device the demo asks for."""

import sys

from atoll.peer.cli.main import main

ON_CPU = "peer-1"

if __name__ == "__main__":
    arguments = sys.argv[1:]
    if "--name" in arguments and arguments[arguments.index("--name") + 1] == ON_CPU:
        arguments[arguments.index("--device") + 1] = "cpu"
    sys.exit(main(arguments))
