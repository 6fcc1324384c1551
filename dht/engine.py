"""The one place that imports hivemind; the warnings of that import stay here."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import hivemind.hivemind_cli as _cli
    from hivemind.dht.node import DHTNode
    from hivemind.dht.routing import DHTID
    from hivemind.dht.validation import DHTRecord, RecordValidatorBase
    from hivemind.p2p import P2P
    from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
    from hivemind.proto import p2pd_pb2 as _p2pd_pb2
    from hivemind.utils.multiaddr import Multiaddr

p2pd_pb2: Any = _p2pd_pb2  # its classes are made at run time; type checkers cannot see them
P2PD_PATH = Path(str(_cli.__file__)).with_name("p2pd")

__all__ = [
    "DHTID",
    "P2P",
    "P2PD_PATH",
    "DHTNode",
    "DHTRecord",
    "Multiaddr",
    "PeerID",
    "RecordValidatorBase",
    "p2pd_pb2",
]
