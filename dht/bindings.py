"""The only import of hivemind; its warnings and its changes to logging are contained here.

hivemind writes its log to stderr past the application's own handlers and renames the level WARNING
for the whole process. It also has torch share tensors by names, for which torch starts a process,
and fails if a busy machine starts it too late: `datasets` shares a tensor in each stream of
documents. All three are undone; we share no tensor with its processes. Its averaging, which we do
not use, imports SciPy's optimizers: a quarter of the time that a peer takes to start. SciPy loads
them on their first use.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import multiprocessing

_sharing: str = multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _deferred(name: str) -> Iterator[None]:
    """Import nothing for a module that is imported meanwhile, unless it is there already.

    Its package has to import it when it is first looked up there, as SciPy does (PEP 562).
    """
    if name in sys.modules:
        yield
        return
    sys.modules[name] = ModuleType(name)
    try:
        yield
    finally:
        del sys.modules[name]


with warnings.catch_warnings(), _deferred("scipy.optimize"):
    warnings.simplefilter("ignore")
    import hivemind.hivemind_cli as _cli
    from hivemind.dht.node import DHTNode
    from hivemind.dht.protocol import DHTProtocol
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.dht.validation import DHTRecord, RecordValidatorBase
    from hivemind.p2p import P2P
    from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
    from hivemind.proto import dht_pb2 as _dht_pb2
    from hivemind.proto import p2pd_pb2 as _p2pd_pb2
    from hivemind.utils.logging import use_hivemind_log_handler
    from hivemind.utils.multiaddr import Multiaddr
    from hivemind.utils.timed_storage import ValueWithExpiration

use_hivemind_log_handler("nowhere")
logging.addLevelName(logging.WARNING, "WARNING")
multiprocessing.set_sharing_strategy(_sharing)  # type: ignore[no-untyped-call]

dht_pb2: Any = _dht_pb2
p2pd_pb2: Any = _p2pd_pb2  # its classes are made at run time; type checkers cannot see them
P2PD_PATH = Path(str(_cli.__file__)).with_name("p2pd")

__all__ = [
    "DHTID",
    "P2P",
    "P2PD_PATH",
    "DHTNode",
    "DHTProtocol",
    "DHTRecord",
    "DictionaryDHTValue",
    "Multiaddr",
    "PeerID",
    "RecordValidatorBase",
    "ValueWithExpiration",
    "dht_pb2",
    "p2pd_pb2",
]
